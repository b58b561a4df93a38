"""What must hold of a small group when something happens in it, and when nothing can happen any more."""

from services.core.flip.messages import EnterReceived, FlipOutcome
from services.core.flip.participant import ParticipantState
from services.core.flip.records import Concluded, Entered, FlipKey
from services.core.ids import Generation
from services.core.log import FIRST_EPOCH, LogState
from tests.sim.space.rank import RankState, checked
from tests.sim.space.state import GroupState, OneJournal, Scope


def check_commit(state: GroupState) -> None:
    key = (state.scheduler.generation, state.scheduler.last_id)
    record = OneJournal(list(state.mover.journal)).last(key)
    checked(
        "journal, then speak",
        isinstance(record, Concluded) and record.outcome is FlipOutcome.COMMITTED,
        lambda: f"COMMIT is written, the journal says {record}",
    )
    for rank in state.ranks:
        tables = rank.tables
        is_verified = tables.state is ParticipantState.VERIFIED and tables.entry is not None
        checked(
            "commit after all verified",
            not rank.is_log_open or (is_verified and tables.entry.flip_id == key[1]),  # type: ignore[union-attr]
            lambda rank=rank: f"COMMIT of {key} with {rank}",  # type: ignore[misc]
        )


def check_enter(state: GroupState, key: FlipKey, round_number: int) -> None:
    for rank in state.ranks:
        # A rank that serves a later generation by now had said it in its life before, and this one is lost.
        checked(
            "nobody enters alone",
            rank.present_in == (*key, round_number) or rank.present_in[0] > key[0],
            lambda rank=rank: f"ENTER of {key}, round {round_number}, with {rank}",  # type: ignore[misc]
        )


def check_told(state: GroupState, rank: RankState) -> None:
    generation, command = rank.from_mover[0]
    if not isinstance(command, EnterReceived):
        return
    record = OneJournal(list(state.mover.journal)).last((Generation(generation), command.flip_id))
    checked(
        "journal, then speak",
        isinstance(record, Entered | Concluded),
        lambda: f"a rank hears {command}, the journal says {record}",
    )


def check_end(state: GroupState, scope: Scope) -> None:
    """Nothing but faults can happen any more: every flip has its outcome, and everyone agrees.

    Raises:
        InvariantError: it is not so.
    """
    s = state.scheduler
    checked("each flip ends", s.is_serving and not s.is_pending, lambda: f"nothing can happen any more: {s}")
    checked("each flip ends", state.mover.key is None, lambda: f"the mover is left with {state.mover}")
    for rank in state.ranks:
        tables = rank.tables
        checked(
            "epoch agreement",
            (tables.epoch, tables.layout, tables.sequence, tables.log_state, tables.state)
            == (s.epoch, s.kind, s.sequence, LogState.RUNNING, ParticipantState.RUNNING),
            lambda rank=rank: f"{rank} at the end of {s}",  # type: ignore[misc]
        )
    if state.budget[1:] == (scope.num_crashes, scope.num_slips, scope.num_expiries):
        checked(
            "convergence",
            s.epoch == FIRST_EPOCH + scope.num_flips,
            lambda: f"nothing went wrong, and {s.epoch - FIRST_EPOCH} flips of {scope.num_flips} committed",
        )
