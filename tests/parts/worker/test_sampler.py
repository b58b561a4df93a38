"""The sampler takes each row's own parameters and tokens from the resident table, whatever else is in the batch."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.cpu.sampling import penalize_reference, sample_reference
from services.core.ids import BlockId, LogIndex, RequestId, RequestIndex, TokenId
from services.core.request import SamplingParams
from services.core.step import AdmittedRequest, StepPlan
from services.worker.steps.sampler import Sampled, Sampler
from services.worker.steps.table import RequestTable, TableLimits

VOCAB = 96
NUM_VALID = 90
LIMITS = TableLimits(
    max_resident_requests=6, max_context_tokens=64, num_blocks=32, vocab_size=VOCAB, max_batch_tokens=64
)
PROMPT = [3, 5, 5, 8]
OUTPUT = [5, 13, 13, 21]


def table(**requests: Any) -> RequestTable:
    """Requests by `r<index>`: (sampling, fields)."""
    resident = RequestTable(LIMITS)
    admitted = []
    for name, (sampling, fields) in requests.items():
        index = int(name[1:])
        given = {"token_ids": PROMPT + OUTPUT, "num_prompt_tokens": len(PROMPT), **fields}
        admitted.append(
            AdmittedRequest(
                request_id=RequestId(name),
                request_index=RequestIndex(index),
                token_ids=tuple(map(TokenId, given.pop("token_ids"))),
                block_ids=(BlockId(index),),
                sampling=sampling,
                **given,
            )
        )
    resident.apply_deltas(StepPlan(admitted=admitted), LogIndex(1))
    return resident


def some_logits(num_rows: int, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def draw(resident: RequestTable, logits: Tensor, *indexes: int) -> Sampled:
    request = np.array(indexes, np.int64)
    return Sampler(NUM_VALID).sample(logits.clone(), resident, request, resident.num_tokens[request])


def test_padded_ids_are_never_drawn_nor_listed() -> None:
    logits = some_logits(2)
    logits[:, NUM_VALID:] = 50.0
    hot = SamplingParams(temperature=1.0, seed=4)
    resident = table(r0=(SamplingParams(), {"num_logprobs": 5}), r1=(hot, {"num_logprobs": 5}))
    sampled = draw(resident, logits, 0, 1)
    assert sampled.ids[0] == logits[0, :NUM_VALID].argmax()
    assert sampled.ids.max() < NUM_VALID
    expected = logits[:, :NUM_VALID].log_softmax(-1)
    for row, logprobs in sampled.logprobs:
        assert all(token < NUM_VALID for token, _ in logprobs.top)
        assert logprobs.sampled == pytest.approx(expected[row, sampled.ids[row]].item(), abs=1e-5)


def test_penalties_cover_what_they_say() -> None:
    """Repetition: prompt and output. Presence and frequency: output alone."""
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=0.4, repetition_penalty=1.3)
    logits = some_logits(1)[:, :NUM_VALID]
    expected = penalize_reference(logits[0], PROMPT + OUTPUT, presence=0, frequency=0, repetition=1.3)
    expected = penalize_reference(expected, OUTPUT, presence=0.7, frequency=0.4, repetition=1.0)
    resident = table(r2=(params, {}))
    penalised = logits.clone()
    Sampler(NUM_VALID).sample(penalised, resident, np.array([2]), np.array([len(PROMPT + OUTPUT)]))
    torch.testing.assert_close(penalised[0].double(), expected, rtol=1e-5, atol=1e-5)


def test_tokens_of_the_row_beyond_its_position_are_not_penalised() -> None:
    """Steps ahead: an earlier holder's tokens may lie behind the row's own."""
    params = SamplingParams(presence_penalty=5.0)
    resident = table(r2=(params, {}))
    resident.tokens_RC[2, len(PROMPT + OUTPUT)] = 40
    logits = some_logits(1)
    logits[0, 40] = 20.0
    assert draw(resident, logits, 2).ids.tolist() == [40]


def test_biases_and_penalties_touch_their_own_rows_and_no_logprob() -> None:
    forced = SamplingParams(logit_bias=((TokenId(60), 100.0), (TokenId(61), -100.0)))
    repelled = SamplingParams(repetition_penalty=1.8)
    resident = table(
        r0=(SamplingParams(), {"num_logprobs": 0}), r3=(forced, {"num_logprobs": 2}), r5=(repelled, {"num_logprobs": 1})
    )
    logits = some_logits(3)
    sampled = draw(resident, logits, 3, 0, 5)
    assert sampled.ids[0] == 60
    assert sampled.ids[1] == logits[1, :NUM_VALID].argmax()
    expected = logits[:, :NUM_VALID].log_softmax(-1)
    assert [row for row, _ in sampled.logprobs] == [0, 1, 2]
    assert [len(logprobs.top) for _, logprobs in sampled.logprobs] == [2, 0, 1]
    for row, logprobs in sampled.logprobs:
        assert logprobs.sampled == pytest.approx(expected[row, sampled.ids[row]].item(), abs=1e-5)
        best = expected[row].topk(len(logprobs.top))
        assert [token for token, _ in logprobs.top] == best.indices.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_nothing_is_reported_that_was_not_asked_for() -> None:
    assert draw(table(r0=(SamplingParams(), {})), some_logits(1), 0).logprobs == ()


def test_a_draw_depends_on_the_output_position_alone() -> None:
    """A request that comes back after preemption, or beside others, goes on as it would have."""
    hot = SamplingParams(temperature=1.0, top_k=40, top_p=0.95, min_p=0.01, seed=2**64 - 3)
    other = SamplingParams(temperature=1.3, seed=9)
    logits = some_logits(1)
    longer = {"token_ids": [1, 2, 3, *PROMPT, *OUTPUT], "num_prompt_tokens": 3 + len(PROMPT)}
    returned = draw(table(r1=(hot, longer)), logits, 1).ids[0]
    alone = draw(table(r4=(hot, {})), logits, 4).ids[0]
    crowd = table(r0=(other, {}), r4=(hot, {}), r5=(other, {}))
    beside = draw(crowd, torch.cat((some_logits(2, seed=7), logits)), 5, 0, 4).ids[2]
    expected = sample_reference(logits[0, :NUM_VALID], 1.0, 40, 0.95, 0.01, 2**64 - 3, len(OUTPUT))
    assert returned == alone == beside == expected


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_is_named_and_the_others_go_on(value: float) -> None:
    logits = some_logits(3)
    logits[1, 17] = value
    resident = table(**{f"r{index}": (SamplingParams(), {"num_logprobs": 1}) for index in range(3)})
    sampled = draw(resident, logits, 0, 1, 2)
    assert sampled.finite.tolist() == [True, False, True]
    assert sampled.tokens().non_finite == {1}
    assert [row for row, _ in sampled.logprobs] == [0, 2]
    assert sampled.ids[[0, 2]].tolist() == logits[[0, 2], :NUM_VALID].argmax(-1).tolist()
