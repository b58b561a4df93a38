"""Exchanges carried out on byte arrays: free pages are poisoned, phases run in random order and stop anywhere."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.core.layout import Layout, ShardUnits
from services.placement.arena import Arenas, PageMap, place_pieces
from services.placement.cuts import pp_layout, tp_layout
from services.placement.exchange import Exchange, ExchangeError, Phase, exchange_plans
from tests.support.shard_models import CASES, HEADS_48, SMALL, TWO_KV_HEADS, ShardModel

PAGE_BYTES = 8
POISON = b"\xdb"


class Ranks:
    """All ranks' memory, and what executes phases on it."""

    def __init__(self, model: ShardModel, arenas: Arenas, staging_pages: int) -> None:
        self.tensors = {tensor.name: tensor for tensor in model.tensors()}
        self.model = model
        self.arenas = [bytearray(POISON * (count * PAGE_BYTES)) for count in arenas.num_pages]
        self.staging = [bytearray(POISON * (staging_pages * PAGE_BYTES)) for _ in arenas.num_pages]

    def images(self, maps: tuple[PageMap, ...]) -> list[dict[int, bytes]]:
        """Per rank and page: what a layout has there."""
        images: list[dict[int, bytes]] = []
        for page_map in maps:
            pages: dict[int, bytes] = {}
            for piece, span in page_map.items():
                held = self.model.piece_bytes(self.tensors[piece.tensor], piece.rows, piece.columns)
                padded = held.ljust(len(span) * PAGE_BYTES, b"\0")
                for index, page in enumerate(range(span.begin, span.end)):
                    assert page not in pages, "two pieces have one page"
                    pages[page] = padded[index * PAGE_BYTES : (index + 1) * PAGE_BYTES]
            images.append(pages)
        return images

    def load(self, maps: tuple[PageMap, ...]) -> None:
        for rank, pages in enumerate(self.images(maps)):
            self.arenas[rank][:] = POISON * len(self.arenas[rank])
            self.staging[rank][:] = POISON * len(self.staging[rank])
            for page, held in pages.items():
                self.arenas[rank][page * PAGE_BYTES : (page + 1) * PAGE_BYTES] = held

    def holds(self, maps: tuple[PageMap, ...]) -> bool:
        return all(
            self.arenas[rank][page * PAGE_BYTES : (page + 1) * PAGE_BYTES] == held
            for rank, pages in enumerate(self.images(maps))
            for page, held in pages.items()
        )

    def execute(self, phase: Phase, order: random.Random, part: float = 1.0) -> None:
        """Page by page in any order; `part` of the pages, where the phase is interrupted."""
        steps = [
            (
                (move.source.rank, move.source.is_staging, move.source.page + page),
                (move.destination.rank, move.destination.is_staging, move.destination.page + page),
            )
            for move in phase
            for page in range(move.num_pages)
        ]
        written = [place for _, place in steps]
        assert len(set(written)) == len(written), "a page is written twice in a phase"
        assert not {place for place, _ in steps} & set(written), "a page is read and written in one phase"
        order.shuffle(steps)
        for source, destination in steps[: int(len(steps) * part)]:
            self._page(*destination)[:] = self._page(*source)

    def _page(self, rank: int, staged: bool, page: int) -> memoryview:
        memory = memoryview((self.staging if staged else self.arenas)[rank])
        assert 0 <= page * PAGE_BYTES < len(memory), "a page outside the bound"
        return memory[page * PAGE_BYTES : (page + 1) * PAGE_BYTES]


def plans(case: tuple[ShardModel, Layout, Layout], staging_pages: int) -> tuple[Arenas, Exchange, Exchange, Ranks]:
    model, pp, tp = case
    arenas = place_pieces(model.tensors(), model.held(pp), model.held(tp), PAGE_BYTES)
    to_tp, to_pp = exchange_plans(arenas, staging_pages)
    return arenas, to_tp, to_pp, Ranks(model, arenas, staging_pages)


def pages_to_move(before: tuple[PageMap, ...], after: tuple[PageMap, ...]) -> int:
    return sum(
        len(span) for had, has in zip(before, after, strict=True) for piece, span in has.items() if piece not in had
    )


@pytest.mark.parametrize("staging_pages", [1, 2, 7, 1000])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_there_and_back_is_bit_identical(case: tuple[ShardModel, Layout, Layout], staging_pages: int) -> None:
    arenas, to_tp, to_pp, ranks = plans(case, staging_pages)
    order = random.Random(staging_pages)
    ranks.load(arenas.first)
    for plan, maps in ((to_tp, arenas.second), (to_pp, arenas.first), (to_tp, arenas.second)):
        for phase in plan.phases:
            ranks.execute(phase, order)
        assert ranks.holds(maps)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_what_stays_has_the_same_pages_and_only_what_must_move_moves(case: tuple[ShardModel, Layout, Layout]) -> None:
    arenas, to_tp, to_pp, _ = plans(case, 4)
    for before, after in zip(arenas.first, arenas.second, strict=True):
        assert all(before[piece] == after[piece] for piece in before.keys() & after.keys())
    for plan, before_maps, after_maps in (
        (to_tp, arenas.first, arenas.second),
        (to_pp, arenas.second, arenas.first),
    ):
        moved = sum(move.num_pages for step in plan.rounds for move in step.transfers)
        assert moved == sum(plan.link_pages.values()) == pages_to_move(before_maps, after_maps)
        assert all(source != destination for source, destination in plan.link_pages)
    sizes = [
        max(sum(map(len, first.values())), sum(map(len, second.values())))
        for first, second in zip(arenas.first, arenas.second, strict=True)
    ]
    assert list(arenas.num_pages) == sizes


