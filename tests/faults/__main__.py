"""`make faults`: real faults on real meshes, cell by cell; a sweep that was stopped goes on where it was.

    python -m tests.faults [--only TEXT] [--fresh] [--list] [--part 0/2] [--directory build/faults]

Cells that were good are not run again; failed ones are. Exit code 0: every cell that was asked for is good.
`results.jsonl` holds a line for each cell, `table.json` and `table.md` what clients saw, `logs/` the logs where a
cell failed. Several sweeps may fill one directory at once, each with its `--part`.
"""

import argparse
import asyncio
import json
import shutil
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from services.mesh.debug.damage import DamageKind
from tests.faults import table
from tests.faults.cell import ASKS, Seen, run_cell
from tests.faults.fault_mesh import FaultMesh, fault_mesh
from tests.faults.matrix import NUM_RANKS, Cell, cells
from tests.faults.scenes import SCENES, Scene, Tables, play
from tests.mesh.support.flipping import Bench, bench_of
from tests.mesh.support.running import ROOT
from tools.load.load import Heard
from tools.mesh_client import mesh_client
from tools.oracle.compare import control_faults
from tools.oracle.positive_control import blind_spots, positive_control

Job = Cell | Scene


@dataclass(slots=True)
class Sweep:
    """The cells to run, in order, and the mesh that serves them now."""

    directory: Path
    commit: str
    _stack: ExitStack = field(default_factory=ExitStack)
    _struck: FaultMesh | None = None
    _kind: tuple[str, Tables] = ("", {})
    _control: list[Heard] = field(default_factory=list)

    def run(self, jobs: Sequence[Job]) -> bool:
        """Runs them all; whether all were good."""
        is_good = True
        try:
            for number, job in enumerate(jobs, 1):
                result = self._one(job)
                table.append(self.directory / "results.jsonl", result)
                is_good &= result.is_good
                print(f"{number}/{len(jobs)} {'good' if result.is_good else 'FAILED'} {result.name}", end=" ")
                print(f"{result.took_s:.1f} s {result.flip} {dict(result.streams)} {result.reason}", flush=True)
        finally:
            self._stack.close()
        return is_good

    def _one(self, job: Job) -> table.Result:
        began_s = time.monotonic()
        try:
            seen = self._on_mesh(job)
        except Exception as error:
            self._keep_logs(job.name)
            self._retire()
            return table.Result(job.name, False, self.commit, time.monotonic() - began_s, reason=_text(error))
        took_s = time.monotonic() - began_s
        return table.Result(
            job.name, True, self.commit, took_s, seen.flip, seen.reason, dict(seen.streams), seen.gaps_s, seen.named_s
        )

    def _on_mesh(self, job: Job) -> Seen:
        kind = (job.mode, job.tables if isinstance(job, Scene) else {})
        if self._struck is None or self._struck.is_worn or self._kind != kind:
            self._retire()
            self._struck, self._kind = self._stack.enter_context(fault_mesh(kind[0], **kind[1])), kind
            self._control = asyncio.run(control_of(self._struck))
        return asyncio.run(run_on(job, self._struck, self._control))

    def _retire(self) -> None:
        self._struck = None
        self._stack.close()

    def _keep_logs(self, name: str) -> None:
        if self._struck is not None:
            kept = self.directory / "logs" / name.replace("/", "_")
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(self._struck.mesh.state / "log", kept)
            shutil.copy(self._struck.mesh.state / "flips.journal", kept)


async def control_of(struck: FaultMesh, kinds: Sequence[DamageKind] = tuple(DamageKind)) -> list[Heard]:
    """The answers with no fault, twice, by an instrument that has seen damaged rows: else nothing is proved."""
    async with bench_of(struck.mesh) as bench:
        first, second = await bench.ask(ASKS), await bench.ask(ASKS)
        blind = blind_spots(await positive_control(bench.client, NUM_RANKS, kinds=kinds))
    assert not (faults := [*control_faults(first, second), *blind]), faults
    return first


async def run_on(job: Job, struck: FaultMesh, control: Sequence[Heard]) -> Seen:
    """One cell on a mesh that is there."""
    async with mesh_client(struck.mesh.config) as client:
        bench = Bench(struck.mesh, client)
        if isinstance(job, Scene):
            return await play(job, struck, bench, control)
        return await run_cell(job, struck, bench, control)


def _text(error: BaseException) -> str:
    """The error in one line; of several together each."""
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_text, error.exceptions))
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:600]


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def main() -> int:
    """Runs what is left of the sweep and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="cells with this in their name")
    parser.add_argument("--fresh", action="store_true", help="forget what was run")
    parser.add_argument("--part", default="0/1", metavar="K/N", help="one of N parts, which may run beside each other")
    parser.add_argument("--list", action="store_true", help="print the cells' names and end")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "faults", help="where results are kept")
    arguments = parser.parse_args()
    chosen: list[Job] = [job for job in (*SCENES, *cells()) if arguments.only in job.name]
    if arguments.list:
        print("\n".join(job.name for job in chosen))
        return 0
    path: Path = arguments.directory / "results.jsonl"
    if arguments.fresh:
        path.unlink(missing_ok=True)
    done = table.read(path)
    part, num_parts = map(int, arguments.part.split("/"))
    chosen = [job for job in chosen if zlib.crc32(job.name.encode()) % num_parts == part]
    left = [job for job in chosen if job.name not in done or not done[job.name].is_good]
    print(f"{len(chosen)} cells, {len(left)} to run", flush=True)
    # Asked to end it ends its mesh first.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        Sweep(arguments.directory, _commit()).run(left)
    finally:
        done = table.read(path)
        found = [done[job.name] for job in chosen if job.name in done]
        rows = table.as_rows(found)
        (arguments.directory / "table.json").write_text(json.dumps(rows, indent=1) + "\n")
        (arguments.directory / "table.md").write_text(table.as_markdown(rows))
    print(table.as_markdown(rows))
    return 0 if all(job.name in done and done[job.name].is_good for job in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
