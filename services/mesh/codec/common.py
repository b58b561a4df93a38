"""Between `flipmesh.common.v1` and core values. An unspecified enum is refused, never guessed."""

from flipmesh.common.v1 import layout_pb2, request_pb2

from services.core.ids import LayoutKind, TokenId
from services.core.request import FinishReason, SamplingParams, TokenLogprobs


class CodecError(ValueError):
    """A message that names nothing core knows; the text names the field and its value."""


_LAYOUT_TO_PROTO = {
    LayoutKind.PP: layout_pb2.LAYOUT_KIND_PP,
    LayoutKind.TP: layout_pb2.LAYOUT_KIND_TP,
}
_LAYOUT_FROM_PROTO = {number: kind for kind, number in _LAYOUT_TO_PROTO.items()}
_FINISH_TO_PROTO = {
    FinishReason.STOP: request_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: request_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: request_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: request_pb2.FINISH_REASON_ERROR,
}
_FINISH_FROM_PROTO = {number: reason for reason, number in _FINISH_TO_PROTO.items()}


def layout_to_proto(kind: LayoutKind) -> "layout_pb2.LayoutKind.ValueType":
    """The proto's number of a layout."""
    return _LAYOUT_TO_PROTO[kind]


def layout_from_proto(number: "layout_pb2.LayoutKind.ValueType", field: str) -> LayoutKind:
    """The layout a message names in `field`.

    Raises:
        CodecError: unspecified or unknown.
    """
    try:
        return _LAYOUT_FROM_PROTO[number]
    except KeyError:
        raise CodecError(f"{field}: layout number {number} is neither PP nor TP") from None


def finish_to_proto(reason: FinishReason) -> "request_pb2.FinishReason.ValueType":
    """The proto's number of a finish reason."""
    return _FINISH_TO_PROTO[reason]


def finish_from_proto(number: "request_pb2.FinishReason.ValueType", field: str) -> FinishReason:
    """The finish reason a message names in `field`.

    Raises:
        CodecError: unspecified or unknown.
    """
    try:
        return _FINISH_FROM_PROTO[number]
    except KeyError:
        raise CodecError(f"{field}: finish reason number {number} is unknown") from None


def sampling_to_proto(sampling: SamplingParams) -> request_pb2.SamplingParams:
    """Every field, effective values."""
    return request_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[request_pb2.TokenBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
    )


def sampling_from_proto(message: request_pb2.SamplingParams) -> SamplingParams:
    """Every field as sent: the router has filled the defaults."""
    return SamplingParams(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p,
        min_p=message.min_p,
        seed=message.seed,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty,
        logit_bias=tuple((TokenId(item.token_id), item.bias) for item in message.logit_bias),
    )


def logprobs_to_proto(logprobs: TokenLogprobs) -> request_pb2.TokenLogprobs:
    """One position's log-probabilities."""
    return request_pb2.TokenLogprobs(
        sampled=logprobs.sampled,
        top_token_ids=[token for token, _ in logprobs.top],
        top_logprobs=[value for _, value in logprobs.top],
    )


def logprobs_from_proto(message: request_pb2.TokenLogprobs) -> TokenLogprobs:
    """One position's log-probabilities.

    Raises:
        CodecError: the two parallel lists differ in length.
    """
    if len(message.top_token_ids) != len(message.top_logprobs):
        raise CodecError(
            f"top_logprobs: {len(message.top_logprobs)} values beside {len(message.top_token_ids)} top_token_ids"
        )
    top = zip(map(TokenId, message.top_token_ids), message.top_logprobs, strict=True)
    return TokenLogprobs(sampled=message.sampled, top=tuple(top))