@pytest.mark.parametrize("staging_pages", [1, 5])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_the_layout_before_comes_back_from_anywhere(
    case: tuple[ShardModel, Layout, Layout], staging_pages: int
) -> None:
    arenas, to_tp, to_pp, ranks = plans(case, staging_pages)
    order = random.Random(staging_pages)
    for plan, maps in ((to_tp, arenas.first), (to_pp, arenas.second)):
        for num_done in range(len(plan.phases) + 1):
            ranks.load(maps)
            for phase in plan.phases[:num_done]:
                ranks.execute(phase, order)
            for phase in plan.phases[num_done : num_done + 1]:
                ranks.execute(phase, order, part=order.random())
            for phase in plan.restoring_phases(num_done):
                ranks.execute(phase, order)
            assert ranks.holds(maps), f"restored after {num_done} phases"


@settings(max_examples=30)
@given(st.data(), st.integers(2, 4), st.integers(1, 6), st.booleans())
def test_any_shares_any_staging(data: st.DataObject, num_ranks: int, staging_pages: int, by_tp_twice: bool) -> None:
    model = data.draw(st.sampled_from([SMALL, TWO_KV_HEADS, HEADS_48]))
    weights = st.lists(st.integers(1, 30), min_size=num_ranks, max_size=num_ranks)

    def tp() -> Layout:
        return tp_layout(model.units, num_ranks, data.draw(weights), replicate_kv_heads=data.draw(st.booleans()))

    first = tp() if by_tp_twice else pp_layout(model.units, num_ranks)
    arenas, there, back, ranks = plans((model, first, tp()), staging_pages)
    order = random.Random(0)
    ranks.load(arenas.first)
    for plan, maps in ((there, arenas.second), (back, arenas.first)):
        for phase in plan.phases:
            ranks.execute(phase, order)
        assert ranks.holds(maps)


def test_writing_before_all_is_read_is_seen() -> None:
    """The oracle fires: a plan whose rounds are carried out the other way round loses bytes."""
    arenas, to_tp, _, ranks = plans(CASES["two even"], 3)
    ranks.load(arenas.first)
    for step in to_tp.rounds:
        ranks.execute(step.writes, random.Random(0))
        ranks.execute(step.transfers, random.Random(0))
    assert not ranks.holds(arenas.second)


def even_pair() -> tuple[Arenas, Ranks]:
    """Two ranks without a free page: the matrices of layers alone."""
    model = ShardModel(ShardUnits(num_layers=4, num_heads=8, num_kv_heads=8, ffn=64, ffn_unit=2, vocab=8))
    names = {tensor.name for tensor in model.tensors() if tensor.layer is not None and "norm" not in tensor.name}
    pp, tp = (
        tuple(tuple(shard for shard in held if shard.tensor in names) for held in model.held(layout))
        for layout in (pp_layout(model.units, 2), tp_layout(model.units, 2))
    )
    arenas = place_pieces(model.tensors(), pp, tp, PAGE_BYTES)
    return arenas, Ranks(model, arenas, 8)


def test_an_even_pair_swaps_as_many_pages_a_round_as_are_staged() -> None:
    arenas, ranks = even_pair()
    to_tp, _ = exchange_plans(arenas, 8)
    moved = {(int(source), int(destination)): count for (source, destination), count in to_tp.link_pages.items()}
    assert moved[0, 1] == moved[1, 0] == arenas.num_pages[0] // 2
    assert len(to_tp.rounds) == -(-moved[0, 1] // 8)
    assert max(len(step.transfers) for step in to_tp.rounds) == 2, "swapped pages lie side by side"
    ranks.load(arenas.first)
    for phase in to_tp.phases:
        ranks.execute(phase, random.Random(0))
    assert ranks.holds(arenas.second)


def test_less_than_the_least_staging_is_refused_with_both_numbers() -> None:
    arenas, _ = even_pair()
    with pytest.raises(ExchangeError, match=r"staging of 0 pages a rank, at least 1 is needed"):
        exchange_plans(arenas, 0)
    assert exchange_plans(arenas, 1)[0].least_staging_pages == 1


@pytest.mark.parametrize("name", ["one rank", "two even"])
def test_where_every_chain_ends_in_a_free_page_nothing_is_staged(name: str) -> None:
    arenas, to_tp, _, ranks = plans(CASES[name], 0)
    assert to_tp.least_staging_pages == 0
    ranks.load(arenas.first)
    for phase in to_tp.phases:
        ranks.execute(phase, random.Random(0))
    assert ranks.holds(arenas.second)


def test_every_rank_computes_the_same_plan() -> None:
    first, second = (plans(CASES["three, 48 heads"], 2)[1] for _ in range(2))
    assert first == second
    assert first.hash == second.hash != plans(CASES["three, 48 heads"], 3)[1].hash


def test_a_copy_that_nobody_takes_comes_back_from_the_one_that_moved() -> None:
    """With replicated KV heads, PP takes one copy of each and lets its own pages overwrite the others."""
    arenas, _, to_pp, _ = plans(CASES["four, (1, 1, 1, 5), replicated"], 2)
    place_of = {(move.destination.rank, move.destination.page) for move in to_pp.refill}
    lost = {
        (rank, span.begin)
        for rank, (before, after) in enumerate(zip(arenas.second, arenas.first, strict=True))
        for piece, span in before.items()
        if piece not in after
        and not any(run.source == rank and run.source_shard == piece for run in arenas.to_first.runs)
    }
    assert place_of == lost != set()
    assert to_pp.restoring_phases(0) == (to_pp.refill,)
