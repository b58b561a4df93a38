"""A whole mesh under test: honcho over the Procfile, on a configuration and a state directory of its own."""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.mesh.support.running import ROOT, Running, processes_with, running

READY_S = 60.0
END_S = 15.0

Tables = dict[str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Mesh:
    """A mesh that is ready; `honcho` is its first process."""

    honcho: Running
    config: Path
    state: Path

    @property
    def base_url(self) -> str:
        return f"http://{(self.state / 'run' / 'router.http').read_text().strip()}"

    def socket(self, process: str) -> Path:
        return self.state / "run" / f"{process}.sock"

    def pid(self, process: str) -> int:
        return int(self.status()["processes"][process]["identity"]["pid"])

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.command("status", "--json").stdout)
        return found

    def command(self, *words: str, timeout_s: float = 60.0) -> "subprocess.CompletedProcess[str]":
        """Runs `flipmesh` on this mesh."""
        command = [sys.executable, "-m", "tools.cli", *words, "--config", str(self.config)]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False)

    def wait_ready(self, timeout_s: float = READY_S) -> None:
        """Until `/ready` answers 200; asks again only after the router's own next line of output or a short while."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_ready():
            if time.monotonic() >= deadline_s:
                raise AssertionError("not ready\n" + "\n".join(self.honcho.seen[-60:]))
            self.honcho.pump(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base_url}/ready", timeout=5) as response:
                return bool(response.status == 200)
        except (FileNotFoundError, urllib.error.URLError, ConnectionError):
            return False


@contextmanager
def started(directory: Path, **tables: dict[str, Any]) -> Iterator[Mesh]:
    """Starts a mesh with these tables over the defaults and waits until it is ready; nothing of it is left after."""
    directory.mkdir(parents=True, exist_ok=True)
    config = write_config(directory, tables)
    honcho = [str(Path(sys.executable).parent / "honcho"), "start", "-f", str(ROOT / "Procfile"), "-d", str(ROOT)]
    with running(honcho, {"FLIPMESH_CONFIG": str(config)}) as process:
        mesh = Mesh(process, config, directory / "state")
        try:
            mesh.wait_ready()
            yield mesh
        finally:
            process.process.terminate()
            process.rest(END_S)
            assert not processes_with(str(config))


def write_config(directory: Path, tables: Tables) -> Path:
    """A TOML with a free port, a small pool and its own state, and what the test sets."""
    defaults: Tables = {
        "router": {"http_port": 0},
        "pool": {"num_blocks": 1024},
        "state": {"dir": str(directory / "state")},
    }
    merged = {name: {**defaults.get(name, {}), **tables.get(name, {})} for name in {**defaults, **tables}}
    lines = [
        f"[{name}]\n" + "\n".join(f"{key} = {toml(value)}" for key, value in table.items())
        for name, table in merged.items()
    ]
    path = directory / "mesh.toml"
    path.write_text("\n\n".join(lines) + "\n")
    return path


def toml(value: object) -> str:
    """A TOML value; JSON's spelling is TOML's for what settings hold."""
    return json.dumps(value)
