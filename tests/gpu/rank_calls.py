"""What the ranks of a group on devices are asked to do between entries: functions that are sent to their processes."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels.cpu import paths
from kernels.reference.backend import ReferenceBackend
from services.core.ids import FlipId, LayoutKind, Rank
from services.placement.compatibility import Device
from services.worker.dataplane.carrier import Carrier
from services.worker.dataplane.device import DeviceCarrier
from services.worker.dataplane.gloo import GlooBounds
from services.worker.dataplane.rendezvous import meet
from services.worker.memory.device import RankDevice, rank_device
from services.worker.memory.rows.exclusive_rows import ExclusiveRows
from services.worker.memory.rows.layout_pool import LayoutPool
from services.worker.participation import Worked, WorkLost
from services.worker.steps.execute import Runner
from services.worker.steps.pipeline import MAX_UNREAD_STEPS
from tests.parts.memory.test_private_flips import FaultyWire
from tests.support.private_group import check_live, check_rows, fill, poison, whole_cache
from tools.bench.rank_processes import GroupSpec

MEET_S = 60.0
Runs = tuple[tuple[int, int], ...]


def on_cuda(spec: GroupSpec, rank: Rank, fds: Mapping[str, int]) -> tuple[Carrier, RankDevice]:
    """Rank r on device r, NCCL between them."""
    device = rank_device(Device.CUDA, rank)
    address, store = meet(fds["flags"], rank, "127.0.0.1:0", MEET_S)
    members = (address, rank, spec.num_ranks, spec.num_ranks - 1, _bounds(spec), store)
    return DeviceCarrier(*members, place=device.place, backend="nccl"), device


def as_on_cuda(spec: GroupSpec, rank: Rank, fds: Mapping[str, int]) -> tuple[Carrier, RankDevice]:
    """The same code over host memory and gloo: a rehearsal where there is no device."""
    paths.takes_torch = lambda tensor: True
    place = torch.device("cpu")
    device = RankDevice(Device.CUDA, place, ReferenceBackend(place, torch.float32))
    address, store = meet(fds["flags"], rank, "127.0.0.1:0", MEET_S)
    members = (address, rank, spec.num_ranks, spec.num_ranks - 1, _bounds(spec), store)
    return DeviceCarrier(*members, place=device.place, backend="gloo"), device


def _bounds(spec: GroupSpec) -> GlooBounds:
    return GlooBounds(spec.limits.max_resident_requests, spec.deadline_s, num_board_steps=2 * MAX_UNREAD_STEPS)


class LogitsLog:
    """Stands before the draws of a runner's sampler and keeps what it is given until it is asked for."""

    def __init__(self, runner: Runner) -> None:
        self._sample = runner.parts.sampler.sample
        self._seen: list[Tensor] = []
        runner.parts.sampler.sample = self.sample  # type: ignore[method-assign]

    def sample(self, logits: Tensor, *rest: Any) -> Any:
        self._seen.append(logits.clone())
        return self._sample(logits, *rest)

    def collected(self) -> list[Any]:
        """[rows, vocabulary] of every step since the last call that sampled here."""
        seen, self._seen = self._seen, []
        return [logits.numpy() for logits in seen]


@dataclass(frozen=True, slots=True)
class Work:
    """One rank's part of a flip."""

    work_ns: int
    answer: Worked | WorkLost


def work(runner: Runner, flip_id: FlipId) -> Work:
    began_ns = time.perf_counter_ns()
    answer = runner.work(flip_id)
    runner.parts.device.finish()
    return Work(time.perf_counter_ns() - began_ns, answer)


def _pool(runner: Runner, kind: LayoutKind) -> LayoutPool:
    memory: Any = runner.parts.memory
    pool: LayoutPool = memory.rows.pools[kind]
    return pool


def _cache(runner: Runner, kind: LayoutKind, seed: int) -> Tensor:
    geometry = runner._geometry
    shape = (geometry.num_layers, _pool(runner, kind).num_blocks, geometry.num_kv_heads, geometry.head_dim)
    return whole_cache(*shape, seed=seed).to(runner.parts.device.place)


def fill_rows(runner: Runner, kind: LayoutKind, seed: int) -> None:
    fill(_pool(runner, kind), _cache(runner, kind, seed))


def _take_turns(runner: Runner) -> bool:
    memory: Any = runner.parts.memory
    return isinstance(memory.rows, ExclusiveRows)


def poison_rows(runner: Runner, kind: LayoutKind) -> None:
    """Where pools take turns the one that is not in force has no pages: nothing is there to be poisoned."""
    if not _take_turns(runner):
        poison(_pool(runner, kind))


def rows_are_right(runner: Runner, kind: LayoutKind, seed: int, live: Runs) -> str:
    """Empty, or what is wrong: live rows have the bits of the cache, all others are poisoned still, if they were."""
    check = check_live if _take_turns(runner) else check_rows
    try:
        check(_pool(runner, kind), _cache(runner, kind, seed), live)  # type: ignore[arg-type]
    except AssertionError as error:
        return f"rank {runner.parts.rank}: rows of {kind.value} differ: {error}"
    return ""


def change_one_byte(runner: Runner, at_message: int) -> None:
    """Of the message of that number that this rank takes next."""
    FaultyWire(runner.parts.carrier, at_message)


def log_place(runner: Runner) -> tuple[int, int]:
    """Sequence and epoch of the log that this rank follows."""
    follower = runner.follower
    assert follower.sequence is not None and follower.epoch is not None
    return follower.sequence, follower.epoch
