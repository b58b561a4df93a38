"""A 64-bit checksum of bytes that move, the same value on every device; it never copies or widens the whole.

The bytes are words of 64 bits, little-endian, the last one filled up with zero bytes. The checksum is the sum over
words i of `x + (x mod 2^32) * (x div 2^32)` where `x = word i ^ ((i + 1) * 0x9E3779B97F4A7C15)`, all modulo 2^64.

Any change within one aligned 32-bit half of one word is seen for certain: the sum's term is `(low + 2^32) * (high + 1)`
less 2^32, and neither factor can make up for the other. Words that changed places, several changes at once and another
length (zeros count) pass with a chance of about 2^-64: the position is part of the product, so that errors with a
pattern do not cancel. It guards against faults, not against an adversary.

A piece that begins at word n of a longer whole is taken with `first_word=n`; the whole's checksum is the sum of its
pieces' (`join_checksums`), so that each run may be checked alone and all together.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

import kernels._native as _native
from kernels.cpu import paths

WORD_BYTES = 8
CHUNK_BYTES = 16 << 20
"""What is looked at at a time outside the C kernel: it takes three times as much for a moment."""

_KEY_STEP = 0x9E3779B97F4A7C15
_LOW_32 = (1 << 32) - 1
_LOW_64 = (1 << 64) - 1


def checksum(memory: Tensor | tuple[int, int], first_word: int = 0) -> int:
    """The checksum, in [0, 2^64), of a contiguous tensor's bytes, or of host memory as (address, number of bytes).

    The device that holds the bytes computes it, with one wait for it. `first_word` is the place of the first word in
    the whole that this is a piece of.

    Raises:
        ValueError: the tensor is not contiguous, or a number is negative.
    """
    if isinstance(memory, tuple):
        address, num_bytes = memory
    elif paths.takes_torch(memory):
        return checksum_reference(memory, first_word)
    else:
        address, num_bytes = memory.data_ptr(), _as_bytes(memory).numel()
    if num_bytes < 0 or first_word < 0:
        raise ValueError(f"a checksum of {num_bytes} bytes from word {first_word}: neither can be negative")
    return int(_native.sum_bytes(address, num_bytes, first_word)) if num_bytes else 0


def join_checksums(pieces: Iterable[int]) -> int:
    """The checksum of a whole from those of its pieces, each taken at its place; 0 for none."""
    return sum(pieces) & _LOW_64


def checksum_reference(tensor: Tensor, first_word: int = 0) -> int:
    """The same in plain torch, on any device, chunk by chunk; it waits for the device once."""
    if first_word < 0:
        raise ValueError(f"a checksum from word {first_word}: it cannot be negative")
    every_byte = _as_bytes(tensor)
    num_words = -(-min(every_byte.numel(), CHUNK_BYTES) // WORD_BYTES)
    steps = torch.arange(1, num_words + 1, device=tensor.device) * _as_signed(_KEY_STEP)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for begin in range(0, every_byte.numel(), CHUNK_BYTES):
        words = _as_words(every_byte[begin : begin + CHUNK_BYTES])
        keys = steps[: words.numel()] + _as_signed((first_word + begin // WORD_BYTES) * _KEY_STEP)
        x = keys.bitwise_xor_(words)
        total += x.sum()
        # An arithmetic shift, made a logical one.
        high = (x >> 32).bitwise_and_(_LOW_32)
        total += high.mul_(x.bitwise_and_(_LOW_32)).sum()
    return int(total.item()) & _LOW_64


def _as_signed(number: int) -> int:
    """The int64 of the same 64 low bits."""
    low = number & _LOW_64
    return low - (1 << 64) if low >> 63 else low


def _as_bytes(tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(
            f"a contiguous tensor expected, got {tuple(tensor.shape)} strides {tensor.stride()}: pack it, or take its "
            "contiguous pieces one by one"
        )
    return tensor.detach().reshape(-1).view(torch.uint8)


def _as_words(some_bytes: Tensor) -> Tensor:
    """At most one chunk as int64: a view where it is whole words that lie on word bounds, else a copy."""
    num_bytes = some_bytes.numel()
    if num_bytes % WORD_BYTES or some_bytes.data_ptr() % WORD_BYTES or some_bytes.storage_offset() % WORD_BYTES:
        padded = some_bytes.new_zeros(-(-num_bytes // WORD_BYTES) * WORD_BYTES)
        padded[:num_bytes] = some_bytes
        some_bytes = padded
    return some_bytes.view(torch.int64)
