"""A KV cache cut by tokens, on real rank memories: logits, the byte oracle of rows, answers across flips, refusals."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import gguf
import pytest

from services.core.errors import ConfigurationError
from services.core.ids import LayoutKind
from services.models.model_files import ModelFiles, open_model
from services.placement.layouts import both_layouts, shard_units
from services.placement.rows.transfers import BlockRuns, kv_holdings
from services.worker.memory.owned_memory import OwnedMode
from services.worker.memory.rows.kv_cache import Pool
from services.worker.participation import Worked
from tests.parts.memory.test_private_flips import check_weights, owned
from tests.parts.worker.test_runner import PROMPT, check_greedy
from tests.parts.worker.test_runner_logits import OTHER
from tests.parts.worker.test_runner_logits import PROMPT as LONG
from tests.parts.worker.test_runner_logits import check as check_logits
from tests.support.private_group import flip, own_blocks, poison, pools_of, rows_of, runs, there_and_back, whole_cache
from tests.support.rank_threads import group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP
NUM_BLOCKS = 40


@dataclass(frozen=True, slots=True)
class Cut:
    """How a group shares the model and, in TP, the rows."""

    kv_tokens: tuple[int, ...]
    tp_weights: tuple[float, ...] | None = None
    pp_layers: tuple[int, ...] | None = None

    @property
    def num_ranks(self) -> int:
        return len(self.kv_tokens)


CUTS = {
    "two even": Cut((1, 1)),
    "two, rows against weights": Cut((1, 3), (2.0, 1.0), (1, 3)),
    "two, one without heads": Cut((3, 2), (9.0, 1.0)),
    "three": Cut((2, 3, 1), (1.0, 4.0, 1.0), (1, 1, 2)),
    "three, a rank that owns no row of a short request": Cut((1, 30, 1)),
    "four, more than heads": Cut((1, 1, 1, 5)),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, TinyLlama]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model = write_gguf(path, TinyShape(num_layers=4), gguf.GGMLQuantizationType.Q4_1)
    return open_model(path), model


@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_logits_of_whole_prompts_chunks_and_decoding(tiny: tuple[ModelFiles, TinyLlama], cut: Cut) -> None:
    """Chunks end within blocks and span owners; some steps have one row, others none on some rank."""
    files, model = tiny
    with group_of(files, cut.num_ranks, kv_tokens=cut.kv_tokens, tp_weights=cut.tp_weights, mode="dual") as group:
        log = group.log
        log.reset(TP, 64, 8, 256)
        for pool in pools_of(group, TP):
            poison(pool)
        log.step([(2, 0, 50)], admitted=[log.admit(2, LONG)], sampled=[0])
        log.settle()
        check_logits(group, model, LONG)
        other = log.admit(5, OTHER)
        log.step([(5, 0, 7), (2, 50, 1)], admitted=[other], sampled=[1], tokens_through=log.sequence)
        log.settle()
        check_logits(group, model, log.requests[2][:-1])
        log.step([(5, 7, 14)], sampled=[0])
        log.settle()
        check_logits(group, model, OTHER)
        log.decode([5, 2], 20)
        check_logits(group, model, log.requests[5][:-1], log.requests[2][:-1])


def test_rows_follow_the_token_vector_and_weights_follow_theirs(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    """The two vectors the other way round would hold other blocks and other heads."""
    with group_of(tiny[0], 2, kv_tokens=(1, 3), tp_weights=(2.0, 1.0), mode="dual") as group:
        group.log.reset(TP, 10, 8, 160)
        pools = pools_of(group, TP)
        assert [own_blocks(pool) for pool in pools] == [[0, 4, 8], [1, 2, 3, 5, 6, 7, 9]]
        assert [pool.keys[0].shape[:2] for pool in pools] == [(3, 3), (7, 3)]
        assert pools[0].places is not None and pools[0].places.tolist() == [0, -1, -1, -1, 1, -1, -1, -1, 2, -1]
        assert [len(rank.runner.stages[TP].layout.shares[index].heads) for index, rank in enumerate(group.ranks)] == [
            4,
            2,
        ]
        assert [pool.num_bytes for pool in pools] == [count * 4 * 3 * 2 * 16 * 16 * 4 for count in (3, 7)]


def test_a_rank_that_takes_the_weights_vector_for_the_tokens_is_refused(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    """Answers would come from rows that nobody wrote: here rank 1 alone has the wrong vector."""
    files = tiny[0]
    wrong = both_layouts(shard_units(files.geometry, files.tensors), 2, None, (1.0, 3.0), (1, 3))
    with group_of(files, 2, kv_tokens=(3, 1), tp_weights=(1.0, 3.0), mode="dual") as group:
        runner = group.ranks[1].runner
        runner.stages = {kind: replace(built, layout=wrong[kind]) for kind, built in runner.stages.items()}
        rows_of(group, 1)._holdings = {kind: kv_holdings(layout, 3) for kind, layout in wrong.items()}
        with pytest.raises(ConfigurationError, match=r"rank 1 shares the rows .* as \[1, 3\], rank 0 as \[3, 1\]"):
            group.log.reset(TP, 16, 8, 256)


@pytest.mark.parametrize(("kind", "needed"), [(TP, 12), (PP, 16)])
def test_a_pool_smaller_than_its_ids_is_refused(
    tiny: tuple[ModelFiles, TinyLlama], kind: LayoutKind, needed: int
) -> None:
    """The allocator issues 16 ids, and one layout's pool of rank 0 was sized for 12."""
    with group_of(tiny[0], 2, kv_tokens=(3, 1), mode="dual") as group:
        rows = rows_of(group, 0)
        open_whole = rows.open

        def open_short(num_blocks: int, asked: LayoutKind) -> Mapping[LayoutKind, Pool]:
            short = dict(open_whole(12, asked))[kind]
            return {**open_whole(num_blocks, asked), kind: short}

        rows.open = open_short  # type: ignore[method-assign]
        held = 12 * needed // 16
        with pytest.raises(
            ConfigurationError,
            match=rf"rank 0 holds {held} blocks of layer 0 in layout {kind.value}, and of the 16 ids .* {needed} are",
        ):
            group.log.reset(TP, 16, 8, 256)


