"""Routers' streams: whose event it is, in which order it is sent, and what happens to one that does not read."""

import pytest
from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb

from services.core.ids import RequestId, TokenId
from services.core.request import Emitted, SamplingParams, Submission
from services.scheduler.streams import sessions as module
from services.scheduler.streams.sessions import Session, Sessions


def emitted(session: Session, name: str, index: int) -> Emitted:
    return Emitted(session.inside(name), index, (TokenId(index),))


def test_events_go_to_their_own_router_under_its_own_names() -> None:
    sessions = Sessions()
    first, second = sessions.open(), sessions.open()
    assert first.inside("a") != second.inside("a")
    sessions.deliver([emitted(first, "a/b", 0), emitted(second, "a/b", 1)])
    [response] = second.take()
    assert [event.request_id for event in response.events.events] == ["a/b"]
    assert response.events.events[0].emitted.first_output_index == 1
    assert len(first.take()) == 1 and first.take() == []


def test_a_submission_is_renamed_and_nothing_else() -> None:
    session = Sessions().open()
    submission = Submission(RequestId("a"), (TokenId(1),), 1, 1, SamplingParams())
    owned = session.owned(submission)
    assert owned.request_id.startswith(session.prefix) and owned.request_id != "a"
    assert (owned.token_ids, owned.sampling) == (submission.token_ids, submission.sampling)


def test_session_one_does_not_own_what_session_eleven_does() -> None:
    sessions = Sessions()
    opened = [sessions.open() for _ in range(11)]
    assert not opened[10].inside("a").startswith(opened[0].prefix)


def test_events_are_coalesced_in_order_around_what_is_not_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_EVENTS_PER_MESSAGE", 2)
    sessions = Sessions()
    session = sessions.open()
    sessions.deliver(emitted(session, "a", index) for index in range(3))
    sessions.tell_all(pb.ServeRequestsResponse(lost=pb.GroupLost(reason="gone")))
    sessions.deliver([emitted(session, "a", 3)])
    kinds = [(response.WhichOneof("message"), len(response.events.events)) for response in session.take()]
    assert kinds == [("events", 2), ("events", 1), ("lost", 0), ("events", 1)]


def test_what_is_for_a_router_that_has_left_goes_nowhere() -> None:
    sessions = Sessions()
    session = sessions.open()
    assert not sessions.is_empty.is_set()
    sessions.close(session)
    sessions.deliver([emitted(session, "a", 0)])
    assert sessions.is_empty.is_set() and session.take() == []


def test_a_router_that_does_not_read_is_cut_and_the_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_OUTBOX_EVENTS", 3)
    sessions = Sessions()
    deaf, other = sessions.open(), sessions.open()
    for index in range(4):
        sessions.deliver([emitted(deaf, "a", index)])
    sessions.deliver([emitted(other, "a", 0)])
    assert deaf.ended.is_set() and deaf.cut_reason is not None and "3 events" in deaf.cut_reason
    assert deaf.take() == [] and len(other.take()) == 1 and not other.ended.is_set()
