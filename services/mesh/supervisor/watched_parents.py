"""Whose end is a supervisor's end: its parent's, and honcho's behind it.

Under honcho a line's parent is a fork of honcho that only carries its output; it ignores signals and does not see
honcho die. So honcho itself is watched too. By hand there is only the parent. A watch is a pidfd: exact, and silent
until then.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

HONCHO_NAME = "HONCHO_PROCESS_NAME"
"""Set by honcho to `<line>.<number>`. It is inherited further, hence compared with the service's name."""


@dataclass(frozen=True, slots=True)
class WatchedParent:
    """A process without which the supervisor has no reason to be."""

    role: str
    pid: int
    pidfd: int


class OrphanedError(Exception):
    """A parent had ended before it could be watched."""


def watch_parents(service: str) -> list[WatchedParent]:
    """Opens what is to be watched: the parent, then honcho if it runs this line.

    A parent outside the pid namespace (pid 0) cannot be watched and is left out. Raises `OrphanedError`.
    """
    parent = os.getppid()
    if parent == 0:
        return []
    parents = [WatchedParent("parent", parent, _open(parent))]
    if os.getppid() != parent:
        raise OrphanedError("the parent ended while this process was starting")
    if os.environ.get(HONCHO_NAME, "").partition(".")[0] == service:
        parents.append(_watch_honcho(parent))
    return parents


def _watch_honcho(runner: int) -> WatchedParent:
    """The runner is a fork without an exec, so honcho is the parent that has the runner's own command line."""
    honcho = _parent_of(runner)
    pidfd = _open(honcho)
    if _parent_of(runner) != honcho or _command_of(runner) != _command_of(honcho):
        raise OrphanedError("honcho ended while this process was starting")
    return WatchedParent("honcho", honcho, pidfd)


def _open(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        raise OrphanedError(f"process {pid} ended while this process was starting ({error})") from error


def _parent_of(pid: int) -> int:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError as error:
        raise OrphanedError(f"process {pid} ended while this process was starting") from error
    # The name is in brackets and may hold any character; the parent is the second word behind it.
    return int(stat.rpartition(")")[2].split()[1])


def _command_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError as error:
        raise OrphanedError(f"process {pid} ended while this process was starting") from error
