"""Two pools, one memory: which blocks have pages, what that costs, and refusals, on real pages."""

import random
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from services.core.ids import LayoutKind
from services.core.layout import Span
from services.placement.rows.transfers import ALL_BLOCKS, BlockShare
from services.worker.memory.pages.backing import MissingMemoryError
from services.worker.memory.rows.exclusive_pools import NOTHING, ExclusivePools, PlaneShape, PoolRefusedError
from tests.support.memory_stand import PIECE, Device

PP, TP = LayoutKind.PP, LayoutKind.TP
SHAPES = {PP: PlaneShape(4, 4096), TP: PlaneShape(12, 2048)}
"""A rank with 2 of 6 layers and 2 of 4 heads: its TP pool is half as large again as its PP pool."""
NUM_BLOCKS = 96
PP_BYTES, TP_BYTES = 96 * 4 * 4096, 96 * 12 * 2048


def pools_on(
    device: Device, shapes: dict[LayoutKind, PlaneShape] = SHAPES, num_blocks: int = NUM_BLOCKS
) -> ExclusivePools:
    ranges = {kind: device.range(kind.name, shapes[kind].num_bytes(num_blocks)) for kind in (PP, TP)}
    return ExclusivePools(ranges, shapes, num_blocks)


def planes(pools: ExclusivePools, kind: LayoutKind) -> Tensor:
    """[planes, blocks, bytes of a block]"""
    shape = pools._shapes[kind]
    extents = (shape.num_planes, shape.blocks.count(pools.num_blocks), shape.block_bytes)
    return pools._backings[kind].tensor(torch.uint8, extents)


def test_the_boot_peak_is_the_larger_pool_and_not_the_sum() -> None:
    device = Device(1 << 30)
    pools = pools_on(device)
    assert pools.held_bytes() == 0
    pools.build(PP)
    assert pools.held == {PP: Span(0, NUM_BLOCKS), TP: NOTHING} and pools.held_bytes() == PP_BYTES
    assert device.peak_bytes <= TP_BYTES < PP_BYTES + TP_BYTES
    assert not planes(pools, PP).any()


def test_a_boot_without_memory_holds_nothing() -> None:
    pools = pools_on(Device(PP_BYTES))
    with pytest.raises(MissingMemoryError, match=f"TP: {TP_BYTES} bytes"):
        pools.build(PP)
    assert pools.held == {PP: NOTHING, TP: NOTHING} and pools.held_bytes() == 0


@pytest.mark.parametrize("step", [5, 31, NUM_BLOCKS])
def test_the_memory_goes_over_some_blocks_at_a_time_and_back(step: int) -> None:
    """What is not yet gone keeps its bytes, what has come reads as zero; no more is held than the larger pool."""
    device = Device(1 << 30)
    pools = pools_on(device)
    pools.build(PP)
    source = planes(pools, PP)
    source.copy_(torch.arange(NUM_BLOCKS, dtype=torch.uint8)[None, :, None].expand_as(source))
    address = source.data_ptr()
    device.free()
    device.peak_bytes = 0
    borders = [*range(0, NUM_BLOCKS, step), NUM_BLOCKS]
    for end in borders[1:]:
        pools.keep(PP, Span(end, NUM_BLOCKS))
        pools.back(TP, Span(0, end))
        if end < NUM_BLOCKS:
            assert source[:, end:].eq(torch.arange(end, NUM_BLOCKS, dtype=torch.uint8)[None, :, None]).all()
        assert not planes(pools, TP)[:, :end].any()
        device.free()
    assert pools.held_bytes() == TP_BYTES
    # Of each plane a piece at either end of what it holds.
    assert device.peak_bytes <= TP_BYTES + 2 * PIECE * (4 + 12)
    for begin in reversed(borders[:-1]):
        pools.keep(TP, Span(0, begin))
        pools.back(PP, Span(begin, NUM_BLOCKS))
    assert pools.held_bytes() == PP_BYTES and planes(pools, PP).data_ptr() == address


