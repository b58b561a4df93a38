"""Between `flipmesh.scheduler.v1` and requests of core."""

from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb

from services.core.ids import RequestId, TokenId
from services.core.request import (
    Admitted,
    Emitted,
    Finished,
    Rejected,
    RejectReason,
    RequestEvent,
    Submission,
)
from services.mesh.codec.common import (
    CodecError,
    finish_from_proto,
    finish_to_proto,
    logprobs_from_proto,
    logprobs_to_proto,
    sampling_from_proto,
    sampling_to_proto,
)

_REJECT_TO_PROTO = {
    RejectReason.OVERLOADED: pb.REJECT_REASON_OVERLOADED,
    RejectReason.INVALID: pb.REJECT_REASON_INVALID,
    RejectReason.UNAVAILABLE: pb.REJECT_REASON_UNAVAILABLE,
}
_REJECT_FROM_PROTO = {number: reason for reason, number in _REJECT_TO_PROTO.items()}


def submission_to_proto(submission: Submission) -> pb.SubmitRequest:
    """A request, new or again."""
    return pb.SubmitRequest(
        request_id=submission.request_id,
        token_ids=submission.token_ids,
        num_prompt_tokens=submission.num_prompt_tokens,
        max_output_tokens=submission.max_output_tokens,
        sampling=sampling_to_proto(submission.sampling),
        stop_token_ids=sorted(submission.stop_token_ids),
        num_logprobs=submission.num_logprobs,
        priority=submission.priority,
    )


def submission_from_proto(message: pb.SubmitRequest) -> Submission:
    """A request as sent; the scheduler judges its values."""
    return Submission(
        request_id=RequestId(message.request_id),
        token_ids=tuple(map(TokenId, message.token_ids)),
        num_prompt_tokens=message.num_prompt_tokens,
        max_output_tokens=message.max_output_tokens,
        sampling=sampling_from_proto(message.sampling),
        stop_token_ids=frozenset(map(TokenId, message.stop_token_ids)),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        priority=message.priority,
    )


def event_to_proto(event: RequestEvent) -> pb.RequestEvent:
    """One event of one request."""
    message = pb.RequestEvent(request_id=event.request_id)
    match event:
        case Admitted():
            message.admitted.num_cached_tokens = event.num_cached_tokens
            # A zero is the default value, so the field is marked present by itself.
            message.admitted.SetInParent()
        case Emitted():
            message.emitted.first_output_index = event.first_output_index
            message.emitted.token_ids.extend(event.token_ids)
            message.emitted.logprobs.extend(map(logprobs_to_proto, event.logprobs))
        case Finished():
            message.finished.reason = finish_to_proto(event.reason)
            message.finished.num_output_tokens = event.num_output_tokens
            message.finished.num_cached_tokens = event.num_cached_tokens
            message.finished.error = event.error
        case Rejected():
            message.rejected.reason = _REJECT_TO_PROTO[event.reason]
            message.rejected.field = event.field
            message.rejected.message = event.message
    return message


def event_from_proto(message: pb.RequestEvent) -> RequestEvent:
    """One event of one request.

    Raises:
        CodecError: no event, or an enum core does not know.
    """
    request_id = RequestId(message.request_id)
    match message.WhichOneof("event"):
        case "admitted":
            return Admitted(request_id, message.admitted.num_cached_tokens)
        case "emitted":
            return Emitted(
                request_id,
                message.emitted.first_output_index,
                tuple(map(TokenId, message.emitted.token_ids)),
                tuple(map(logprobs_from_proto, message.emitted.logprobs)),
            )
        case "finished":
            return Finished(
                request_id,
                finish_from_proto(message.finished.reason, "finished.reason"),
                message.finished.num_output_tokens,
                message.finished.num_cached_tokens,
                message.finished.error,
            )
        case "rejected":
            return Rejected(
                request_id,
                _reject_from_proto(message.rejected.reason),
                message.rejected.field,
                message.rejected.message,
            )
        case None:
            raise CodecError(f"event: the event of request {message.request_id!r} is empty")


def _reject_from_proto(number: "pb.RejectReason.ValueType") -> RejectReason:
    try:
        return _REJECT_FROM_PROTO[number]
    except KeyError:
        raise CodecError(f"rejected.reason: number {number} is unknown") from None
