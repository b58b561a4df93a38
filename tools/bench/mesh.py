"""Figures of a running mesh: prefill and decode rates by layout, flips under streams, processor time at rest.

Each sample of a layout is taken between two looks at the scheduler; if epoch or generation changed in between it is
refused, never averaged in. Asks over HTTP, as clients do. Bounded by its counts.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import anyio
from flipmesh.mover.v1 import mover_service_pb2
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub

from services.core.ids import LayoutKind
from services.mesh.rpc import unary
from tools.absence import Absence
from tools.acceptance.figures import gaps_at_flips, placebo_gaps
from tools.load.http_load import HttpLoad, Shape, Streamed
from tools.load.observe import FlipSeen, cpu_s, flip_seen
from tools.load.own_mesh import read_address
from tools.load.steering import bring_to, place_now
from tools.mesh_client import CALL_S, MeshClient
from tools.status import ask_all

LAYOUTS = (LayoutKind.PP, LayoutKind.TP)
PROMPT_LENGTHS = (512, 2048)
STREAM_COUNTS = (1, 8)
DECODE_TOKENS = 96
DECODE_PROMPT_TOKENS = 16
FLIP_STREAMS = 8
FLIP_STREAM_TOKENS = 128
SETTLE_S = 0.4
"""Between two flips: several tokens of each stream, so that a usual gap can be told from one over a flip."""
REPORT_S = 0.5
IDLE_S = 10.0
MAX_REFUSED = 3
"""Samples of one figure that may be refused in a row before the bench gives up."""


class SampleRefusedError(Exception):
    """A sample that mixes layouts, or a request that failed."""


@dataclass(frozen=True, slots=True)
class Samples:
    """Repetitions of one figure."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle one."""
        return median(self.values)

    def shown(self) -> str:
        """Median, then the least and the greatest."""
        return f"{self.median:.1f} ({min(self.values):.1f}-{max(self.values):.1f})"


@dataclass(slots=True)
class FlipFigures:
    """Flips under streams; milliseconds."""

    pauses_ms: dict[str, list[float]] = field(default_factory=dict)
    """By direction."""
    added_ms: dict[str, list[float]] = field(default_factory=dict)
    control_added_ms: list[float] = field(default_factory=list)
    """The same measured where nothing flipped."""
    num_abandoned: int = 0


