"""`flipmesh oracle`: does a request survive a flip with the right answer?

Streams of free text run twice with no flip, as the control, then once for each direction with a flip by hand when a
third of the tokens is out. What is judged is what came after that point: ids, and by how much the model preferred each.
Before it says yes it damages rows of scratch requests and must see each damage (positive_control). A commit is what the
mover's record says, never that a call returned. The policy stands aside meanwhile.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from enum import Enum

import anyio
from flipmesh.common.v1 import introspection_pb2
from flipmesh.common.v1.introspection_pb2_grpc import IntrospectionServiceStub
from flipmesh.mover.v1 import mover_service_pb2
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub
from flipmesh.policy.v1 import policy_service_pb2
from flipmesh.policy.v1.policy_service_pb2_grpc import PolicyServiceStub

from services.core.ids import LayoutKind
from services.mesh.codec.common import layout_from_proto
from services.mesh.rpc import unary
from tools.control import flip_by_hand
from tools.load.load import MAX_STREAMS, Ask, Heard, Load
from tools.mesh_client import CALL_S, MeshClient, add_common, mesh_client
from tools.oracle.asks import asks_of
from tools.oracle.compare import EPSILON, MARGIN_BOUND, Difference, control_faults, first_difference, judge
from tools.oracle.positive_control import Shown, blind_spots, positive_control, table

REPORT_S = 12.0
"""For a flip's record to be complete: its requests have gone on and the scheduler has said so."""
LOOK_AGAIN_S = 0.1


class Verdict(Enum):
    """What the run says."""

    PASS = "pass"
    FAIL = "fail"
    INVALID = "instrument invalid"


EXIT_CODES = {Verdict.PASS: 0, Verdict.FAIL: 1, Verdict.INVALID: 2}


@dataclass(frozen=True, slots=True)
class Probe:
    """One flip under the streams; times in seconds."""

    target: str
    flip_id: int
    flip_points: tuple[int, ...]
    """Tokens of each stream that were out when the flip was asked for."""
    tokens_after: int
    """That came after the commit was known, over all streams."""
    pause_s: float | None
    longest_gap_s: float
    near_ties: tuple[Difference, ...]
    failures: tuple[str, ...]
    invalid: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole run."""

    verdict: Verdict
    reasons: tuple[str, ...]
    control_text: str
    control_longest_gap_s: float
    probes: tuple[Probe, ...]
    shown: tuple[Shown, ...] = ()
    """Damages of the positive control."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `oracle` to the command line."""
    parser = subparsers.add_parser("oracle", help="do answers survive a flip? exit 0: yes, 1: no, 2: it cannot be told")
    parser.add_argument("--direction", choices=["both", *(kind.value for kind in LayoutKind)], default="both")
    parser.add_argument("--requests", type=int, default=4, help="streams at once (default 4)")
    parser.add_argument("--tokens", type=int, default=120, help="tokens of each stream (default 120)")
    parser.add_argument("--stall", type=float, default=5.0, help="longest gap between chunks, in seconds (default 5)")
    add_common(parser)
    parser.set_defaults(run=lambda arguments: asyncio.run(_run(arguments)))


def conclude(
    reasons_invalid: Sequence[str], control: Sequence[Heard], probes: Sequence[Probe], shown: Sequence[Shown] = ()
) -> Report:
    """The verdict over all probes: what invalidates the instrument weighs more than what it shows."""
    invalid = [*reasons_invalid, *(reason for probe in probes for reason in probe.invalid)]
    failures = [reason for probe in probes for reason in probe.failures]
    verdict = Verdict.INVALID if invalid else Verdict.FAIL if failures else Verdict.PASS
    longest_s = max(heard.longest_gap_ns() for heard in control) * 1e-9
    return Report(verdict, tuple(invalid or failures), control[0].text, longest_s, tuple(probes), tuple(shown))


async def _run(arguments: argparse.Namespace) -> int:
    num_streams = max(1, min(arguments.requests, MAX_STREAMS))
    async with mesh_client(arguments.config) as client, _policy_aside(client):
        report = await examine(
            client, asks_of(num_streams, max(6, arguments.tokens)), arguments.direction, arguments.stall
        )
    print(json.dumps(as_json(report), indent=2) if arguments.json else as_text(report))
    return EXIT_CODES[report.verdict]


async def examine(client: MeshClient, asks: Sequence[Ask], direction: str, stall_s: float) -> Report:
    """The control twice, then the probes. Raises `MeshError` where a process of the mesh does not answer."""
    controls = [await Load(client.channel("router"), asks).run() for _ in range(2)]
    if invalid := control_faults(*controls):
        return conclude(invalid, controls[0], [])
    shown = await positive_control(client, client.settings.group.num_ranks)
    if blind := blind_spots(shown):
        return conclude(blind, controls[0], [], shown)
    probes = []
    for target in await _targets(client, direction):
        probes.append(await _probe(client, asks, controls[0], target, stall_s))
        if probes[-1].invalid:
            break
    return conclude([], controls[0], probes, shown)


async def _targets(client: MeshClient, direction: str) -> list[LayoutKind]:
    """Where to flip, in order; for one direction the mesh is first brought to the other side."""
    now = await _layout(client)
    if direction == "both":
        return [now.other, now]
    target = LayoutKind(direction)
    if now is target:
        await flip_by_hand(client, target.other)
    return [target]


