"""Has chats rendered by processes of their own, which are bounded, killed where they overstep, and replaced.

A process is started by spawning, never by forking this one, and ends with this one, whatever ends it. A chat waits for
a free process in a bounded queue; one that oversteps costs its own process and the others their turn, nothing else.
"""

import asyncio
import json
import marshal
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread

from services.models.model_files import DEFAULT_TEMPLATE, ModelFiles
from services.router.text.render_process import LENGTH, LENGTHS
from services.router.text.templates import MAX_RENDERED_CHARS, ChatRefusedError, RenderedChat
from services.router.text.vocabulary import Vocabulary

MODULE = "services.router.text.render_process"
MAX_WAITING_RENDERS = 256
"""Chats that may wait for a process; above it the router is overloaded and says so."""
MAX_HEAD_BYTES = 4 * 1024 * 1024
MAX_TEXT_BYTES = 4 * MAX_RENDERED_CHARS
"""Of an answer: more is not read."""
TOOL_TEMPLATE = "tool_use"
"""What files that have several templates call the one for requests with tools."""


@dataclass(frozen=True, slots=True)
class RenderBounds:
    """What rendering one chat may take."""

    processor_s: float = 3.0
    """Ten times what the largest chat takes, a thousand times what most do."""
    wall_s: float = 10.0
    """From the question to the answer, the start of a new process included; it may have little of a busy machine."""
    memory_bytes: int = 512 * 1024 * 1024
    """Of address space; the largest chat, with its text in three forms, takes less than half."""


class RendererBusyError(RuntimeError):
    """Too many chats wait to be rendered; the client may try again."""


class RendererLostError(RuntimeError):
    """The process that rendered a chat is gone, and not by its bounds."""


class _RenderProcess:
    """One process. Made on the loop's thread, since the kernel ends it with the thread that made it."""

    def __init__(self, setup: bytes) -> None:
        self._link, theirs = socket.socketpair()
        self._link.setblocking(False)
        command = [sys.executable, "-m", MODULE, "--parent-pid", str(os.getpid())]
        with theirs:
            self._process: subprocess.Popen[bytes] = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, start_new_session=True
            )
        self._unsent = setup

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    async def ask(self, frame: bytes) -> tuple[dict[str, Any], str]:
        """What it answers. Raises `EOFError` or `OSError` if it is gone, `ValueError` if it answers nonsense."""
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(self._link, self._unsent + frame)
        self._unsent = b""
        num_head_bytes, num_text_bytes = LENGTHS.unpack(await self._receive(LENGTHS.size))
        if num_head_bytes > MAX_HEAD_BYTES or num_text_bytes > MAX_TEXT_BYTES:
            raise ValueError(f"it answers {num_head_bytes} + {num_text_bytes} bytes")
        head = json.loads(await self._receive(num_head_bytes))
        return head, (await self._receive(num_text_bytes)).decode()

    async def _receive(self, num_bytes: int) -> bytearray:
        loop, received = asyncio.get_running_loop(), bytearray(num_bytes)
        view = memoryview(received)
        while view:
            num_received = await loop.sock_recv_into(self._link, view)
            if not num_received:
                raise EOFError
            view = view[num_received:]
        return received

    async def end(self) -> int:
        """Kills it unless it is dead, and returns its exit code: negative, the signal that it ended by."""
        with anyio.CancelScope(shield=True):
            self._process.kill()
            code = await anyio.to_thread.run_sync(self._process.wait)
        self._link.close()
        return code


