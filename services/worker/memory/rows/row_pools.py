"""A rank's KV pools of both layouts, as its memory sees them: opened, and moved from one to the other by a flip."""

from collections.abc import Mapping
from typing import Protocol

from services.core.flip.work import RowsKind
from services.core.ids import LayoutKind
from services.core.step import FlipEntry
from services.worker.memory.flip_plan import FlipPlan, Performs
from services.worker.memory.rows.kv_cache import Pool


class RowPools(Protocol):
    """Use from the model thread."""

    @property
    def kind(self) -> RowsKind:
        """How they are kept."""

    @property
    def usable(self) -> frozenset[LayoutKind]:
        """Layouts whose pool has its memory now; which of them the rows are in, the log says."""

    @property
    def num_batches(self) -> int:
        """Of the flip that was planned last; 0: none."""

    @property
    def performs(self) -> Performs:
        """The asks of a flip that are about rows."""

    def open(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """Pools of equal ids, of which `kind` is in force; those of an earlier call are gone."""

    def release_above(self, num_blocks: int) -> int:
        """Returns memory that has only rows of blocks from `num_blocks` on; bytes, by the system's account.

        Before a step is computed, and with no rank at a step that has such rows; those ids may come back in later ones.
        """

    def back_below(self, num_blocks: int) -> None:
        """Rows of blocks below `num_blocks` may be written from here on: has their memory back where touching does not.

        Raises:
            BackingError: there is none.
        """

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """A rank's verdict on moving the live rows; nothing is touched."""

    def obstacle(self, flip: FlipEntry) -> str:
        """Why the flip that was planned could not begin now; empty: it could. Nobody waits."""

    def close(self) -> None:
        """Returns the memory; no view of it may be touched from here on."""
