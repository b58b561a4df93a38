"""The two machines of a flip: the way through, every way out, and the rows that must not exist."""

import pytest

from services.core.flip.coordinator import CoordinatorState, FlipCoordinator
from services.core.flip.messages import (
    AbandonReached,
    AssembleReceived,
    CommitReached,
    Conclude,
    CoordinatorEvent,
    DeadlineReached,
    DisarmReceived,
    EnterReceived,
    EntryReached,
    FlipDeadlines,
    FlipOutcome,
    FlipProtocolError,
    JournalEnter,
    MoverConnected,
    ParticipantEvent,
    RankFailed,
    RankLost,
    RankNotReady,
    RankParked,
    RankPresent,
    RankVerified,
    RankWithdrew,
    RoomSeen,
    SayFailed,
    SayNotReady,
    SayParked,
    SayPresent,
    SayVerified,
    SayWithdrawn,
    SendAssemble,
    SendDisarm,
    SendEnter,
    StartWork,
    WorkDone,
    WorkFailed,
)
from services.core.flip.participant import FlipParticipant, ParticipantState
from services.core.flip.pending_events import PendingEvents
from services.core.ids import FlipId, Generation, Rank

DEADLINES = FlipDeadlines(park_ns=30, presence_ns=60, data_plane_ns=10)
FLIP = FlipId(7)
R0, R1 = Rank(0), Rank(1)


def present(rank: Rank, round_number: int = 1, *, fits: bool = True, plan_hash: int = 5) -> RankPresent:
    return RankPresent(rank, round_number, fits, "" if fits else "the pool is too small", plan_hash)


def coordinator(*events: CoordinatorEvent, at_ns: int = 0) -> FlipCoordinator:
    attempt = FlipCoordinator(FLIP, 2, DEADLINES, now_ns=0)
    for event in events:
        attempt.on_event(event, at_ns)
    return attempt


PARKED = (RankParked(R0), RankParked(R1))
ENTERED = (*PARKED, present(R0), present(R1))


def test_the_way_to_commit() -> None:
    attempt = coordinator()
    assert attempt.on_event(RankParked(R0), 1) == []
    assert attempt.on_event(RankParked(R1), 2) == [SendAssemble(1)]
    assert attempt.on_event(present(R1), 3) == []
    assert attempt.on_event(present(R0), 4) == [JournalEnter(1), SendEnter(1)]
    assert attempt.on_event(RankVerified(R0, 100, 4), 5) == []
    committed = Conclude(FlipOutcome.COMMITTED, "all ranks verified", 150, 6)
    assert attempt.on_event(RankVerified(R1, 50, 2), 6) == [committed]
    assert attempt.outcome == committed
    assert attempt.deadline_ns is None


def test_each_phase_has_its_own_clock_and_presence_counts_from_the_last_park() -> None:
    attempt = coordinator()
    assert attempt.deadline_ns == 30
    attempt.on_event(RankParked(R0), 10)
    assert attempt.deadline_ns == 30
    attempt.on_event(RankParked(R1), 25)
    assert attempt.deadline_ns == 25 + 60
    attempt.on_event(present(R0), 40)
    attempt.on_event(present(R1), 50)
    assert attempt.deadline_ns == 50 + 10


def test_a_withdrawal_before_enter_opens_a_new_round_and_old_presence_counts_for_nothing() -> None:
    attempt = coordinator(*PARKED, present(R0))
    assert attempt.on_event(RankWithdrew(R0, 1, "a message came in"), 0) == [SendAssemble(2)]
    assert attempt.on_event(present(R1, 1), 0) == []
    assert attempt.on_event(present(R1, 2), 0) == []
    assert attempt.state is CoordinatorState.ASSEMBLING
    assert attempt.on_event(present(R0, 2), 0) == [JournalEnter(2), SendEnter(2)]


def test_rounds_are_bounded() -> None:
    attempt = coordinator(*PARKED, RankWithdrew(R0, 1, "x"), RankWithdrew(R0, 2, "x"), RankWithdrew(R0, 3, "again"))
    assert attempt.outcome is not None
    assert attempt.outcome.outcome is FlipOutcome.ABANDONED
    assert "round 3, the last: again" in attempt.outcome.reason


def test_a_withdrawal_after_enter_binds() -> None:
    attempt = coordinator(*ENTERED)
    assert attempt.on_event(RankWithdrew(R0, 1, "too late"), 0) == []
    assert attempt.state is CoordinatorState.ENTERED


