"""Gaps between tokens around flips: each flip measured by itself, however fast they follow each other."""

from services.core.ids import RequestId, TokenId
from services.core.request import Emitted, Finished, FinishReason, RequestEvent
from services.scheduler.token_gaps import MAX_OPEN_GAPS, TokenGaps

A, B = RequestId("a"), RequestId("b")


def token(request_id: RequestId) -> RequestEvent:
    return Emitted(request_id, 0, (TokenId(1),))


def end(request_id: RequestId) -> RequestEvent:
    return Finished(request_id, FinishReason.LENGTH, 1, 0)


def test_the_longest_gap_of_those_that_were_decoding() -> None:
    gaps = TokenGaps()
    gaps.note([token(A)], 10)
    gaps.note([token(B)], 20)
    flip = gaps.begin()
    assert (flip.num_decoding, flip.is_closed, flip.longest_ns) == (2, False, None)
    assert not gaps.note([token(A)], 50)
    assert (flip.is_closed, flip.longest_ns) == (False, 40)
    assert gaps.note([token(B)], 55)
    assert (flip.is_closed, flip.longest_ns) == (True, 40)


def test_later_tokens_add_nothing() -> None:
    gaps = TokenGaps()
    gaps.note([token(A)], 10)
    flip = gaps.begin()
    gaps.note([token(A)], 20)
    assert not gaps.note([token(A)], 1000)
    assert flip.longest_ns == 10


def test_nobody_decodes_nobody_waits() -> None:
    gaps = TokenGaps()
    gaps.note([token(A)], 10)
    gaps.note([end(A)], 11)
    flip = gaps.begin()
    assert (flip.num_decoding, flip.is_closed, flip.longest_ns) == (0, True, None)


def test_a_request_that_first_speaks_after_the_flip_is_not_its_gap() -> None:
    gaps = TokenGaps()
    gaps.note([token(A)], 10)
    flip = gaps.begin()
    gaps.note([token(B)], 5000)
    gaps.note([token(A)], 15)
    assert flip.longest_ns == 5


def test_an_end_closes_and_is_no_gap() -> None:
    gaps = TokenGaps()
    gaps.note([token(A)], 10)
    flip = gaps.begin()
    assert gaps.note([end(A)], 900)
    assert (flip.is_closed, flip.longest_ns) == (True, None)


def test_a_last_token_with_its_end_is_a_gap() -> None:
    gaps = TokenGaps()
    gaps.note([token(A)], 10)
    flip = gaps.begin()
    assert gaps.note([token(A), end(A)], 60)
    assert flip.longest_ns == 50


def test_flips_without_a_token_between_them_share_its_gap() -> None:
    """Each has its own measure: a later flip neither resets nor inherits an earlier one's."""
    gaps = TokenGaps()
    gaps.note([token(A), token(B)], 10)
    first = gaps.begin()
    gaps.note([token(A)], 30)
    second = gaps.begin()
    gaps.note([token(B)], 100)
    assert (first.is_closed, first.longest_ns) == (True, 90)
    assert (second.is_closed, second.longest_ns) == (False, 90)
    gaps.note([token(A)], 130)
    assert (first.longest_ns, second.longest_ns) == (90, 100)


def test_open_flips_are_bounded_and_the_oldest_is_given_up() -> None:
    gaps = TokenGaps()
    gaps.note([token(A)], 10)
    flips = [gaps.begin() for _ in range(MAX_OPEN_GAPS + 1)]
    gaps.note([token(A)], 20)
    assert [flip.is_closed for flip in flips] == [False] + [True] * MAX_OPEN_GAPS
