"""The supervisor over real processes: restarts, groups, and an end that leaves nothing behind."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from services.mesh.limits import EX_CONFIG
from tests.mesh.support.running import ROOT, Running, gone, open_pid, processes_with, python, running, send


@pytest.fixture
def state(tmp_path: Path) -> Path:
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def environment(tmp_path: Path, state: Path) -> dict[str, str]:
    config = tmp_path / "mesh.toml"
    config.write_text('[group]\nnum_ranks = 3\n[state]\ndir = "state"\n')
    return {"FLIPMESH_CONFIG": str(config)}


def supervise(service: str) -> list[str]:
    return python("-m", "services.mesh.supervisor", service, "--module", "tests.mesh.support.tiny")


def wish(state: Path, what: str) -> None:
    fresh = state / "wish.new"
    fresh.write_text(what)
    fresh.replace(state / "wish")


def published(state: Path) -> list[str]:
    return sorted(path.name for path in (state / "run").iterdir() if path.suffix != ".lock")


def pid_of(supervisor: Running, name: str) -> int:
    return int(supervisor.line(rf" {name} started pid=(\d+)")[1])


def test_ends_within_its_budget_and_takes_its_files_away(state: Path, environment: dict[str, str]) -> None:
    with running(supervise("tiny"), environment) as supervisor:
        supervisor.line("tiny serving")
        assert published(state) == ["tiny.sock", "tiny.supervisor.json"]
        assert (state / "run" / "tiny.sock").stat().st_mode & 0o777 == 0o600
        assert (state / "run").stat().st_mode & 0o777 == 0o700
        supervisor.process.send_signal(signal.SIGTERM)
        assert supervisor.code(5.0) == 0
        assert published(state) == []


def test_restarts_what_died_with_growing_delay(state: Path, environment: dict[str, str]) -> None:
    wish(state, "crash")
    with running(supervise("tiny"), environment) as supervisor:
        delays = [float(supervisor.line(r"restarting in_s=(\S+)")[1]) for _ in range(2)]
        assert delays == [0.5, 1.0]
        status = json.loads((state / "run" / "tiny.supervisor.json").read_text())
        assert status["last_exit"]["how"] == "exit 1"
        wish(state, "serve")
        supervisor.line("tiny serving")
        status = json.loads((state / "run" / "tiny.supervisor.json").read_text())
        assert (status["num_restarts"], status["stage"], len(status["children"])) == (2, "running", 1)
        supervisor.process.send_signal(signal.SIGTERM)
        assert supervisor.code(5.0) == 0


def test_a_configuration_error_is_said_once_and_not_restarted(state: Path, environment: dict[str, str]) -> None:
    wish(state, "refuse")
    with running(supervise("tiny"), environment) as supervisor:
        lines = supervisor.rest()
        assert supervisor.code() == EX_CONFIG
    assert sum(line == "tiny: configuration error: tiny.key = 1 is wrong: leave it out" for line in lines) == 1
    assert sum(" tiny started" in line for line in lines) == 1


def test_a_wrong_file_stops_the_supervisor_itself(tmp_path: Path, environment: dict[str, str]) -> None:
    (tmp_path / "mesh.toml").write_text("[group]\nnum_rank = 3\n")
    with running(supervise("tiny"), environment) as supervisor:
        (line,) = supervisor.rest()
        assert supervisor.code() == EX_CONFIG
    assert "[group] has no key num_rank; did you mean num_ranks?" in line


def test_an_ended_generation_is_followed_at_once_but_not_for_ever(state: Path, environment: dict[str, str]) -> None:
    wish(state, "generation")
    with running(supervise("tiny"), environment) as supervisor:
        delays = [float(supervisor.line(r"restarting in_s=(\S+)")[1]) for _ in range(7)]
    assert delays == [0.0] * 6 + [0.5]


def test_a_lost_rank_replaces_the_group_and_keeps_the_weights(environment: dict[str, str]) -> None:
    with running(supervise("worker"), environment) as supervisor:
        first = {match[1]: match[2] for match in supervisor.several(r"worker-(\d) started pid=(\d+)", 3)}
        assert set(first) == {"0", "1", "2"}
        supervisor.several("region region=flags", 3)
        others = [open_pid(int(pid)) for rank, pid in first.items() if rank != "1"]
        os.kill(int(first["1"]), signal.SIGKILL)
        assert supervisor.line(r"child-ended child=worker-1 how=(\S+)")[1] == "SIGKILL"
        assert all(gone(pidfd, 5.0) for pidfd in others)
        found = [match.groups() for match in supervisor.several(r"region region=(\w+) found=(\w+)", 9)]
        # The first rank that looks finds the weights as the dead group left them, and nothing of it elsewhere.
        old, new = set(first.values()), dict[str, str]()
        for region, content in found:
            new.setdefault(region, content)
        assert new["weights"] in old
        assert new["pool"] == new["flags"] == "zeroes"
        assert not {content for region, content in found if region != "weights"} & old


def test_a_rank_that_will_not_go_is_killed(state: Path, environment: dict[str, str]) -> None:
    wish(state, "block")
    with running(supervise("worker"), environment) as supervisor:
        pids = {match[1]: match[2] for match in supervisor.several(r"worker-(\d) started pid=(\d+)", 3)}
        supervisor.several(r"worker-\d serving", 3)
        wish(state, "serve")
        os.kill(int(pids["0"]), signal.SIGKILL)
        supervisor.line("killing")
        assert {match[1] for match in supervisor.several(r"child-ended child=\S+ how=(\S+)", 2)} == {"SIGKILL"}
        supervisor.several(r"worker-\d serving", 3)


def test_a_service_that_hangs_is_killed_within_the_budget(state: Path, environment: dict[str, str]) -> None:
    wish(state, "block")
    with running(supervise("tiny"), environment) as supervisor:
        supervisor.line("tiny serving")
        supervisor.process.send_signal(signal.SIGTERM)
        assert supervisor.code() == 0
        assert published(state) == []


def test_a_second_signal_does_not_wait(state: Path, environment: dict[str, str]) -> None:
    wish(state, "linger")
    with running(supervise("tiny"), environment) as supervisor:
        supervisor.line("tiny serving")
        supervisor.process.send_signal(signal.SIGTERM)
        supervisor.line("tiny stopping")
        supervisor.process.send_signal(signal.SIGINT)
        supervisor.line("killing")
        assert supervisor.code() == 0


def test_a_killed_supervisor_takes_its_service_with_it(environment: dict[str, str]) -> None:
    with running(supervise("tiny"), environment) as supervisor:
        service = open_pid(pid_of(supervisor, "tiny"))
        os.kill(supervisor.pid, signal.SIGKILL)
        assert gone(service, 5.0)


def test_two_supervisors_of_a_kind_do_not_share_a_directory(state: Path, environment: dict[str, str]) -> None:
    with running(supervise("tiny"), environment) as first:
        first.line("tiny serving")
        with running(supervise("tiny"), environment) as second:
            (line,) = second.rest()
            assert second.code() == EX_CONFIG
        assert f"(process {first.pid})" in line
        assert published(state) == ["tiny.sock", "tiny.supervisor.json"]


def test_signals_only_what_it_started(state: Path, environment: dict[str, str]) -> None:
    script = (
        "import subprocess, sys; other = subprocess.Popen(['sleep', '60']); print('other', other.pid, flush=True);"
        f"code = subprocess.call([sys.executable, *{supervise('tiny')[1:]!r}]);"
        "print('alive' if other.poll() is None else 'dead', code, flush=True); other.kill()"
    )
    with running([sys.executable, "-c", script], environment) as parent:
        other = open_pid(int(parent.line(r"other (\d+)")[1]))
        parent.line("tiny serving")
        os.kill(json.loads((state / "run" / "tiny.supervisor.json").read_text())["pid"], signal.SIGTERM)
        parent.line("alive 0")
        assert gone(other)


@pytest.fixture
def procfile(tmp_path: Path, state: Path) -> Path:
    path = tmp_path / "Procfile"
    interpreter = sys.executable
    path.write_text(
        f"tiny: exec {interpreter} -m services.mesh.supervisor tiny --module tests.mesh.support.tiny\n"
        f"worker: exec {interpreter} -m services.mesh.supervisor worker --module tests.mesh.support.tiny\n"
    )
    return path


def honcho(procfile: Path) -> list[str]:
    return python("-m", "honcho", "-f", str(procfile), "-d", str(ROOT), "start")


def wait_until_served(mesh: Running) -> None:
    names = {match[1] for match in mesh.several(r"(\S+) serving socket", 4)}
    assert names == {"tiny", "worker-0", "worker-1", "worker-2"}


def test_honcho_that_is_killed_leaves_nothing(procfile: Path, state: Path, environment: dict[str, str]) -> None:
    with running(honcho(procfile), environment) as mesh:
        wait_until_served(mesh)
        config = environment["FLIPMESH_CONFIG"]
        ours = [open_pid(pid) for pid, _ in processes_with(config) if pid != mesh.pid]
        assert len(ours) == 2 + 2 + 4, "two runners, two supervisors, one service and three ranks"
        os.kill(mesh.pid, signal.SIGKILL)
        assert all(gone(pidfd, 6.0) for pidfd in ours)
        mesh.code()
        assert processes_with(config) == []
    assert published(state) == []
    assert not [line for line in Path("/proc/net/unix").read_text().splitlines() if str(state) in line]


def test_honcho_that_is_stopped_ends_cleanly(procfile: Path, state: Path, environment: dict[str, str]) -> None:
    with running(honcho(procfile), environment) as mesh:
        wait_until_served(mesh)
        mesh.process.send_signal(signal.SIGINT)
        lines = mesh.rest(6.0)
        mesh.code()
    stopped = [match[1] for line in lines if (match := re.search(r"(\w+)\.1 stopped \(rc=0\)", line))]
    assert sorted(stopped) == ["tiny", "worker"]
    assert not any("SIGKILL" in line or "second-signal" in line for line in lines)
    assert published(state) == []
    assert processes_with(environment["FLIPMESH_CONFIG"]) == []


def test_one_crash_under_honcho_is_not_everyones(procfile: Path, environment: dict[str, str]) -> None:
    with running(honcho(procfile), environment) as mesh:
        pid = pid_of(mesh, "tiny")
        victim = open_pid(pid)
        mesh.line("tiny serving")
        send(victim, signal.SIGKILL)
        assert gone(victim)
        assert pid_of(mesh, "tiny") != pid
        mesh.line("tiny serving")
        mesh.process.send_signal(signal.SIGTERM)
        lines = mesh.rest(6.0)
        mesh.code()
    assert not any(re.search(r"worker-\d ended", line) for line in lines[: lines.index(next(filter(_stopping, lines)))])


def _stopping(line: str) -> bool:
    return "SIGTERM received" in line
