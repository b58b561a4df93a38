"""`flipmesh acceptance`: the whole promise in one unattended run, with a verdict that a script can believe.

A mixed load of continuous decoders and long prompts (or a trace), first with no flips, as the control, then under the
policy `auto`; beside it streams of free text whose answers are held against their control, by an instrument that has
seen damaged rows first. Exit code 0 only if every check of `acceptance.verdict` passes. The mesh is one of its own
unless `--running` names one. It decides nothing itself: it makes load, watches and has it judged.
"""

import argparse
import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio

from services.core.errors import ConfigurationError, MeshError
from services.core.ids import LayoutKind
from services.mesh.settings.tables import Settings, load_settings
from tools.acceptance.page import page_of
from tools.acceptance.report import Plan, Report, Run, Window, report_of
from tools.bench.machine_facts import machine_facts
from tools.load.answer_probe import AnswerProbe
from tools.load.arrivals import fit, read_trace
from tools.load.http_load import HttpLoad, Shape
from tools.load.observe import Observer
from tools.load.own_mesh import ROOT, own_mesh, read_address
from tools.load.steering import bring_to, set_mode
from tools.mesh_client import MeshClient
from tools.oracle.positive_control import blind_spots, positive_control

MAX_MINUTES = 24 * 60
EXPECTED_FLIPS_PER_MINUTE = 4 / 3
"""Each way. Bursts come four times a minute; a busy machine may still be at one when the next comes."""
REST_WITHIN_S = 15.0
LOOK_AGAIN_S = 0.2
TRACE_PROMPT_TOKENS = 1500
TRACE_OUTPUT_TOKENS = 128


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `acceptance` to the command line."""
    parser = subparsers.add_parser("acceptance", help="the whole promise, unattended; exit 0 only if it was kept")
    parser.add_argument("--minutes", type=float, default=3.0, help="under the policy auto (default 3)")
    parser.add_argument(
        "--control", type=float, default=None, metavar="S", help="seconds of the same load with no flips"
    )
    parser.add_argument(
        "--ranks", type=int, default=None, help="of the mesh that is started (default: the deployment's)"
    )
    parser.add_argument("--running", action="store_true", help="use the running mesh that --config names")
    parser.add_argument("--trace", type=Path, default=None, metavar="FILE", help="arrivals instead of the usual load")
    parser.add_argument("--decoders", type=int, default=12, help="continuous decoders (default 12)")
    parser.add_argument("--min-flips", type=int, default=None, metavar="N", help="each way (default: 4 in 3 minutes)")
    parser.add_argument("--page", type=Path, default=None, metavar="FILE", help="also write a page for people")
    parser.add_argument(
        "--log", type=Path, default=None, metavar="FILE", help="keep the log of the mesh that is started"
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE", help="write everything into one document")
    parser.add_argument(
        "--config", type=Path, default=None, metavar="FILE", help="the deployment's TOML (default: FLIPMESH_CONFIG)"
    )
    parser.set_defaults(run=lambda arguments: asyncio.run(_run(arguments)))


async def _run(arguments: argparse.Namespace) -> int:
    plan = plan_of(arguments)
    async with _mesh(arguments) as (client, readiness_s):
        report = await accept(client, plan, readiness_s)
    document = report.document()
    if arguments.json is not None:
        await asyncio.to_thread(arguments.json.write_text, json.dumps(document, indent=1) + "\n")
    if arguments.page is not None:
        await asyncio.to_thread(arguments.page.write_text, page_of(document))
    print(report.text())
    return 0 if report.passed else 1


def plan_of(arguments: argparse.Namespace) -> Plan:
    """What the arguments ask for.

    Raises:
        ConfigurationError: they contradict each other, or the trace cannot be read.
    """
    minutes, seconds = arguments.minutes, arguments.minutes * 60
    if not 0 < minutes <= MAX_MINUTES:
        raise ConfigurationError(f"--minutes {minutes:g}: more than 0 and at most {MAX_MINUTES} expected")
    control_s = arguments.control if arguments.control is not None else min(60.0, max(20.0, seconds / 5))
    shape = Shape(num_decoders=arguments.decoders)
    statement = (
        f"{shape.num_decoders} continuous decoders of {shape.decoder_prompt_tokens}+{shape.decoder_tokens} tokens, "
        f"{shape.burst_prompts} prompts of {shape.burst_prompt_tokens} every {shape.burst_every_s:g} s"
    )
    if arguments.trace is not None:
        shape, statement = _traced(arguments.trace, control_s + seconds)
    expected = max(1, math.floor(minutes * EXPECTED_FLIPS_PER_MINUTE))
    return Plan(minutes, control_s, arguments.min_flips or expected, shape, statement)


def _traced(path: Path, seconds: float) -> tuple[Shape, str]:
    try:
        trace = read_trace(path)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--trace: {error}") from error
    scaled = fit(trace, seconds=seconds, max_prompt_tokens=TRACE_PROMPT_TOKENS, max_output_tokens=TRACE_OUTPUT_TOKENS)
    return Shape(num_decoders=0, burst_prompts=0, arrivals=scaled.arrivals), f"{path.name}: {scaled.statement()}"


@asynccontextmanager
async def _mesh(arguments: argparse.Namespace) -> AsyncIterator[tuple[MeshClient, float | None]]:
    """A client of the mesh to be accepted, and how long its start took where it was started here."""
    settings: Settings = load_settings(arguments.config)
    if not arguments.running:
        policy = {"mode": "manual"}
        async with (
            own_mesh(settings, num_ranks=arguments.ranks, policy=policy, log=arguments.log) as mesh,
            _client(load_settings(mesh.config)) as client,
        ):
            yield client, mesh.readiness_s
        return
    if arguments.ranks is not None:
        raise ConfigurationError("--ranks is for a mesh that is started here: leave out --running or --ranks")
    async with _client(settings) as client:
        before = await set_mode(client, "manual")
        try:
            yield client, None
        finally:
            with anyio.CancelScope(shield=True):
                await set_mode(client, before)


@asynccontextmanager
async def _client(settings: Settings) -> AsyncIterator[MeshClient]:
    client = MeshClient(settings)
    try:
        yield client
    finally:
        await client.close()


async def accept(client: MeshClient, plan: Plan, readiness_s: float | None) -> Report:
    """The run, on a mesh whose policy is `manual`; it is left under `auto`."""
    settings, facts = client.settings, await asyncio.to_thread(machine_facts, ROOT)
    address = read_address(client.paths.address("router", "http"))
    load = HttpLoad(address, settings.model.name, plan.shape, settings.router.api_key)
    await bring_to(client, LayoutKind.TP)
    observer, probe = Observer(client), AnswerProbe(client)
    await observer.look()
    verdicts_before = observer.num_verdicts
    await probe.take_control()
    probe.control_faults += await _blind_spots(client)
    window = Window(control_begin_ns=time.time_ns())
    offset_ns = time.time_ns() - time.monotonic_ns()
    stops_s = time.monotonic() + plan.control_s + plan.minutes * 60
    async with anyio.create_task_group() as watching:
        watching.start_soon(observer.run)
        async with anyio.create_task_group() as loading:
            loading.start_soon(load.run, plan.control_s + plan.minutes * 60)
            loading.start_soon(_begin_auto, client, window, plan.control_s)
            loading.start_soon(probe.run, stops_s)
        window.end_ns = time.time_ns()
        await _rest(observer)
        watching.cancel_scope.cancel()
    await observer.weigh()
    return report_of(
        Run(
            plan=plan,
            num_ranks=settings.group.num_ranks,
            model=settings.model.name,
            window=window,
            offset_ns=offset_ns,
            streamed=load.streamed,
            num_skipped=load.num_skipped,
            seed=load.seed,
            observer=observer,
            probe=probe,
            verdicts_before=verdicts_before,
            readiness_s=readiness_s,
            facts=facts,
        )
    )


async def _blind_spots(client: MeshClient) -> list[str]:
    """Why the instrument cannot be believed: it must see damaged rows before it judges any."""
    try:
        return blind_spots(await positive_control(client, client.settings.group.num_ranks))
    except MeshError as error:
        return [f"damage cannot be done here, so that nothing shows that it would be seen: {error}"]


async def _begin_auto(client: MeshClient, window: Window, control_s: float) -> None:
    await anyio.sleep(control_s)
    window.auto_begin_ns = time.time_ns()
    await set_mode(client, "auto")


async def _rest(observer: Observer) -> None:
    """Until the scheduler has let go of the last request, or long enough to say that it does not."""
    with anyio.move_on_after(REST_WITHIN_S):
        await observer.look()
        while (last := observer.loads[-1]).resident or last.queued or last.held_blocks:
            await anyio.sleep(LOOK_AGAIN_S)
            await observer.look()