@pytest.mark.parametrize(
    ("events", "outcome", "names"),
    [
        ((RankNotReady(R1, "chunk 3 of 9"), RankParked(R0), DeadlineReached()), FlipOutcome.ABANDONED, "chunk 3 of 9"),
        ((*PARKED, present(R1), DeadlineReached()), FlipOutcome.ABANDONED, "rank 0 (said nothing)"),
        ((*PARKED, present(R0, fits=False)), FlipOutcome.ABANDONED, "rank 0 refuses: the pool is too small"),
        ((*PARKED, present(R0), present(R1, plan_hash=6)), FlipOutcome.ABANDONED, "{0: 5, 1: 6}"),
        ((RankWithdrew(R0, 0, "leaving"),), FlipOutcome.ABANDONED, "rank 0 withdrew before the gate opened: leaving"),
        ((RankLost(R1, "stream ended"),), FlipOutcome.ABANDONED, "rank 1 lost"),
        ((*PARKED, RankLost(R1, "stream ended")), FlipOutcome.ABANDONED, "rank 1 lost"),
        ((*ENTERED, RankLost(R1, "stream ended")), FlipOutcome.BROKEN, "rank 1 lost after ENTER"),
        ((*ENTERED, RankVerified(R0), DeadlineReached()), FlipOutcome.BROKEN, "not verified in time: rank 1"),
        ((*ENTERED, RankFailed(R0, "checksum", restored=True)), FlipOutcome.RESTORED, "rank 0 failed: checksum"),
        ((*ENTERED, RankFailed(R0, "checksum", restored=False)), FlipOutcome.BROKEN, "rank 0 failed: checksum"),
    ],
)
def test_every_way_out_names_who_and_why(
    events: tuple[CoordinatorEvent, ...], outcome: FlipOutcome, names: str
) -> None:
    attempt = coordinator(*events)
    assert attempt.outcome is not None
    assert attempt.outcome.outcome is outcome
    assert names in attempt.outcome.reason
    assert attempt.on_event(RankVerified(R0), 99) == []


def test_ranks_are_told_to_stand_down_before_an_attempt_is_concluded() -> None:
    attempt = coordinator(*PARKED)
    effects = attempt.on_event(present(R0, fits=False), 0)
    assert [type(effect) for effect in effects] == [SendDisarm, Conclude]


@pytest.mark.parametrize("early", [RankVerified(R0), RankFailed(R0, "x", restored=True)])
def test_work_before_enter_is_an_error(early: CoordinatorEvent) -> None:
    with pytest.raises(FlipProtocolError, match="while assembling"):
        coordinator(*PARKED, early)


def test_a_recovered_attempt_goes_on_from_enter() -> None:
    attempt = FlipCoordinator.recovered(FLIP, 2, DEADLINES, now_ns=100, entered_round=2)
    assert attempt.deadline_ns == 110
    attempt.on_event(RankVerified(R0), 101)
    attempt.on_event(RankVerified(R0), 101)
    assert attempt.outcome is None
    attempt.on_event(RankVerified(R1), 102)
    assert attempt.outcome is not None
    assert attempt.outcome.outcome is FlipOutcome.COMMITTED


def test_a_rank_that_never_heard_enter_is_told_again_after_a_restart() -> None:
    attempt = FlipCoordinator.recovered(FLIP, 2, DEADLINES, now_ns=100, entered_round=2)
    assert attempt.on_event(RankParked(R0), 101) == []
    assert attempt.on_event(present(R0, 1), 101) == []
    assert attempt.on_event(present(R0, 2), 101) == [SendEnter(2)]


def test_what_was_said_early_is_heard_once_and_only_for_its_attempt() -> None:
    early, key, other = PendingEvents(), (Generation(3), FLIP), (Generation(3), FlipId(8))
    early.keep(key, RankParked(R0))
    early.keep(key, RankParked(R1))
    early.keep(other, RankParked(R1))
    early.forget(R1)
    early.keep(key, RankVerified(R1))
    assert early.take(key) == [RankParked(R0), RankVerified(R1)]
    assert early.take(key) == early.take(other) == []


ENTRY = EntryReached(FLIP, fits=True, refusal="", plan_hash=5)


def participant(*events: ParticipantEvent) -> FlipParticipant:
    rank = FlipParticipant()
    for event in events:
        rank.on_event(event)
    return rank


def test_a_rank_through_a_committed_flip() -> None:
    rank = participant()
    assert rank.on_event(AssembleReceived(FLIP, 1)) == [
        SayNotReady(FLIP, "still executing the log before the FLIP entry")
    ]
    assert rank.on_event(ENTRY) == [SayParked(FLIP)]
    assert rank.on_event(AssembleReceived(FLIP, 1)) == [SayPresent(FLIP, 1, True, "", 5)]
    assert rank.on_event(EnterReceived(FLIP, 1)) == [StartWork(FLIP)]
    assert rank.on_event(WorkDone(FLIP, 100, 4)) == [SayVerified(FLIP, 100, 4)]
    assert rank.on_event(MoverConnected()) == [SayVerified(FLIP, 100, 4)]
    assert rank.on_event(CommitReached(FLIP)) == []
    assert rank.state is ParticipantState.RUNNING
    assert rank.on_event(EnterReceived(FLIP, 1)) == []


