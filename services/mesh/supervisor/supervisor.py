"""Keeps one service running: `python -m services.mesh.supervisor <service>`, one line of the Procfile.

Starts the service's processes, starts them again when they end, and ends with honcho whatever ended that. The ranks of
`worker` are one group: when one ends, all are replaced. Standard library only, no thread, no tick: it sleeps until a
process it watches ends, a signal comes or a delay is over. It signals the processes it started and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from enum import Enum
from types import FrameType
from typing import Any

from services.core.errors import ConfigurationError, refusal_text
from services.mesh.limits import EX_CONFIG, SHUTDOWN_KILL_S
from services.mesh.logs.files import PatientOutput, RotatedFile
from services.mesh.logs.line import Level, format_line
from services.mesh.settings.paths import StatePaths, hold_lock, write_atomically
from services.mesh.settings.tables import Settings, load_settings
from services.mesh.supervisor.regions import Regions
from services.mesh.supervisor.restart_policy import RestartPolicy
from services.mesh.supervisor.supervised import Child, describe_exit, start
from services.mesh.supervisor.watched_parents import OrphanedError, WatchedParent, watch_parents

GROUP_SERVICE = "worker"
GROUP_GRACE_S = 1.0
"""How long ranks may take to end after one of them did; the generation is lost either way."""

ABANDON_S = 0.3
"""How long a killed process may take to go before the supervisor ends without it (it hangs in the kernel)."""

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Stage(Enum):
    """What a supervisor is at."""

    RUNNING = "running"
    CLEARING = "clearing"
    BACKOFF = "backoff"
    ENDING = "ending"


class Supervisor:
    """One service's processes over time.

    `_deadline_s` belongs to the stage: CLEARING and ENDING kill at it, BACKOFF starts again at it, RUNNING has none.
    """

    def __init__(self, service: str, module: str, settings: Settings, paths: StatePaths) -> None:
        self._service, self._module, self._paths = service, module, paths
        self._num_ranks = settings.group.num_ranks if service == GROUP_SERVICE else None
        self._regions = Regions() if self._num_ranks is not None else None
        self._policy = RestartPolicy()
        self._output = PatientOutput(sys.stdout.fileno())
        self._file = RotatedFile(
            paths.log_file(f"{service}-supervisor"), settings.telemetry.max_file_bytes, settings.telemetry.max_files
        )
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._ended_by_itself: list[int] = []
        self._stage = Stage.BACKOFF
        self._deadline_s: float | None = None
        self._began_s = 0.0
        self._killed = False
        self._num_starts = 0
        self._last_exit: dict[str, Any] | None = None
        self._lost: WatchedParent | None = None
        self._exit_code: int | None = None

    def run(self, parents: Sequence[WatchedParent]) -> int:
        """Supervises until told to end, or until its parents do; returns the exit code."""
        self._watch_signals()
        for parent in parents:
            self._selector.register(parent.pidfd, selectors.EVENT_READ, parent)
        self._start_all()
        while self._exit_code is None:
            timeout_s = None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())
            for key, _ in self._selector.select(timeout_s):
                self._on_ready(key.data)
            if self._deadline_s is not None and time.monotonic() >= self._deadline_s:
                self._on_deadline()
        self._clean_up(parents)
        return self._exit_code

    def _watch_signals(self) -> None:
        wakeup, self._signals = socket.socketpair()
        for end in (wakeup, self._signals):
            end.setblocking(False)
        self._wakeup = wakeup
        signal.set_wakeup_fd(wakeup.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            signal.signal(number, _leave_to_wakeup)
        self._selector.register(self._signals, selectors.EVENT_READ, None)

    def _on_ready(self, source: Child | WatchedParent | None) -> None:
        match source:
            case Child():
                self._on_child_ended(source)
            case WatchedParent():
                self._selector.unregister(source.pidfd)
                self._lost = source
                self._end(f"{source.role} (process {source.pid}) ended")
            case None:
                for number in self._signals.recv(64):
                    self._end(signal.Signals(number).name)

    def _start_all(self) -> None:
        fds = self._regions.renew() if self._regions is not None else {}
        self._stage, self._deadline_s, self._killed = Stage.RUNNING, None, False
        self._began_s = time.monotonic()
        self._ended_by_itself.clear()
        self._num_starts += 1
        try:
            for rank in [None] if self._num_ranks is None else range(self._num_ranks):
                child = start(self._module, self._service, rank, fds, self._began_s)
                self._children.append(child)
                self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        except OSError as error:
            self._on_start_failed(error)
        else:
            self._say(Level.INFO, "started", {child.name: child.process.pid for child in self._children})
        self._write_state()

    def _on_start_failed(self, error: OSError) -> None:
        """The system is short of processes or memory: what did start is cleared away, then it is tried again."""
        self._say(Level.ERROR, "start-failed", {"error": error})
        self._ended_by_itself.append(1)
        if self._children:
            self._clear_group()
        else:
            self._on_all_ended()

    def _clear_group(self) -> None:
        self._stage, self._deadline_s = Stage.CLEARING, time.monotonic() + GROUP_GRACE_S
        self._signal_all(signal.SIGTERM)

    def _on_child_ended(self, child: Child) -> None:
        self._selector.unregister(child.pidfd)
        code = child.reap()
        self._children.remove(child)
        if self._stage is not Stage.ENDING:
            self._note_exit(child, code)
        if not self._children:
            self._on_all_ended()
        elif self._stage is Stage.RUNNING:
            self._clear_group()
        self._write_state()

    def _note_exit(self, child: Child, code: int) -> None:
        """What ends after the first did is mostly a consequence; only a configuration error still counts."""
        if self._stage is Stage.RUNNING or code == EX_CONFIG:
            self._ended_by_itself.append(code)
        lived_s = time.monotonic() - child.began_s
        if self._stage is Stage.RUNNING:
            self._last_exit = {"name": child.name, "how": describe_exit(code), "at_unix_s": time.time()}
        level = Level.WARNING if self._stage is Stage.RUNNING else Level.INFO
        self._say(level, "child-ended", {"child": child.name, "how": describe_exit(code), "lived_s": lived_s})

    def _on_all_ended(self) -> None:
        if self._stage is Stage.ENDING:
            self._exit_code = 0
            return
        now_s = time.monotonic()
        self._remove_published()
        delay_s = self._policy.delay_s(self._ended_by_itself, now_s - self._began_s, now_s)
        if delay_s is None:
            self._say(Level.ERROR, "not-restarted", {"reason": "configuration error, see above"})
            self._exit_code = EX_CONFIG
            return
        self._stage, self._deadline_s = Stage.BACKOFF, now_s + delay_s
        self._say(Level.INFO, "restarting", {"in_s": delay_s, "restarts": self._num_starts})

    def _on_deadline(self) -> None:
        if self._stage is Stage.BACKOFF:
            self._start_all()
        elif not self._killed:
            self._kill_all()
        elif self._stage is Stage.ENDING:
            self._say(Level.ERROR, "left-behind", {child.name: child.process.pid for child in self._children})
            self._exit_code = 1
        else:
            # Killed and still there: hung in the kernel. Nothing else helps, so wait for it to go.
            self._deadline_s = None

    def _end(self, reason: str) -> None:
        """Ends everything within the budget; asked a second time, at once."""
        if self._stage is Stage.ENDING:
            self._kill_all()
            return
        self._say(Level.INFO, "ending", {"reason": reason})
        self._stage, self._deadline_s = Stage.ENDING, time.monotonic() + SHUTDOWN_KILL_S
        self._killed = False
        self._signal_all(signal.SIGTERM)
        if not self._children:
            self._exit_code = 0
        self._write_state()

    def _kill_all(self) -> None:
        if not self._killed:
            self._say(Level.WARNING, "killing", {child.name: child.process.pid for child in self._children})
        self._killed = True
        self._deadline_s = time.monotonic() + ABANDON_S
        self._signal_all(signal.SIGKILL)

    def _signal_all(self, number: signal.Signals) -> None:
        for child in self._children:
            child.signal(number)

    def _clean_up(self, parents: Sequence[WatchedParent]) -> None:
        self._remove_published()
        self._paths.supervisor_state(self._service).unlink(missing_ok=True)
        self._say(Level.INFO, "ended", {"code": self._exit_code})
        if self._lost is not None and self._lost.role == "honcho":
            # Honcho's runner has nobody left to report to, ignores every other signal and may hang in reporting.
            runner = next(parent for parent in parents if parent.role == "parent")
            signal.pidfd_send_signal(runner.pidfd, signal.SIGKILL)

    def _remove_published(self) -> None:
        for path in self._paths.published(self._service):
            path.unlink(missing_ok=True)

    def _write_state(self) -> None:
        until_s = self._deadline_s if self._stage is Stage.BACKOFF else None
        state = {
            "service": self._service,
            "pid": os.getpid(),
            "stage": self._stage.value,
            "children": [
                {"name": child.name, "pid": child.process.pid, "began_unix_s": child.began_unix_s}
                for child in self._children
            ],
            "num_restarts": self._num_starts - 1,
            "last_exit": self._last_exit,
            "backoff_until_unix_s": None if until_s is None else time.time() + until_s - time.monotonic(),
        }
        try:
            write_atomically(self._paths.supervisor_state(self._service), json.dumps(state) + "\n")
        except OSError as error:
            # A full disk must not end the one process that keeps the others.
            self._say(Level.WARNING, "state-not-written", {"error": error})

    def _say(self, level: Level, event: str, fields: dict[str, object]) -> None:
        line = format_line(time.time(), level, f"{self._service}-supervisor", event, fields) + "\n"
        encoded = line.encode("utf-8", "backslashreplace")
        self._file.write(encoded)
        self._output.write(encoded)


def _leave_to_wakeup(number: int, frame: FrameType | None) -> None:
    """The number comes through the wakeup socket; a handler must exist for it to be written there."""


def main() -> int:
    """Reads the arguments and the settings, and supervises."""
    parser = argparse.ArgumentParser(prog="python -m services.mesh.supervisor", description=__doc__)
    parser.add_argument("service", help="the service to keep running")
    parser.add_argument("--module", help="what to start instead of services.<service>")
    arguments = parser.parse_args()
    service: str = arguments.service
    os.umask(0o077)
    try:
        parents = watch_parents(service)
        settings = load_settings()
        paths = StatePaths(settings.state.dir)
        paths.create()
        hold_lock(paths.run / f"{service}.supervisor.lock", f"the supervisor of {service}")
    except ConfigurationError as error:
        os.write(2, refusal_text(service, error))
        return EX_CONFIG
    except OrphanedError as error:
        os.write(2, f"{service}: not started: {error}\n".encode())
        return 1
    return Supervisor(service, arguments.module or f"services.{service}", settings, paths).run(parents)
