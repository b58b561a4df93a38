"""What `flipmesh status` says of a process that gave no answer."""

from pathlib import Path
from typing import Any

import pytest

from tools.absence import absence

SUPERVISOR: dict[str, Any] = {"children": [{"name": "worker-1", "pid": 42}], "last_exit": None}
TRANSPORT = "GetStatusRequest: DEADLINE_EXCEEDED: " + "words of the transport " * 20


def table_with(proc: Path, letter: str) -> Path:
    (proc / "42").mkdir()
    (proc / "42" / "stat").write_text(f"42 (a (strange) name) {letter} 1 2 3")
    return proc


@pytest.mark.parametrize(
    ("letter", "transport", "state", "words"),
    [
        ("T", TRANSPORT, "stopped", "process 42 is stopped by a signal or a debugger: kill -CONT 42"),
        ("t", "", "stopped", "process 42 is stopped"),
        (
            "S",
            TRANSPORT,
            "silent",
            "process 42 runs and did not answer within 2 s (GetStatusRequest: DEADLINE_EXCEEDED:",
        ),
        ("R", "", "starting", "process 42 runs and has no socket yet"),
        ("Z", TRANSPORT, "absent", "not running"),
    ],
)
def test_the_process_table_speaks_first(tmp_path: Path, letter: str, transport: str, state: str, words: str) -> None:
    found = absence("worker-1", SUPERVISOR, transport, table_with(tmp_path, letter))
    assert found.state == state
    assert found.why.startswith(words)
    assert len(found.why) < 200, "the transport's text is last and short"


def test_one_that_ended_is_absent_with_how_it_ended(tmp_path: Path) -> None:
    supervisor = {"children": [], "last_exit": {"name": "worker-0", "how": "SIGKILL"}}
    assert str(absence("worker-1", supervisor, "", tmp_path)) == (
        "absent: not running; worker-0 ended with SIGKILL, its supervisor starts it again"
    )
    assert str(absence("worker-1", {}, "", tmp_path)) == "absent: not running, nor is its supervisor"
