"""Flips of ranks that own their memory: every live row and weight keeps its bits, faults are caught, answers hold."""

from collections.abc import Sequence
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from kernels.weights import Matrix, Weight
from services.core.ids import FlipId, LayoutKind
from services.core.step import AbandonEntry
from services.models.model_files import ModelFiles, open_model
from services.placement.rows.transfers import BlockRuns
from services.worker.memory.owned_memory import OwnedMode
from services.worker.memory.rank_memory import NotWholeError
from services.worker.participation import Worked, WorkLost
from tests.parts.memory.test_private_weights import asked, values
from tests.parts.worker.test_runner import PROMPT, check_greedy
from tests.support.private_group import (
    check_rows,
    fill,
    flip,
    live_blocks,
    poison,
    pools_of,
    rows_of,
    runs,
    whole_cache,
)
from tests.support.rank_threads import Group, group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP
SHAPE = TinyShape(num_layers=4)
NUM_BLOCKS = 24
HEAD_BLOCK_BYTES = 2 * 16 * SHAPE.head_dim * 4
CUTS: dict[str, tuple[int, Sequence[int] | None, Sequence[float] | None]] = {
    "one rank": (1, None, None),
    "two even": (2, None, None),
    "two uneven": (2, (1, 3), (2.0, 1.0)),
    "two, one without heads": (2, (3, 1), (9.0, 1.0)),
    "three even": (3, None, None),
    "three uneven": (3, (1, 1, 2), (1.0, 4.0, 1.0)),
    "four, more than heads": (4, None, None),
}
LIVE = {
    "nothing": runs(),
    "one block": runs((7, 1)),
    "scattered": runs((0, 1), (3, 5), (11, 2), (23, 1)),
    "all": runs((0, NUM_BLOCKS)),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, TinyLlama]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model = write_gguf(path, SHAPE, gguf.GGMLQuantizationType.Q4_1)
    return open_model(path), model


# Rows go the same way in all three.
@pytest.mark.parametrize(
    "mode", ["dual", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("exchange", "image"))]
)
@pytest.mark.parametrize("live", LIVE.values(), ids=LIVE)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_to_tp_and_back_every_live_row_keeps_its_bits(
    tiny: tuple[ModelFiles, TinyLlama],
    cut: tuple[int, Sequence[int] | None, Sequence[float] | None],
    live: BlockRuns,
    mode: OwnedMode,
) -> None:
    num_ranks, pp_layers, tp_weights = cut
    cache = whole_cache(SHAPE.num_layers, NUM_BLOCKS, SHAPE.num_kv_heads, SHAPE.head_dim)
    with group_of(tiny[0], num_ranks, pp_layers=pp_layers, tp_weights=tp_weights, mode=mode) as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        check_weights(group, PP, tiny)
        for pool in pools_of(group, PP):
            fill(pool, cache)
        for target in (TP, PP):
            for pool in pools_of(group, target):
                poison(pool)
            flipped = flip(group, target, live)
            assert all(isinstance(answer, Worked) for answer in flipped.answers)
            assert len({parked.plan_hash for parked in flipped.parked}) == 1
            for pool in pools_of(group, target):
                check_rows(pool, cache, live)
            check_weights(group, target, tiny)


def check_weights(group: Group, kind: LayoutKind, tiny: tuple[ModelFiles, TinyLlama]) -> None:
    """Every part that a stage of this layout multiplies by has the bits of the files."""
    files, model = tiny
    for rank, rank_thread in enumerate(group.ranks):
        weights = rank_thread.runner.parts.memory.weights(kind)
        for name, rows, columns in asked(files, rank_thread.runner.stages[kind].layout, rank):
            wanted = model.weights[name]
            if wanted.dim() == 1:
                assert torch.equal(weights.vector(name), wanted)
            else:
                found = expanded(weights.matrix(name, rows=rows, columns=columns))
                assert torch.equal(found, wanted[rows.begin : rows.end, columns.begin : columns.end]), name


