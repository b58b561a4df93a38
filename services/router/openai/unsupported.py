"""Fields that are known, would change the answer, and are not supported: refused by name instead of ignored. Pure.

A row says which values of a field are harmless; everything else is a 400. Values that only tune speed or bookkeeping do
not belong here: they are ignored.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.router.openai.fields import Fields
from services.router.openai.refusal import unsupported
from services.router.openai.wanted import Endpoint


@dataclass(frozen=True, slots=True)
class _Row:
    harmless: tuple[object, ...]
    """Values with which the answer is the same as without the field."""
    why: str


_NOT_YET = "is not supported yet: leave it out"
_ABSENT = _Row((), _NOT_YET)
_OFF = _Row((False,), _NOT_YET)
_EMPTY = _Row(([], {}, ""), _NOT_YET)

_BOTH: Mapping[str, _Row] = {
    "use_beam_search": _OFF,
    "length_penalty": _Row((1,), _NOT_YET),
    "min_tokens": _Row((0,), _NOT_YET),
    "bad_words": _EMPTY,
    "allowed_token_ids": _ABSENT,
    "logits_processors": _EMPTY,
    "prompt_logprobs": _ABSENT,
    "truncate_prompt_tokens": _ABSENT,
    "include_stop_str_in_output": _OFF,
    "skip_special_tokens": _Row((True,), _NOT_YET),
    "guided_json": _ABSENT,
    "guided_regex": _ABSENT,
    "guided_choice": _ABSENT,
    "guided_grammar": _ABSENT,
    "structured_outputs": _EMPTY,
    "json_schema": _ABSENT,
    "regex": _ABSENT,
    "ebnf": _ABSENT,
    "stop_regex": _EMPTY,
    "lora_path": _ABSENT,
}
_CHAT: Mapping[str, _Row] = {
    "audio": _ABSENT,
    "modalities": _Row((["text"],), 'must be ["text"]: this model writes text only'),
    "functions": _EMPTY,
    "function_call": _Row(("none",), _NOT_YET),
    "reasoning_effort": _Row(("none",), _NOT_YET),
    "web_search_options": _ABSENT,
    "chat_template": _ABSENT,
    "chat_template_kwargs": _EMPTY,
    "continue_final_message": _OFF,
    "add_generation_prompt": _Row((True,), _NOT_YET),
    "echo": _OFF,
    "best_of": _Row((1,), "is not supported: ask for n choices instead"),
}
_COMPLETIONS: Mapping[str, _Row] = {
    "suffix": _Row(("",), "is not supported: this model only continues text"),
    "best_of": _Row((1,), "above 1 is not supported: ask for n choices instead"),
}


def refuse_unsupported(fields: Fields, endpoint: Endpoint) -> None:
    """Returns if every known but unsupported field is absent or harmless.

    Raises:
        RefusalError: naming the first that is neither.
    """
    for table in (_BOTH, _CHAT if endpoint is Endpoint.CHAT else _COMPLETIONS):
        for name, row in table.items():
            value = fields.value(name)
            if value is not None and value not in row.harmless:
                raise unsupported(name, row.why)
    _refuse_format(fields)
    if endpoint is Endpoint.CHAT:
        _refuse_tools(fields)


def _refuse_format(fields: Fields) -> None:
    wanted = fields.object("response_format")
    if wanted is not None and wanted.value("type") != "text":
        raise unsupported("response_format", 'other than {"type": "text"} is not supported yet')


def _refuse_tools(fields: Fields) -> None:
    tools, choice = fields.value("tools"), fields.value("tool_choice")
    if choice is not None and choice not in ("none", "auto"):
        raise unsupported("tool_choice", 'other than "none" is not supported yet')
    if tools and choice != "none":
        raise unsupported("tools", 'is not supported yet: leave it out, or set tool_choice to "none"')
