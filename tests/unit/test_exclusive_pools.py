"""Two pools, one memory: boot, seams, flushes and refusals on real pages."""

import pytest
import torch

from services.core.ids import LayoutKind
from services.worker.backing import MissingMemoryError
from services.worker.exclusive_pools import (
    ExclusivePools,
    PoolRefusedError,
    PoolShape,
    PoolsLostError,
    PoolViews,
    Seam,
    SeamFailedError,
    SeamStep,
    capacity_blocks,
)
from tests.unit.memory_stand import PIECE, Device

PP, TP = LayoutKind.PP, LayoutKind.TP
SHAPES = {PP: PoolShape(2, 4, 16), TP: PoolShape(6, 2, 16)}
"""A rank with 2 of 6 layers and 2 of 4 heads: its TP pool is half as large again as its PP pool."""
NUM_BLOCKS = 96
PP_BYTES, TP_BYTES = 96 * 2 * 2 * 4 * 1024, 96 * 2 * 6 * 2 * 1024


def pools_on(device: Device, margin_bytes: int = 0, shapes: dict[LayoutKind, PoolShape] = SHAPES) -> ExclusivePools:
    ranges = {kind: device.range(kind.name, NUM_BLOCKS * shapes[kind].block_bytes, margin_bytes) for kind in (PP, TP)}
    return ExclusivePools(ranges, shapes, NUM_BLOCKS)


def built(device: Device, margin_bytes: int = 0) -> ExclusivePools:
    pools = pools_on(device, margin_bytes)
    pools.build((PP, TP), lambda kind, views: None)
    return pools


def test_the_boot_peak_is_the_larger_pool_not_the_sum() -> None:
    device = Device(1 << 30)
    pools = pools_on(device)
    assert (pools.pool_bytes(PP), pools.pool_bytes(TP)) == (PP_BYTES, TP_BYTES)
    seen: list[tuple[LayoutKind, int]] = []

    def capture(kind: LayoutKind, views: PoolViews) -> None:
        assert pools.held is kind
        for plane in (*views.keys, *views.values):
            assert plane.shape == (NUM_BLOCKS, SHAPES[kind].num_kv_heads, 16, 16) and plane.is_contiguous()
            assert not plane.count_nonzero()
            plane.fill_(1)
        device.free()
        seen.append((kind, pools.held_bytes()))

    pools.build((PP, TP), capture)
    assert seen == [(PP, PP_BYTES), (TP, TP_BYTES)]
    assert pools.held is PP and pools.held_bytes() == PP_BYTES
    assert device.peak_bytes == TP_BYTES < PP_BYTES + TP_BYTES
    assert not pools.views[PP].keys[0].count_nonzero(), "what warm-up wrote is gone"


def test_a_boot_without_memory_holds_nothing() -> None:
    device = Device(PP_BYTES)
    pools = pools_on(device)
    with pytest.raises(MissingMemoryError, match=f"TP: {TP_BYTES} bytes"):
        pools.build((PP, TP), lambda kind, views: None)
    assert pools.held is None and pools.held_bytes() == 0


@pytest.mark.parametrize("start", [PP, TP])
def test_a_seam_hands_the_memory_over_at_unchanged_addresses(start: LayoutKind) -> None:
    device = Device(TP_BYTES + PIECE)
    pools = pools_on(device, margin_bytes=PIECE)
    pools.build((start, start.other), lambda kind, views: None)
    addresses = {kind: [plane.data_ptr() for plane in pools.views[kind].keys] for kind in SHAPES}
    for to in (start.other, start, start.other):
        source = pools.views[to.other].keys[1]
        source[5].fill_(2.5)
        packed = source[5].clone()
        seam = pools.open_seam(to)
        seam.release_source()
        assert pools.held is None and pools.held_bytes() == 0
        seam.back_destination(deadline_s=0)
        assert pools.held is to and pools.held_bytes() == pools.pool_bytes(to)
        destination = pools.views[to].keys[1]
        assert not destination.count_nonzero(), "freshly backed"
        destination[5, :2] = packed[:2]
        seam.commit()
        assert destination[5, :2].eq(2.5).all() and not destination[4].count_nonzero()
        assert [plane.data_ptr() for plane in pools.views[to].keys] == addresses[to]
    assert device.peak_bytes <= TP_BYTES


