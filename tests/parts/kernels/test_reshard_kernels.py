"""Rows packed and scattered, and checksums, bit for bit, on both instruction paths and against plain torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from kernels.cpu.checksum import CHUNK_BYTES, checksum, checksum_reference, join_checksums
from kernels.cpu.reshard import (
    Planes,
    Runs,
    move_reference,
    pack,
    pack_and_sum,
    packed_bytes,
    scatter,
)
from services.core.layout import Span, spans
from services.placement.cuts import largest_remainder

pytestmark = pytest.mark.usefixtures("each_path")

NAN_BITS = 0x7FC0_DEAD
LOW_64 = (1 << 64) - 1


def random_bytes(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(256, (count,), dtype=torch.uint8, generator=generator)


def defined_checksum(content: bytes, first_word: int = 0) -> int:
    """The definition, word by word."""
    padded = content + bytes(-len(content) % 8)
    total = 0
    for index in range(len(padded) // 8):
        word = int.from_bytes(padded[8 * index : 8 * index + 8], "little")
        word ^= (first_word + index + 1) * 0x9E3779B97F4A7C15 & LOW_64
        total += word + (word & LOW_64 >> 32) * (word >> 32)
    return total & LOW_64


def test_checksums_are_as_defined_at_any_length_and_address(generator: torch.Generator) -> None:
    for length in [*range(70), 96, 128, 1000, 4099]:
        whole = random_bytes(length + 8, generator)
        for begin in (0, 1, 8):
            piece = whole[begin : begin + length]
            want = defined_checksum(piece.numpy().tobytes(), first_word=length)
            assert checksum(piece, length) == checksum((piece.data_ptr(), length), length) == want
            assert checksum_reference(piece, length) == want


def test_checksums_of_any_type_and_past_a_chunk(generator: torch.Generator) -> None:
    large = random_bytes(CHUNK_BYTES + 77, generator)
    assert checksum(large) == checksum_reference(large)
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.float64):
        tensor = torch.randn(7, 5, 3, generator=generator).to(dtype)
        content = bytes(tensor.view(torch.uint8).flatten().tolist())
        assert checksum(tensor) == checksum_reference(tensor) == defined_checksum(content)


def test_checksums_see_flips_swaps_signs_and_lengths(generator: torch.Generator) -> None:
    words = torch.randint(-(2**63), 2**63 - 1, (64,), generator=generator)
    seen = {checksum(words)}
    for index in range(64):
        flipped = words.clone()
        flipped[index] ^= 1 << (index % 63)
        seen.add(checksum(flipped))
    for first in range(63):
        swapped = words.clone()
        swapped[[first, 63]] = words[[63, first]]
        seen.add(checksum(swapped))
    assert len(seen) == 1 + 64 + 63
    signs = torch.randn(64, generator=generator)
    for first in range(0, 60, 2):
        changed = signs.clone()
        changed[first : first + 3 : 2] *= -1.0  # the same bit of two words
        seen.add(checksum(changed))
    assert len(seen) == 1 + 64 + 63 + 30
    # Two pairs of words trade places, each pair the mirror of the other: what sums with regular factors do not see.
    mirrored = torch.arange(64)
    for first in range(40):
        mirrored[[first, first + 1, first + 20, first + 21]] = torch.tensor([7, 9, 9, 7])
        before = checksum(mirrored)
        mirrored[[first, first + 1, first + 20, first + 21]] = torch.tensor([9, 7, 7, 9])
        assert checksum(mirrored) != before
    zeros = torch.zeros(100, dtype=torch.int64)
    assert len({checksum(zeros[:count]) for count in range(100)}) == 100


def test_checksums_of_pieces_join(generator: torch.Generator) -> None:
    whole = random_bytes(1003, generator)
    cuts = [0, 8, 40, 40, 512, 1003]
    pieces = [checksum(whole[a:b], a // 8) for a, b in pairwise(cuts)]
    assert join_checksums(pieces) == checksum(whole)
    assert join_checksums([]) == checksum(whole[:0]) == checksum_reference(whole[:0]) == 0


def test_checksums_of_scattered_or_negative_memory_are_refused() -> None:
    for take in (checksum, checksum_reference):
        with pytest.raises(ValueError, match="contiguous tensor expected"):
            take(torch.zeros(4, 4)[:, :2])
        with pytest.raises(ValueError, match="negative"):
            take(torch.zeros(4), -1)
    with pytest.raises(ValueError, match="-5 bytes"):
        checksum((1, -5))


@dataclass(frozen=True, slots=True)
class Pools:
    """Keys and values of some layers and heads as one rank has them."""

    layers: Span
    heads: Span
    planes: tuple[Tensor, ...]

    def of(self, layers: Span) -> Planes:
        first = 2 * (layers.begin - self.layers.begin)
        return Planes.of(self.planes[first : first + 2 * len(layers)])

    def local(self, heads: Span) -> Span:
        return Span(heads.begin - self.heads.begin, heads.end - self.heads.begin)


def poisoned(layers: Span, heads: Span, num_blocks: int, head_dim: int) -> Pools:
    shape = (num_blocks, len(heads), 16, head_dim)
    planes = [torch.full(shape, NAN_BITS, dtype=torch.int32).view(torch.float32) for _ in range(2 * len(layers))]
    return Pools(layers, heads, tuple(planes))


def move(source: Pools, target: Pools, runs: Runs) -> None:
    """What both have in common, by way of one staging buffer and two checksums."""
    layers = Span(max(source.layers.begin, target.layers.begin), min(source.layers.end, target.layers.end))
    heads = Span(max(source.heads.begin, target.heads.begin), min(source.heads.end, target.heads.end))
    if not len(heads):
        return
    planes = source.of(layers)
    staging = torch.empty(packed_bytes(planes, source.local(heads), runs), dtype=torch.uint8)
    sent = pack_and_sum(planes, source.local(heads), runs, staging)
    scatter(target.of(layers), target.local(heads), runs, staging)
    assert pack_and_sum(target.of(layers), target.local(heads), runs, staging) == sent == checksum(staging)


def bits(planes: Sequence[Tensor]) -> list[Tensor]:
    return [plane.view(torch.int32) for plane in planes]


def blocks_of(num_blocks: int, generator: torch.Generator, share: float) -> Runs:
    chosen = (torch.rand(num_blocks, generator=generator) < share).nonzero().flatten().tolist()
    return Runs.of_blocks((block, 1) for block in chosen)


def slots_of(num_blocks: int, generator: torch.Generator, share: float) -> Runs:
    chosen = torch.rand(num_blocks * 16 + 1, generator=generator) < share
    edges = chosen.int().diff(prepend=torch.zeros(1, dtype=torch.int32), append=torch.zeros(1, dtype=torch.int32))
    begins, ends = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    pairs = [(a, min(b, num_blocks * 16) - a) for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
    return Runs.of_slots(pairs)


def all_runs(num_blocks: int, generator: torch.Generator) -> list[Runs]:
    """Empty, one row, one block, runs that end inside blocks, full pools."""
    return [
        Runs.of_blocks([]),
        Runs.of_slots([(37, 0), (37, 1), (40, 0)]),
        Runs.of_blocks([(num_blocks - 1, 1)]),
        Runs.of_slots([(5, 40), (45, 3), (60, num_blocks * 16 - 60)]),
        Runs.of_blocks([(0, num_blocks)]),
        Runs.of_slots([(0, num_blocks * 16)]),
        blocks_of(num_blocks, generator, 0.5),
        slots_of(num_blocks, generator, 0.3),
    ]


def live_slots(runs: Runs) -> Tensor:
    slots = [
        slot for a, n in runs.begin_length.tolist() for slot in range(a * runs.slots_each, (a + n) * runs.slots_each)
    ]
    return torch.tensor(slots, dtype=torch.int64)


SHARES = {
    "two_even": (8, (1, 1), (2, 2), 64),
    "two_uneven": (3, (2, 1), (1, 3), 64),
    "three_of_48_heads": (48, (30, 17, 17), (3, 1, 1), 8),
    "one_rank_without_heads": (3, (1, 1, 1, 5), (1, 1, 2, 1), 16),
}


@pytest.mark.parametrize("name", SHARES)
def test_pp_to_tp_and_back_is_bit_identical(generator: torch.Generator, name: str) -> None:
    num_heads, weights, stages, head_dim = SHARES[name]
    num_blocks, num_layers = 7, sum(stages)
    every_head, every_layer = Span(0, num_heads), Span(0, num_layers)
    shape = (2 * num_layers, num_blocks, num_heads, 16, head_dim)
    truth = torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int32, generator=generator)
    for runs in all_runs(num_blocks, generator):
        slot = live_slots(runs)
        want = torch.full_like(truth, NAN_BITS)
        want[:, slot // 16, :, slot % 16] = truth[:, slot // 16, :, slot % 16]
        pp = [
            Pools(layers, every_head, tuple(truth[2 * layers.begin : 2 * layers.end].view(torch.float32)))
            for layers in spans(stages)
        ]
        tp = [
            poisoned(every_layer, heads, num_blocks, head_dim) for heads in spans(largest_remainder(num_heads, weights))
        ]
        for source in pp:
            for target in tp:
                move(source, target, runs)
        for pools in tp:
            for plane, expected in zip(bits(pools.planes), want, strict=True):
                assert torch.equal(plane, expected[:, pools.heads.begin : pools.heads.end])
        back = [poisoned(source.layers, every_head, num_blocks, head_dim) for source in pp]
        for source in tp:
            for target in back:
                move(source, target, runs)
        assert torch.equal(torch.stack([plane for pools in back for plane in bits(pools.planes)]), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_native_and_plain_torch_agree(generator: torch.Generator, dtype: torch.dtype) -> None:
    for head_dim in (32, 96):  # rows of one, two, three, four, six and twelve vectors
        shape = (3, 6, 5, 16, head_dim)
        content = random_bytes(3 * 6 * 5 * 16 * head_dim * dtype.itemsize, generator)
        source = Planes.of(list(content.view(dtype).view(shape)))
        for runs in all_runs(6, generator):
            for heads in (Span(0, 5), Span(1, 3), Span(2, 2)):
                staging = torch.empty(packed_bytes(source, heads, runs), dtype=torch.uint8)
                plain = torch.empty_like(staging)
                pack(source, heads, runs, staging)
                move_reference(source, heads, runs, plain, packs=True)
                assert torch.equal(staging, plain)
                staging.zero_()
                want = checksum_reference(plain, 11)
                assert pack_and_sum(source, heads, runs, staging, 11) == want
                assert torch.equal(staging, plain)
                targets = [torch.full(shape, 3, dtype=dtype) for _ in range(2)]
                scatter(Planes.of(list(targets[0])), heads, runs, staging)
                move_reference(Planes.of(list(targets[1])), heads, runs, staging, packs=False)
                first, second = (target.view(torch.uint8) for target in targets)
                assert torch.equal(first, second)


@pytest.mark.parametrize("offset", [0, 8])
def test_large_moves_past_the_caches(generator: torch.Generator, offset: int) -> None:
    """Above the bound from which lines are streamed; a staging off the vectors' bounds is written as it lies."""
    shape = (2, 90, 4, 16, 256)
    source, target = torch.randn(shape, generator=generator), torch.zeros(shape)
    runs, heads = Runs.of_slots([(7, 90 * 16 - 7)]), Span(1, 4)
    num_bytes = packed_bytes(Planes.of(list(source)), heads, runs)
    assert num_bytes > 8 << 20
    staging = torch.empty(num_bytes + 64, dtype=torch.uint8)
    staging = staging[-staging.data_ptr() % 32 + offset :][:num_bytes]
    assert pack_and_sum(Planes.of(list(source)), heads, runs, staging) == checksum(staging)
    scatter(Planes.of(list(target)), heads, runs, staging)
    want = torch.zeros_like(source)
    want[:, :, 1:] = source[:, :, 1:]
    want[:, 0, :, :7] = 0.0
    assert torch.equal(target, want)


