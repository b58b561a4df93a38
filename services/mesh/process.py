"""The life of one process: from its arguments to its exit code.

`services/<name>/__main__.py` is one call: `run_service("name", main)`, with `async def main(shell: Shell) -> None`.
One uvloop made for this process alone (no global policy), one budget for its end, one place where errors become exit
codes. Keep the imports of `__main__` light: what is heavy belongs into `main`, after the process is tied to its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import NoReturn

import anyio
import uvloop
from flipmesh.common.v1 import debug_pb2
from flipmesh.common.v1.debug_pb2_grpc import add_DebugServiceServicer_to_server

from services.core.errors import ConfigurationError, GenerationEndedError, refusal_text
from services.core.ids import Rank
from services.mesh import limits
from services.mesh.debug.breakpoints import HoldPoint, Holds
from services.mesh.debug.server import DebugServer
from services.mesh.grpc_server import GrpcServer
from services.mesh.identity import Identity, identify
from services.mesh.logs.files import PatientOutput, RotatedFile
from services.mesh.logs.line import Level
from services.mesh.logs.log import Log, adopt_foreign_lines
from services.mesh.rpc import Peers
from services.mesh.settings.paths import StatePaths, hold_lock, process_name
from services.mesh.settings.tables import Settings, load_settings
from services.mesh.shell import Shell
from services.mesh.supervisor.parent_death import tie_to_parent
from services.mesh.telemetry.introspection import Introspection
from services.mesh.telemetry.metrics import Metrics
from services.mesh.telemetry.progress import Phase, Progress
from services.mesh.telemetry.start_record import write_start_record
from services.mesh.telemetry.traces import Tracing, open_tracing

Main = Callable[[Shell], Awaitable[None]]

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
OWNER_ONLY = 0o077
EXIT_AFTER_MAIN_S = 3.0
"""How long the interpreter may take to end once `main` has, whatever threads are left."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """What a process is started with. `supervisor_pid` None: started by hand."""

    rank: Rank | None
    supervisor_pid: int | None
    fds: Mapping[str, int]


def parse_arguments(service: str, words: Sequence[str]) -> Arguments:
    """Reads `--rank K --supervisor-pid PID --fds NAME=FD,…`; leaves with a usage message on anything else."""
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}", description=f"the {service} of a mesh")
    parser.add_argument("--rank", type=int, help="which rank of the group this process is")
    parser.add_argument("--supervisor-pid", type=int, help="end when this process, the parent, ends")
    parser.add_argument("--fds", type=_parse_fds, default={}, help="inherited descriptors, NAME=FD,…")
    found = parser.parse_args(words)
    return Arguments(None if found.rank is None else Rank(found.rank), found.supervisor_pid, found.fds)


def _parse_fds(text: str) -> dict[str, int]:
    pairs = (item.partition("=") for item in text.split(",") if item)
    return {name: int(number) for name, _, number in pairs}


def run_service(service: str, main: Main) -> NoReturn:
    """Runs `main` as the process's whole life and exits with what it deserves.

    0: ended as asked. 1: an error, logged once. 75: `GenerationEndedError`, to be started again at once. 78:
    `ConfigurationError`, printed, not to be started again.
    """
    arguments = parse_arguments(service, sys.argv[1:])
    tie_to_parent(arguments.supervisor_pid)
    faulthandler.enable()
    os.umask(OWNER_ONLY)
    for fd in arguments.fds.values():
        os.set_inheritable(fd, False)
    try:
        settings = load_settings()
        paths = StatePaths(settings.state.dir)
        paths.create()
        name = process_name(service, arguments.rank)
        hold_lock(paths.run / f"{name}.lock", name)
    except ConfigurationError as error:
        os.write(2, refusal_text(service, error))
        sys.exit(limits.EX_CONFIG)
    code = _live(service, arguments, settings, paths, main)
    # Threads of libraries must not keep a finished process.
    _exit_hard_after(EXIT_AFTER_MAIN_S, code)
    sys.exit(code)


def _live(service: str, arguments: Arguments, settings: Settings, paths: StatePaths, main: Main) -> int:
    identity = identify(service, arguments.rank)
    with ExitStack() as open_things:
        log = _open_log(identity, settings, paths)
        open_things.callback(log.close)
        open_things.callback(adopt_foreign_lines(log))
        tracing = open_tracing(settings.telemetry, identity, paths, log)
        open_things.callback(tracing.close)
        try:
            write_start_record(paths, identity, settings, sys.argv)
        except OSError as error:
            # A full disk does not keep a process from being started again.
            log.warning("start-record-not-written", error=error)
        log.info("started", pid=identity.pid, incarnation=identity.incarnation, config=settings.source)
        build = partial(_build_shell, identity, arguments, settings, paths, log, tracing)
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(_main_until_stopped(build, main))
            code = 0
        except (Exception, BaseExceptionGroup, asyncio.CancelledError) as error:
            code = _exit_code_of(error, service, log)
        log.info("ended", code=code)
    return code


def _open_log(identity: Identity, settings: Settings, paths: StatePaths) -> Log:
    telemetry = settings.telemetry
    path = paths.log_file(identity.service, identity.rank)
    file = RotatedFile(path, telemetry.max_file_bytes, telemetry.max_files)
    return Log(identity.name, Level[telemetry.log_level.upper()], file, PatientOutput(sys.stdout.fileno()))


def _build_shell(
    identity: Identity, arguments: Arguments, settings: Settings, paths: StatePaths, log: Log, tracing: Tracing
) -> Shell:
    """Within the loop, which the server and the stop event belong to."""
    progress, metrics = Progress(identity.name), Metrics()
    introspection = Introspection(identity, progress, metrics)
    server = GrpcServer(paths.socket(identity.service, identity.rank), introspection, log)
    return Shell(
        identity=identity,
        settings=settings,
        paths=paths,
        fds=arguments.fds,
        log=log,
        tracer=tracing.tracer,
        metrics=metrics,
        progress=progress,
        introspection=introspection,
        server=server,
        peers=Peers(paths, log),
        stop=anyio.Event(),
        holds=_open_holds(identity.service, settings, server, log),
    )


def _open_holds(service: str, settings: Settings, server: GrpcServer, log: Log) -> Holds | None:
    """Where the settings enable them; a service that passes no point has none to refuse either."""
    if service not in {point.service for point in HoldPoint}:
        return None
    holds = Holds() if settings.debug.enabled else None
    if holds is not None:
        log.warning("can-be-held", reason="debug.enabled = true: for tests alone")
    descriptor = debug_pb2.DESCRIPTOR.services_by_name["DebugService"]
    server.add(add_DebugServiceServicer_to_server, DebugServer(service, holds), descriptor)
    return holds


async def _main_until_stopped(build: Callable[[], Shell], main: Main) -> None:
    shell = build()
    _end_on_signals(shell)
    try:
        await _within_budget(shell, main)
    finally:
        with anyio.CancelScope(shield=True):
            await shell.peers.close()


async def _within_budget(shell: Shell, main: Main) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_cancel_after_grace, shell, tasks.cancel_scope)
        await main(shell)
        tasks.cancel_scope.cancel()


async def _cancel_after_grace(shell: Shell, scope: anyio.CancelScope) -> None:
    await shell.stop.wait()
    await anyio.sleep(limits.SHUTDOWN_GRACE_S)
    shell.log.warning("grace-over", grace_s=limits.SHUTDOWN_GRACE_S, phase=shell.progress.mark.phase.name)
    scope.cancel()


def _end_on_signals(shell: Shell) -> None:
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, partial(_on_signal, shell, number))


def _on_signal(shell: Shell, number: signal.Signals) -> None:
    """The first signal asks `main` to end and starts the budget; a second one ends the process at once."""
    if shell.stop.is_set():
        shell.log.warning("ended-by-second-signal", signal=number.name)
        shell.log.close()
        os._exit(128 + number)
    shell.log.info("stopping", signal=number.name)
    shell.progress.enter(Phase.DRAINING, f"ending on {number.name}", limits.SHUTDOWN_GRACE_S)
    shell.stop.set()
    # In a thread, so that it also ends a process whose loop hangs.
    _exit_hard_after(limits.SHUTDOWN_HARD_S, 1)


def _exit_hard_after(delay_s: float, code: int) -> None:
    timer = threading.Timer(delay_s, os._exit, (code,))
    timer.daemon = True
    timer.start()


def _exit_code_of(error: BaseException, service: str, log: Log) -> int:
    """Logs the error once and says with which code the process ends."""
    leaves = list(_leaves(error))
    if refusals := [leaf for leaf in leaves if isinstance(leaf, ConfigurationError)]:
        os.write(2, refusal_text(service, refusals[0]))
        log.error("configuration-refused", error=refusals[0])
        return limits.EX_CONFIG
    if all(isinstance(leaf, GenerationEndedError) for leaf in leaves):
        log.info("generation-ended", reason=leaves[0])
        return limits.EX_GENERATION_ENDED
    # A group around a single error says nothing that the error itself does not.
    log.failure("failed", leaves[0] if len(leaves) == 1 else error)
    return 1


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for part in error.exceptions for leaf in _leaves(part)]
    return [error]
