"""A mesh of one's own for the length of a measurement: a configuration and a state directory in a temporary place.

Model and cuts come from a deployment's settings; ports and sockets are the mesh's own, so that a running deployment is
not disturbed. Nothing of it is left afterwards but the log that was asked for.
"""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from services.core.errors import ConfigurationError
from services.mesh.settings.tables import Settings
from tools.load.http_client import Loopback, parse_loopback
from tools.mesh_client import NotRunningError

ROOT = Path(__file__).parents[2]
READY_S = 180.0
END_S = 10.0
LOOK_AGAIN_S = 0.1
MAX_SHOWN_LINES = 30

Tables = dict[str, dict[str, object]]


@dataclass(frozen=True, slots=True)
class OwnMesh:
    """A mesh that is ready."""

    config: Path
    log: Path
    readiness_s: float
    """From the start of its first process until `/ready` said yes."""


def tables_of(settings: Settings, *, num_ranks: int | None, state: Path, policy: Mapping[str, object]) -> Tables:
    """The configuration: the deployment's model and scheduler, and what must be the measurement's own.

    Cuts that name each rank are left out where the number of ranks is another.
    """
    model: dict[str, object] = {"name": settings.model.name}
    if settings.model.path is not None:
        model["path"] = str(settings.model.path)
    if settings.model.context_tokens is not None:
        model["context_tokens"] = settings.model.context_tokens
    ranks = settings.group.num_ranks if num_ranks is None else num_ranks
    group: dict[str, object] = {"num_ranks": ranks, "threads_per_rank": settings.group.threads_per_rank}
    if ranks == settings.group.num_ranks:
        cuts = {"pp_layers": settings.group.pp_layers, "tp_weights": settings.group.tp_weights}
        group |= {name: list(cut) for name, cut in cuts.items() if cut is not None}
    pool = settings.pool.num_blocks
    return {
        "model": model,
        "group": group,
        "pool": {} if pool is None else {"num_blocks": pool},
        "router": {"http_port": 0},
        "policy": dict(policy),
        "debug": {"enabled": True},
        "state": {"dir": str(state)},
    }


def as_toml(tables: Tables) -> str:
    """The file; JSON's spelling is TOML's for what settings hold."""
    blocks = (
        "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())])
        for name, table in tables.items()
    )
    return "\n\n".join(blocks) + "\n"


@asynccontextmanager
async def own_mesh(
    settings: Settings, *, num_ranks: int | None, policy: Mapping[str, object], log: Path | None = None
) -> AsyncIterator[OwnMesh]:
    """Starts a mesh, waits until it is ready, and ends it.

    Raises:
        NotRunningError: it did not become ready, with the end of its log.
    """
    with tempfile.TemporaryDirectory(prefix="flipmesh-") as directory:
        config, state = Path(directory) / "mesh.toml", Path(directory) / "state"
        config.write_text(as_toml(tables_of(settings, num_ranks=num_ranks, state=state, policy=policy)))
        log = log or Path(directory) / "mesh.log"
        began_s = time.monotonic()
        with _honcho(config, log) as honcho:
            await _until_ready(honcho, state / "run" / "router.http", log)
            yield OwnMesh(config, log, time.monotonic() - began_s)


@contextlib.contextmanager
def _honcho(config: Path, log: Path) -> "Iterator[subprocess.Popen[bytes]]":
    honcho = Path(sys.executable).parent / "honcho"
    if not honcho.exists():
        raise ConfigurationError(f"there is no {honcho}: install the package with its requirements")
    command = [str(honcho), "start", "-f", str(ROOT / "Procfile"), "-d", str(ROOT)]
    environment = {**os.environ, "FLIPMESH_CONFIG": str(config), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(END_S)


async def _until_ready(honcho: "subprocess.Popen[bytes]", address: Path, log: Path) -> None:
    deadline_s = time.monotonic() + READY_S
    while not await asyncio.to_thread(_is_ready, address):
        if honcho.poll() is not None or time.monotonic() > deadline_s:
            raise NotRunningError(f"the mesh did not become ready:\n{_end_of(log)}")
        await asyncio.sleep(LOOK_AGAIN_S)


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text("utf-8", "replace").splitlines()[-MAX_SHOWN_LINES:])


def _is_ready(address: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, ConfigurationError, NotRunningError):
        found = read_address(address)
        with urllib.request.urlopen(f"http://{found.host}:{found.port}/ready", timeout=5) as response:
            return bool(response.status == 200)
    return False


def read_address(path: Path) -> Loopback:
    """The address that a router has published.

    Raises:
        NotRunningError: none is there.
    """
    try:
        return parse_loopback(path.read_text().strip())
    except FileNotFoundError as error:
        raise NotRunningError(f"the router is not running: no address at {path}") from error
