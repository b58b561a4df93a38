"""Renders a chat into the text that the model was trained on, with the template that its files carry.

A template is a program by a stranger. Here it runs sandboxed and cannot change what it is given; its time and memory
are bounded by the process that this runs in (`render_process`), which imports nothing else. There is no built-in
template: a model without one is asked through completions.

The dialect is the one that templates are written for: Jinja with trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that escapes nothing, and the tag `generation`, which marks text and changes none.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.router.text.control_texts import ControlTexts

MAX_RENDERED_CHARS = 16 * 1024 * 1024
"""Twice the largest request by default; a template that loops over its output stops here."""
REASON_CHARS = 500
"""Of an error's text, what a client needs to see."""


class ChatRefusedError(ValueError):
    """The template does not take these messages; the text, the template's own where it has one, is for the client."""


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A chat as text. `masks`: characters of it that stand for a control token's text, to be read letter by letter."""

    text: str
    masks: Mapping[str, str]


class _RaisedByTemplateError(jinja2.TemplateError):
    """What `raise_exception` in a template raises."""


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}`: marks the assistant's text for training; here only its text counts."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Takes the tag away and leaves what is inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> str:
    raise _RaisedByTemplateError(str(message))


class ChatTemplates:
    """The chat templates of one model, by name."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_texts: Mapping[str, str],
        control_texts: ControlTexts,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_texts` is what templates call `bos_token` and the like; `control_texts` is masked in messages.

        Templates are compiled when they are first asked for: compiling one is already running a stranger's program.
        """
        self._texts, self._special_texts, self._control_texts = templates, dict(special_texts), control_texts
        self._compiled: dict[str, jinja2.Template] = {}
        self._environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        self._environment.filters["tojson"] = _tojson
        self._environment.globals["raise_exception"] = _raise_exception
        self._environment.globals["strftime_now"] = lambda form: now().strftime(form)

    def render(self, name: str, values: Mapping[str, object]) -> RenderedChat:
        """The text of a chat. `values` are the template's variables: `messages`, `tools` and what else it is given.

        Raises `ChatRefusedError` if the template refuses the messages or fails on them, or makes too long a text.
        """
        try:
            template = self._template(name)
            messages, masks = self._masked(values)
            return RenderedChat(_bounded(template, {**self._special_texts, **values, **messages}), masks)
        except _RaisedByTemplateError as error:
            raise ChatRefusedError(f"the model's chat template refuses the messages: {_reason(error)}") from error
        except (ChatRefusedError, MemoryError):
            raise
        # A template may do anything that an expression can, so anything may come out of it; the process itself is fine.
        except Exception as error:
            kind = type(error).__name__
            raise ChatRefusedError(
                f"the model's chat template fails on the messages: {kind}: {_reason(error)}"
            ) from error

    def _masked(self, values: Mapping[str, object]) -> tuple[dict[str, object], dict[str, str]]:
        """What clients write, masked; roles stay, since they are words of this API and none of a client's."""
        messages = [_with_parsed_arguments(message) for message in _objects(values["messages"])]
        roles = [message.get("role") for message in messages]
        masked, masks = self._control_texts.masked([messages, values.get("tools")])
        assert isinstance(masked, list), f"a list was masked, {type(masked).__name__} came back"
        restored = [{**message, "role": role} for message, role in zip(masked[0], roles, strict=True)]
        return {"messages": restored, "tools": masked[1]}, masks

    def _template(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            try:
                self._compiled[name] = self._environment.from_string(self._texts[name])
            except jinja2.TemplateError as error:
                raise ChatRefusedError(
                    f"the model's chat template cannot be used: {_reason(error)}; /v1/completions needs none"
                ) from error
        return self._compiled[name]


def _bounded(template: jinja2.Template, values: Mapping[str, object]) -> str:
    """Renders piece by piece, so that the size is looked at between the pieces."""
    pieces: list[str] = []
    num_chars = 0
    for piece in template.generate(values):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise jinja2.TemplateRuntimeError(f"the rendered chat is longer than {MAX_RENDERED_CHARS} characters")
    return "".join(pieces)


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:REASON_CHARS]


def _objects(value: object) -> list[dict[str, object]]:
    assert isinstance(value, list), f"messages are a list, got {type(value).__name__}"
    return value


def _with_parsed_arguments(message: dict[str, object]) -> dict[str, object]:
    """Tool calls with their arguments as objects: clients send JSON text, templates are written for objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_parsed_call(call) for call in calls]}


def _parsed_call(call: object) -> object:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(call, dict) or not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}
