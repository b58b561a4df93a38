"""The bodies of /tokenize and /detokenize. Pure but for the call into the tokeniser."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.core.ids import TokenId
from services.router.openai.fields import Fields, shown
from services.router.openai.messages import read_messages
from services.router.openai.refusal import Kind, RefusalError, invalid
from services.router.openai.requests import read_token_ids
from services.router.openai.wanted import RequestBounds
from services.router.text.served_model import ServedModel


@dataclass(frozen=True, slots=True)
class TokenizeOptions:
    """A text, or a chat where `messages` is not empty."""

    prompt: str
    messages: tuple[Mapping[str, object], ...]
    add_prefix: bool

    @property
    def num_chars(self) -> int:
        """How much there is to tokenise."""
        return len(self.prompt) + sum(len(str(message["content"])) for message in self.messages)

    async def encode(self, model: ServedModel, *, max_tokens: int) -> tuple[TokenId, ...]:
        """Its ids, as a request with it would have them.

        Raises:
            RefusalError: too long, empty, or refused by the template.
        """
        if self.messages:
            return await model.encode_chat(self.messages, max_tokens=max_tokens)
        return await model.encode(self.prompt, field="prompt", max_tokens=max_tokens, add_prefix=self.add_prefix)


def parse_tokenize(body: object) -> TokenizeOptions:
    """`{"prompt": "...", "add_special_tokens": true}` or `{"messages": [...]}`.

    Raises:
        RefusalError: naming the field at fault.
    """
    fields = _object(body)
    if fields.value("messages") is not None:
        return TokenizeOptions("", read_messages(fields), True)
    prompt = fields.string("prompt")
    if prompt is None:
        raise invalid("prompt", "is required: a string, or messages instead")
    return TokenizeOptions(prompt, (), fields.flag("add_special_tokens", True))


def parse_detokenize(body: object, bounds: RequestBounds) -> tuple[TokenId, ...]:
    """`{"tokens": [...]}`.

    Raises:
        RefusalError: naming the field at fault.
    """
    value = _object(body).value("tokens")
    if not isinstance(value, list):
        raise invalid("tokens", f"must be a list of token ids, got {shown(value)}")
    return read_token_ids(value, "tokens", bounds)


def _object(body: object) -> Fields:
    if not isinstance(body, dict):
        raise RefusalError(Kind.INVALID, f"the body must be a JSON object, got {shown(body)}", code="invalid_body")
    return Fields(body)