def test_a_seam_that_would_not_fit_is_abandoned_before_anything_is_lost() -> None:
    device = Device(TP_BYTES + PIECE)
    pools = built(device, PIECE)
    pools.views[PP].values[0].fill_(4)
    assert pools.shortage_bytes(TP) == 0
    device.others_bytes = 3 * PIECE
    assert pools.shortage_bytes(TP) == 3 * PIECE
    with pytest.raises(MissingMemoryError, match=f"{3 * PIECE} too few"):
        pools.wait_for_room(TP, deadline_s=0)
    seam = pools.open_seam(TP)
    with pytest.raises(MissingMemoryError):
        seam.release_source()
    assert seam.step is SeamStep.READING and pools.held is PP
    assert pools.views[PP].values[0].eq(4).all()
    device.others_bytes = 0
    seam.release_source()


def test_room_is_waited_for() -> None:
    device = Device(TP_BYTES)
    pools = built(device)
    looks = 0

    def free() -> int:
        nonlocal looks
        looks += 1
        return 0 if looks < 3 else TP_BYTES

    for backing in device.backings:
        backing._free_bytes = free
    pools.wait_for_room(TP, deadline_s=60)
    assert looks == 3


def test_the_smaller_pool_always_fits() -> None:
    device = Device(TP_BYTES)
    pools = pools_on(device)
    pools.build((TP, PP), lambda kind, views: None)
    device.others_bytes = TP_BYTES
    assert pools.shortage_bytes(PP) == 0


def seam_whose_memory_is_taken(device: Device) -> tuple[ExclusivePools, Seam, torch.Tensor]:
    pools = built(device)
    pools.views[PP].keys[0][7].fill_(9)
    packed = pools.views[PP].keys[0][7].clone()
    seam = pools.open_seam(TP)
    seam.release_source()
    device.others_bytes = TP_BYTES - PP_BYTES
    with pytest.raises(SeamFailedError, match="no pages for TP within 0 s, restore"):
        seam.back_destination(deadline_s=0)
    return pools, seam, packed


def test_a_destination_that_is_not_to_be_had_leads_back() -> None:
    """RESTORED: the source's pages come back empty and the packed rows are written back."""
    device = Device(TP_BYTES)
    pools, seam, packed = seam_whose_memory_is_taken(device)
    seam.restore(deadline_s=0)
    assert (seam.step, pools.held) == (SeamStep.RESTORED, PP)
    assert not pools.views[PP].keys[0].count_nonzero()
    pools.views[PP].keys[0][7] = packed
    assert pools.views[PP].keys[0][7].eq(9).all()
    device.others_bytes = 0
    second = pools.open_seam(TP)
    second.release_source()
    second.back_destination(0)
    second.restore(0)
    assert pools.held is PP, "also from where the destination was backed but not verified"


def test_where_neither_is_to_be_had_the_generation_ends() -> None:
    device = Device(TP_BYTES)
    pools, seam, _ = seam_whose_memory_is_taken(device)
    device.others_bytes = TP_BYTES
    with pytest.raises(PoolsLostError, match="the generation ends"):
        seam.restore(deadline_s=0)
    assert pools.held is None and pools.held_bytes() == 0


def test_reads_come_before_the_release_and_writes_after_the_backing() -> None:
    """T, A: every step out of order is refused by name, and changes nothing."""
    pools = built(Device(1 << 30))
    seam = pools.open_seam(TP)
    early = (lambda: seam.back_destination(0), seam.commit, lambda: seam.restore(0))
    for step in early:
        with pytest.raises(PoolRefusedError, match="is READING"):
            step()
    assert pools.held is PP and pools.held_bytes() == PP_BYTES
    seam.release_source()
    for step in (seam.release_source, seam.commit):
        with pytest.raises(PoolRefusedError, match="is RELEASED"):
            step()
    with pytest.raises(PoolRefusedError, match="nothing is held"):
        pools.open_seam(TP)
    seam.back_destination(0)
    seam.commit()
    with pytest.raises(PoolRefusedError, match="is COMMITTED"):
        seam.restore(0)
    with pytest.raises(PoolRefusedError, match="TP is held"):
        pools.open_seam(TP)


