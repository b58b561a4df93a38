"""Pages of real memory handed out under two layouts and moved as plans say."""

import random

import pytest
import torch

from kernels.cpu.linear import dequantize
from services.core.ids import LayoutKind, Rank
from services.core.layout import Span
from services.models.ggml_types import GgmlType, row_bytes
from services.placement.exchange import PageMove, Place
from services.worker.memory.pages.backing import MissingMemoryError
from services.worker.memory.weights.arena import Arena, ArenaError
from tests.support.memory_stand import PIECE, Device, random_bytes

PP, TP = LayoutKind.PP, LayoutKind.TP
PAGE = 4096
RANK, PEER = Rank(1), Rank(0)


def arena_of(num_pages: int, num_staging_pages: int) -> Arena:
    device = Device(1 << 40)
    arena = device.range("arena", num_pages * PAGE, piece_bytes=PAGE)
    return Arena(RANK, arena, device.range("staging", num_staging_pages * PAGE, piece_bytes=PAGE), PAGE)


def within(source: int, destination: int, count: int = 1, *, out: bool = False, back: bool = False) -> PageMove:
    """A move of this rank; `out`: into staging, `back`: from there."""
    return PageMove(Place(RANK, back, source), Place(RANK, out, destination), count)


def test_views_stay_valid_while_the_layout_under_them_changes() -> None:
    arena = arena_of(8, 4)
    pp = arena.tensor(PP, Span(0, 4), torch.float32, (4, 1024))
    tp = arena.tensor(TP, Span(2, 6), torch.float32, (4096,))
    pp.copy_(torch.arange(4096.0).view(4, 1024))
    addresses = pp.data_ptr(), tp.data_ptr()
    assert addresses == (arena.flat.data_ptr(), arena.flat.data_ptr() + 2 * PAGE)
    arena.move_within([within(0, 2, 4)])
    assert torch.equal(tp, torch.arange(4096.0))
    arena.move_within([within(2, 0, 4)])
    assert torch.equal(pp.view(-1), torch.arange(4096.0))
    assert (pp.data_ptr(), tp.data_ptr()) == addresses


