"""Rank processes for scenarios of carriers, kept from one scenario to the next."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from typing import Any

from kernels.cpu.collectives import RegionShape, ShmRegion
from tests.mesh.support.running import ROOT

MAX_RANKS = 3
NAMED_WITHIN_S = 30.0
"""The scenarios' own deadline is 1 s, and gloo's executor is given two more; a busy machine takes some besides."""


class RankPool:
    """Rank processes that outlive a scenario, since importing torch is most of a test's time."""

    def __init__(self) -> None:
        shapes = [RegionShape(n, max_message_bytes=512 * 576 * 4, max_rows=64, num_board_steps=8) for n in (2, 3)]
        self.regions = {shape.num_ranks: ShmRegion.create(shape) for shape in shapes}
        self._processes = [self._start(rank) for rank in range(MAX_RANKS)]
        self._starting = set(range(MAX_RANKS))

    def run(self, carrier: str, num_ranks: int, scenario: str, *, seed: int = 1, ragged: bool = False) -> list[Any]:
        """Returns each rank's answer; None from one that died."""
        self.regions[num_ranks].reset()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        order = {
            "carrier": carrier,
            "num_ranks": num_ranks,
            "scenario": scenario,
            "seed": seed,
            "fd": self.regions[num_ranks].fd,
            "port": port,
            "leaves_ragged": ragged,
        }
        for rank in self._starting & set(range(num_ranks)):
            assert self._line(rank) == "ready\n"
            self._starting.discard(rank)
        for rank in range(num_ranks):
            stdin = self._processes[rank].stdin
            assert stdin is not None
            stdin.write(json.dumps(order) + "\n")
            stdin.flush()
        return [self._answer(rank) for rank in range(num_ranks)]

    def close(self) -> None:
        for process in self._processes:
            self._stop(process)
        for region in self.regions.values():
            region.close()

    def _answer(self, rank: int) -> Any:
        line = self._line(rank)
        if line:
            return json.loads(line)
        self._stop(self._processes[rank])
        self._processes[rank] = self._start(rank)
        self._starting.add(rank)
        return None

    def _line(self, rank: int) -> str:
        stdout = self._processes[rank].stdout
        assert stdout is not None
        return stdout.readline()

    def _start(self, rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.mesh.support.carrier_rank", str(rank)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[region.fd for region in self.regions.values()],
        )

    def _stop(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
