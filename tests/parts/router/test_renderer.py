"""Chats rendered by a process of its own: bounded whatever the template does, and nobody else is stopped by it."""

import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import psutil
import pytest

from services.router.text import renderer as renderer_module
from services.router.text.renderer import ChatRenderer, RenderBounds, RendererBusyError
from services.router.text.templates import ChatRefusedError

USER = {"role": "user", "content": "hi"}
BOUNDS = RenderBounds(processor_s=0.3, wall_s=60.0, memory_bytes=300 * 1024 * 1024)
SLOW = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
BY_CONTENT = "{% if messages[0].content == 'evil' %}" + SLOW + "{% endif %}{{ messages[0].content }}"


@asynccontextmanager
async def rendering(template: str, bounds: RenderBounds = BOUNDS, **options: int) -> AsyncIterator[ChatRenderer]:
    made = ChatRenderer({"default": template}, {"bos_token": "<s>"}, ["<|end|>"], bounds=bounds, **options)
    async with made.running():
        yield made
    assert not children(), "a process was left behind"


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if renderer_module.MODULE in child.cmdline()]


async def test_a_chat_goes_there_and_back() -> None:
    async with rendering("{{ bos_token }}{{ messages[0].content }}{{ tools }}{{ x }}") as made:
        message = {"role": "user", "content": "é\x00🙂<|end|>"}
        chat = await made.render([message], variables={"x": None})
        assert chat.text.translate(str.maketrans(dict(chat.masks))) == "<s>é\x00🙂<|end|>NoneNone"
        assert list(chat.masks.values()) == ["<|end|>"]
        assert (await made.render([USER], tools=[{"name": "f"}])).text.startswith("<s>hi[{")


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (SLOW, "processor"),
        ("{{ (7 ** (messages | length * 90000000)) % 7 }}", "processor"),
        (
            "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
            "memory|proc",
        ),
        ("{{ '%999999999d' % (messages | length) }}", "memory"),
        ("{{ 'a' * (messages | length * 10 ** 10) }}", "memory"),
        ("{{ [0] * (messages | length * 10 ** 9) }}", "memory"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}", "longer than|proc"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "RecursionError"),
        ("{{ '\\ud800' }}", "not valid Unicode"),
    ],
)
async def test_whatever_a_template_does_is_a_refusal_and_the_next_chat_is_served(template: str, words: str) -> None:
    guarded = "{% if messages[0].content == 'evil' %}" + template + "{% endif %}ok"
    async with rendering(guarded) as made:
        with pytest.raises(ChatRefusedError, match=words):
            await made.render([{"role": "user", "content": "evil"}])
        assert (await made.render([USER])).text == "ok"


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ 'a' * 10 ** 10 }}", "memory"),
        ("{{ (7 ** 90000000) % 7 }}", "processor"),
        ("{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}", "RecursionError"),
        ("{{ messages[0].content | nope }}", "cannot be used"),
        ("{% if %}", "cannot be used"),
    ],
)
async def test_a_template_that_cannot_be_compiled_is_refused_each_time(template: str, words: str) -> None:
    """Compilers compute what is constant, so the bounds hold for compiling too."""
    async with rendering(template) as made:
        for _ in range(2):
            with pytest.raises(ChatRefusedError, match=words):
                await made.render([USER])


async def test_a_process_is_used_again_and_one_that_is_gone_is_replaced() -> None:
    async with rendering(BY_CONTENT) as made:
        (first,) = children()
        for _ in range(3):
            await made.render([USER])
        assert children() == [first]
        first.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, first.pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222 (it is dead in a moment)
        assert (await made.render([USER])).text == "hi"
        assert first not in children()
        with pytest.raises(ChatRefusedError, match=r"more than 0.3 s of a processor"):
            await made.render([{"role": "user", "content": "evil"}])
        assert (await made.render([USER])).text == "hi"


async def test_one_that_does_not_answer_is_killed_by_the_clock() -> None:
    async with rendering("{{ messages[0].content }}", RenderBounds(wall_s=0.5)) as made:
        (process,) = children()
        process.suspend()
        with pytest.raises(ChatRefusedError, match=r"not rendered within 0\.5 s"):
            await made.render([USER])
        assert process not in children()


async def test_a_chat_that_is_given_up_takes_its_process_with_it() -> None:
    async with rendering(BY_CONTENT, RenderBounds(processor_s=60.0, wall_s=60.0)) as made:
        (process,) = children()
        async with anyio.create_task_group() as group:
            group.start_soon(made.render, [{"role": "user", "content": "evil"}])
            await anyio.wait_all_tasks_blocked()
            group.cancel_scope.cancel()
        assert process not in children()
        assert (await made.render([USER])).text == "hi"


async def test_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(renderer_module, "MAX_WAITING_RENDERS", 1)
    async with rendering("{{ messages[0].content }}", RenderBounds()) as made:
        (process,) = children()
        process.suspend()
        texts: list[str] = []

        async def one() -> None:
            texts.append((await made.render([USER])).text)

        async with anyio.create_task_group() as group:
            group.start_soon(one)
            group.start_soon(one)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(RendererBusyError, match="try again later"):
                await made.render([USER])
            process.resume()
        assert texts == ["hi", "hi"]


async def test_p4_10_without_a_template_nothing_is_guessed_and_nothing_runs() -> None:
    made = ChatRenderer({}, {})
    async with made.running():
        assert not children()
        with pytest.raises(ChatRefusedError, match="hold no chat template: use /v1/completions, or serve files"):
            await made.render([USER])


async def test_messages_that_are_too_deep_are_refused() -> None:
    deep: object = "x"
    for _ in range(5000):
        deep = [deep]
    async with rendering("{{ messages[0].content }}") as made:
        with pytest.raises(ChatRefusedError, match="nested too deeply"):
            await made.render([{"role": "user", "content": "", "tool_calls": deep}])
        assert (await made.render([USER])).text == "hi"


async def test_the_largest_chat_fits_the_bounds() -> None:
    template = "{% for message in messages %}<|x|>{{ message.role }}\n{{ message.content | trim }}{% endfor %}"
    async with rendering(template, RenderBounds(wall_s=60.0)) as made:
        content = "🙂" * (2 * 1024 * 1024)
        assert len((await made.render([{"role": "user", "content": content}])).text) > len(content)


def test_it_ends_with_its_router_even_if_it_is_stopped() -> None:
    code = (
        "import anyio, os, signal\n"
        "from services.router.text.renderer import ChatRenderer\n"
        "async def main():\n"
        "    made = ChatRenderer({'default': 'x'}, {})\n"
        "    async with made.running():\n"
        "        await made.render([{'role': 'user', 'content': ''}])\n"
        "        os.kill(made._idle[0].pid, signal.SIGSTOP)\n"
        "        print(made._idle[0].pid, flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
        "anyio.run(main)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], check=False, stdout=subprocess.PIPE, text=True, timeout=60)
    assert ended.returncode == -signal.SIGKILL
    pid = int(ended.stdout)
    with suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(timeout=10)
