"""Chat templates: rendered as they are meant to be, refused in their own words, bounded whatever they do."""

from datetime import UTC, datetime
from threading import Event

import anyio
import pytest

from services.router.text import templates
from services.router.text.templates import ChatRefusedError, ChatRenderer, RendererBusyError

USER = {"role": "user", "content": "hi"}
CHATML = (
    "{% for message in messages %}\n"
    "    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] }}<|im_end|>\n"
    "{% endfor %}\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (
    "{% if messages | length == 0 %}{{ raise_exception('No messages') }}{% endif %}"
    "{% for message in messages %}{% if message.role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{{ message.content }}{% endfor %}"
)


def render(template: str, *messages: dict[str, object], special_texts: dict[str, str] | None = None, **options) -> str:
    renderer = ChatRenderer({"default": template}, special_texts or {}, now=lambda: datetime(2026, 1, 2, tzinfo=UTC))
    return renderer.render_now(messages or (USER,), **options)


def test_blocks_are_trimmed_and_the_answer_is_opened_on_demand() -> None:
    start = "<|im_start|>user\nhi<|im_end|>\n"
    assert render(CHATML) == start + "<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == start


def test_the_dialect_that_templates_are_written_in() -> None:
    assert render("{{ bos_token }}|{{ eos_token }}", special_texts={"bos_token": "<s>"}) == "<s>|"
    assert render("{{ {'b': 'é<', 'a': 1} | tojson }}") == '{"b": "é<", "a": 1}'
    assert render("{{ [1] | tojson(indent=2) }}") == "[\n  1\n]"
    loop = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}"
    assert render(loop + "{{ i }}{% endfor %}") == "02"
    assert render("{{ strftime_now('%d %b %Y') }}") == "02 Jan 2026"
    assert render("{% generation %}kept{% endgeneration %}") == "kept"
    assert (
        render("{% if tools is none %}none{% endif %}{{ enable_thinking }}", variables={"enable_thinking": 1})
        == "none1"
    )


def test_tools_take_the_template_made_for_them_and_their_arguments_are_objects() -> None:
    both = {
        "default": "plain",
        "tool_use": "{{ tools[0].name }} {{ messages[0].tool_calls[0].function.arguments.city }}",
    }
    call = {"function": {"name": "weather", "arguments": '{"city": "Łódź"}'}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    renderer = ChatRenderer(both, {})
    assert renderer.render_now([message], tools=[{"name": "weather"}]) == "weather Łódź"
    assert renderer.render_now([message]) == "plain"
    broken = {**message, "tool_calls": [{"function": {"name": "weather", "arguments": "{not json"}}]}
    only = ChatRenderer({"default": "{{ messages[0].tool_calls[0].function.arguments }}"}, {})
    assert only.render_now([broken]) == "{not json"


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([{"role": "system", "content": "be"}, USER], "System role not supported"),
        ([USER, USER], "Conversation roles must alternate user/assistant/user/assistant/..."),
        ([], "No messages"),
    ],
)
def test_p2_24_a_template_refuses_in_its_own_words(messages: list[dict[str, object]], words: str) -> None:
    with pytest.raises(ChatRefusedError, match="chat template refuses the messages") as caught:
        ChatRenderer({"default": STRICT}, {}).render_now(messages)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ messages[0].absent.deeper }}", "UndefinedError"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content | nope }}", "cannot be used"),
        ("{% if %}", "cannot be used"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update({'a': 1}) }}", "SecurityError"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ 'a' * 10 ** 9 }}", "product"),
        ("{{ [0] * 10000000 }}", "product"),
        ("{{ 10 ** 100 }}", "product"),
        ("{% for i in range(10 ** 8) %}{% endfor %}", "OverflowError"),
    ],
)
def test_p2_24_whatever_goes_wrong_in_a_template_is_a_refusal(template: str, words: str) -> None:
    with pytest.raises(ChatRefusedError, match=words):
        render(template)


def test_small_products_are_allowed() -> None:
    assert render("{{ '-' * 3 }}{{ 2 ** 10 }}{{ 1.5 * 2 }}") == "---10243.0"


def test_output_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}"
    monkeypatch.setattr(templates, "MAX_RENDERED_CHARS", 10_000)
    with pytest.raises(ChatRefusedError, match="longer than 10000 characters"):
        render(endless)
    monkeypatch.setattr(templates, "MAX_RENDER_S", 0.0)
    with pytest.raises(ChatRefusedError, match=r"not rendered within 0\.0 s"):
        render(endless)


def test_p4_10_without_a_template_nothing_is_guessed() -> None:
    with pytest.raises(
        ChatRefusedError, match=r"hold no chat template: use /v1/completions, or serve files that hold one"
    ):
        ChatRenderer({}, {}).render_now([USER])


def test_messages_are_left_as_they_were() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": [{"function": {"arguments": "{}"}}]}
    before = repr(message)
    render("{% set ns = namespace(n=0) %}{% set ns.n = 1 %}{{ ns.n }}", message)
    assert repr(message) == before


async def test_rendering_beside_the_loop_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(templates, "MAX_WAITING_RENDERS", 1)
    started, release = Event(), Event()

    def blocking_now() -> datetime:
        started.set()
        assert release.wait(30)
        return datetime(2026, 1, 2, tzinfo=UTC)

    renderer = ChatRenderer({"default": "{{ strftime_now('%Y') }}"}, {}, now=blocking_now)
    results: list[str] = []

    async def one() -> None:
        results.append(await renderer.render([USER]))

    async with anyio.create_task_group() as group:
        group.start_soon(one)
        await anyio.to_thread.run_sync(started.wait)
        group.start_soon(one)
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(RendererBusyError, match="try again later"):
            await renderer.render([USER])
        release.set()
    assert results == ["2026", "2026"]