def expanded(weight: Weight) -> Tensor:
    """[rows, columns] float32, whether it is in one piece or in several."""
    if isinstance(weight, Matrix):
        return values(weight)
    out = torch.full((weight.num_rows, weight.num_columns), torch.nan)
    for piece in weight.pieces:
        part = values(piece.matrix)
        rows, columns = part.shape
        out[piece.first_row : piece.first_row + rows, piece.first_column : piece.first_column + columns] = part
    return out


def test_what_is_reported_is_what_came_over_the_wire(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    """Of three heads rank 0 has two; two layers of each rank's four heads-and-layers come from the other."""
    live = LIVE["scattered"]
    with group_of(tiny[0], 2, mode="dual") as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        answers = flip(group, TP, live).answers
        taken = [counted(group, answer) for answer in answers]
    num_blocks = len(live_blocks(live))
    assert taken == [(num_blocks * 2 * heads * HEAD_BLOCK_BYTES, 16 * num_blocks) for heads in (2, 1)]


def counted(group: Group, answer: Worked | WorkLost) -> tuple[int, int]:
    assert isinstance(answer, Worked)
    assert min(answer.read_ns, answer.write_ns, answer.verify_ns) > 0 and answer.seam_ns == 0
    return answer.bytes_moved, answer.rows_moved


@pytest.mark.parametrize("mode", ["dual", "exchange", "image"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_answers_across_flips_are_the_references(
    tiny: tuple[ModelFiles, TinyLlama], cut: tuple[int, Sequence[int] | None, Sequence[float] | None], mode: OwnedMode
) -> None:
    files, model = tiny
    num_ranks, pp_layers, tp_weights = cut
    with group_of(files, num_ranks, pp_layers=pp_layers, tp_weights=tp_weights, mode=mode) as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        group.log.prefill({0: PROMPT, 1: PROMPT[5:]}, 16)
        for target in (TP, PP, TP):
            for pool in pools_of(group, target):
                poison(pool)
            answers = flip(group, target, owned(group)).answers
            assert all(isinstance(answer, Worked) for answer in answers), answers
            group.log.decode([0, 1], 6)
        check_greedy(model, group.log.requests[0], 40, 19)
        check_greedy(model, group.log.requests[1], 35, 19)


def owned(group: Group) -> BlockRuns:
    """What the driver's requests hold: it takes blocks from the end of the pool."""
    return runs((NUM_BLOCKS - group.log.num_blocks_used, group.log.num_blocks_used))


class FaultyWire:
    """Stands before a carrier's `recv` and changes one byte of one message."""

    def __init__(self, carrier: Any, at_message: int) -> None:
        self._recv, self._left = carrier.recv, at_message
        carrier.recv = self

    def __call__(self, into: Tensor, *args: Any, **kwargs: Any) -> None:
        self._recv(into, *args, **kwargs)
        self._left -= 1
        if self._left == 0:
            into.view(-1)[into.numel() // 2] ^= 1


@pytest.mark.parametrize("mode", ["dual", "exchange", "image"])
@pytest.mark.parametrize("at_message", [1, 3])
@pytest.mark.parametrize("victim", [0, 1])
def test_one_changed_byte_is_caught_and_the_layout_before_serves_on(
    tiny: tuple[ModelFiles, TinyLlama], victim: int, at_message: int, mode: OwnedMode
) -> None:
    files, model = tiny
    with group_of(files, 2, mode=mode) as group:
        group.log.reset(TP, NUM_BLOCKS, 8, 256)
        group.log.prefill({0: PROMPT * 4}, 64)
        FaultyWire(rows_of(group, victim)._mover._wire._carrier, at_message)
        answers = flip(group, PP, owned(group)).answers
        lost = answers[victim]
        assert isinstance(lost, WorkLost) and lost.restored and f"to rank {victim} are not what was sent" in lost.reason
        # Where weights follow, nobody sends any before all rows are right.
        assert isinstance(answers[1 - victim], Worked if mode == "dual" else WorkLost)
        group.log.decode([0], 6)
        assert all(isinstance(answer, Worked) for answer in flip(group, PP, owned(group)).answers)
        group.log.decode([0], 6)
        check_greedy(model, group.log.requests[0], 160, 13)


@pytest.mark.parametrize("mode", ["dual", "exchange", "image"])
def test_a_rank_that_cannot_begin_holds_up_nobody(tiny: tuple[ModelFiles, TinyLlama], mode: OwnedMode) -> None:
    files, model = tiny
    with group_of(files, 3, mode=mode) as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        group.log.prefill({0: PROMPT}, 16)
        pool = pools_of(group, TP)[1]
        keys, pool.keys = pool.keys, {}
        answers = flip(group, TP, owned(group)).answers
        assert all(isinstance(answer, WorkLost) and answer.restored for answer in answers)
        assert isinstance(answers[0], WorkLost) and "ranks [1] have failed" in answers[0].reason
        pool.keys = keys
        group.log.decode([0], 3)
        flip(group, TP, owned(group))
        group.log.decode([0], 3)
        check_greedy(model, group.log.requests[0], 40, 7)


@pytest.mark.parametrize("mode", ["dual", "exchange", "image"])
def test_a_peer_that_never_comes_ends_the_generation_by_name(
    tiny: tuple[ModelFiles, TinyLlama], mode: OwnedMode
) -> None:
    """Nor does an ABANDON that comes afterwards make a group of ranks that have lost each other."""
    with group_of(tiny[0], 2, deadline_s=0.5, mode=mode) as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        group.log.prefill({0: PROMPT}, 16)
        [answer] = flip(group, TP, LIVE["all"], working=[0]).answers
        assert isinstance(answer, WorkLost) and not answer.restored
        assert "ALL_GATHER for FLIP on rank 0" in answer.reason and "rank 1" in answer.reason
        group.log.write(AbandonEntry(FlipId(group.log.sequence), "a test"))
        with pytest.raises(NotWholeError, match="work that is broken here: rank 0: CollectiveError"):
            group.ranks[0].answer()


@pytest.mark.parametrize("mode", ["dual", "exchange", "image"])
def test_an_error_within_the_exchange_releases_the_partner(tiny: tuple[ModelFiles, TinyLlama], mode: OwnedMode) -> None:
    with group_of(tiny[0], 2, mode=mode) as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        carrier: Any = rows_of(group, 1)._mover._wire._carrier

        def fail(*args: Any, **kwargs: Any) -> None:
            raise MemoryError("no memory for the message")

        carrier.send = fail
        answers = flip(group, TP, LIVE["all"]).answers
        assert all(isinstance(answer, WorkLost) and not answer.restored for answer in answers)
        assert isinstance(answers[0], WorkLost) and "ABORTED" in answers[0].reason
        assert isinstance(answers[1], WorkLost) and "no memory for the message" in answers[1].reason


@pytest.mark.parametrize("mode", ["dual", "exchange", "image"])
def test_live_blocks_beyond_the_pool_are_a_refusal(tiny: tuple[ModelFiles, TinyLlama], mode: OwnedMode) -> None:
    with group_of(tiny[0], 2, mode=mode) as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        flipped = flip(group, TP, runs((20, 5)))
        assert all(not parked.fits and f"beyond the pool's {NUM_BLOCKS}" in parked.refusal for parked in flipped.parked)
        assert all(isinstance(answer, WorkLost) and answer.restored for answer in flipped.answers)


def test_a_second_reset_begins_with_empty_pools(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    with group_of(tiny[0], 2, mode="dual") as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        for pool in pools_of(group, PP):
            poison(pool)
        rows_of(group, 0).open(2 * NUM_BLOCKS, PP)
        pool = pools_of(group, PP)[0]
        assert pool.num_blocks == 2 * NUM_BLOCKS and not any(plane.any() for plane in pool.keys.values())
        assert torch.equal(pool.values[0], torch.zeros_like(pool.values[0]))
