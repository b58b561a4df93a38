"""Rows of the KV pool on their way from one layout to another: packed into one staging buffer, scattered from it.

One call moves the rows of all planes (a layer's keys or its values) at once. Packing reads the pool and writes the
staging, scattering the reverse; neither ever does both, so that a flip that packs everything before it scatters
anything has read every row before it writes one, also where source and destination share memory. Which rows move, and
to whom, is not decided here.

The staging's order, outermost first: plane; run, cut where blocks end; head; slot; element. It does not depend on how
many heads or blocks the pool has, nor on which heads they are: what one layout packs, another scatters, as long as
both name the same slots of their blocks by the same runs. Bytes are moved as they are, whatever their type.

On the CPU it is one pass in C, the checksum included; elsewhere, one indexed copy for each plane.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

import kernels._native as _native
from kernels.cpu import paths
from kernels.cpu.checksum import checksum
from services.core.ids import BLOCK_SLOTS
from services.core.layout import Span

ROW_ALIGNMENT_BYTES = 32
"""A row of one head is whole vectors."""


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """The planes whose rows move, in the order in which both sides name them; built once, used for every move."""

    tensors: tuple[Tensor, ...]
    """Each [num_blocks, num_kv_heads, 16, head_dim], contiguous, of one type, shape and device."""
    addresses: Tensor
    """int64, in host memory."""

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "Planes":
        """Raises ValueError where the tensors differ, or are not planes of a pool."""
        if not tensors:
            raise ValueError("no plane to move: name at least one")
        first = tensors[0]
        for tensor in tensors:
            same = (tensor.shape, tensor.dtype, tensor.device) == (first.shape, first.dtype, first.device)
            if not same or tensor.dim() != 4 or tensor.shape[2] != BLOCK_SLOTS or not tensor.is_contiguous():
                raise ValueError(
                    f"contiguous planes [blocks, heads, {BLOCK_SLOTS}, head_dim] like the first expected, which is "
                    f"{first.dtype} {tuple(first.shape)} on {first.device}; got {tensor.dtype} {tuple(tensor.shape)} "
                    f"strides {tensor.stride()} on {tensor.device}"
                )
        planes = cls(tuple(tensors), torch.tensor([tensor.data_ptr() for tensor in tensors]))
        if planes.row_bytes % ROW_ALIGNMENT_BYTES:
            raise ValueError(
                f"a row of {first.shape[3]} {first.dtype} is {planes.row_bytes} bytes, a multiple of "
                f"{ROW_ALIGNMENT_BYTES} expected"
            )
        return planes

    @property
    def num_blocks(self) -> int:
        """Blocks of each plane."""
        return self.tensors[0].shape[0]

    @property
    def num_heads(self) -> int:
        """KV heads of each plane."""
        return self.tensors[0].shape[1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one slot of one head."""
        return self.tensors[0].shape[3] * self.tensors[0].element_size()

    @property
    def is_host(self) -> bool:
        """Whether the C kernels reach them."""
        return not paths.takes_torch(self.tensors[0])


@dataclass(frozen=True, slots=True, eq=False)
class Runs:
    """Rows by runs of blocks or of slots, ascending and disjoint (a row named twice is a fault of the plan)."""

    begin_length: Tensor
    """int32 [runs, 2], contiguous, in host memory."""
    slots_each: int
    """Slots of one unit of the runs."""

    @classmethod
    def of_blocks(cls, runs: Iterable[tuple[int, int]]) -> "Runs":
        """Whole blocks, by (first block, number of blocks)."""
        return cls(_pairs(runs), BLOCK_SLOTS)

    @classmethod
    def of_slots(cls, runs: Iterable[tuple[int, int]]) -> "Runs":
        """Single rows, by (first slot, number of slots); slot s is slot s % 16 of block s // 16."""
        return cls(_pairs(runs), 1)

    @property
    def num_slots(self) -> int:
        """Slots of all runs."""
        return int(self.begin_length[:, 1].sum()) * self.slots_each


def _pairs(runs: Iterable[tuple[int, int]]) -> Tensor:
    return torch.tensor(list(chain.from_iterable(runs)), dtype=torch.int32).view(-1, 2)


def packed_bytes(planes: Planes, heads: Span, runs: Runs) -> int:
    """Bytes of the staging buffer for these rows: exactly what `pack` and `scatter` take."""
    return len(planes.tensors) * runs.num_slots * len(heads) * planes.row_bytes


def pack(planes: Planes, heads: Span, runs: Runs, staging: Tensor) -> None:
    """Copies the rows into `staging`, a contiguous tensor of `packed_bytes` bytes on the planes' device.

    Raises:
        ValueError: heads or a run outside the pool, runs that do not ascend, a staging buffer of another size, device
            or order, or one that overlaps a plane; nothing was written.
    """
    _move(planes, heads, runs, staging, packs=True)


def pack_and_sum(planes: Planes, heads: Span, runs: Runs, staging: Tensor, first_word: int = 0) -> int:
    """`pack`, and `checksum(staging, first_word)` from the same pass where the planes are in host memory."""
    _check(planes, heads, runs, staging)
    if first_word < 0:
        raise ValueError(f"a checksum from word {first_word}: it cannot be negative")
    if planes.is_host:
        return _call(planes, heads, runs, staging, packs=True, sums=True, first_word=first_word)
    move_reference(planes, heads, runs, staging, packs=True)
    return checksum(staging, first_word)


def scatter(planes: Planes, heads: Span, runs: Runs, staging: Tensor) -> None:
    """Copies the rows from `staging` to their places; every other slot and head stays. Raises as `pack`."""
    _move(planes, heads, runs, staging, packs=False)


