"""Two ranks agree on their digest if and only if their plans came to the same there: every field of a row counts."""

from dataclasses import fields, replace
from typing import Any

import pytest

from services.core.ids import BlockId, LogIndex, RequestId, RequestIndex, TokenId
from services.core.request import SamplingParams
from services.core.step import AdmittedRequest, StepPlan
from services.worker.steps.digest import DigestChain, plan_parts
from services.worker.steps.table import RequestTable, TableLimits

LIMITS = TableLimits(max_resident_requests=4, max_context_tokens=64, num_blocks=16, vocab_size=100, max_batch_tokens=64)
SAMPLING = SamplingParams(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=7, logit_bias=((TokenId(4), 1.5),))
REQUEST = AdmittedRequest(
    request_id=RequestId("a"),
    request_index=RequestIndex(1),
    token_ids=tuple(map(TokenId, range(20))),
    num_prompt_tokens=18,
    block_ids=(BlockId(3), BlockId(9)),
    sampling=SAMPLING,
    num_logprobs=2,
)
PLAN = StepPlan(
    admitted=[REQUEST, replace(REQUEST, request_id=RequestId("b"), request_index=RequestIndex(2))],
    block_request_index=[RequestIndex(1)],
    block_position=[2],
    block_id=[BlockId(5)],
    row_request_index=[RequestIndex(1), RequestIndex(2)],
    row_start=[0, 4],
    row_num_tokens=[20, 16],
    sampled_row=[0, 1],
    dead_from=BlockId(12),
)
LATER = StepPlan(
    released=[RequestIndex(1)], row_request_index=[RequestIndex(2)], row_start=[19], row_num_tokens=[1], sampled_row=[0]
)


LATER_AGAIN = replace(LATER, released=[])


def digests(*plans: StepPlan, first: int = 3) -> list[int]:
    table, chain = RequestTable(LIMITS), DigestChain()
    found = []
    for sequence, plan in enumerate(plans, first):
        changes = table.apply_deltas(plan, LogIndex(sequence))
        found.append(chain.extend(plan_parts(sequence, plan, changes, table.rows(plan), table)))
    return found


def admitting(**changes: Any) -> StepPlan:
    return replace(PLAN, admitted=[replace(REQUEST, **changes), PLAN.admitted[1]])


def sampling(**changes: Any) -> StepPlan:
    return admitting(sampling=replace(SAMPLING, **changes))


OTHERS: dict[str, StepPlan] = {
    "microbatch": replace(PLAN, microbatch=1),
    "tokens_through": replace(PLAN, tokens_through=LogIndex(1)),
    "dead_from": replace(PLAN, dead_from=None),
    "block_id": replace(PLAN, block_id=[BlockId(6)]),
    "block_request_index": replace(PLAN, block_request_index=[RequestIndex(2)]),
    "no block": replace(PLAN, block_request_index=[], block_position=[], block_id=[]),
    "row_request_index": replace(PLAN, row_request_index=[RequestIndex(2), RequestIndex(1)], row_start=[0, 4]),
    "row_start": replace(PLAN, row_start=[0, 3]),
    "row_num_tokens": replace(PLAN, row_num_tokens=[19, 16]),
    "sampled_row": replace(PLAN, sampled_row=[0]),
    "token_ids": admitting(token_ids=(*REQUEST.token_ids[:-1], TokenId(99))),
    "block_ids": admitting(block_ids=(BlockId(3), BlockId(8))),
    "num_prompt_tokens": admitting(num_prompt_tokens=17),
    "num_logprobs": admitting(num_logprobs=3),
    "no logprobs": admitting(num_logprobs=None),
    "only the sampled logprob": admitting(num_logprobs=0),
    "temperature": sampling(temperature=0.6),
    "top_k": sampling(top_k=4),
    "top_p": sampling(top_p=0.8),
    "min_p": sampling(min_p=0.2),
    "seed": sampling(seed=7 + 2**40),
    "presence_penalty": sampling(presence_penalty=0.1),
    "frequency_penalty": sampling(frequency_penalty=0.1),
    "repetition_penalty": sampling(repetition_penalty=1.1),
    "logit_bias": sampling(logit_bias=((TokenId(4), 1.25),)),
    "biased id": sampling(logit_bias=((TokenId(5), 1.5),)),
    "no bias": sampling(logit_bias=()),
}


def test_equal_plans_have_equal_digests_and_every_step_another() -> None:
    assert digests(PLAN, LATER) == digests(PLAN, LATER)
    assert len(set(digests(PLAN, LATER, LATER_AGAIN))) == 3


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_whatever_differs_shows_at_once_and_from_there_on(other: StepPlan) -> None:
    for ours, theirs in zip(digests(PLAN, LATER), digests(other, LATER), strict=True):
        assert ours != theirs


def test_a_release_and_the_place_in_the_log_count() -> None:
    assert digests(PLAN, LATER)[1] != digests(PLAN, LATER_AGAIN)[1]
    assert digests(PLAN, first=3) != digests(PLAN, first=4)


def test_no_field_is_left_out() -> None:
    """Of a plan and of its parameters; what is a name of the request's own, or follows from others, is said here."""
    silent = {"request_id", "admitted", "sampling", "released", "block_position", "request_index"}
    assert _names(StepPlan, AdmittedRequest, SamplingParams) - silent <= OTHERS.keys()


def _names(*values: Any) -> set[str]:
    return {field.name for value in values for field in fields(value)}
