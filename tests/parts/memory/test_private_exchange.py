"""Weights that move between arenas: faults are caught by what the files say, and every way back leads to them."""

from typing import Any

import gguf
import pytest
import torch

from kernels.cpu.backend import CpuBackend
from kernels.weights import Matrix, PiecedMatrix, PlacedMatrix
from services.core.ids import FlipId, LayoutKind
from services.core.step import AbandonEntry, FlipEntry
from services.models.model_files import ModelFiles, open_model
from services.worker.memory.rank_memory import NotWholeError
from services.worker.memory.weights.arena_weights import ArenaWeights
from services.worker.participation import Worked, WorkLost
from tests.parts.memory.test_private_flips import FaultyWire, check_weights, owned
from tests.parts.worker.test_runner import PROMPT, check_greedy
from tests.support.private_group import flip, rows_of, runs
from tests.support.rank_threads import DEADLINE_S, Group, group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP
NUM_BLOCKS = 24
Tiny = tuple[ModelFiles, TinyLlama]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model = write_gguf(path, TinyShape(num_layers=4), gguf.GGMLQuantizationType.Q8_0)
    return open_model(path), model


def weights_of(group: Group, rank: int) -> ArenaWeights:
    weights = group.ranks[rank].runner.parts.memory._weights
    assert isinstance(weights, ArenaWeights)
    return weights


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_changed_byte_of_the_weights_takes_all_back(tiny: Tiny, num_ranks: int) -> None:
    with group_of(tiny[0], num_ranks, mode="exchange") as group:
        log = group.log
        log.reset(PP, NUM_BLOCKS, 8, 256)
        log.prefill({0: PROMPT}, 16)
        # No live row: every message is pages.
        FaultyWire(rows_of(group, 1)._mover._wire._carrier, 2)
        answers = flip(group, TP, runs()).answers
        assert all(isinstance(answer, WorkLost) and answer.restored for answer in answers)
        assert isinstance(answers[1], WorkLost) and "pieces are not the files'" in answers[1].reason
        assert isinstance(answers[0], WorkLost) and "ranks [1] have failed" in answers[0].reason
        check_weights(group, PP, tiny)
        log.decode([0], 5)
        assert all(isinstance(answer, Worked) for answer in flip(group, TP, owned(group)).answers)
        check_weights(group, TP, tiny)
        log.decode([0], 5)
        check_greedy(tiny[1], log.requests[0], 40, 11)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_a_verdict_against_it_exchanges_everything_back(
    tiny: Tiny, num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank finds fault with what is right: all come back without the files."""
    with group_of(tiny[0], num_ranks, mode="exchange") as group:
        log = group.log
        log.reset(PP, NUM_BLOCKS, 8, 256)
        log.prefill({0: PROMPT}, 16)
        weights, pieces = weights_of(group, 1), [next(iter(weights_of(group, 1)._maps[TP]))]
        honest = weights.wrong
        with monkeypatch.context() as patched:
            patched.setattr(weights, "wrong", lambda kind: pieces if kind is TP else honest(kind))
            patched.setattr(ArenaWeights, "refill", no_files)
            answers = flip(group, TP, owned(group)).answers
        assert all(isinstance(answer, WorkLost) and answer.restored for answer in answers), answers
        check_weights(group, PP, tiny)
        log.decode([0], 5)
        flip(group, TP, owned(group))
        log.decode([0], 5)
        check_greedy(tiny[1], log.requests[0], 40, 11)


def no_files(weights: ArenaWeights, kind: LayoutKind) -> None:
    raise AssertionError(f"the pieces of {kind.value} were exchanged back: no file is needed")


def test_abandoned_after_its_pages_have_moved(tiny: Tiny) -> None:
    """The mover may give up what every rank has verified: the layout before is had back without a peer."""
    with group_of(tiny[0], 2, mode="exchange") as group:
        log = group.log
        log.reset(PP, NUM_BLOCKS, 8, 256)
        log.prefill({0: PROMPT}, 16)
        log.write(FlipEntry(FlipId(9), TP, owned(group)))
        log.answers()
        at_work = [rank.thread.submit(rank.runner.work, FlipId(9)) for rank in group.ranks]
        assert all(isinstance(future.result(timeout=DEADLINE_S), Worked) for future in at_work)
        check_weights(group, TP, tiny)
        log.write(AbandonEntry(FlipId(9), "a test"))
        log.answers()
        check_weights(group, PP, tiny)
        log.decode([0], 5)
        check_greedy(tiny[1], log.requests[0], 40, 6)


def test_a_generation_may_begin_in_the_layout_that_was_not_loaded(tiny: Tiny) -> None:
    with group_of(tiny[0], 3, mode="exchange") as group:
        group.log.reset(TP, NUM_BLOCKS, 8, 256)
        check_weights(group, TP, tiny)
        group.log.prefill({0: PROMPT}, 16)
        flip(group, PP, owned(group))
        group.log.decode([0], 4)
        check_greedy(tiny[1], group.log.requests[0], 40, 5)


def test_an_exchange_that_breaks_ends_the_generation(tiny: Tiny) -> None:
    with group_of(tiny[0], 2, mode="exchange") as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        carrier: Any = rows_of(group, 0)._mover._wire._carrier

        def fail(*args: Any, **kwargs: Any) -> None:
            raise MemoryError("no memory for the message")

        carrier.send = fail
        answers = flip_without_outcome(group)
        assert all(isinstance(answer, WorkLost) and not answer.restored for answer in answers)
        assert weights_of(group, 0).active is None


def flip_without_outcome(group: Group) -> list[Worked | WorkLost]:
    group.log.write(FlipEntry(FlipId(5), TP, ()))
    group.log.answers()
    at_work = [rank.thread.submit(rank.runner.work, FlipId(5)) for rank in group.ranks]
    return [future.result(timeout=DEADLINE_S) for future in at_work]


def test_files_that_changed_are_no_way_back(tiny: Tiny) -> None:
    with group_of(tiny[0], 2, mode="exchange") as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        weights = weights_of(group, 0)
        piece = next(iter(weights._moving(TP)))
        weights._sums[TP][piece] ^= 1
        with pytest.raises(NotWholeError, match=r"1 pieces of tp are not what was loaded at start"):
            group.ranks[0].runner.parts.memory.settle(TP)
        assert weights.active is None


def test_what_moved_is_near_the_floor(tiny: Tiny) -> None:
    """An arena is the larger layout, not the sum; what comes in is what the other has of the new one."""
    with group_of(tiny[0], 2, mode="exchange") as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        answers = flip(group, TP, runs()).answers
        for rank, answer in enumerate(answers):
            plan = weights_of(group, rank).plan
            pages = sum(count for (_, into), count in plan.exchanges[TP].link_pages.items() if into == rank)
            assert isinstance(answer, Worked) and answer.bytes_moved == pages * plan.arenas.page_bytes > 0


def test_pieces_that_are_no_cover_are_refused() -> None:
    with pytest.raises(ValueError, match="pieces of 0 weights cannot cover 4 x 8"):
        PiecedMatrix(4, 8, ())


def test_a_product_with_a_grid_of_pieces() -> None:
    generator = torch.Generator().manual_seed(5)
    whole, x = (torch.randn(shape, generator=generator) for shape in ((6, 40), (3, 40)))
    matrix = Matrix.from_tensor(whole)
    pieces = tuple(
        PlacedMatrix(row, column, matrix.rows(row, row_end).columns(column, column_end))
        for row, row_end in ((0, 2), (2, 6))
        for column, column_end in ((0, 24), (24, 40))
    )
    out = torch.full((3, 6), 7.0)
    CpuBackend().linear(x, PiecedMatrix(6, 40, pieces), out)
    torch.testing.assert_close(out, x @ whole.T, rtol=1e-5, atol=1e-5)
    CpuBackend().linear(x, PiecedMatrix(6, 40, pieces), out, accumulate=True)
    torch.testing.assert_close(out, 2 * (x @ whole.T), rtol=1e-5, atol=1e-5)
