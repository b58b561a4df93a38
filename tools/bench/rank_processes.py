"""A group of real rank processes over shared memory, driven by pipes: what a mesh's workers are, without gRPC.

For the bench of the worker and for tests of its numbers. Never serves; a rank ends with its pipe.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from kernels.cpu.shm_region import RegionShape
from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout
from services.core.step import LogEntry
from services.mesh.supervisor.parent_death import tie_to_parent
from services.models.model_files import ModelFiles, open_model
from services.placement.layouts import both_layouts, cut_within_blocks, shard_units
from services.placement.ledger import PoolBacking
from services.placement.staging import MAX_CHUNK_BYTES
from services.worker.boot import open_region, settle
from services.worker.dataplane.carrier import Carrier
from services.worker.dataplane.shm import ShmCarrier
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.owned_memory import OwnedMemorySpec, OwnedMode, owned_memory, shared_memory
from services.worker.memory.rank_memory import RankMemory
from services.worker.memory.weights.mapped import WeightStore
from services.worker.memory.wire import MoveBounds
from services.worker.model_thread import Answer
from services.worker.steps.execute import Runner
from services.worker.steps.pipeline import MAX_UNREAD_STEPS
from services.worker.steps.stages import RunnerLimits

ANSWER_S = 120.0
"""How long one entry, one call or a rank's start may take: above every deadline of a wait for peers."""
END_S = 10.0
"""How long a rank may take to leave once its pipe is closed."""


class Observer(Protocol):
    """Made in every rank around its runner; what it collects is asked for over the pipe."""

    def __init__(self, runner: Runner) -> None:
        """Attaches to the runner."""

    def collected(self) -> object:
        """What there is since the last call."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """What a group is made of."""

    model: Path
    num_ranks: int
    limits: RunnerLimits
    pp_layers: Sequence[int] | None = None
    tp_weights: Sequence[float] | None = None
    observer: type[Observer] | None = None
    kv_tokens: Sequence[int] | None = None
    mode: Literal["shared"] | OwnedMode = "shared"
    place: "Place | None" = None
    """Where ranks are and what carries between them, a function of a module; None: host memory, all of it shared."""
    backing: PoolBacking = PoolBacking.RESIDENT
    deadline_s: float = 60.0
    """Of every wait for a peer."""


Place = Callable[[GroupSpec, Rank, Mapping[str, int]], tuple[Carrier, RankDevice]]
"""Called in each rank, with the descriptors of `weights`, `pool` and `flags`."""


@dataclass(frozen=True, slots=True)
class RankCall:
    """Something to be done by a rank between two entries: a function of a module, so that it can be sent."""

    call: Callable[..., object]
    arguments: tuple[object, ...] = ()


class RankProcess:
    """One rank's process and the pipe to it."""

    def __init__(self, process: BaseProcess, pipe: Connection) -> None:
        self.process, self._pipe = process, pipe

    def submit(self, entry: LogEntry | RankCall) -> None:
        """Hands over the next entry, or call; a call is made with the runner and its arguments."""
        self._pipe.send(entry)

    def answer(self) -> Answer | None:
        """Waits for the oldest entry's answer; raises what the rank raised, or TimeoutError."""
        if not self._pipe.poll(ANSWER_S):
            raise TimeoutError(f"process {self.process.pid} has not answered within {ANSWER_S:g} s")
        answer = self._pipe.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]

    def result(self) -> Any:
        """Waits for what the oldest call returned; raises what the rank raised."""
        return self.answer()

    def observed(self) -> Any:
        """What the observer collected; no entry may be unanswered."""
        self._pipe.send(None)
        return self._pipe.recv()

    def end(self) -> None:
        """Closes the pipe and waits for the process."""
        self._pipe.close()
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@contextmanager
def rank_processes(spec: GroupSpec) -> Iterator[list[RankProcess]]:
    """The ranks, ready for RESET."""
    fds = {name: os.memfd_create(name, os.MFD_CLOEXEC) for name in ("weights", "pool", "flags")}
    places = {name: f"/proc/{os.getpid()}/fd/{fd}" for name, fd in fds.items()}
    context = multiprocessing.get_context("spawn")
    ranks = []
    try:
        for rank in range(spec.num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_rank, args=(spec, Rank(rank), places, theirs, os.getpid()), daemon=True)
            process.start()
            theirs.close()
            ranks.append(RankProcess(process, ours))
        for rank_process in ranks:
            rank_process.answer()
        yield ranks
    finally:
        for rank_process in ranks:
            rank_process.end()
        for fd in fds.values():
            os.close(fd)


def _rank(spec: GroupSpec, rank: Rank, places: dict[str, str], pipe: Connection, parent: int) -> None:
    """The life of one rank: build, say so, execute until the pipe ends."""
    tie_to_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    fds = {name: os.open(place, os.O_RDWR) for name, place in places.items()}
    files = open_model(spec.model)
    carrier, device = spec.place(spec, rank, fds) if spec.place else (_shm_carrier(spec, rank, fds, files), HOST)
    runner = _build(spec, files, carrier, device, fds)
    observer = spec.observer(runner) if spec.observer else None
    settle()
    pipe.send(None)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            entry = pipe.recv()
            if entry is None:
                pipe.send(observer.collected() if observer else None)
                continue
            try:
                pipe.send(
                    entry.call(runner, *entry.arguments) if isinstance(entry, RankCall) else runner.execute(entry)
                )
            except Exception as error:
                pipe.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))
    carrier.close()


def _build(spec: GroupSpec, files: ModelFiles, carrier: Carrier, device: RankDevice, fds: Mapping[str, int]) -> Runner:
    units = shard_units(files.geometry, files.tensors)
    layouts = both_layouts(units, spec.num_ranks, spec.pp_layers, spec.tp_weights, spec.kv_tokens)
    memory = _memory(spec, files, layouts, carrier, device, fds)
    return Runner(Rank(carrier.rank), files.geometry, memory, layouts, carrier, spec.limits, device=device)


def _message_bytes(spec: GroupSpec, files: ModelFiles) -> int:
    """Largest message of which the data plane holds two: hidden states, and a flip's parts are cut to it."""
    return spec.limits.max_batch_tokens * files.geometry.hidden_size * 4


def _shm_carrier(spec: GroupSpec, rank: Rank, fds: Mapping[str, int], files: ModelFiles) -> Carrier:
    shape = RegionShape(
        num_ranks=spec.num_ranks,
        max_message_bytes=_message_bytes(spec, files),
        max_rows=spec.limits.max_resident_requests,
        num_board_steps=2 * MAX_UNREAD_STEPS,
    )
    return ShmCarrier(open_region(fds["flags"], shape), rank, spec.deadline_s)


def _memory(
    spec: GroupSpec,
    files: ModelFiles,
    layouts: Mapping[LayoutKind, Layout],
    carrier: Carrier,
    device: RankDevice,
    fds: Mapping[str, int],
) -> RankMemory:
    if spec.mode != "shared":
        bounds = MoveBounds(min(MAX_CHUNK_BYTES, _message_bytes(spec, files)))
        kept = OwnedMemorySpec(spec.mode, LayoutKind.PP, bounds, device.free_bytes, device=device, backing=spec.backing)
        return owned_memory(files, layouts, carrier, kept)
    cut = cut_within_blocks(files.geometry, files.tensors, layouts.values())
    store = WeightStore(files, fds["weights"], cut)
    store.expand(carrier.rank, spec.num_ranks)
    return shared_memory(Rank(carrier.rank), store, fds["pool"], files.geometry, layouts)
