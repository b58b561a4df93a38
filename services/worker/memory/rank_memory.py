"""Where a rank's weights and KV rows are, as its runner sees them; the one place where memory modes differ.

In `shared` mode every rank maps one copy of both and a flip moves nothing; where ranks own what they hold, a flip moves
bytes between them (`private`). The runner knows neither: it asks for weights by layout, for pools by layout, and lets
the memory do a flip's work. Never decides that a flip happens, and never switches: COMMIT does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout
from services.core.step import FlipEntry
from services.models.geometry import ModelGeometry
from services.placement.rows.transfers import pooled_heads
from services.worker.memory.rows.kv_cache import KvPool, Pool
from services.worker.memory.weights.mapped import WeightStore
from services.worker.model.stage import Weights
from services.worker.participation import Worked, WorkLost


class RestorableError(RuntimeError):
    """A flip's work that failed with the layout before intact: the flip ends, serving goes on."""


class DataPlaneLostError(RuntimeError):
    """A flip's work that failed within an exchange: peers cannot be waited for any more and the generation ends."""


@dataclass(frozen=True, slots=True)
class FlipPlan:
    """A rank's verdict on a flip, before anything is touched."""

    hash: int
    """Of what is to move: equal on all ranks or not the same plan."""
    refusal: str = ""
    """Why it does not fit; empty: it fits."""


@dataclass(frozen=True, slots=True)
class Moved:
    """What a flip's work took and moved; durations do not overlap."""

    read_ns: int = 0
    seam_ns: int = 0
    write_ns: int = 0
    verify_ns: int = 0
    bytes_moved: int = 0
    """Received from other ranks."""
    rows_moved: int = 0
    """Rows received, in part or whole, from other ranks; a row that comes from two counts twice."""


class RankMemory(Protocol):
    """One rank's weights and pools under both layouts."""

    @property
    def weights_bytes(self) -> int:
        """What this rank maps or owns of the weights."""

    def weights(self, kind: LayoutKind) -> Weights:
        """The weights of this rank's share under a layout."""

    def open_pools(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """Pools of `num_blocks` for both layouts, at RESET, of which `kind` is in force; earlier ones are gone."""

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
        """What the flip would move; never raises for what the entry says."""

    def move(self, flip: FlipEntry) -> Moved:
        """Read, seam, write and verify; until COMMIT the layout before is there, or can be had back.

        Raises:
            RestorableError: it could not be done; the layout before has its bytes.
            DataPlaneLostError: the exchange broke.
        """

    def settle(self, kind: LayoutKind) -> None:
        """After an outcome: `kind` is in force from the next entry on, whatever was moved.

        Raises:
            DataPlaneLostError: its bytes cannot be had.
        """


def work_on(memory: RankMemory, flip: FlipEntry, entered_unix_ns: int) -> Worked | WorkLost:
    """Does a flip's work; a failure that the flip's protocol has a word for is its answer."""
    try:
        moved = memory.move(flip)
    except RestorableError as error:
        return WorkLost(flip.flip_id, str(error), restored=True)
    except DataPlaneLostError as error:
        return WorkLost(flip.flip_id, str(error), restored=False)
    return Worked(
        flip.flip_id,
        entered_unix_ns,
        read_ns=moved.read_ns,
        seam_ns=moved.seam_ns,
        write_ns=moved.write_ns,
        verify_ns=moved.verify_ns,
        bytes_moved=moved.bytes_moved,
        rows_moved=moved.rows_moved,
    )


class SharedMemory:
    """One copy that all ranks of a host map; both layouts are views of it."""

    def __init__(
        self,
        rank: Rank,
        store: WeightStore,
        pool_fd: int,
        geometry: ModelGeometry,
        layouts: Mapping[LayoutKind, Layout],
    ) -> None:
        self._rank, self._store, self._pool_fd, self._geometry = rank, store, pool_fd, geometry
        self._pool: KvPool | None = None
        tp = layouts[LayoutKind.TP]
        self._pooled = pooled_heads(tp, geometry.num_kv_heads)
        self._first_kv_head = tp.shares[rank].kv_heads.begin - self._pooled.places[rank].begin

    @property
    def weights_bytes(self) -> int:
        """See RankMemory: mapped, by every rank alike."""
        return self._store.file_bytes + self._store.expanded_bytes

    def weights(self, kind: LayoutKind) -> Weights:
        """See RankMemory."""
        return self._store

    def open_pools(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """See RankMemory: one pool for both."""
        copied = self._pooled.copied
        self._pool = pool = KvPool(self._pool_fd, self._geometry, num_blocks, len(copied))
        return {LayoutKind.PP: pool.seen(0, copied), LayoutKind.TP: pool.seen(self._first_kv_head)}

    def release_above(self, num_blocks: int) -> int:
        """See RankMemory: by rank 0 for all; no rank is beyond the step that it is about to begin."""
        return 0 if self._rank or self._pool is None else self._pool.release_above(num_blocks)

    def back_below(self, num_blocks: int) -> None:
        """See RankMemory: by touching."""

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """See RankMemory: nothing moves, everything fits."""
        return FlipPlan(0)

    def move(self, flip: FlipEntry) -> Moved:
        """See RankMemory: the bytes of both layouts are where they are."""
        return Moved()

    def settle(self, kind: LayoutKind) -> None:
        """See RankMemory: both layouts are there."""
