"""A rank's KV pools of both layouts, as a memory mode sees them: opened, and moved from one to the other by a flip."""

from collections.abc import Mapping
from typing import Protocol

from services.core.ids import LayoutKind
from services.core.step import FlipEntry
from services.worker.memory.rank_memory import FlipPlan, Moved
from services.worker.memory.rows.kv_cache import Pool


class RowPools(Protocol):
    """See RankMemory for the order of calls. Use from the model thread."""

    def open(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """Pools of equal ids, of which `kind` is in force; those of an earlier call are gone."""

    def release_above(self, num_blocks: int) -> int:
        """See RankMemory: of both layouts' pools."""

    def back_below(self, num_blocks: int) -> None:
        """See RankMemory: of the pool in force."""

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """A rank's verdict on moving the live rows; nothing is touched."""

    def move(self, flip: FlipEntry) -> Moved:
        """Moves the live rows; raises like RankMemory.move."""

    def settle(self, kind: LayoutKind) -> None:
        """`kind` is in force from now on: its rows are there, or are had back; raises like RankMemory.settle."""

    def close(self) -> None:
        """Returns the memory; no view of it may be touched from here on."""