@pytest.mark.parametrize("seed", range(30))
def test_pieces_are_those_that_any_row_lies_in(seed: int) -> None:
    """Against every byte looked at."""
    draw = random.Random(seed)
    num_blocks, piece = draw.randint(1, 20), draw.choice([8, 16, 64])
    share = draw.choice([ALL_BLOCKS, BlockShare(5, Span(1, 3)), BlockShare(3, Span(2, 3))])
    shape = PlaneShape(draw.randint(0, 5), draw.choice([0, 8, 24, 40]), share)
    held = Span(*sorted((draw.randint(0, num_blocks), draw.randint(0, num_blocks))))
    own = [block for block in range(num_blocks) if block % share.period in share.part]
    wanted = {
        byte // piece
        for plane in range(shape.num_planes)
        for place, block in enumerate(own)
        if block in held
        for byte in range(
            (plane * len(own) + place) * shape.block_bytes, (plane * len(own) + place + 1) * shape.block_bytes
        )
    }
    found = list(shape.pieces(held, num_blocks, piece))
    assert {byte // piece for begin, end in found for byte in range(begin, end)} == wanted
    assert all(begin < end and begin % piece == end % piece == 0 for begin, end in found)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(found))


def test_pages_that_cannot_be_had_change_nothing() -> None:
    device = Device(TP_BYTES)
    pools = pools_on(device)
    pools.build(PP)
    planes(pools, PP).fill_(7)
    pools.keep(PP, Span(48, NUM_BLOCKS))
    held = pools.held_bytes()
    device.others_bytes = TP_BYTES - held - 5 * PIECE
    with pytest.raises(MissingMemoryError):
        pools.back(TP, Span(0, 48))
    assert pools.held == {PP: Span(48, NUM_BLOCKS), TP: NOTHING} and pools.held_bytes() == held
    assert planes(pools, PP)[:, 48:].eq(7).all()
    device.others_bytes = 0
    pools.back(TP, Span(0, 48))


def test_room_is_waited_for_and_refused_with_numbers() -> None:
    device = Device(TP_BYTES)
    pools = pools_on(device)
    pools.build(TP)
    looks = 0

    def free() -> int:
        nonlocal looks
        looks += 1
        return 0 if looks < 3 else 30

    for backing in device.backings:
        backing._free_bytes = free
    pools.wait_for_room(20, margin_bytes=10, deadline_s=60)
    assert looks == 3
    with pytest.raises(
        MissingMemoryError, match=r"21 bytes are to be backed and 10 to stay free, 30 are free after 0 s"
    ):
        pools.wait_for_room(21, margin_bytes=10, deadline_s=0)


def test_pages_above_the_highest_live_row_are_released_and_had_again() -> None:
    pools = pools_on(Device(1 << 30), {PP: PlaneShape(4, 16384), TP: PlaneShape(12, 8192)})
    pools.build(PP)
    rows = planes(pools, PP)
    rows.copy_(torch.arange(1, 5, dtype=torch.uint8)[:, None, None].expand_as(rows))
    whole = pools.held_bytes()
    freed = pools.keep(PP, Span(0, 30))
    dead = whole * (NUM_BLOCKS - 30) // NUM_BLOCKS
    assert dead - len(rows) * 2 * PIECE < freed <= dead and pools.held_bytes() == whole - freed
    assert rows[:, :30].eq(torch.arange(1, 5, dtype=torch.uint8)[:, None, None]).all()
    pools.back(PP, pools.every_block)
    assert pools.held_bytes() == whole and not rows[:, 32:].any(), "from the first whole piece on"


def test_a_pool_smaller_than_the_id_space_is_refused() -> None:
    """V"""
    device = Device(1 << 30)
    ranges = {PP: device.range("PP", PP_BYTES), TP: device.range("TP", TP_BYTES - PIECE)}
    with pytest.raises(PoolRefusedError, match=f"{TP_BYTES - PIECE} bytes are not the {TP_BYTES} of the 96 blocks"):
        ExclusivePools(ranges, SHAPES, NUM_BLOCKS)


def test_a_rank_without_heads_takes_part() -> None:
    pools = pools_on(Device(1 << 30), {PP: PlaneShape(4, 4096), TP: PlaneShape(12, 0)})
    pools.build(PP)
    pools.keep(PP, Span(96, 96))
    pools.back(TP, pools.every_block)
    assert pools.held_bytes() == 0
    assert pools.keep(TP, Span(0, 0)) == 0