def _move(planes: Planes, heads: Span, runs: Runs, staging: Tensor, *, packs: bool) -> None:
    _check(planes, heads, runs, staging)
    if planes.is_host:
        _call(planes, heads, runs, staging, packs=packs, sums=False, first_word=0)
    else:
        move_reference(planes, heads, runs, staging, packs=packs)


def _check(planes: Planes, heads: Span, runs: Runs, staging: Tensor) -> None:
    if heads.end > planes.num_heads:
        raise ValueError(f"heads [{heads.begin}, {heads.end}) outside the pool's {planes.num_heads}")
    if runs.begin_length.dtype != torch.int32 or not runs.begin_length.is_contiguous():
        raise ValueError(f"runs int32 and contiguous expected, got {runs.begin_length.dtype}: see Runs")
    if not staging.is_contiguous() or staging.device != planes.tensors[0].device:
        raise ValueError(
            f"a contiguous staging buffer on {planes.tensors[0].device} expected, got strides {staging.stride()} on "
            f"{staging.device}"
        )
    begin, plane_bytes = staging.data_ptr(), planes.tensors[0].nbytes
    if ((planes.addresses < begin + staging.nbytes) & (planes.addresses + plane_bytes > begin)).any():
        raise ValueError("the staging buffer overlaps a plane: rows would be written before they are read")


def _call(planes: Planes, heads: Span, runs: Runs, staging: Tensor, *, packs: bool, sums: bool, first_word: int) -> int:
    return int(
        _native.move_rows(
            planes.addresses.data_ptr(),
            len(planes.tensors),
            planes.num_blocks,
            planes.num_heads,
            planes.row_bytes,
            heads.begin,
            len(heads),
            runs.begin_length.data_ptr(),
            len(runs.begin_length),
            runs.slots_each,
            staging.data_ptr(),
            staging.nbytes,
            packs,
            sums,
            first_word,
        )
    )


def move_reference(planes: Planes, heads: Span, runs: Runs, staging: Tensor, *, packs: bool) -> None:
    """The same in plain torch, on any device; raises ValueError for runs outside the pool or a staging of another size.

    For a moment it takes some words of 8 bytes for each row of one plane.
    """
    _check_runs(runs, planes.num_blocks)
    expected_bytes = packed_bytes(planes, heads, runs)
    if staging.nbytes != expected_bytes:
        raise ValueError(f"a staging buffer of {expected_bytes} bytes expected, got {staging.nbytes} bytes")
    if not expected_bytes:
        return
    first = planes.tensors[0]
    rows = _rows_in_order(runs, heads, planes.num_heads, first.device)
    # Wide elements where all of it lies on their bounds.
    offsets = [tensor.storage_offset() * tensor.element_size() for tensor in (*planes.tensors, staging)]
    element = torch.int64 if not any(offset % torch.int64.itemsize for offset in offsets) else torch.uint8
    parts = staging.reshape(-1).view(torch.uint8).view(len(planes.tensors), len(rows), planes.row_bytes).view(element)
    for plane, part in zip(planes.tensors, parts, strict=True):
        pool = plane.view(-1, first.shape[3]).view(element)
        if packs:
            torch.index_select(pool, 0, rows, out=part)
        else:
            pool.index_copy_(0, rows, part)


def _check_runs(runs: Runs, num_blocks: int) -> None:
    begin, length = runs.begin_length.long().unbind(1)
    free_from = torch.cat([begin.new_zeros(1), (begin + length)[:-1]])[: len(begin)]
    limit = num_blocks * BLOCK_SLOTS // runs.slots_each
    for run in ((length < 0) | (begin < free_from) | (begin + length > limit)).nonzero().flatten()[:1].tolist():
        raise ValueError(
            f"run {run}: [{begin[run]}, {begin[run]} + {length[run]}) outside [{free_from[run]}, {limit}), what is "
            "left of the pool after the run before"
        )


def _rows_in_order(runs: Runs, heads: Span, num_pool_heads: int, device: torch.device) -> Tensor:
    """Rows of a plane seen as [blocks * heads * 16, head_dim], in the staging's order; S slots, H heads."""
    num_slots = runs.num_slots
    begin, length = (runs.begin_length.long() * runs.slots_each).to(device).unbind(1)
    run_S = torch.arange(len(begin), device=device).repeat_interleave(length, output_size=num_slots)
    index_S = torch.arange(num_slots, device=device)
    slot_S = index_S + (begin - length.cumsum(0) + length)[run_S]
    # A piece begins where a run or a block does.
    begins_S = torch.cat([run_S.new_ones(1), run_S.diff()]).bool() | (slot_S % BLOCK_SLOTS == 0)
    piece_S = begins_S.cumsum(0) - 1
    piece_length = torch.zeros_like(index_S).index_add_(0, piece_S, torch.ones_like(index_S))
    piece_begin_S = (piece_length.cumsum(0) - piece_length)[piece_S]
    head_H = torch.arange(len(heads), device=device)
    place_SH = (piece_begin_S * len(heads) + index_S - piece_begin_S)[:, None] + head_H * piece_length[piece_S][:, None]
    row_SH = (slot_S // BLOCK_SLOTS * num_pool_heads + heads.begin)[:, None] + head_H
    row_SH = row_SH * BLOCK_SLOTS + (slot_S % BLOCK_SLOTS)[:, None]
    return torch.empty_like(row_SH).view(-1).index_copy_(0, place_SH.view(-1), row_SH.view(-1))