class MeshBench:
    """Measures one mesh, whose policy is `manual`."""

    def __init__(self, client: MeshClient, repeat: int) -> None:
        self._client, self._repeat = client, repeat
        settings = client.settings
        self._address = read_address(client.paths.address("router", "http"))
        self._load = HttpLoad(self._address, settings.model.name, Shape(), settings.router.api_key)

    async def prefill(self, num_tokens: int) -> dict[LayoutKind, Samples]:
        """Prompt tokens per second of one prompt by itself, by its first streamed token."""

        async def sample() -> float:
            streamed = _whole(await self._load.ask("prefill", num_tokens, 1))
            assert streamed.ttft_ns is not None, "a whole answer has a first token"
            return num_tokens * 1e9 / streamed.ttft_ns

        return await self.samples(sample)

    async def decode(self, num_streams: int) -> dict[LayoutKind, Samples]:
        """Tokens per second of all streams together, while all of them decode; first tokens left out."""

        async def sample() -> float:
            answers = await self._together(num_streams, DECODE_TOKENS)
            begin_ns = max(streamed.arrived_ns[0] for streamed in answers)
            end_ns = min(streamed.arrived_ns[-1] for streamed in answers)
            num_tokens = sum(begin_ns < at_ns <= end_ns for streamed in answers for at_ns in streamed.arrived_ns)
            return num_tokens * 1e9 / (end_ns - begin_ns)

        return await self.samples(sample)

    async def _together(self, num_streams: int, num_tokens: int) -> list[Streamed]:
        answers = [self._load.ask("decode", DECODE_PROMPT_TOKENS, num_tokens) for _ in range(num_streams)]
        return [_whole(streamed) for streamed in await asyncio.gather(*answers)]

    async def samples(self, sample: Callable[[], Awaitable[float]]) -> dict[LayoutKind, Samples]:
        """`repeat` samples under each layout, in turns, so that a machine that changes meanwhile changes for both; one
        round before is thrown away.

        Raises:
            SampleRefusedError: the layout changed under too many of them.
        """
        values: dict[LayoutKind, list[float]] = {layout: [] for layout in LAYOUTS}
        for _ in range(self._repeat + 1):
            for layout in LAYOUTS:
                values[layout].append(await self._sample(layout, sample))
        return {layout: Samples(tuple(found[1:])) for layout, found in values.items()}

    async def _sample(self, layout: LayoutKind, sample: Callable[[], Awaitable[float]]) -> float:
        for _ in range(MAX_REFUSED):
            before = await bring_to(self._client, layout)
            value = await sample()
            if await place_now(self._client) == before:
                return value
        raise SampleRefusedError(f"the layout changed in {MAX_REFUSED} samples: something else flips")

    async def flips(self, num_each_way: int) -> FlipFigures:
        """Flips by hand under streams, to and fro, and the same streams for as long without."""
        load = HttpLoad(
            self._address,
            self._client.settings.model.name,
            Shape(
                num_decoders=FLIP_STREAMS,
                decoder_prompt_tokens=DECODE_PROMPT_TOKENS,
                decoder_tokens=FLIP_STREAM_TOKENS,
                burst_prompts=0,
            ),
            self._client.settings.router.api_key,
        )
        await bring_to(self._client, LayoutKind.TP)
        offset_ns = time.time_ns() - time.monotonic_ns()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run, 3600.0)
            await anyio.sleep(2 * SETTLE_S)
            control_ns = time.time_ns()
            await anyio.sleep(2 * num_each_way * SETTLE_S)
            begin_ns = time.time_ns()
            for _ in range(num_each_way):
                for layout in (LayoutKind.PP, LayoutKind.TP):
                    await bring_to(self._client, layout)
                    await anyio.sleep(SETTLE_S)
            await anyio.sleep(REPORT_S)
            load.stop()
        flips = [flip for flip in await self._seen(2 * num_each_way) if flip.armed_unix_ns >= begin_ns]
        arrivals = [[at_ns + offset_ns for at_ns in _whole(streamed).arrived_ns] for streamed in load.streamed]
        return flip_figures(flips, arrivals, control_ns, begin_ns)

    async def _seen(self, max_flips: int) -> list[FlipSeen]:
        request = mover_service_pb2.ListFlipsRequest(max_flips=max_flips)
        answer = await unary(MoverServiceStub(self._client.channel("mover")).ListFlips, request, timeout_s=CALL_S)
        return [flip_seen(record) for record in answer.flips]

    async def idle_cpu(self) -> dict[str, float]:
        """Percent of one core by process while nothing is asked, supervisors included."""
        answers = await ask_all(self._client)
        pids = {name: answer.identity.pid for name, answer in answers.items() if not isinstance(answer, Absence)}
        supervisors = {_parent(pid) for pid in pids.values()} - set(pids.values())
        pids |= {f"supervisor {pid}": pid for pid in supervisors}
        await anyio.sleep(1.0)
        before = {name: _cpu_s(pid) for name, pid in pids.items()}
        began_s = time.monotonic()
        await anyio.sleep(IDLE_S)
        elapsed_s = time.monotonic() - began_s
        return {name: 100 * (_cpu_s(pid) - before[name]) / elapsed_s for name, pid in pids.items()}


def flip_figures(
    flips: Sequence[FlipSeen], arrivals: Sequence[Sequence[int]], control_ns: int, begin_ns: int
) -> FlipFigures:
    """Pauses and added gaps by direction, beside the control in [control_ns, begin_ns)."""
    figures = FlipFigures(num_abandoned=sum(not flip.is_committed for flip in flips))
    gaps = gaps_at_flips(flips, arrivals)
    for flip in flips:
        way = f"{flip.source} to {flip.target}"
        if flip.is_committed and flip.pause_ns is not None:
            figures.pauses_ms.setdefault(way, []).append(flip.pause_ns / 1e6)
            added = [gap.added_ms for gap in gaps.get((flip.generation, flip.flip_id), [])]
            figures.added_ms.setdefault(way, []).extend(added)
    pauses = [pause for found in figures.pauses_ms.values() for pause in found]
    usual_ns = int(median(pauses) * 1e6) if pauses else 0
    figures.control_added_ms = [gap.added_ms for gap in placebo_gaps(control_ns, begin_ns, usual_ns, arrivals)]
    return figures


def _whole(streamed: Streamed) -> Streamed:
    if not streamed.is_whole:
        raise SampleRefusedError(
            f"a request failed: {streamed.error or f'{streamed.num_tokens} of {streamed.max_tokens} tokens'}"
        )
    return streamed


def _parent(pid: int) -> int:
    """Its parent, from the fields after the name in parentheses."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _cpu_s(pid: int) -> float:
    """0 for a process that is gone: it uses nothing."""
    with contextlib.suppress(OSError):
        return cpu_s(pid)
    return 0.0
