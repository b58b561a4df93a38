"""More ranks than KV heads: several ranks have the same head, each in columns of its own; logits, rows, answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import gguf
import pytest
import torch

from services.core.blocks import kv_block_bytes
from services.core.ids import LayoutKind
from services.models.model_files import ModelFiles, open_model
from services.placement.rows.transfers import pooled_heads
from services.worker.memory.owned_memory import OwnedMode
from services.worker.participation import Worked
from tests.parts.memory.test_private_flips import check_weights, owned
from tests.parts.worker.test_runner import PROMPT, check_greedy
from tests.parts.worker.test_runner_logits import OTHER
from tests.parts.worker.test_runner_logits import PROMPT as LONG
from tests.parts.worker.test_runner_logits import check as check_logits
from tests.support.private_group import flip, poison, pools_of, runs, there_and_back, whole_cache
from tests.support.rank_threads import Group, group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP
Mode = Literal["shared"] | OwnedMode


@dataclass(frozen=True, slots=True)
class Case:
    """A model's heads, the ranks' weights, and what each rank has: (KV heads, query heads)."""

    num_heads: int
    num_kv_heads: int
    tp_weights: Sequence[float] | None
    held: Sequence[tuple[Sequence[int], Sequence[int]]]

    @property
    def num_ranks(self) -> int:
        return len(self.held)

    @property
    def shape(self) -> TinyShape:
        return TinyShape(num_layers=4, num_heads=self.num_heads, num_kv_heads=self.num_kv_heads)


CASES = {
    "2 on 4": Case(8, 2, None, [([0], [0, 1]), ([0], [2, 3]), ([1], [4, 5]), ([1], [6, 7])]),
    "3 on 4": Case(6, 3, None, [([0], [0, 1]), ([1], [2, 3]), ([2], [4]), ([2], [5])]),
    "2 on 4, uneven": Case(
        12, 2, [3.0, 2.0, 1.0, 6.0], [([0], [0, 1, 2]), ([0], [3, 4]), ([0], [5]), ([1], range(6, 12))]
    ),
    "1 on 3, uneven": Case(6, 1, [1.0, 1.0, 4.0], [([0], [0]), ([0], [1]), ([0], [2, 3, 4, 5])]),
    "2 on 3, a rank idle": Case(2, 2, None, [([], []), ([0], [0]), ([1], [1])]),
}


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def served(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Case, ModelFiles, TinyLlama]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model = write_gguf(path, request.param.shape, gguf.GGMLQuantizationType.Q8_0)
    return request.param, open_model(path), model


def test_each_rank_has_the_heads_that_its_weight_asks_for(served: tuple[Case, ModelFiles, TinyLlama]) -> None:
    case, files, _ = served
    with group_of(files, case.num_ranks, tp_weights=case.tp_weights) as group:
        shares = group.ranks[0].runner.stages[TP].layout.shares
        found = [
            (range(share.kv_heads.begin, share.kv_heads.end), range(share.heads.begin, share.heads.end))
            for share in shares
        ]
        got = [(sorted(kv_heads), sorted(heads)) for kv_heads, heads in found]
        assert got == [(list(kv_heads), list(heads)) for kv_heads, heads in case.held]


@pytest.mark.parametrize(
    ("mode", "layout", "by_tokens"),
    [("shared", PP, False), ("shared", TP, False), ("dual", TP, False), ("exchange", TP, True)],
)
def test_logits_are_the_references(
    served: tuple[Case, ModelFiles, TinyLlama], mode: Mode, layout: LayoutKind, by_tokens: bool
) -> None:
    case, files, model = served
    kv_tokens = (2, 1, 1, 3)[: case.num_ranks] if by_tokens else None
    with group_of(files, case.num_ranks, tp_weights=case.tp_weights, kv_tokens=kv_tokens, mode=mode) as group:
        log = group.log
        log.reset(layout, 32, 8, 256)
        log.prefill({2: LONG}, 20)
        check_logits(group, model, LONG)
        log.step([(5, 0, 7), (2, 50, 1)], admitted=[log.admit(5, OTHER)], sampled=[1], tokens_through=log.sequence)
        log.settle()
        check_logits(group, model, log.requests[2][:-1])
        log.step([(5, 7, 14)], sampled=[0])
        log.settle()
        log.decode([5, 2], 6)
        check_logits(group, model, log.requests[5][:-1], log.requests[2][:-1])


@pytest.mark.parametrize("mode", ["dual", "exchange"])
def test_to_tp_and_back_every_live_row_keeps_its_bits(
    served: tuple[Case, ModelFiles, TinyLlama], mode: OwnedMode
) -> None:
    """Each rank that has a head has all of its rows; back to PP they come from any one of them."""
    case, files, model = served
    shape, live = case.shape, runs((0, 1), (3, 5), (11, 1))
    cache = whole_cache(shape.num_layers, 12, shape.num_kv_heads, shape.head_dim)
    with group_of(files, case.num_ranks, tp_weights=case.tp_weights, mode=mode) as group:
        there_and_back(group, cache, live)
        check_weights(group, TP, (files, model))


@pytest.mark.parametrize("mode", ["shared", pytest.param("dual", marks=pytest.mark.slow), "exchange"])
def test_answers_across_flips_are_the_references(served: tuple[Case, ModelFiles, TinyLlama], mode: Mode) -> None:
    case, files, model = served
    with group_of(files, case.num_ranks, tp_weights=case.tp_weights, mode=mode) as group:
        group.log.reset(PP, 24, 8, 256)
        group.log.prefill({0: PROMPT, 1: PROMPT[5:]}, 16)
        for target in (TP, PP, TP):
            poison_what_is_not_in_force(group, target, mode)
            answers = flip(group, target, owned(group)).answers
            assert all(isinstance(answer, Worked) for answer in answers), answers
            group.log.decode([0, 1], 5)
        check_greedy(model, group.log.requests[0], 40, 16)
        check_greedy(model, group.log.requests[1], 35, 16)


def poison_what_is_not_in_force(group: Group, target: LayoutKind, mode: Mode) -> None:
    for pool in pools_of(group, target) if mode != "shared" else ():
        poison(pool)


def test_ranks_that_map_one_pool_share_no_column(served: tuple[Case, ModelFiles, TinyLlama]) -> None:
    case, files, _ = served
    shape = case.shape
    with group_of(files, case.num_ranks, tp_weights=case.tp_weights) as group:
        group.log.reset(TP, 4, 8, 64)
        pools = [rank.runner.pool for rank in group.ranks]
        layout = group.ranks[0].runner.stages[TP].layout
        columns = []
        for pool, share in zip(pools, layout.shares, strict=True):
            assert pool is not None
            begin = share.kv_heads.begin - pool.first_kv_head
            columns += range(begin, begin + len(share.kv_heads))
        num_held = sum(len(kv_heads) for kv_heads, _ in case.held)
        assert sorted(columns) == list(range(num_held))
        assert pools[0] is not None
        assert pools[0].num_bytes == 4 * kv_block_bytes(shape.num_layers, num_held, shape.head_dim, 4)
        assert len(pooled_heads(layout, shape.num_kv_heads).copied) == num_held - shape.num_kv_heads
        assert torch.is_tensor(pools[0].keys[0]) and pools[0].keys[0].shape[1] == num_held