@pytest.mark.parametrize(
    "events",
    [
        (ENTRY,),
        (ENTRY, AssembleReceived(FLIP, 1)),
        (ENTRY, AssembleReceived(FLIP, 1), DisarmReceived(FLIP)),
        (ENTRY, AssembleReceived(FLIP, 1), EnterReceived(FLIP, 1)),
        (ENTRY, AssembleReceived(FLIP, 1), EnterReceived(FLIP, 1), WorkDone(FLIP, 0, 0)),
        (ENTRY, AssembleReceived(FLIP, 1), EnterReceived(FLIP, 1), WorkFailed(FLIP, "x", restored=True)),
    ],
)
def test_abandon_ends_every_parked_state(events: tuple[ParticipantEvent, ...]) -> None:
    rank = participant(*events)
    rank.on_event(AbandonReached(FLIP))
    assert rank.state is ParticipantState.RUNNING
    assert rank.flip_id is None


@pytest.mark.parametrize(
    "events",
    [
        (),
        (ENTRY,),
        (ENTRY, AssembleReceived(FLIP, 1)),
        (ENTRY, AssembleReceived(FLIP, 1), EnterReceived(FLIP, 1)),
        (ENTRY, AssembleReceived(FLIP, 1), EnterReceived(FLIP, 1), WorkFailed(FLIP, "x", restored=True)),
    ],
)
def test_commit_without_verification_is_an_error(events: tuple[ParticipantEvent, ...]) -> None:
    rank = participant(*events)
    with pytest.raises(FlipProtocolError):
        rank.on_event(CommitReached(FLIP))


def test_enter_needs_presence_in_that_very_round() -> None:
    with pytest.raises(FlipProtocolError):
        participant(ENTRY, EnterReceived(FLIP, 1))
    with pytest.raises(FlipProtocolError, match="ENTER of round 1, present in 2"):
        participant(ENTRY, AssembleReceived(FLIP, 1), AssembleReceived(FLIP, 2), EnterReceived(FLIP, 1))


def test_a_message_of_another_attempt_is_an_error() -> None:
    with pytest.raises(FlipProtocolError, match="flip 8 named, parked for flip 7"):
        participant(ENTRY, AssembleReceived(FlipId(8), 1))


@pytest.mark.parametrize("events", [(ENTRY,), (ENTRY, AssembleReceived(FLIP, 1))])
def test_a_later_attempt_may_be_called_off_before_the_outcome_of_this_one_is_read(
    events: tuple[ParticipantEvent, ...],
) -> None:
    rank = participant(*events)
    state = rank.state
    assert rank.on_event(DisarmReceived(FlipId(FLIP + 1))) == []
    assert (rank.state, rank.flip_id) == (state, FLIP)


@pytest.mark.parametrize("result", [WorkDone(FLIP, 100, 4), WorkFailed(FLIP, "not parked for it", restored=True)])
def test_work_that_crossed_its_outcome_says_nothing_not_even_in_the_next_attempt(result: ParticipantEvent) -> None:
    rank = participant(ENTRY, AssembleReceived(FLIP, 1), EnterReceived(FLIP, 1), AbandonReached(FLIP))
    assert rank.on_event(result) == []
    after = FlipId(FLIP + 1)
    rank.on_event(EntryReached(after, fits=True, refusal="", plan_hash=5))
    rank.on_event(AssembleReceived(after, 1))
    rank.on_event(EnterReceived(after, 1))
    assert rank.on_event(result) == []
    assert rank.state is ParticipantState.ENTERED


def test_failure_is_said_again_after_a_reconnect() -> None:
    rank = participant(
        ENTRY, AssembleReceived(FLIP, 1), EnterReceived(FLIP, 1), WorkFailed(FLIP, "checksum", restored=True)
    )
    assert rank.on_event(MoverConnected()) == [SayFailed(FLIP, "checksum", True)]


def test_room_that_is_gone_takes_presence_back_once_and_binds_if_enter_is_on_its_way() -> None:
    rank = FlipParticipant()
    rank.on_event(EntryReached(FLIP, True, "", 5))
    assert rank.on_event(RoomSeen(FLIP, "")) == []
    assert rank.on_event(AssembleReceived(FLIP, 1)) == [SayPresent(FLIP, 1, True, "", 5)]
    assert rank.on_event(RoomSeen(FLIP, "no room")) == [SayWithdrawn(FLIP, 1, "no room")]
    assert rank.on_event(RoomSeen(FLIP, "no room")) == [], "said once"
    assert rank.on_event(EnterReceived(FLIP, 1)) == [StartWork(FLIP)], "the work looks for itself"
    assert rank.on_event(RoomSeen(FLIP, "no room")) == []


def test_the_next_round_hears_what_was_seen_last() -> None:
    rank = FlipParticipant()
    rank.on_event(EntryReached(FLIP, True, "", 5))
    rank.on_event(AssembleReceived(FLIP, 1))
    rank.on_event(RoomSeen(FLIP, "no room"))
    assert rank.on_event(AssembleReceived(FLIP, 2)) == [SayPresent(FLIP, 2, False, "no room", 5)]
    assert rank.on_event(RoomSeen(FLIP, "")) == []
    assert rank.on_event(AssembleReceived(FLIP, 3)) == [SayPresent(FLIP, 3, True, "", 5)]
    rank.on_event(AbandonReached(FLIP))
    assert rank.on_event(RoomSeen(FLIP, "late")) == []
