"""The model as the router knows it: its name, its tokenizer, its chat template; never its weights."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType

from services.core.ids import TokenId
from services.router.openai.refusal import Kind, RefusalError, invalid
from services.router.streams.choice_text import ChoiceText
from services.router.text.detokenize import StopStrings
from services.router.text.renderer import ChatRenderer, RendererBusyError, RendererLostError
from services.router.text.templates import ChatRefusedError
from services.router.text.tokens import PromptRefusedError, TokenizerBusyError, Tokens

PACKAGE = "flipmesh"
RETRY_AFTER_S = 1
"""What a client is told to wait when the tokeniser is busy, in seconds."""


def software_version() -> str:
    """The version of this installation."""
    return version(PACKAGE)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What is served. `digest` tells models apart; `created_s` is when this router opened it."""

    name: str
    digest: str
    tokens: Tokens
    renderer: ChatRenderer
    created_s: int

    @property
    def fingerprint(self) -> str:
        """OpenAI's system_fingerprint: equal as long as model and software are."""
        text = f"{self.name} {self.digest} {software_version()}"
        return "fp_" + hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def vocabulary_size(self) -> int:
        """Ids that a client may name."""
        return len(self.tokens.vocabulary.pieces)

    @property
    def end_ids(self) -> frozenset[TokenId]:
        """Ids that end an answer."""
        return self.tokens.vocabulary.end_ids

    def token_bytes(self, token_id: TokenId) -> bytes:
        """What a token is written as, control tokens included."""
        return self.tokens.vocabulary.piece(token_id, with_control=True)

    def choice_text(self, stops: StopStrings | None) -> ChoiceText:
        """The machine that makes one choice's text."""
        return ChoiceText(self.tokens.vocabulary, stops)

    async def encode(
        self,
        text: str,
        *,
        field: str,
        max_tokens: int,
        add_prefix: bool = True,
        masks: Mapping[str, str] = MappingProxyType({}),
    ) -> tuple[TokenId, ...]:
        """The ids of a prompt, computed beside the loop; a character of `masks` is read as its text, literally.

        Raises:
            RefusalError: too long for `max_tokens`, empty, or the tokeniser is busy.
        """
        try:
            ids = await self.tokens.encode(text, max_tokens=max_tokens, add_prefix=add_prefix, masks=masks)
        except PromptRefusedError as error:
            code = "context_length_exceeded" if text else "empty_prompt"
            raise invalid(field, f"cannot be served: {error}", code) from error
        except TokenizerBusyError as error:
            raise RefusalError(Kind.OVERLOADED, str(error), retry_after_s=RETRY_AFTER_S) from error
        return tuple(ids)

    async def encode_chat(self, messages: Sequence[Mapping[str, object]], *, max_tokens: int) -> tuple[TokenId, ...]:
        """The ids of a chat, as its template writes it.

        Raises:
            RefusalError: the template refuses the messages (with its own words), or as for `encode`.
        """
        try:
            chat = await self.renderer.render(messages)
        except ChatRefusedError as error:
            raise invalid("messages", f"cannot be rendered: {error}", "chat_template_error") from error
        except RendererBusyError as error:
            raise RefusalError(Kind.OVERLOADED, str(error), retry_after_s=RETRY_AFTER_S) from error
        except RendererLostError as error:
            raise RefusalError(Kind.FAILED, str(error)) from error
        return await self.encode(chat.text, field="messages", max_tokens=max_tokens, masks=chat.masks)
