"""One process by hand: how it starts, what it leaves, and how it ends in each case."""

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.mesh.limits import EX_CONFIG, EX_GENERATION_ENDED
from services.mesh.process import parse_arguments
from tests.mesh.support.running import Running, gone, open_pid, python, running

TINY = python("-m", "tests.mesh.support.tiny")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "mesh.toml"
    config.write_text('[state]\ndir = "state"\n[router]\napi_key = "sesame"\n')
    return {"FLIPMESH_CONFIG": str(config), "SOME_TOKEN": "sesame", "SOME_PLACE": "here"}


@pytest.fixture
def tiny(environment: dict[str, str]) -> Iterator[Running]:
    with running(TINY, environment) as process:
        yield process


def wish(state: Path, what: str) -> None:
    (state / "wish").write_text(what)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_cleanly(state: Path, tiny: Running, number: signal.Signals) -> None:
    tiny.line("tiny serving")
    tiny.process.send_signal(number)
    assert tiny.code(5.0) == 0
    assert not (state / "run" / "tiny.sock").exists()
    lines = tiny.rest()
    assert lines == (state / "log" / "tiny.log").read_text().splitlines()
    assert [line.split()[3] for line in lines] == ["started", "serving", "stopping", "ended"]


@pytest.mark.parametrize(
    ("what", "code", "line"),
    [
        ("crash", 1, 'ERROR tiny failed error="as wished"'),
        ("refuse", EX_CONFIG, "tiny: configuration error: tiny.key = 1 is wrong"),
        ("generation", EX_GENERATION_ENDED, 'INFO tiny generation-ended reason="as wished"'),
    ],
)
def test_errors_become_exit_codes_and_are_logged_once(
    state: Path, environment: dict[str, str], what: str, code: int, line: str
) -> None:
    wish(state, what)
    with running(TINY, environment) as process:
        lines = process.rest()
        assert process.code(5.0) == code
    assert sum(line in seen for seen in lines) == 1


def test_a_main_that_does_not_return_is_cancelled_after_its_grace(state: Path, environment: dict[str, str]) -> None:
    wish(state, "linger")
    with running(TINY, environment) as process:
        process.line("tiny serving")
        process.process.send_signal(signal.SIGTERM)
        process.line("grace-over")
        assert process.code() == 0, "one that is ended by its hard limit leaves with 1"
    assert not (state / "run" / "tiny.sock").exists()


def test_a_loop_that_hangs_does_not_keep_the_process(state: Path, environment: dict[str, str]) -> None:
    wish(state, "block")
    with running(TINY, environment) as process:
        process.line("tiny serving")
        process.process.send_signal(signal.SIGTERM)
        assert process.code() == 1


def test_a_second_signal_ends_it_at_once(state: Path, environment: dict[str, str]) -> None:
    wish(state, "linger")
    with running(TINY, environment) as process:
        process.line("tiny serving")
        process.process.send_signal(signal.SIGTERM)
        process.line("tiny stopping")
        process.process.send_signal(signal.SIGTERM)
        assert process.code() == 128 + signal.SIGTERM
        process.line("ended-by-second-signal")


def test_p5_4_it_ends_with_its_parent(environment: dict[str, str]) -> None:
    script = f"import subprocess, sys; subprocess.call({TINY!r})"
    with running([sys.executable, "-c", script], environment) as parent:
        pid = int(parent.line(r"tiny started pid=(\d+)")[1])
        service = open_pid(pid)
        os.kill(parent.pid, signal.SIGKILL)
        assert gone(service, 5.0)


def test_p5_4_a_parent_that_was_gone_before_is_noticed(environment: dict[str, str]) -> None:
    """Given as the parent's pid is one that is not the parent: what a service finds whose supervisor has just died."""
    with running([*TINY, "--supervisor-pid", "1"], environment) as process:
        (line,) = process.rest()
        assert process.code() == 1
    assert line == "the parent (process 1) ended while this process was starting"


def test_two_of_a_kind_do_not_share_a_socket(environment: dict[str, str], tiny: Running) -> None:
    tiny.line("tiny serving")
    with running(TINY, environment) as second:
        (line,) = second.rest()
        assert second.code() == EX_CONFIG
    assert f"tiny runs already in {Path(environment['FLIPMESH_CONFIG']).parent / 'state'} (process {tiny.pid})" in line


def test_it_records_what_it_was_started_with_and_no_secret(
    state: Path, environment: dict[str, str], tiny: Running
) -> None:
    tiny.line("tiny serving")
    path = state / "log" / "tiny.start.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert "sesame" not in path.read_text()
    record = json.loads(path.read_text())
    assert record["identity"]["pid"] == tiny.pid
    assert record["settings"]["group"]["num_ranks"] == 2
    assert record["environment"]["SOME_PLACE"] == "here"
    assert record["environment"]["SOME_TOKEN"] == "(withheld)"
    assert {"python", "kernel", "grpcio", "anyio"} <= set(record["versions"])


def test_p5_11_no_global_loop_policy_is_set() -> None:
    import services.mesh.process  # noqa: F401 (what the import does is the subject)

    assert type(asyncio.get_event_loop_policy()).__module__ == "asyncio.unix_events"


def test_p5_13_a_collector_that_says_nothing_does_not_hold_up_the_end(state: Path, environment: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as black_hole:
        port = black_hole.getsockname()[1]
        config = Path(environment["FLIPMESH_CONFIG"])
        config.write_text(
            f'[state]\ndir = "state"\n[telemetry]\ntraces = "otlp"\notlp_endpoint = "http://127.0.0.1:{port}"\n'
        )
        wish(state, "span")
        with running(TINY, environment) as process:
            process.line("tiny serving")
            process.process.send_signal(signal.SIGTERM)
            assert process.code() == 0


def test_an_idle_process_sleeps(tiny: Running) -> None:
    """A served, idle process wakes seldom: about six times a second, in all its threads; one that polls wakes often."""
    tiny.line("tiny serving")
    before, began_s = num_wakes(tiny.pid), time.monotonic()
    with pytest.raises(AssertionError, match="no line"):
        tiny.line("nothing is said", timeout_s=2.0)
    assert (num_wakes(tiny.pid) - before) / (time.monotonic() - began_s) < 50


def num_wakes(pid: int) -> int:
    """How often its threads have gone to sleep by themselves; what a busy machine takes from them does not count."""
    texts = [(task / "status").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    return sum(int(line.split()[1]) for text in texts for line in text.splitlines() if line.startswith("voluntary"))


def test_arguments_are_a_closed_set(capsys: pytest.CaptureFixture[str]) -> None:
    found = parse_arguments("worker", ["--rank", "1", "--supervisor-pid", "9", "--fds", "pool=3,flags=4"])
    assert (found.rank, found.supervisor_pid, found.fds) == (1, 9, {"pool": 3, "flags": 4})
    with pytest.raises(SystemExit):
        parse_arguments("worker", ["--ranks", "1", "--verbose"])
    assert "unrecognized arguments" in capsys.readouterr().err
