"""A mesh to be struck: real processes, the real small model, short deadlines, holds enabled; and what it may not leak.

One mesh serves many cells, until it has been struck so often that its supervisors would begin to wait. What a cell
must not change is counted before and after: processes, descriptors of those that lived through it, shared memory.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.matrix import NUM_RANKS, Fault, Victim
from tests.mesh.support.meshes import Mesh, started
from tests.mesh.support.running import processes_with

DEADLINES = {
    "stall_s": 2.0,
    "collective_s": 3.5,
    "park_s": 5.0,
    "presence_s": 5.0,
    "flip_data_plane_s": 5.0,
    "mover_silence_s": 10.0,
    "scheduler_silence_s": 6.0,
    "step_s": 6.5,
}
"""Short, and still longer than a busy machine takes to start a mover; a scheduler stays stopped longer than a step may
last."""
MAX_KILLS = 4
"""Of one service in one mesh: the next start would wait for 4 s."""
MAX_NEW_DESCRIPTORS = 3
"""Of a process that lived through a cell: channels to peers that were reborn come and go late."""


@dataclass(slots=True)
class FaultMesh:
    """A mesh, and what was done to it."""

    mesh: Mesh
    kills: Counter[str] = field(default_factory=Counter)

    def note(self, victim: Victim, fault: Fault) -> None:
        """A process was, or will be, killed: a rank that stays stopped is killed by its supervisor."""
        if fault is Fault.KILL or (fault is Fault.STOP and victim.service == "worker"):
            self.kills[victim.service] += 1

    @property
    def is_worn(self) -> bool:
        """Whether the next kill would be followed by a long wait."""
        return any(count >= MAX_KILLS for count in self.kills.values())

    def holdings(self) -> "Holdings":
        """What its processes hold now."""
        found = processes_with(str(self.mesh.config))
        descriptors = {pid: count for pid, _ in found if (count := _num_descriptors(pid)) is not None}
        return Holdings(Counter(command for _, command in map(_without_numbers, found)), descriptors)


@dataclass(frozen=True, slots=True)
class Holdings:
    """Processes by command, descriptors by pid; shared memory has no names here, so a descriptor is all of it."""

    commands: Mapping[str, int]
    descriptors: Mapping[int, int]

    def leaks(self, later: "Holdings") -> list[str]:
        """What is more than it was."""
        before, after = Counter(self.commands), Counter(later.commands)
        found = [f"{count} processes more: {command}" for command, count in (after - before).items()]
        found += [f"{count} processes fewer: {command}" for command, count in (before - after).items()]
        for pid, num_before in self.descriptors.items():
            if (num_after := later.descriptors.get(pid, 0)) > num_before + MAX_NEW_DESCRIPTORS:
                found.append(f"process {pid} had {num_before} descriptors and has {num_after}")
        return found


def _num_descriptors(pid: int) -> int | None:
    try:
        return len(list((Path("/proc") / str(pid) / "fd").iterdir()))
    except OSError:
        return None


def _without_numbers(process: tuple[int, str]) -> tuple[int, str]:
    """The command without pids and descriptors, which differ from start to start."""
    pid, command = process
    words = command.split()
    for option in ("--supervisor-pid", "--fds"):
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
    return pid, " ".join(words)


@contextmanager
def fault_mesh(mode: str, **tables: dict[str, Any]) -> Iterator[FaultMesh]:
    """A fresh mesh in a directory of its own; nothing of it is left after."""
    directory = Path(tempfile.mkdtemp(prefix="flipmesh-faults-"))
    settings: dict[str, dict[str, Any]] = {
        "group": {"num_ranks": NUM_RANKS, "mode": mode},
        "policy": {"mode": "manual"},
        "deadlines": DEADLINES,
        "debug": {"enabled": True},
    }
    merged = {name: {**settings.get(name, {}), **tables.get(name, {})} for name in {**settings, **tables}}
    try:
        with started(directory, **merged) as mesh:
            yield FaultMesh(mesh)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
