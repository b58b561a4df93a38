"""Why a process of the mesh gave no answer: first what the system says of it, then, short, what the transport said.

One truth for a process: what is stopped is called stopped here as the sentinel calls it, and never absent. Reads the
supervisor's published state and /proc; never signals, never waits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.mesh_client import CALL_S

MAX_TRANSPORT_WORDS = 12
PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class Absence:
    """A process that gave no answer: one word for the table, and a sentence with the next step."""

    state: str
    why: str

    def __str__(self) -> str:
        return f"{self.state}: {self.why}"


def absence(name: str, supervisor: Mapping[str, Any], transport: str, proc: Path = PROC) -> Absence:
    """What is so of a process without an answer.

    `supervisor`: what the supervisor of its line has published, empty where there is none. `transport`: why the call
    failed, empty where there was no socket to call.
    """
    pids = {child["name"]: child["pid"] for child in supervisor.get("children", ())}
    pid = pids.get(name)
    letter = None if pid is None else _state_letter(proc / str(pid) / "stat")
    if letter is None or letter in "ZX":
        return Absence("absent", "not running" + _since(supervisor))
    if letter in "Tt":
        return Absence("stopped", f"process {pid} is stopped by a signal or a debugger: kill -CONT {pid}")
    if not transport:
        return Absence("starting", f"process {pid} runs and has no socket yet")
    words = transport.split()
    said = " ".join(words[:MAX_TRANSPORT_WORDS]) + (" ..." if len(words) > MAX_TRANSPORT_WORDS else "")
    return Absence("silent", f"process {pid} runs and did not answer within {CALL_S:g} s ({said})")


def _since(supervisor: Mapping[str, Any]) -> str:
    if not supervisor:
        return ", nor is its supervisor"
    ended = supervisor.get("last_exit")
    return f"; {ended['name']} ended with {ended['how']}, its supervisor starts it again" if ended else ""


def _state_letter(stat: Path) -> str | None:
    """The letter of the process table; None: there is no such process."""
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return None