def test_source_and_destination_in_one_arena(generator: torch.Generator) -> None:
    """Everything is packed before anything is scattered, so rows survive a destination that lies across its source."""
    arena = torch.randn(2 * 6 * 3 * 16 * 32 + 5000, generator=generator)
    source = arena[: 2 * 6 * 3 * 16 * 32].view(2, 6, 3, 16, 32)
    target = arena[4096 : 4096 + 2 * 9 * 2 * 16 * 32].view(2, 9, 2, 16, 32)
    heads, runs = Span(1, 3), Runs.of_slots([(3, 40), (50, 46)])
    want = source[:, :, 1:].clone()
    planes = Planes.of(list(source))
    staging = torch.empty(packed_bytes(planes, heads, runs) // 4)
    pack(planes, heads, runs, staging)
    scatter(Planes.of(list(target)), Span(0, 2), runs, staging)
    slot = live_slots(runs)
    assert torch.equal(target[:, slot // 16, :, slot % 16], want[:, slot // 16, :, slot % 16])
    size = packed_bytes(planes, heads, runs) // 4
    before = arena.clone()
    for begin in (0, 100, source.numel() - 1):
        with pytest.raises(ValueError, match="overlaps a plane"):
            pack(planes, heads, runs, torch.as_strided(arena, (min(size, len(arena) - begin),), (1,), begin))
    assert torch.equal(arena, before)


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (Runs.of_blocks([(3, 2)]), r"\[3, 3 \+ 2\) outside \[0, 4\)"),
        (Runs.of_blocks([(-1, 1)]), r"run 0: \[-1"),
        (Runs.of_blocks([(2, 1), (1, 1)]), r"run 1: \[1, 1 \+ 1\) outside \[3, 4\)"),
        (Runs.of_slots([(2, 3), (4, 1)]), r"outside \[5, 64\)"),
        (Runs.of_slots([(2, -1)]), r"\[2, 2 \+ -1\)"),
        (Runs.of_slots([(63, 2)]), r"\[63, 63 \+ 2\)"),
        (Runs.of_slots([(2**31 - 1, 2**31 - 1)]), "outside"),
        (Runs.of_blocks([(0, 2)]), "bytes expected"),
    ],
)
def test_runs_that_do_not_fit_are_refused_before_anything_is_written(runs: Runs, said: str) -> None:
    planes = Planes.of([torch.ones(4, 2, 16, 8)])
    staging = torch.full((16 * 2 * 8,), 7.0)
    for call in (pack, pack_and_sum, scatter):
        with pytest.raises(ValueError, match=said):
            call(planes, Span(0, 2), runs, staging)
    for packs in (True, False):
        with pytest.raises(ValueError, match=said):
            move_reference(planes, Span(0, 2), runs, staging, packs=packs)
    assert (staging == 7.0).all()
    assert (planes.tensors[0] == 1.0).all()


def test_what_is_no_pool_or_no_staging_is_refused() -> None:
    good = torch.zeros(4, 2, 16, 8)
    for planes, said in (
        ([], "no plane"),
        ([good, good[:2]], "like the first"),
        ([good, good.double()], "like the first"),
        ([good[:, :1]], "contiguous planes"),
        ([torch.zeros(4, 2, 8, 8)], "contiguous planes"),
        ([good[..., :4].contiguous()], "multiple of 32"),
    ):
        with pytest.raises(ValueError, match=said):
            Planes.of(planes)
    pool, runs, staging = Planes.of([good]), Runs.of_blocks([(0, 1)]), torch.zeros(256)
    with pytest.raises(ValueError, match=r"heads \[1, 3\) outside the pool's 2"):
        pack(pool, Span(1, 3), runs, staging)
    with pytest.raises(ValueError, match="contiguous staging"):
        pack(pool, Span(0, 2), runs, torch.zeros(512)[::2])
    with pytest.raises(ValueError, match="runs int32"):
        pack(pool, Span(0, 2), Runs(torch.zeros(1, 2, dtype=torch.int64), 16), staging)
    with pytest.raises(ValueError, match="negative"):
        pack_and_sum(pool, Span(0, 2), runs, staging, -1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_device_gives_the_same_bytes_and_checksums(generator: torch.Generator) -> None:
    shape = (3, 6, 5, 16, 32)
    source = torch.randn(shape, generator=generator)
    large = random_bytes(CHUNK_BYTES + 77, generator)
    assert checksum(large.cuda()) == checksum(large)
    assert checksum(large[1:].cuda()[2:]) == checksum(large[3:])
    for runs in all_runs(6, generator):
        host, device = Planes.of(list(source)), Planes.of(list(source.cuda()))
        want = torch.empty(packed_bytes(host, Span(1, 4), runs), dtype=torch.uint8)
        got = want.cuda()
        assert pack_and_sum(device, Span(1, 4), runs, got) == pack_and_sum(host, Span(1, 4), runs, want)
        assert torch.equal(got.cpu(), want)
        targets = torch.zeros(shape), torch.zeros(shape).cuda()
        for target, staging in zip(targets, (want, got), strict=True):
            scatter(Planes.of(list(target)), Span(1, 4), runs, staging)
        assert torch.equal(targets[0], targets[1].cpu())