LIVE = {
    "nothing": runs(),
    "one block": runs((7, 1)),
    "scattered": runs((0, 1), (3, 5), (11, 9), (39, 1)),
    "all": runs((0, NUM_BLOCKS)),
}


@pytest.mark.parametrize("mode", ["dual", pytest.param("exchange", marks=pytest.mark.slow)])
@pytest.mark.parametrize("live", LIVE.values(), ids=LIVE)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_to_tp_and_back_every_live_row_keeps_its_bits(
    tiny: tuple[ModelFiles, TinyLlama], cut: Cut, live: BlockRuns, mode: OwnedMode
) -> None:
    cache = whole_cache(4, NUM_BLOCKS, 3, 16)
    with group_of(
        tiny[0],
        cut.num_ranks,
        pp_layers=cut.pp_layers,
        tp_weights=cut.tp_weights,
        kv_tokens=cut.kv_tokens,
        mode=mode,
    ) as group:
        there_and_back(group, cache, live)
        check_weights(group, TP, tiny)
        held = [block for pool in pools_of(group, TP) for block in own_blocks(pool)]
        assert sorted(held) == list(range(NUM_BLOCKS))


@pytest.mark.parametrize("mode", ["dual", "exchange"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_answers_across_flips_are_the_references(tiny: tuple[ModelFiles, TinyLlama], cut: Cut, mode: OwnedMode) -> None:
    files, model = tiny
    with group_of(
        files, cut.num_ranks, pp_layers=cut.pp_layers, tp_weights=cut.tp_weights, kv_tokens=cut.kv_tokens, mode=mode
    ) as group:
        group.log.reset(PP, 24, 8, 256)
        group.log.prefill({0: PROMPT, 1: PROMPT[5:]}, 16)
        for target in (TP, PP, TP):
            for pool in pools_of(group, target):
                poison(pool)
            answers = flip(group, target, owned(group)).answers
            assert all(isinstance(answer, Worked) for answer in answers), answers
            group.log.decode([0, 1], 6)
        check_greedy(model, group.log.requests[0], 40, 19)
        check_greedy(model, group.log.requests[1], 35, 19)