def test_a_packed_matrix_multiplies_where_it_lies() -> None:
    arena = arena_of(4, 1)
    rows, columns = 8, 256
    stride = row_bytes(GgmlType.Q8_0, columns)
    matrix = arena.matrix(TP, Span(1, 3), GgmlType.Q8_0, rows, columns)
    assert matrix.address == arena.flat.data_ptr() + PAGE
    blocks = arena.run(1, 2)[: rows * stride].view(rows * columns // 32, 34)
    blocks[:, :2] = torch.full((len(blocks), 1), 0.5, dtype=torch.float16).view(torch.uint8)
    blocks[:, 2:] = torch.arange(32, dtype=torch.uint8)
    out = torch.empty((rows, columns))
    dequantize(matrix, out)
    assert torch.equal(out, (torch.arange(columns) % 32 * 0.5).expand(rows, columns))


def test_a_page_is_handed_out_once_in_a_layout() -> None:
    arena = arena_of(8, 1)
    arena.tensor(PP, Span(2, 4), torch.uint8, (2 * PAGE,))
    arena.tensor(PP, Span(4, 5), torch.uint8, (PAGE,))
    arena.tensor(TP, Span(3, 5), torch.uint8, (PAGE + 1,))
    for pages in (Span(3, 4), Span(0, 3), Span(4, 6), Span(0, 8), Span(2, 4)):
        with pytest.raises(ArenaError, match="handed out already in PP"):
            arena.tensor(PP, pages, torch.uint8, (1,))
    arena.tensor(PP, Span(0, 2), torch.uint8, (1,))
    arena.tensor(PP, Span(5, 8), torch.uint8, (1,))


def test_pages_that_are_not_there_are_refused_with_numbers() -> None:
    arena = arena_of(4, 1)
    with pytest.raises(ArenaError, match=r"pages \[3, 5\) are not within the 4 of the arena"):
        arena.tensor(PP, Span(3, 5), torch.uint8, (1,))
    with pytest.raises(ArenaError, match="have 4096 bytes, the view needs 4100"):
        arena.tensor(PP, Span(0, 1), torch.float32, (1025,))
    with pytest.raises(ArenaError, match=r"pages \[0, 2\) are not within the 1 of the staging"):
        arena.run(0, 2, in_staging=True)
    with pytest.raises(ArenaError, match="pages of rank 0 are not on rank 1"):
        arena.pages_of(Place(PEER, False, 0), 1)
    arena.tensor(PP, Span(0, 1), torch.float32, (1024,))


def test_transfers_read_and_write_pages_in_place() -> None:
    here, there = arena_of(4, 2), Arena(PEER, *(Device(1 << 40).range(n, 4 * PAGE) for n in ("arena", "staging")), PAGE)
    here.flat.copy_(random_bytes(4 * PAGE, 1))
    move = PageMove(Place(RANK, False, 1), Place(PEER, True, 2), 2)
    there.pages_of(move.destination, 2).copy_(here.pages_of(move.source, 2))
    assert torch.equal(there.run(2, 2, in_staging=True), here.run(1, 2))
    back = move.reversed()
    here.run(1, 2).zero_()
    here.pages_of(back.destination, 2).copy_(there.pages_of(back.source, 2))
    assert torch.equal(here.flat, random_bytes(4 * PAGE, 1))
    assert here.move_within([move]) == 0, "a move to a peer is no local one"


@pytest.mark.parametrize("seed", range(40))
def test_local_moves_are_as_if_all_were_read_first(seed: int) -> None:
    draw = random.Random(seed)
    num_pages = draw.randint(1, 12)
    arena = arena_of(num_pages, num_pages)
    before = random_bytes(num_pages * PAGE, seed)
    arena.flat.copy_(before)
    places = draw.sample(range(num_pages), draw.randint(0, num_pages))
    moves = [within(draw.randrange(num_pages), place) for place in places]
    expected = before.clone().view(num_pages, PAGE)
    for move in moves:
        expected[move.destination.page] = before.view(num_pages, PAGE)[move.source.page]
    assert arena.move_within(moves) == len(moves) * PAGE
    assert torch.equal(arena.flat.view(num_pages, PAGE), expected)


def test_a_run_that_overlaps_itself_is_moved_whole() -> None:
    for step in (1, -1, 0):
        arena = arena_of(8, 5)
        before = random_bytes(8 * PAGE, 3)
        arena.flat.copy_(before)
        arena.move_within([within(2, 2 + step, 5)])
        assert torch.equal(arena.run(2 + step, 5), before[2 * PAGE : 7 * PAGE])


def test_a_round_through_staging_writes_what_it_read() -> None:
    """A swap as a plan makes it: aside, over, back."""
    arena = arena_of(2, 1)
    before = random_bytes(2 * PAGE, 5)
    arena.flat.copy_(before)
    arena.move_within([within(0, 0, out=True)])
    arena.move_within([within(1, 0)])
    arena.move_within([within(0, 1, back=True)])
    assert torch.equal(arena.run(0, 1), before[PAGE:]) and torch.equal(arena.run(1, 1), before[:PAGE])


def test_what_cannot_be_moved_moves_nothing() -> None:
    arena = arena_of(4, 2)
    before = random_bytes(4 * PAGE, 6)
    arena.flat.copy_(before)
    with pytest.raises(ArenaError, match="would be written twice"):
        arena.move_within([within(0, 2, 2), within(1, 3)])
    with pytest.raises(ArenaError, match="need 4 staging pages, it has 2"):
        arena.move_within([within(0, 1), within(1, 2), within(2, 3), within(3, 0)])
    assert torch.equal(arena.flat, before)


def test_staging_that_a_move_names_is_not_used_for_another() -> None:
    arena = arena_of(4, 4)
    arena.flat.copy_(torch.arange(4, dtype=torch.uint8).repeat_interleave(PAGE))
    arena.run(0, 1, in_staging=True).fill_(9)
    arena.move_within([within(0, 1), within(0, 0, back=True), within(1, 2)])
    assert arena.flat[::PAGE].tolist() == [9, 0, 1, 3]
    with pytest.raises(ArenaError, match="need 5 staging pages, it has 4"):
        arena.move_within([within(0, 1), within(1, 0, back=True), within(1, 2)])


def test_an_arena_without_memory_for_its_staging_holds_nothing() -> None:
    device = Device(6 * PIECE)
    backing, staging = device.range("arena", 4 * PIECE), device.range("staging", 4 * PIECE)
    with pytest.raises(MissingMemoryError, match=f"staging: {4 * PIECE} bytes"):
        Arena(RANK, backing, staging, PAGE)
    assert backing.held_bytes() == staging.held_bytes() == 0
    with pytest.raises(ArenaError, match="pages of 100 bytes"):
        Arena(RANK, backing, staging, 100)
