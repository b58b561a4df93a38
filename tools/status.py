"""`flipmesh status`: the mesh at a glance. Asks every process once, passively, and prints what came back."""

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
from flipmesh.common.v1 import introspection_pb2 as pb
from flipmesh.common.v1.introspection_pb2_grpc import IntrospectionServiceStub
from google.protobuf.json_format import MessageToDict
from rich.console import Console
from rich.table import Table

from services.core.errors import MeshError
from services.core.ids import Rank
from services.mesh.rpc import unary
from services.mesh.settings.paths import process_name
from tools.absence import Absence, absence
from tools.mesh_client import CALL_S, MeshClient, NotRunningError, add_common, mesh_client

TIMELINE = 6
"""Layouts shown at a glance; all that are kept are in the JSON."""

_COLOURS = {
    pb.PHASE_READY: "green",
    pb.PHASE_STARTING: "yellow",
    pb.PHASE_WAITING: "yellow",
    pb.PHASE_WORKING: "yellow",
    pb.PHASE_DRAINING: "yellow",
}

Answers = dict[str, pb.GetStatusResponse | Absence]
"""By process name: its status, or why there is none."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `status` to the command line."""
    parser = subparsers.add_parser("status", help="what every process of the mesh is at")
    add_common(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """0: every process is ready. 1: some are not, or absent."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    async with mesh_client(arguments.config) as client:
        answers = await ask_all(client)
        restarts = supervised(client)
    if arguments.json:
        print(json.dumps(as_json(answers, restarts), indent=2))
    else:
        Console().print(as_table(answers, restarts))
    return 0 if all(is_ready(answer) for answer in answers.values()) else 1


async def ask_all(client: MeshClient) -> Answers:
    """Every process at once, each within `CALL_S`."""
    found: dict[str, pb.GetStatusResponse | str] = {}

    async def ask(service: str, rank: Rank | None) -> None:
        name = process_name(service, rank)
        try:
            stub = IntrospectionServiceStub(client.channel(service, rank))
            found[name] = await unary(stub.GetStatus, pb.GetStatusRequest(with_memory=True), timeout_s=CALL_S)
        except NotRunningError:
            found[name] = ""
        except (MeshError, grpc.aio.AioRpcError) as error:
            found[name] = str(error)

    async with anyio.create_task_group() as tasks:
        for service, rank in client.processes:
            tasks.start_soon(ask, service, rank)
    supervisors = supervised(client)
    names = [process_name(service, rank) for service, rank in client.processes]
    return {
        name: absence(name, supervisors[name], answer) if isinstance(answer := found[name], str) else answer
        for name in names
    }


def is_ready(answer: pb.GetStatusResponse | Absence) -> bool:
    """Whether a process is there and at work."""
    return not isinstance(answer, Absence) and answer.phase == pb.PHASE_READY


def as_json(answers: Answers, restarts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """One document: processes by name, absent ones with their reason."""
    processes: dict[str, Any] = {}
    for name, answer in answers.items():
        facts = (
            {"absent": str(answer)}
            if isinstance(answer, Absence)
            else MessageToDict(answer, preserving_proto_field_name=True)
        )
        processes[name] = {**facts, "supervisor": restarts.get(name, {})}
    return {"ready": all(map(is_ready, answers.values())), "processes": processes}


def as_table(answers: Answers, restarts: dict[str, dict[str, Any]]) -> Table:
    """A line for each process."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, justify in (("process", "left"), ("state", "left"), ("pid", "right"), ("up", "right")):
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("memory", justify="right", no_wrap=True)
    table.add_column("starts", justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    for name, answer in answers.items():
        starts = str(restarts.get(name, {}).get("num_restarts", 0) + 1)
        if isinstance(answer, Absence):
            table.add_row(name, f"[red]{answer.state}[/red]", "", "", "", starts, answer.why)
            continue
        state = pb.Phase.Name(answer.phase).removeprefix("PHASE_").lower()
        colour = _COLOURS.get(answer.phase, "red")
        table.add_row(
            name,
            f"[{colour}]{state}[/{colour}]",
            str(answer.identity.pid),
            duration(answer.uptime_ns),
            f"{answer.memory_bytes / 2**20:.0f} MB",
            starts,
            describe(answer),
        )
    return table


def describe(answer: pb.GetStatusResponse) -> str:
    """What a process says of itself, in one line."""
    parts = [answer.waiting_for] if answer.waiting_for else []
    match answer.WhichOneof("service"):
        case "router":
            router = answer.router
            parts.append(f"{router.model_name} on http://{router.http_address}, {router.num_open_requests} open")
            if not router.serving:
                parts.append("not serving yet")
        case "scheduler":
            parts.append(_describe_scheduler(answer.scheduler))
        case "worker":
            parts.append(_describe_worker(answer.worker))
        case "policy":
            advice = _layout(answer.policy.advice)
            parts.append(f"{answer.policy.mode}: {advice}, {answer.policy.reason or 'no signal yet'}")
        case "mover":
            mover = answer.mover
            parts.append(f"{mover.num_committed_total} flips committed, {mover.num_abandoned_total} not")
            if mover.last_abandon_reason:
                parts.append(f"last: {mover.last_abandon_reason}")
        case "sentinel":
            parts.append(f"watches {answer.sentinel.num_ranks_watched} ranks")
            if answer.sentinel.last_verdict:
                parts.append(f"last verdict {answer.sentinel.last_verdict}")
        case _:
            pass
    return "; ".join(part for part in parts if part)


def _describe_scheduler(status: pb.SchedulerStatus) -> str:
    leaks = f", {status.num_unaccounted_blocks} blocks LEAKED" if status.num_unaccounted_blocks else ""
    layouts = " > ".join(_layout(span.layout) for span in status.timeline[-TIMELINE:])
    last = status.timeline[-1].reason if status.timeline else ""
    return (
        f"{_layout(status.layout)} epoch {status.epoch}, {status.num_ranks_joined}/{status.num_ranks} ranks, "
        f"{status.num_resident_requests} resident, {status.num_queued_requests} queued, "
        f"{status.uncomputed_prefill_tokens} prompt tokens to compute, blocks {status.num_held_blocks} held "
        f"{status.num_cached_blocks} cached {status.num_free_blocks} free{leaks}, step {status.num_steps_total}; "
        f"layouts {layouts}: {last}"
    )


def _describe_worker(status: pb.WorkerStatus) -> str:
    last = status.last_sequence if status.HasField("last_sequence") else 0
    return (
        f"{_layout(status.layout)} rank {status.rank}, entry {last}, computed {status.compute_ns_total * 1e-9:.1f} s, "
        f"waited {status.wait_ns_total * 1e-9:.1f} s, weights {status.weights_bytes / 2**20:.0f} MB {status.mode}"
    )


def _layout(number: int) -> str:
    return {1: "PP", 2: "TP"}.get(number, "no layout")


def duration(nanoseconds: int) -> str:
    """`12 s`, `3 min`, `2.5 h`: two digits are enough at a glance."""
    seconds = nanoseconds * 1e-9
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def supervised(client: MeshClient) -> dict[str, dict[str, Any]]:
    """By process name, what the supervisor of its line has published; empty where there is none."""
    return {
        process_name(service, rank): _supervised(client.paths.supervisor_state(service))
        for service, rank in client.processes
    }


def _supervised(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}
    return found if isinstance(found, dict) else {}
