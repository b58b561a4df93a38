"""Who a process is, and which life of it: what logs, traces, metrics and status carry."""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path

from services.core.ids import Rank
from services.mesh.settings.paths import process_name

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class Identity:
    """One start of one process. `incarnation` differs for every start, also after the pid comes round again."""

    service: str
    rank: Rank | None
    pid: int
    incarnation: str
    boot_id: str
    started_ns: int

    @property
    def name(self) -> str:
        """`worker-1`, or `router`."""
        return process_name(self.service, self.rank)


def identify(service: str, rank: Rank | None) -> Identity:
    """Makes this process's identity; once for each start. `started_ns` is wall time."""
    started_ns = time.time_ns()
    return Identity(
        service=service,
        rank=rank,
        pid=os.getpid(),
        incarnation=f"{started_ns // 1_000_000:x}-{secrets.token_hex(4)}",
        boot_id=BOOT_ID.read_text("ascii").strip(),
        started_ns=started_ns,
    )
