"""One choice: what the client gets whatever the scheduler, the generations and the chunking do."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.ids import LayoutKind, RequestId, TokenId
from services.core.request import (
    Admitted,
    Emitted,
    Finished,
    FinishReason,
    Rejected,
    RejectReason,
    SamplingParams,
    Submission,
    TokenLogprobs,
)
from services.router.openai.refusal import Kind
from services.router.streams.choice_text import ChoiceText
from services.router.streams.sessions import MAX_RESUBMISSIONS, Choice, FinishAt, TryAgain
from services.router.text.detokenize import StopStrings
from services.scheduler.batch.batcher import Batcher
from tests.support.scripted_scheduler import END_ID, byte_tokens
from tests.support.toy_rank import layout_of, limits_of

VOCABULARY = byte_tokens().vocabulary
PROMPT = tuple(map(TokenId, b"ask"))


def a_choice(*stop: str, max_output_tokens: int = 100, echo: str = "", num_logprobs: int | None = None) -> Choice:
    submission = Submission(
        request_id=RequestId("r.0"),
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        max_output_tokens=max_output_tokens,
        sampling=SamplingParams(temperature=1.0, seed=9),
        stop_token_ids=frozenset({END_ID}),
        num_logprobs=num_logprobs,
    )
    return Choice(0, submission, ChoiceText(VOCABULARY, StopStrings(stop) if stop else None), echo)


def emitted(choice: Choice, first: int, output: bytes) -> Emitted:
    return Emitted(choice.request_id, first, tuple(map(TokenId, output)))


def drained(choice: Choice) -> str:
    delta = choice.take()
    return "" if delta is None else delta.text


def test_text_then_one_ending() -> None:
    choice = a_choice()
    assert choice.take() is None
    assert choice.on_event(Admitted(choice.request_id, 2), 0.0) is None
    assert choice.take() is None, "being admitted is nothing to a client"
    choice.on_event(emitted(choice, 0, b"hi"), 1.0)
    assert drained(choice) == "hi"
    choice.on_event(Finished(choice.request_id, FinishReason.LENGTH, 2, 2), 2.0)
    delta = choice.take()
    assert delta is not None
    assert delta.ending is not None
    assert (delta.text, delta.ending.reason) == ("", FinishReason.LENGTH)
    choice.on_event(Finished(choice.request_id, FinishReason.STOP, 2, 2), 3.0)
    choice.fail(Kind.FAILED, "too late")
    assert choice.take() is None
    assert (choice.num_output_tokens, choice.num_cached_tokens, choice.first_token_s) == (2, 2, 1.0)


def test_a_slow_client_finds_one_delta() -> None:
    choice = a_choice(echo="ask")
    for index, byte in enumerate(b"coalesced"):
        choice.on_event(emitted(choice, index, bytes([byte])), 0.0)
    assert drained(choice) == "askcoalesced"


def test_nothing_empty_is_handed_out_while_a_character_is_unfinished() -> None:
    choice = a_choice()
    first, second = "é".encode()
    choice.on_event(emitted(choice, 0, bytes([first])), 0.0)
    assert choice.take() is None
    choice.on_event(emitted(choice, 1, bytes([second])), 0.0)
    assert drained(choice) == "é"


def test_the_end_token_counts_and_is_no_text() -> None:
    choice = a_choice()
    choice.on_event(Emitted(choice.request_id, 0, (TokenId(65), END_ID)), 0.0)
    choice.on_event(Finished(choice.request_id, FinishReason.STOP, 2, 0), 0.0)
    delta = choice.take()
    assert delta is not None
    assert (delta.text, delta.token_ids, choice.num_output_tokens) == ("A", [65], 2)


def test_a_stop_string_ends_it_at_once() -> None:
    choice = a_choice("END")
    assert choice.on_event(emitted(choice, 0, b"theEN"), 0.0) is None
    assert drained(choice) == "the"
    assert choice.on_event(emitted(choice, 5, b"Dtail"), 0.0) == FinishAt(6)
    delta = choice.take()
    assert delta is not None
    assert delta.ending is not None
    assert (delta.text, delta.ending.reason, choice.num_output_tokens) == ("", FinishReason.STOP, 6)
    assert choice.on_event(emitted(choice, 10, b"more"), 0.0) is None
    assert choice.take() is None
    assert not choice.on_lost(0.0)


def test_text_held_for_a_stop_string_is_given_at_the_end() -> None:
    choice = a_choice("END")
    choice.on_event(emitted(choice, 0, b"theEN"), 0.0)
    choice.on_event(Finished(choice.request_id, FinishReason.LENGTH, 5, 0), 0.0)
    delta = choice.take()
    assert delta is not None
    assert delta.ending is not None
    assert (delta.text, delta.ending.reason) == ("theEN", FinishReason.LENGTH)


def test_a_lost_generation_is_asked_again_with_what_was_emitted() -> None:
    choice = a_choice()
    choice.on_event(Admitted(choice.request_id, 2), 0.0)
    choice.on_event(emitted(choice, 0, b"abc"), 0.0)
    assert choice.on_lost(5.0)
    again = choice.submission
    assert again.token_ids == PROMPT + tuple(map(TokenId, b"abc"))
    assert (again.num_prompt_tokens, again.max_output_tokens, again.sampling.seed) == (3, 100, 9)
    assert again.request_id != RequestId("r.0")
    assert choice.request_id == again.request_id
    choice.on_event(Admitted(choice.request_id, 6), 6.0)
    choice.on_event(emitted(choice, 3, b"def"), 6.0)
    assert drained(choice) == "abcdef"
    assert choice.num_cached_tokens == 2, "its own tokens in the cache are not the client's"


def test_what_comes_twice_is_dropped_by_its_index() -> None:
    choice = a_choice(num_logprobs=0)
    logprobs = tuple(TokenLogprobs(-float(index), ()) for index in range(4))
    choice.on_event(Emitted(choice.request_id, 0, tuple(map(TokenId, b"ab")), logprobs[:2]), 0.0)
    choice.on_event(Emitted(choice.request_id, 0, tuple(map(TokenId, b"abcd")), logprobs), 0.0)
    delta = choice.take()
    assert delta is not None
    assert (delta.text, [item.sampled for item in delta.logprobs]) == ("abcd", [0.0, -1.0, -2.0, -3.0])


def test_a_gap_is_an_error_and_not_a_wrong_answer() -> None:
    choice = a_choice()
    choice.on_event(emitted(choice, 1, b"b"), 0.0)
    assert choice.ending is not None
    assert choice.ending.failure is not None
    assert "output token 0 was expected and 1 came" in choice.ending.failure.message
    other = a_choice()
    other.on_event(Finished(other.request_id, FinishReason.STOP, 3, 0), 0.0)
    assert other.ending is not None
    assert other.ending.failure is not None


@pytest.mark.parametrize(
    ("output", "max_output_tokens", "reason"),
    [((TokenId(65), END_ID), 9, FinishReason.STOP), ((TokenId(65), TokenId(66)), 2, FinishReason.LENGTH)],
)
def test_a_whole_output_is_ended_by_the_next_generation(
    output: tuple[TokenId, ...], max_output_tokens: int, reason: FinishReason
) -> None:
    """Only the word that it ended was lost: who decides it is the real batcher, here as in a mesh."""
    choice = a_choice(max_output_tokens=max_output_tokens)
    choice.on_event(Emitted(choice.request_id, 0, output), 0.0)
    assert choice.on_lost(1.0)
    assert choice.ending is None
    [finished] = Batcher(limits_of(), layout_of(LayoutKind.TP)).submit(choice.submission, 0)
    assert choice.on_event(finished, 2.0) is None
    assert choice.ending is not None
    assert (choice.ending.reason, choice.ending.failure) == (reason, None)


def test_budgets_of_time_and_of_generations() -> None:
    choice = a_choice()
    choice.on_lost(10.0)
    assert not choice.overdue(12.0, budget_s=2.0)
    assert choice.overdue(12.1, budget_s=2.0)
    choice.on_event(emitted(choice, 0, b"a"), 13.0)
    assert not choice.overdue(99.0, budget_s=2.0), "it goes on: the wait is over"
    for _ in range(MAX_RESUBMISSIONS - 1):
        assert choice.on_lost(14.0)
    assert not choice.on_lost(15.0)
    assert choice.ending is not None
    assert choice.ending.failure is not None


def test_refusals_before_and_after_a_loss() -> None:
    fresh = a_choice()
    assert fresh.on_event(Rejected(fresh.request_id, RejectReason.OVERLOADED, "", "9 of 8"), 0.0) is None
    assert fresh.ending is not None
    assert fresh.ending.failure is not None
    assert (fresh.ending.failure.kind, fresh.ending.failure.retry_after_s) == (Kind.OVERLOADED, 1)
    again = a_choice()
    again.on_lost(0.0)
    rejected = Rejected(again.request_id, RejectReason.OVERLOADED, "", "9 of 8")
    assert again.on_event(rejected, 0.0) == TryAgain("9 of 8")
    assert again.ending is None
    again.on_event(Rejected(again.request_id, RejectReason.INVALID, "token_ids", "too long"), 0.0)
    assert again.ending is not None


@given(
    text=st.text(max_size=40),
    stop=st.sampled_from([(), ("ab",), ("\U0001f642", "xyz")]),
    cuts=st.lists(st.integers(1, 7), max_size=30),
    losses=st.sets(st.integers(0, 20), max_size=3),
)
def test_the_answer_is_the_same_however_it_comes(
    text: str, stop: tuple[str, ...], cuts: list[int], losses: set[int]
) -> None:
    output = text.encode("utf-8", "replace")
    choice, given = a_choice(*stop, max_output_tokens=max(1, len(output))), ""
    at, step = 0, 0
    while choice.ending is None and at < len(output):
        if step in losses:
            choice.on_lost(0.0)
        size = cuts[step % len(cuts)] if cuts else 1
        choice.on_event(emitted(choice, at, output[at : at + size]), 0.0)
        at, step = at + size, step + 1
        given += drained(choice) if choice.ending is None else ""
    if choice.ending is None:
        choice.on_event(Finished(choice.request_id, FinishReason.LENGTH, len(output), 0), 0.0)
    delta = choice.take()
    given += delta.text if delta is not None else ""
    whole = output.decode()
    cut = min((whole.find(word) for word in stop if word in whole), default=len(whole))
    assert given == whole[:cut]