class ChatRenderer:
    """The chat templates of one model, in `num_processes` processes, each with one chat at a time."""

    def __init__(
        self,
        templates: Mapping[str, str],
        special_texts: Mapping[str, str],
        control_texts: Sequence[str] = (),
        *,
        num_processes: int = 1,
        bounds: RenderBounds | None = None,
    ) -> None:
        """`special_texts` is what templates call `bos_token` and the like; `control_texts` is masked in messages.

        A template that cannot be compiled is no fault here: completions need none, so only chats are refused.
        """
        self._names, self._num_processes, self._bounds = frozenset(templates), num_processes, bounds or RenderBounds()
        self._setup = _frame(
            {
                "templates": dict(templates),
                "special_texts": dict(special_texts),
                "control_texts": list(control_texts),
                "memory_bytes": self._bounds.memory_bytes,
                "processor_s": self._bounds.processor_s,
            }
        )
        self._places = anyio.CapacityLimiter(num_processes)
        self._idle: list[_RenderProcess] = []
        self._is_running = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Has the processes, before the first chat needs one; leaves none behind."""
        self._is_running = True
        if self._names:
            self._idle = [_RenderProcess(self._setup) for _ in range(self._num_processes)]
        try:
            yield
        finally:
            self._is_running = False
            processes, self._idle = self._idle, []
            for process in processes:
                await process.end()

    async def render(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        tools: Sequence[Mapping[str, object]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, object] | None = None,
    ) -> RenderedChat:
        """The text of a chat. `variables` are passed to the template as they are, beside what it is always given.

        Raises `ChatRefusedError` if the template refuses the messages, fails on them or oversteps a bound,
        `RendererBusyError` if too many wait, and `RendererLostError`.
        """
        values = {
            **(variables or {}),
            "messages": [dict(message) for message in messages],
            "tools": [dict(tool) for tool in tools] if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            frame = _frame({"template": self._name(has_tools=bool(tools)), "values": values})
        except ValueError as error:
            raise ChatRefusedError(f"the messages are nested too deeply: {error}") from error
        if self._places.statistics().tasks_waiting >= MAX_WAITING_RENDERS:
            raise RendererBusyError(f"{MAX_WAITING_RENDERS} chats wait to be rendered already: try again later")
        async with self._places:
            if not self._is_running:
                raise RendererLostError("chats are rendered while the server runs, and it does not any more")
            return await self._rendered(frame)

    async def _rendered(self, frame: bytes) -> RenderedChat:
        process = await self._living()
        try:
            async with asyncio.timeout(self._bounds.wall_s):
                head, text = await process.ask(frame)
        except TimeoutError:
            await self._replace(process)
            raise ChatRefusedError(f"the chat was not rendered within {self._bounds.wall_s:g} s") from None
        except (EOFError, OSError, ValueError) as error:
            raise self._loss(await self._replace(process), error) from error
        except BaseException:
            # Nobody will read its answer any more.
            await self._replace(process)
            raise
        if head.get("out_of_memory"):
            await self._replace(process)
            raise ChatRefusedError(f"rendering the chat takes more than {self._bounds.memory_bytes} bytes of memory")
        await self._keep(process)
        if "refused" in head:
            raise ChatRefusedError(str(head["refused"]))
        return RenderedChat(text, head["masks"])

    async def _living(self) -> _RenderProcess:
        while self._idle:
            process = self._idle.pop()
            if process.is_alive:
                return process
            await process.end()
        return _RenderProcess(self._setup)

    async def _keep(self, process: _RenderProcess) -> None:
        if self._is_running:
            self._idle.append(process)
        else:
            await process.end()

    async def _replace(self, process: _RenderProcess) -> int:
        code = await process.end()
        if self._is_running:
            self._idle.append(_RenderProcess(self._setup))
        return code

    def _loss(self, code: int, error: Exception) -> Exception:
        if code == -signal.SIGPROF:
            return ChatRefusedError(f"rendering the chat takes more than {self._bounds.processor_s:g} s of a processor")
        return RendererLostError(f"the process that rendered the chat ended with {code}: {error or 'no answer'}")

    def _name(self, has_tools: bool) -> str:
        name = TOOL_TEMPLATE if has_tools and TOOL_TEMPLATE in self._names else DEFAULT_TEMPLATE
        if name in self._names:
            return name
        raise ChatRefusedError(
            "the model's files hold no chat template: use /v1/completions, or serve files that hold one "
            "(tokenizer.chat_template in GGUF, chat_template.jinja in a directory)"
        )


def open_renderer(
    model: ModelFiles, vocabulary: Vocabulary, *, num_processes: int = 1, literal_content: bool = True
) -> ChatRenderer:
    """The renderer of an opened model; without a template it refuses every chat and says why.

    `literal_content`: control tokens that are written in messages are text.
    """
    texts = {"bos_token": vocabulary.bos_id, "eos_token": vocabulary.eos_id}
    written = {name: vocabulary.control_text(token_id) for name, token_id in texts.items()}
    special_texts = {name: text for name, text in written.items() if text is not None}
    control_texts = sorted(vocabulary.control_texts.values()) if literal_content else []
    return ChatRenderer(model.chat_templates, special_texts, control_texts, num_processes=num_processes)


def _frame(value: dict[str, Any]) -> bytes:
    raw = marshal.dumps(value)
    return LENGTH.pack(len(raw)) + raw