@pytest.mark.parametrize("to", [PP, TP])
def test_a_flush_zeroes_what_holds_pages_and_skips_the_rest(to: LayoutKind) -> None:
    pools = pools_on(Device(1 << 30))
    assert pools.flush() == 0, "nothing is held yet"
    pools.build((to, to.other), lambda kind, views: None)
    planes = (*pools.views[to].keys, *pools.views[to].values)
    for plane in planes:
        plane.fill_(1)
    assert pools.flush() == pools.pool_bytes(to)
    assert not any(plane.count_nonzero() for plane in planes)
    assert pools.held_bytes() == pools.pool_bytes(to), "the other pool was not grown by a zero"


def test_pages_above_the_highest_live_row_are_released_and_had_again() -> None:
    shapes = {PP: PoolShape(2, 4, 64), TP: PoolShape(6, 2, 64)}
    pools = pools_on(Device(1 << 30), shapes=shapes)
    pools.build((PP, TP), lambda kind, views: None)
    planes = (*pools.views[PP].keys, *pools.views[PP].values)
    for number, plane in enumerate(planes, start=1):
        plane.fill_(number)
    whole = pools.held_bytes()
    freed = pools.release_above(30, own_live_blocks=30)
    dead = whole * (NUM_BLOCKS - 30) // NUM_BLOCKS
    assert dead - len(planes) * 2 * PIECE < freed <= dead
    assert pools.held_bytes() == whole - freed
    assert all(plane[:30].eq(number).all() for number, plane in enumerate(planes, start=1))
    assert pools.flush() == whole - freed, "only what is backed is touched"
    assert pools.back_all() == freed
    assert not any(plane.count_nonzero() for plane in planes)


def test_a_rank_refuses_to_release_what_it_knows_is_live() -> None:
    """T: check and safety net do not share a blind spot."""
    pools = built(Device(1 << 30))
    pools.views[PP].keys[1].fill_(6)
    with pytest.raises(PoolRefusedError, match=r"from 8 on .* live ones below 40"):
        pools.release_above(8, own_live_blocks=40)
    assert pools.held_bytes() == PP_BYTES and pools.views[PP].keys[1].eq(6).all()


def test_exclusive_capacity_against_two_resident_pools() -> None:
    budget = 8 << 20
    shared, alone = (capacity_blocks(budget, SHAPES, PIECE, exclusive=exclusive) for exclusive in (False, True))
    assert alone == budget // SHAPES[TP].block_bytes
    assert shared == budget // sum(shape.block_bytes for shape in SHAPES.values()) - 1, "two ranges round, one does not"
    assert capacity_blocks(PIECE - 1, SHAPES, PIECE, exclusive=True) == 0
    for blocks, kinds in ((alone, ([PP], [TP])), (shared, ([PP, TP],))):
        for held in kinds:
            sizes = [-(-blocks * SHAPES[kind].block_bytes // PIECE) * PIECE for kind in held]
            assert sum(sizes) <= budget
    with pytest.raises(PoolRefusedError, match="no KV rows"):
        capacity_blocks(budget, {PP: PoolShape(0, 4, 16), TP: PoolShape(6, 0, 16)}, PIECE, exclusive=True)


def test_a_pool_smaller_than_the_id_space_is_refused() -> None:
    """V"""
    device = Device(1 << 30)
    ranges = {PP: device.range("PP", PP_BYTES), TP: device.range("TP", TP_BYTES - PIECE)}
    with pytest.raises(PoolRefusedError, match=f"hold 93 blocks, the allocator issues {NUM_BLOCKS}"):
        ExclusivePools(ranges, SHAPES, NUM_BLOCKS)


def test_a_rank_without_heads_takes_part() -> None:
    shapes = {PP: PoolShape(2, 4, 16), TP: PoolShape(6, 0, 16)}
    pools = pools_on(Device(1 << 30), shapes=shapes)
    pools.build((PP, TP), lambda kind, views: None)
    seam = pools.open_seam(TP)
    seam.release_source()
    seam.back_destination(0)
    assert pools.held is TP and pools.held_bytes() == 0 and pools.flush() == 0
    assert pools.release_above(0, 0) == 0
    assert [plane.numel() for plane in pools.views[TP].keys] == [0] * 6
