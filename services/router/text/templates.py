"""Renders a chat into the text that the model was trained on, with the template that its files carry.

A template is a program by a stranger: it runs sandboxed, cannot change what it is given, and its output, its time and
the size of its products are bounded. There is no built-in template: a model without one is asked through completions.

The dialect is the one that templates are written for: Jinja with trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that escapes nothing, and the tag `generation`, which marks text and changes none.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime

import anyio
import anyio.to_thread
import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.models.model_files import DEFAULT_TEMPLATE, ModelFiles
from services.router.text.vocabulary import Vocabulary

MAX_RENDERED_CHARS = 16 * 1024 * 1024
"""Twice the largest request by default; a template that loops over its output stops here."""
MAX_RENDER_S = 10.0
"""For one chat; looked at whenever the template puts something out."""
MAX_PRODUCT = 1_000_000
"""Largest number, and longest text or list, that a template may make by multiplying."""
MAX_WAITING_RENDERS = 256
"""Chats that may wait for a thread; above it the router is overloaded and says so."""
TOOL_TEMPLATE = "tool_use"
"""What files that have several templates call the one for requests with tools."""
REASON_CHARS = 500
"""Of an error's text, what a client needs to see."""


class ChatRefusedError(ValueError):
    """The template does not take these messages; the text, the template's own where it has one, is for the client."""


class RendererBusyError(RuntimeError):
    """Too many chats wait to be rendered; the client may try again."""


class _RaisedByTemplateError(jinja2.TemplateError):
    """What `raise_exception` in a template raises."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of templates: nothing may be changed, and no product may be huge."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Carries out a product unless its result would be out of bounds."""
        sizes = [len(side) if isinstance(side, Sequence) else side for side in (left, right)]
        numbers = [abs(size) if isinstance(size, (int, float)) else 0 for size in sizes]
        is_small = numbers[1] <= 64 if operator == "**" else numbers[0] * numbers[1] <= MAX_PRODUCT
        if not is_small or max(numbers) > MAX_PRODUCT:
            raise jinja2.TemplateRuntimeError(f"a product in the template is larger than {MAX_PRODUCT}")
        return super().call_binop(context, operator, left, right)


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


def _environment(now: Callable[[], datetime]) -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


class ChatRenderer:
    """The chat templates of one model."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_texts: Mapping[str, str],
        *,
        num_threads: int = 1,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_texts` is what templates call `bos_token` and the like.

        A template that cannot be compiled is kept as its fault: completions need none, so only chats are refused.
        """
        environment = _environment(now)
        self._templates = {name: _compiled(environment, text) for name, text in templates.items()}
        self._special_texts = dict(special_texts)
        self._threads = anyio.CapacityLimiter(num_threads)

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """As `render_now`, beside the event loop, since a long chat takes its time; raises `RendererBusyError` too."""
        if self._threads.statistics().tasks_waiting >= MAX_WAITING_RENDERS:
            raise RendererBusyError(f"{MAX_WAITING_RENDERS} chats wait to be rendered already: try again later")

        def render() -> str:
            return self.render_now(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, variables=variables
            )

        return await anyio.to_thread.run_sync(render, limiter=self._threads)

    def render_now(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """The text of a chat. `variables` are passed to the template as they are, and win over everything else.

        Raises `ChatRefusedError` if the template refuses the messages or fails on them, or a bound is met.
        """
        template = self._template(has_tools=bool(tools))
        values: dict[str, object] = {
            **self._special_texts,
            "messages": [_with_parsed_arguments(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **(variables or {}),
        }
        try:
            return _bounded(template, values)
        except _RaisedByTemplateError as error:
            raise ChatRefusedError(f"the model's chat template refuses the messages: {_reason(error)}") from error
        # A template may do anything that an expression can, so anything may come out of it; the process itself is fine.
        except Exception as error:
            name = type(error).__name__
            raise ChatRefusedError(
                f"the model's chat template fails on the messages: {name}: {_reason(error)}"
            ) from error

    def _template(self, has_tools: bool) -> jinja2.Template:
        name = TOOL_TEMPLATE if has_tools and TOOL_TEMPLATE in self._templates else DEFAULT_TEMPLATE
        template = self._templates.get(name)
        if isinstance(template, jinja2.Template):
            return template
        if template is not None:
            raise ChatRefusedError(f"the model's chat template cannot be used: {template}; /v1/completions needs none")
        raise ChatRefusedError(
            "the model's files hold no chat template: use /v1/completions, or serve files that hold one "
            "(tokenizer.chat_template in GGUF, chat_template.jinja in a directory)"
        )


def open_renderer(model: ModelFiles, vocabulary: Vocabulary, num_threads: int = 1) -> ChatRenderer:
    """The renderer of an opened model; without a template it refuses every chat and says why."""
    texts = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    written = {name: vocabulary.control_text(token_id) for name, token_id in texts.items()}
    special_texts = {name: text for name, text in written.items() if text is not None}
    return ChatRenderer(model.chat_templates, special_texts, num_threads=num_threads)


def _compiled(environment: _Sandbox, text: str) -> jinja2.Template | str:
    try:
        return environment.from_string(text)
    except jinja2.TemplateError as error:
        return _reason(error)


def _bounded(template: jinja2.Template, values: Mapping[str, object]) -> str:
    """Renders piece by piece, so that size and time are looked at between the pieces."""
    pieces: list[str] = []
    num_chars, deadline = 0, time.monotonic() + MAX_RENDER_S
    for piece in template.generate(values):
        pieces.append(piece)
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            raise jinja2.TemplateRuntimeError(f"the rendered chat is longer than {MAX_RENDERED_CHARS} characters")
        if time.monotonic() > deadline:
            raise jinja2.TemplateRuntimeError(f"the chat was not rendered within {MAX_RENDER_S} s")
    return "".join(pieces)


def _reason(error: BaseException) -> str:
    return (str(error) or type(error).__name__)[:REASON_CHARS]


def _with_parsed_arguments(message: Mapping[str, object]) -> Mapping[str, object]:
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
