"""Bounds of what the router takes on."""

import pytest

from services.router.admission import Admission
from services.router.openai.refusal import Kind, RefusalError


def test_requests_are_counted_and_bounded() -> None:
    emptied: list[int] = []
    admission = Admission(2, 100, 100, on_empty=lambda: emptied.append(1))
    with admission.request(stream=True), admission.request(stream=False):
        assert (admission.num_open_requests, admission.num_streams) == (2, 1)
        with pytest.raises(RefusalError) as refused, admission.request(stream=False):
            pass
        assert refused.value.kind is Kind.OVERLOADED
        assert refused.value.retry_after_s
        assert admission.num_open_requests == 2, "a refusal takes no place"
    assert (admission.num_open_requests, admission.num_streams, admission.num_requests_total) == (0, 0, 2)
    assert emptied == [1]


def test_a_failing_request_gives_its_place_back() -> None:
    admission = Admission(1, 100, 100)
    with pytest.raises(ZeroDivisionError), admission.request(stream=True):
        raise ZeroDivisionError
    assert (admission.num_open_requests, admission.num_streams) == (0, 0)


def test_one_large_prompt_passes_and_a_second_waits_outside() -> None:
    admission = Admission(9, 100, 100)
    with admission.tokenising(500):
        with pytest.raises(RefusalError), admission.tokenising(1):
            pass
        assert admission.tokenising_chars == 500
    with admission.tokenising(60), admission.tokenising(40):
        assert admission.tokenising_chars == 100
    assert admission.tokenising_chars == 0


def test_nothing_is_taken_while_it_drains() -> None:
    admission = Admission(9, 100, 100)
    admission.close("the server is shutting down")
    with pytest.raises(RefusalError, match="shutting down") as refused, admission.request(stream=False):
        pass
    assert refused.value.kind is Kind.UNAVAILABLE


def test_bodies_have_room_by_their_declared_length() -> None:
    admission = Admission(9, 100, 100)
    with admission.receiving(60):
        with pytest.raises(RefusalError) as refused, admission.receiving(41):
            pass
        assert refused.value.kind is Kind.OVERLOADED
        with admission.receiving(40):
            assert admission.receiving_bytes == 100
    assert admission.receiving_bytes == 0
    with admission.receiving(500):
        assert admission.receiving_bytes == 500, "one alone may be of any size that a body may have"


def test_what_would_be_refused_is_refused_before_its_body_is_read() -> None:
    admission = Admission(1, 100, 100)
    admission.check_room()
    with admission.request(stream=False), pytest.raises(RefusalError, match="the most that may be"):
        admission.check_room()
    admission.close("the server is shutting down")
    with pytest.raises(RefusalError, match="shutting down"):
        admission.check_room()