async def _probe(
    client: MeshClient, asks: Sequence[Ask], control: Sequence[Heard], target: LayoutKind, stall_s: float
) -> Probe:
    load = Load(client.channel("router"), asks)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load.run)
        await load.until(sum(ask.max_tokens for ask in asks) // 3)
        flip_points = tuple(len(heard.token_ids) for heard in load.heard)
        answer = await flip_by_hand(client, target)
        num_before = load.num_tokens
    differences = [
        difference
        for stream, (one, other) in enumerate(zip(control, load.heard, strict=True))
        if (difference := first_difference(stream, one, other)) is not None
    ]
    failures, invalid = judge(differences, flip_points)
    failures += [f"stream {stream}: {heard.error}" for stream, heard in enumerate(load.heard) if heard.error]
    longest_s = max(heard.longest_gap_ns() for heard in load.heard) * 1e-9
    if longest_s > stall_s:
        failures.append(f"a stream stood still for {longest_s:.2f} s, at most {stall_s:g} s may pass")
    record = await _record(client, answer.flip_id)
    invalid += _flip_faults(record, target, answer.reason, load.num_tokens - num_before)
    return Probe(
        target=target.value,
        flip_id=answer.flip_id,
        flip_points=flip_points,
        tokens_after=load.num_tokens - num_before,
        pause_s=record.pause_ns * 1e-9 if record is not None and record.HasField("pause_ns") else None,
        longest_gap_s=longest_s,
        near_ties=tuple(difference for difference in differences if difference.is_near_tie),
        failures=tuple(failures),
        invalid=tuple(invalid),
    )


def _flip_faults(
    record: mover_service_pb2.FlipRecord | None, target: LayoutKind, reason: str, num_after: int
) -> list[str]:
    """Why there was no flip to judge by, if there was none."""
    if record is None:
        return [f"the mover knows of no such flip to {target.value}: {reason}"]
    if record.state != mover_service_pb2.FLIP_STATE_COMMITTED:
        return [f"flip {record.flip_id} to {target.value} did not commit: {record.reason}"]
    if record.num_carried_requests == 0:
        return [f"flip {record.flip_id} carried no request"]
    return [] if num_after > 0 else [f"flip {record.flip_id}: no token came after the commit; ask for more tokens"]


async def _record(client: MeshClient, flip_id: int) -> mover_service_pb2.FlipRecord | None:
    """The mover's record of the newest flip with this number, complete if it becomes so in time."""
    stub = MoverServiceStub(client.channel("mover"))
    found: mover_service_pb2.FlipRecord | None = None
    with anyio.move_on_after(REPORT_S):
        while True:
            answer = await unary(stub.ListFlips, mover_service_pb2.ListFlipsRequest(max_flips=8), timeout_s=CALL_S)
            found = next((record for record in answer.flips if record.flip_id == flip_id), None)
            if found is None or found.state != mover_service_pb2.FLIP_STATE_COMMITTED or found.num_carried_requests:
                break
            await anyio.sleep(LOOK_AGAIN_S)
    return found


async def _layout(client: MeshClient) -> LayoutKind:
    stub = IntrospectionServiceStub(client.channel("scheduler"))
    status = await unary(stub.GetStatus, introspection_pb2.GetStatusRequest(), timeout_s=CALL_S)
    return layout_from_proto(status.scheduler.layout, "layout")


@asynccontextmanager
async def _policy_aside(client: MeshClient) -> AsyncIterator[None]:
    """Flips by hand alone, and afterwards whatever held before."""
    stub = PolicyServiceStub(client.channel("policy"))
    manual = policy_service_pb2.SetModeRequest(mode=policy_service_pb2.POLICY_MODE_MANUAL)
    before = await unary(stub.SetMode, manual, timeout_s=CALL_S)
    try:
        yield
    finally:
        with anyio.CancelScope(shield=True):
            await unary(stub.SetMode, policy_service_pb2.SetModeRequest(mode=before.previous), timeout_s=CALL_S)


def as_json(report: Report) -> dict[str, object]:
    """One document."""
    return {**asdict(report), "verdict": report.verdict.value, "epsilon": EPSILON, "margin_bound": MARGIN_BOUND}


def as_text(report: Report) -> str:
    """A line for each probe, then the verdict and why."""
    lines = [f"control: {report.control_text[:60]!r}, longest gap {report.control_longest_gap_s * 1e3:.0f} ms"]
    for probe in report.probes:
        pause = "unknown" if probe.pause_s is None else f"{probe.pause_s * 1e3:.1f} ms"
        points = f"{min(probe.flip_points)}-{max(probe.flip_points)}"
        lines.append(
            f"flip {probe.flip_id} to {probe.target.upper()} at token {points}, "
            f"{probe.tokens_after} tokens after it, pause {pause}, longest gap {probe.longest_gap_s * 1e3:.0f} ms, "
            f"{len(probe.near_ties)} near ties"
        )
    if report.shown:
        lines += ["positive control:", table(report.shown)]
    return "\n".join([*lines, *report.reasons, report.verdict.value])
