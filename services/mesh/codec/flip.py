"""Between the messages of `JoinFlip` and the events and effects of the flip's two machines.

Times and durations that ride along are for traces alone; no decision reads them, so they have no place in core.
"""

from flipmesh.common.v1 import layout_pb2
from flipmesh.mover.v1 import mover_service_pb2
from flipmesh.worker.v1 import worker_service_pb2 as pb

from services.core.flip.messages import (
    AssembleReceived,
    CoordinatorEvent,
    DisarmReceived,
    EnterReceived,
    FlipOutcome,
    ParticipantEffect,
    RankFailed,
    RankNotReady,
    RankParked,
    RankPresent,
    RankVerified,
    RankWithdrew,
    SayFailed,
    SayNotReady,
    SayParked,
    SayPresent,
    SayVerified,
    SayWithdrawn,
    SendAssemble,
    SendDisarm,
    SendEnter,
)
from services.core.ids import FlipId, Rank
from services.mesh.codec.common import CodecError

_OUTCOMES = {
    FlipOutcome.COMMITTED: mover_service_pb2.FLIP_STATE_COMMITTED,
    FlipOutcome.ABANDONED: mover_service_pb2.FLIP_STATE_ABANDONED,
    FlipOutcome.RESTORED: mover_service_pb2.FLIP_STATE_RESTORED,
    FlipOutcome.BROKEN: mover_service_pb2.FLIP_STATE_BROKEN,
}
_OUTCOMES_BACK = {number: outcome for outcome, number in _OUTCOMES.items()}


def outcome_to_proto(outcome: FlipOutcome) -> "mover_service_pb2.FlipState.ValueType":
    """The proto's number of an outcome."""
    return _OUTCOMES[outcome]


def outcome_from_proto(number: "mover_service_pb2.FlipState.ValueType") -> FlipOutcome | None:
    """The outcome a state is, or None where the flip goes on."""
    return _OUTCOMES_BACK.get(number)


def command_to_proto(
    command: SendAssemble | SendEnter | SendDisarm, fence: layout_pb2.Fence, flip_id: FlipId
) -> pb.JoinFlipRequest:
    """What the mover tells a rank."""
    match command:
        case SendAssemble(round_number):
            return pb.JoinFlipRequest(fence=fence, flip_id=flip_id, round=round_number, assemble=pb.AssembleCommand())
        case SendEnter(round_number):
            return pb.JoinFlipRequest(fence=fence, flip_id=flip_id, round=round_number, enter=pb.EnterCommand())
        case SendDisarm(reason):
            return pb.JoinFlipRequest(fence=fence, flip_id=flip_id, disarm=pb.DisarmCommand(reason=reason))


def command_from_proto(message: pb.JoinFlipRequest) -> AssembleReceived | EnterReceived | DisarmReceived:
    """What a rank hears from the mover.

    Raises:
        CodecError: the message carries no command.
    """
    flip_id = FlipId(message.flip_id)
    match message.WhichOneof("command"):
        case "assemble":
            return AssembleReceived(flip_id, message.round)
        case "enter":
            return EnterReceived(flip_id, message.round)
        case "disarm":
            return DisarmReceived(flip_id)
        case None:
            raise CodecError(f"command: the message for flip {flip_id} carries none")


Said = SayParked | SayPresent | SayWithdrawn | SayNotReady | SayVerified | SayFailed


def said_to_proto(said: Said, fence: layout_pb2.Fence, rank: Rank) -> pb.JoinFlipResponse:
    """What a rank tells the mover; the caller adds times."""
    message = pb.JoinFlipResponse(fence=fence, flip_id=said.flip_id, rank=rank)
    match said:
        case SayParked():
            message.parked.SetInParent()
        case SayPresent():
            message.round = said.round
            message.present.fits = said.fits
            message.present.refusal = said.refusal
            message.present.plan_hash = said.plan_hash
        case SayWithdrawn():
            message.round = said.round
            message.withdraw.reason = said.reason
        case SayNotReady():
            message.not_ready.reason = said.reason
        case SayVerified():
            message.verified.bytes_moved = said.bytes_moved
            message.verified.rows_moved = said.rows_moved
        case SayFailed():
            message.failed.reason = said.reason
            message.failed.restored = said.restored
    return message


def said_of(effects: list[ParticipantEffect]) -> list[Said]:
    """The effects that are messages."""
    return [effect for effect in effects if isinstance(effect, Said)]


def event_from_proto(message: pb.JoinFlipResponse) -> CoordinatorEvent | None:
    """What the mover hears from a rank; None for what only a trace wants.

    Raises:
        CodecError: the message carries no event.
    """
    rank = Rank(message.rank)
    match message.WhichOneof("event"):
        case "parked":
            return RankParked(rank)
        case "present":
            present = message.present
            return RankPresent(rank, message.round, present.fits, present.refusal, present.plan_hash)
        case "not_ready":
            return RankNotReady(rank, message.not_ready.reason)
        case "withdraw":
            return RankWithdrew(rank, message.round, message.withdraw.reason)
        case "verified":
            return RankVerified(rank, message.verified.bytes_moved, message.verified.rows_moved)
        case "failed":
            return RankFailed(rank, message.failed.reason, message.failed.restored)
        case "resumed":
            return None
        case None:
            raise CodecError(f"event: the message of rank {rank} for flip {message.flip_id} carries none")
