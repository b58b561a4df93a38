"""A whole router in this process, wired by its real factory, between real clients and a scripted scheduler."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
from opentelemetry.trace import Tracer

from services.mesh.settings.tables import DeadlineSettings, GroupSettings, RouterSettings, Settings
from services.mesh.shell import Shell
from services.router.http.server import bind
from services.router.service import Router, build, public_address, serve
from tests.support.scripted_scheduler import MODEL, WINDOW, ScriptedScheduler, scheduler_at, scripted_model, shell_in

ALPHABET = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass
class Stand:
    """A router in this process, its scheduler, and a client of each kind."""

    url: str
    router: Router
    shell: Shell
    scheduler: ScriptedScheduler
    http: httpx.AsyncClient
    openai: openai.AsyncOpenAI

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": MODEL, **body})

    async def complete_with(self, key: str, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {key}"})

    async def chat(self, **body: Any) -> httpx.Response:
        messages = [{"role": "user", "content": "hello"}]
        return await self.http.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **body})


@asynccontextmanager
async def stand(
    folder: Path,
    write: Callable[[bytes], bytes],
    tokens_per_message: int = 1,
    *,
    tracer: Tracer | None = None,
    tcp: bool = False,
    deadlines: DeadlineSettings | None = None,
    **router: Any,
) -> AsyncIterator[Stand]:
    """The router, ready. `router`: settings of it; `tcp`: gRPC on a public address as well."""
    settings = Settings(
        source=folder / "mesh.toml",
        group=GroupSettings(num_ranks=1),
        router=RouterSettings(grpc_address="127.0.0.1:0" if tcp else None, **router),
        deadlines=deadlines or DeadlineSettings(),
    )
    scheduler = ScriptedScheduler(write, tokens_per_message=tokens_per_message)
    async with shell_in(folder, settings, tracer) as shell, scheduler_at(shell.paths.socket("scheduler"), scheduler):
        parts = build(shell, scripted_model(), WINDOW)
        bound = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        public = public_address(settings.router, shell.paths.address("router", "grpc"))
        async with (
            shell.server.running(public=public),
            httpx.AsyncClient(base_url=url, timeout=20) as http,
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
        ):
            # A plain task: the fixture's two halves run in different ones, which a task group does not allow.
            serving = asyncio.create_task(serve(shell, parts, bound))
            await eventually(lambda: parts.health.served_generation is not None)
            yield Stand(url, parts, shell, scheduler, http, client)
            scheduler.open_gate()
            shell.stop.set()
            await serving


async def eventually(holds: Callable[[], bool]) -> None:
    """Lets everything else run until `holds`."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110 (many owners change what is looked at)
            await asyncio.sleep(0)


def alphabet(prompt: bytes) -> bytes:
    return ALPHABET


def events_of(text: str) -> list[Any]:
    """The data of each server-sent event; the framing is checked on the way."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [data if data == "[DONE]" else json.loads(data) for data in (e.removeprefix("data: ") for e in events)]
