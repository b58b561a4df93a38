"""The request table holds what the log says, and turns every broken entry into a protocol error."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.backend import StepInputs
from services.core.ids import BLOCK_SLOTS, BlockId, LayoutKind, LogIndex, RequestId, RequestIndex, TokenId, blocks_for
from services.core.log import ProtocolError
from services.core.request import SamplingParams
from services.core.step import AdmittedRequest, StepPlan
from services.worker.steps.inputs import StepBuffers
from services.worker.steps.sampling_words import Param
from services.worker.steps.table import RequestTable, TableLimits

LIMITS = TableLimits(max_resident_requests=4, max_context_tokens=40, num_blocks=9, vocab_size=100, max_batch_tokens=48)


def admitted(index: int, tokens: list[int], blocks: list[int] | None = None, **changes: object) -> AdmittedRequest:
    request = AdmittedRequest(
        request_id=RequestId(f"r{index}"),
        request_index=RequestIndex(index),
        token_ids=tuple(TokenId(token) for token in tokens),
        num_prompt_tokens=len(tokens),
        block_ids=tuple(BlockId(block) for block in (blocks if blocks is not None else range(blocks_for(len(tokens))))),
        sampling=SamplingParams(),
    )
    return replace(request, **changes)  # type: ignore[arg-type]


def table_with(*requests: AdmittedRequest) -> RequestTable:
    table = RequestTable(LIMITS)
    table.apply_deltas(StepPlan(admitted=list(requests)), LogIndex(1))
    return table


def ids_of(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def floats(value: float) -> float:
    """Of 32 bits."""
    return float(np.float32(value))


def inputs_of(table: RequestTable, plan: StepPlan) -> StepInputs:
    return StepBuffers(LayoutKind.PP, table).fill(table.rows(plan))


def plan_of(*rows: tuple[int, int, int], **fields: object) -> StepPlan:
    return StepPlan(
        row_request_index=[RequestIndex(index) for index, _, _ in rows],
        row_start=[start for _, start, _ in rows],
        row_num_tokens=[count for _, _, count in rows],
        **fields,  # type: ignore[arg-type]
    )


def test_rows_read_the_tokens_that_were_admitted() -> None:
    table = table_with(admitted(2, [7, 8, 9]), admitted(0, [1, 2], [4]))
    inputs = inputs_of(table, plan_of((2, 1, 2), (0, 0, 2), sampled_row=[0]))
    assert inputs.input_ids.tolist() == [8, 9, 1, 2]
    assert inputs.query_start.tolist() == [0, 2, 4]
    assert inputs.context_tokens.tolist() == [3, 2]
    assert inputs.positions.tolist() == [1, 2, 0, 1]
    assert inputs.slots.tolist() == [1, 2, 64, 65]
    assert inputs.row_of_sequence.tolist() == [2, 0]
    assert inputs.sampled_tokens.tolist() == [1]


def test_sampled_tokens_become_readable() -> None:
    table = table_with(admitted(1, [5]))
    table.apply_tokens(LogIndex(1), np.array([1]), np.array([1]), ids_of(42))
    assert inputs_of(table, plan_of((1, 1, 1))).input_ids.tolist() == [42]


def test_a_token_from_before_a_place_was_taken_again_is_dropped() -> None:
    table = table_with(admitted(1, [5]))
    table.apply_deltas(StepPlan(released=[RequestIndex(1)], admitted=[admitted(1, [6])]), LogIndex(3))
    table.apply_tokens(LogIndex(2), np.array([1]), np.array([1]), ids_of(42))
    assert table.num_tokens[1] == 1
    table.apply_tokens(LogIndex(3), np.array([1]), np.array([1]), ids_of(43))
    assert table.tokens_RC[1, :2].tolist() == [6, 43]


def test_a_token_for_a_freed_place_is_dropped() -> None:
    table = table_with(admitted(1, [5]))
    table.apply_deltas(StepPlan(released=[RequestIndex(1)]), LogIndex(2))
    table.apply_tokens(LogIndex(1), np.array([1]), np.array([1]), ids_of(42))
    assert table.tokens_RC[1, 1] == 0
    assert table.running() == []


def test_a_token_at_the_end_of_the_context_is_dropped() -> None:
    table = table_with(admitted(0, list(range(40))))
    table.apply_tokens(LogIndex(1), np.array([0]), np.array([40]), ids_of(3))
    assert table.num_tokens[0] == 40


def test_blocks_are_appended_in_order_for_several_requests() -> None:
    table = table_with(admitted(0, [1] * 16), admitted(3, [1] * 3, [8]))
    plan = StepPlan(
        block_request_index=[RequestIndex(0), RequestIndex(3), RequestIndex(0)],
        block_position=[1, 1, 2],
        block_id=[BlockId(5), BlockId(6), BlockId(7)],
    )
    table.apply_deltas(plan, LogIndex(2))
    assert table.blocks_RB[0].tolist() == [0, 5, 7]
    assert table.blocks_RB[3].tolist() == [8, 6, 0]
    assert table.num_blocks.tolist() == [3, 0, 0, 2]


def test_sampling_parameters_of_an_earlier_holder_are_gone() -> None:
    biased = SamplingParams(temperature=0.5, repetition_penalty=1.1, seed=2**64 - 1, logit_bias=((TokenId(3), 2.0),))
    table = table_with(admitted(1, [5], sampling=biased))
    assert table.penalised[1]
    assert table.params_PR[[Param.SEED_LOW, Param.SEED_HIGH], 1].tolist() == [-1, -1]
    assert table.params_PR.view(torch.float32)[[Param.TEMPERATURE, Param.REPETITION], 1].tolist() == [0.5, floats(1.1)]
    table.apply_deltas(StepPlan(released=[RequestIndex(1)], admitted=[admitted(1, [6])]), LogIndex(3))
    assert not table.penalised[1]
    assert table.bias == {}
    assert table.num_bias[1] == 0
    assert table.params_PR[[Param.SEED_LOW, Param.SEED_HIGH], 1].tolist() == [0, 0]
    assert table.params_PR.view(torch.float32)[[Param.TEMPERATURE, Param.REPETITION], 1].tolist() == [0, 1]


BROKEN_DELTAS = {
    "release of a free place": StepPlan(released=[RequestIndex(2)]),
    "release out of range": StepPlan(released=[RequestIndex(4)]),
    "release twice": StepPlan(released=[RequestIndex(0), RequestIndex(0)]),
    "admission to a held place": StepPlan(admitted=[admitted(0, [1])]),
    "admission out of range": StepPlan(admitted=[admitted(4, [1])]),
    "admission twice": StepPlan(admitted=[admitted(1, [1]), admitted(1, [1])]),
    "no token": StepPlan(admitted=[admitted(1, [])]),
    "too many tokens": StepPlan(admitted=[admitted(1, [1] * 41)]),
    "too many blocks": StepPlan(admitted=[admitted(1, [1], [0, 1, 2, 3])]),
    "no prompt": StepPlan(admitted=[admitted(1, [1], num_prompt_tokens=0)]),
    "prompt longer than tokens": StepPlan(admitted=[admitted(1, [1], num_prompt_tokens=2)]),
    "token outside the vocabulary": StepPlan(admitted=[admitted(1, [100])]),
    "block outside the pool": StepPlan(admitted=[admitted(1, [1], [9])]),
    "bias outside the vocabulary": StepPlan(
        admitted=[admitted(1, [1], sampling=SamplingParams(logit_bias=((TokenId(100), 1.0),)))]
    ),
    "block for a free place": StepPlan(
        block_request_index=[RequestIndex(1)], block_position=[0], block_id=[BlockId(1)]
    ),
    "block with a gap": StepPlan(block_request_index=[RequestIndex(0)], block_position=[2], block_id=[BlockId(1)]),
    "block over another": StepPlan(block_request_index=[RequestIndex(0)], block_position=[0], block_id=[BlockId(1)]),
    "two blocks in one place": StepPlan(
        block_request_index=[RequestIndex(0)] * 2, block_position=[1, 1], block_id=[BlockId(1), BlockId(2)]
    ),
    "block position out of range": StepPlan(
        block_request_index=[RequestIndex(0)], block_position=[3], block_id=[BlockId(1)]
    ),
    "appended block outside the pool": StepPlan(
        block_request_index=[RequestIndex(0)], block_position=[1], block_id=[BlockId(9)]
    ),
    "lists of different lengths": StepPlan(block_request_index=[RequestIndex(0)], block_position=[1], block_id=[]),
}


@pytest.mark.parametrize("plan", BROKEN_DELTAS.values(), ids=BROKEN_DELTAS)
def test_broken_deltas_are_refused(plan: StepPlan) -> None:
    with pytest.raises(ProtocolError):
        table_with(admitted(0, [1, 2])).apply_deltas(plan, LogIndex(2))


BROKEN_ROWS = {
    "none": plan_of(),
    "of nobody": plan_of((1, 0, 1)),
    "out of range": plan_of((4, 0, 1)),
    "two of one request": plan_of((0, 0, 1), (0, 1, 1)),
    "without tokens": plan_of((0, 0, 0)),
    "before the start": plan_of((0, -1, 1)),
    "beyond the tokens known": plan_of((0, 2, 1)),
    "beyond its blocks": plan_of((3, 16, 1)),
    "sampled row out of range": plan_of((0, 0, 1), sampled_row=[1]),
    "sampled rows not rising": plan_of((0, 0, 1), (3, 0, 1), sampled_row=[1, 0]),
    "sampled row twice": plan_of((0, 0, 1), (3, 0, 1), sampled_row=[0, 0]),
    "more tokens than fit": plan_of((2, 0, 40), (0, 0, 2), (3, 0, 7)),
}


@pytest.mark.parametrize("plan", BROKEN_ROWS.values(), ids=BROKEN_ROWS)
def test_broken_rows_are_refused(plan: StepPlan) -> None:
    table = table_with(admitted(0, [1, 2]), admitted(3, [1] * 20, [0]), admitted(2, [1] * 40))
    with pytest.raises(ProtocolError):
        table.rows(plan)


def test_a_reset_that_cannot_be_is_refused() -> None:
    with pytest.raises(ProtocolError, match="lower max_resident_requests"):
        RequestTable(replace(LIMITS, max_resident_requests=2**31, max_context_tokens=2**31))


numbers = st.integers(-3, 45)


@given(st.lists(st.tuples(numbers, numbers, numbers), max_size=5), st.lists(numbers, max_size=3))
def test_any_rows_are_refused_or_inside(rows: list[tuple[int, int, int]], sampled: list[int]) -> None:
    table = table_with(admitted(0, [1, 2]), admitted(3, [1] * 20), admitted(2, [1] * 40))
    try:
        checked = table.rows(plan_of(*rows, sampled_row=sampled))
    except ProtocolError:
        return
    inputs = StepBuffers(LayoutKind.PP, table).fill(checked)
    assert len(inputs.input_ids) == sum(count for _, _, count in rows) <= LIMITS.max_batch_tokens
    assert (checked.context_tokens <= table.num_blocks[checked.request] * BLOCK_SLOTS).all()
