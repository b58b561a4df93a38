"""What memory this host, and the control groups around this process, have left; and what a process takes.

Reads /proc and the cgroup files, versions 1 and 2, at every level up to the root: the tightest binds. Never changes a
limit and never trusts /proc/meminfo alone, which shows a container the whole machine. Both versions charge a group for
the files that it read (page cache); what of that can be dropped at once (inactive file pages) counts as left. Shared
memory cannot be dropped and does not. Standard library only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from services.core.errors import ConfigurationError

_NAMES = MappingProxyType({1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")})
"""(limit, use) by version."""
MACHINE_LINES = 3
"""Of /proc/meminfo: MemTotal, MemFree and MemAvailable, since Linux 3.14."""
MAX_FILE_BYTES = 65_536
"""Of these files, each of which the kernel gives in one read: the longest met has 5 KB."""
MAX_LEVELS = 32
"""Control groups from a process up to the root: a deeper tree is a loop or a mistake."""


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """One control group's account, in bytes."""

    path: str
    version: int
    limit_bytes: int
    used_bytes: int
    droppable_bytes: int
    """Of those used, pages of files that nobody needs now; part of `used_bytes`."""

    @property
    def left_bytes(self) -> int:
        """Until the limit, droppable pages counted as free; never below 0."""
        return max(0, self.limit_bytes - self.used_bytes + self.droppable_bytes)


@dataclass(frozen=True, slots=True)
class HostMemory:
    """One reading."""

    total_bytes: int
    available_bytes: int
    """What the kernel says could be had without swapping."""
    cgroups: tuple[CgroupMemory, ...]
    """Those that limit this process, innermost first; empty: none does."""

    @property
    def left_bytes(self) -> int:
        """What can still be had here: the least of the machine and its control groups."""
        return min((self.available_bytes, *(group.left_bytes for group in self.cgroups)))

    @property
    def _tightest(self) -> CgroupMemory | None:
        """The control group that binds; None: the machine does."""
        group = min(self.cgroups, key=lambda found: found.left_bytes, default=None)
        return None if group is None or self.available_bytes <= group.left_bytes else group

    @property
    def limit_bytes(self) -> int:
        """Of whoever says `left_bytes`: what could be had if nobody else took any."""
        return self.total_bytes if self._tightest is None else self._tightest.limit_bytes

    @property
    def binding(self) -> str:
        """Who says `left_bytes`."""
        group = self._tightest
        return "the machine" if group is None else f"control group {group.path} (v{group.version})"


@dataclass(frozen=True, slots=True)
class ProcessMemory:
    """A process's proportional set: pages shared with others count in equal parts."""

    pss_bytes: int
    anonymous_bytes: int
    """Its own, in no file."""
    file_bytes: int
    shared_memory_bytes: int


class HostMemoryReader:
    """Readings of this host. The roots are for tests."""

    def __init__(self, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> None:
        self._meminfo = proc / "meminfo"
        self._directories = tuple(_memory_directories(proc / "self" / "cgroup", cgroup))

    def read(self) -> HostMemory:
        """Now. Takes some tens of microseconds.

        Raises:
            ConfigurationError: the kernel does not say what is available.
        """
        machine = _fields(self._meminfo, MACHINE_LINES)
        if "MemAvailable" not in machine or "MemTotal" not in machine:
            raise ConfigurationError(f"{self._meminfo} has no MemAvailable: set pool.num_blocks or pool.kv_bytes")
        total = machine["MemTotal"]
        groups = (_read_group(directory, version, total) for directory, version in self._directories)
        return HostMemory(total, machine["MemAvailable"], tuple(group for group in groups if group is not None))


def process_memory(pid: int | None = None, proc: Path = Path("/proc")) -> ProcessMemory | None:
    """Of this process, or of another one of the same user; None where it is gone or the kernel will not say."""
    found = _fields(proc / ("self" if pid is None else str(pid)) / "smaps_rollup")
    if "Pss" not in found:
        return None
    return ProcessMemory(*(found.get(name, 0) for name in ("Pss", "Pss_Anon", "Pss_File", "Pss_Shmem")))


def _memory_directories(own: Path, root: Path) -> Iterator[tuple[Path, int]]:
    """Yields (directory, version) of every memory group from this process's own up to the root."""
    for line in _lines(own):
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _levels(root, path, 2)
            # Where version 1 has the memory controller, version 2 may be mounted beside it.
            yield from _levels(root / "unified", path, 2)
        elif "memory" in controllers.split(","):
            yield from _levels(root / "memory", path, 1)


def _levels(base: Path, path: str, version: int) -> Iterator[tuple[Path, int]]:
    """In a container the path may be the host's and absent here; then only those levels count that are there."""
    parts = [part for part in path.split("/") if part not in ("", "..")][:MAX_LEVELS]
    for depth in range(len(parts), -1, -1):
        directory = base.joinpath(*parts[:depth])
        if (directory / _NAMES[version][0]).exists():
            yield directory, version


def _read_group(directory: Path, version: int, total_bytes: int) -> CgroupMemory | None:
    """None where its limit is none, or above the machine's memory."""
    limit_name, used_name = _NAMES[version]
    limit = next(iter(_lines(directory / limit_name)), "")
    if not limit.isdecimal() or int(limit) >= total_bytes:
        return None
    used = next(iter(_lines(directory / used_name)), "")
    if not used.isdecimal():
        return None
    counts = dict(line.split(" ", 1) for line in _lines(directory / "memory.stat") if " " in line)
    droppable = counts.get("inactive_file" if version == 2 else "total_inactive_file", "0")
    return CgroupMemory(str(directory), version, int(limit), int(used), int(droppable))


def _fields(path: Path, max_lines: int | None = None) -> dict[str, int]:
    """`Name: N kB` lines, in bytes."""
    fields = {}
    for line in _lines(path)[:max_lines]:
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdecimal():
            fields[name] = int(words[0]) * 1024
    return fields


def _lines(path: Path) -> list[str]:
    """Empty where the file is absent or may not be read. By descriptor: a text file object costs four times as much."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return []
    try:
        return os.read(descriptor, MAX_FILE_BYTES).decode("ascii", "replace").splitlines()
    except OSError:
        return []
    finally:
        os.close(descriptor)
