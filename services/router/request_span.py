"""The span of one request, in the attributes of OpenTelemetry's gen_ai conventions. Never carries a client's text."""

from opentelemetry.trace import Span

from services.router.openai.replies import finish_word
from services.router.openai.wanted import Endpoint, InferenceRequest
from services.router.streams.open_request import OpenRequest


def describe(span: Span, asked: InferenceRequest, model: str, generation: OpenRequest | None) -> None:
    """Attributes of the gen_ai conventions."""
    if not span.is_recording():
        return
    sampling = asked.sampling
    span.set_attributes(
        {
            "gen_ai.operation.name": "chat" if asked.endpoint is Endpoint.CHAT else "text_completion",
            "gen_ai.provider.name": "flipmesh",
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": asked.num_choices,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
        }
    )
    if generation is None:
        return
    usage = generation.usage
    endings = [choice.ending for choice in generation.choices if choice.ending and not choice.ending.failure]
    span.set_attributes(
        {
            "gen_ai.response.id": generation.reply_id,
            "gen_ai.response.model": model,
            "gen_ai.usage.input_tokens": usage.num_prompt_tokens,
            "gen_ai.usage.output_tokens": usage.num_output_tokens,
            "gen_ai.response.finish_reasons": [finish_word(ending.reason) or "" for ending in endings],
        }
    )
    if (first_s := generation.first_token_s) is not None:
        delay_s = first_s - generation.began_s
        span.set_attribute("gen_ai.server.time_to_first_token", delay_s)
        began_ns = getattr(span, "start_time", None)
        at_ns = None if began_ns is None else began_ns + int(delay_s * 1e9)
        span.add_event("gen_ai.first_token", timestamp=at_ns)
