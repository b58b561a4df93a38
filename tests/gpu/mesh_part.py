"""A mesh of real processes on two GPUs: scheduler, mover, policy and the ranks as their supervisors start them.

A router needs a vocabulary, which a random model has not, so this speaks to the scheduler as a router does: requests by
their ids on its stream, flips by its call. The same requests are answered without a flip first.
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
import grpc.aio
from flipmesh.mover.v1 import mover_service_pb2
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub
from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb
from flipmesh.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

from services.core.ids import LayoutKind
from services.mesh.codec.common import layout_to_proto
from services.mesh.rpc import CHANNEL_OPTIONS, unary
from services.mesh.settings.tables import CONFIG_VARIABLE
from tests.mesh.support.meshes import write_config
from tests.mesh.support.running import ROOT, processes_with
from tests.mesh.support.toy_group import Router

SERVICES = ("scheduler", "worker", "mover", "policy")
READY_S, ANSWERS_S, FLIP_S, END_S = 150.0, 120.0, 60.0, 10.0
NUM_OUTPUT = 40
MS = 1e6
GROUPS: dict[str, dict[str, Any]] = {
    "dual": {"mode": "dual"},
    "exchange, uneven": {"mode": "exchange", "pp_layers": (1, 2), "tp_weights": [2.0, 1.0]},
}
"""`pp_layers` in thirds of the model's layers."""


@dataclass(slots=True)
class MeshFindings:
    """What one mesh showed."""

    name: str
    failures: list[str] = field(default_factory=list)
    num_tokens: int = 0
    bytes_moved: dict[str, int] = field(default_factory=dict)
    work_ms: dict[str, list[float]] = field(default_factory=lambda: {"pp": [], "tp": []})
    seconds: float = 0.0


async def mesh_findings(
    folder: Path, model: Path, num_layers: int, prompts: Mapping[int, Sequence[int]], *, rehearse: bool
) -> list[MeshFindings]:
    """One mesh after the other; `rehearse`: on CPU ranks over gloo."""
    found = []
    for name, shares in GROUPS.items():
        findings, began_s = MeshFindings(f"mesh, {name}"), time.monotonic()
        group = {**shares, **({"carrier": "gloo"} if rehearse else {"carrier": "nccl", "device": "cuda"})}
        if "pp_layers" in group:
            first = max(1, num_layers * group["pp_layers"][0] // 3)
            group["pp_layers"] = [first, num_layers - first]
        try:
            with mesh_of(folder / name.partition(",")[0], model, group) as state:
                await answers_hold(findings, state, prompts)
        except Exception as error:  # a mesh that breaks is a row of the table
            findings.failures.append(f"{type(error).__name__}: {error}")
            findings.failures += last_words(folder / name.partition(",")[0])
        findings.seconds = time.monotonic() - began_s
        sys.stdout.write(f"{findings.name}: {findings.failures or 'holds'} ({findings.seconds:.0f} s)\n")
        found.append(findings)
    return found


@contextmanager
def mesh_of(directory: Path, model: Path, group: dict[str, Any]) -> Iterator[Path]:
    """A mesh's state directory while its supervisors run; nothing of it is left after."""
    directory.mkdir()
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": str(model)},
        "group": {"num_ranks": 2, **group},
        "pool": {"num_blocks": 96},
        "policy": {"mode": "manual"},
    }
    config = write_config(directory, tables)
    environment = {**os.environ, CONFIG_VARIABLE: str(config)}
    command = [sys.executable, "-m", "services.mesh.supervisor"]
    with (directory / "output").open("w") as output:
        processes = [
            subprocess.Popen([*command, service], env=environment, cwd=ROOT, stdout=output, stderr=output)
            for service in SERVICES
        ]
        try:
            yield directory / "state"
        finally:
            for process in processes:
                process.terminate()
            for process in processes:
                end(process)
    if left := processes_with(str(config)):
        raise RuntimeError(f"processes are left of this mesh: {left}")


def end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def last_words(directory: Path) -> list[str]:
    """What the processes said last."""
    output = directory / "output"
    return output.read_text().splitlines()[-12:] if output.exists() else []


async def channel_to(state: Path, service: str) -> grpc.aio.Channel:
    channel = grpc.aio.insecure_channel(f"unix:{state / 'run' / f'{service}.sock'}", options=CHANNEL_OPTIONS)
    with anyio.fail_after(READY_S):
        await channel.channel_ready()
    return channel


async def answers_hold(found: MeshFindings, state: Path, prompts: Mapping[int, Sequence[int]]) -> None:
    """The same requests twice, without a flip and while flips go to and fro; then what the flips moved and took."""
    scheduler, mover = await channel_to(state, "scheduler"), await channel_to(state, "mover")
    router = Router(scheduler, READY_S)
    await router.until("opened")
    control = await asked(router, "alone", prompts)
    flips = 0
    async with anyio.create_task_group() as tasks:
        done = anyio.Event()

        async def flip_until_done() -> None:
            nonlocal flips
            target = LayoutKind.PP
            while not done.is_set():
                answer = await flip(scheduler, target)
                if answer.outcome != pb.FLIP_OUTCOME_COMMITTED:
                    found.failures.append(f"flip to {target.value}: {answer.reason}")
                    return
                flips, target = flips + 1, target.other

        tasks.start_soon(flip_until_done)
        heard = await asked(router, "across", prompts)
        done.set()
    found.num_tokens = sum(map(len, heard.values()))
    found.failures += [
        f"answer {index} across flips differs from that without" for index in prompts if heard[index] != control[index]
    ]
    if flips < 2:
        found.failures.append(f"{flips} flips committed meanwhile, at least one each way expected")
    await take_records(found, mover)
    for channel in (scheduler, mover):
        await channel.close()


async def asked(router: Router, name: str, prompts: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
    """Answers of all prompts at once, by prompt."""
    names = {index: f"{name}-{index}" for index in prompts}
    for index, prompt in prompts.items():
        await router.submit(names[index], list(prompt), NUM_OUTPUT)
    with anyio.fail_after(ANSWERS_S):
        await router.ended(*names.values())
    return {index: router.output(request) for index, request in names.items()}


async def flip(scheduler: grpc.aio.Channel, target: LayoutKind) -> pb.RequestFlipResponse:
    request = pb.RequestFlipRequest(target=layout_to_proto(target))
    return await unary(SchedulerServiceStub(scheduler).RequestFlip, request, timeout_s=FLIP_S)


async def take_records(found: MeshFindings, mover: grpc.aio.Channel) -> None:
    """Bytes of the flip that moved most, each way, and the work of all: the slower rank's."""
    answer = await unary(MoverServiceStub(mover).ListFlips, mover_service_pb2.ListFlipsRequest(), timeout_s=FLIP_S)
    names = {layout_to_proto(kind): kind.value for kind in LayoutKind}
    for record in answer.flips:
        kind = names[record.target]
        found.bytes_moved[kind] = max(found.bytes_moved.get(kind, 0), record.bytes_moved)
        found.work_ms[kind].append(max((rank.read_ns + rank.write_ns + rank.verify_ns) / MS for rank in record.ranks))
