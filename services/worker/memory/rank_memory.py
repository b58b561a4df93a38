"""Where a rank's weights and KV rows are, as its runner sees them: weights of one kind times rows of one kind.

A flip's work is a program (core.flip.work) that is composed from the two kinds; here it is given what performs its
asks. Never decides that a flip happens, and never switches: COMMIT does. A rank that has said that it is broken stays
so until its process ends.
"""

from collections.abc import Mapping
from typing import Protocol

from services.core.flip.work import Broken, Finished, FlipWork, Outcome, Restored, WeightsKind, settle
from services.core.flip.work_asks import Agree, LookForRoom
from services.core.flip.work_table import Answer
from services.core.ids import LayoutKind
from services.core.step import FlipEntry
from services.placement.reshard import stable_hash
from services.worker.memory.drive import carry_out
from services.worker.memory.flip_plan import FlipPlan, NotDoneError, Performs
from services.worker.memory.rows.kv_cache import Pool
from services.worker.memory.rows.row_pools import RowPools
from services.worker.memory.tally import Tally
from services.worker.memory.wire import Wire
from services.worker.model.stage import Weights
from services.worker.participation import Worked, WorkLost


class NotWholeError(RuntimeError):
    """The layout in force is not whole on this rank, and cannot be made so: the generation ends."""


class RankWeights(Protocol):
    """One rank's weights under both layouts. Use from the model thread."""

    @property
    def kind(self) -> WeightsKind:
        """How they are kept."""

    @property
    def num_bytes(self) -> int:
        """What this rank maps or owns of them."""

    @property
    def performs(self) -> Performs:
        """The asks of a flip that are about weights."""

    @property
    def usable(self) -> frozenset[LayoutKind]:
        """Layouts whose every byte is known to be here now."""

    def of(self, kind: LayoutKind) -> Weights:
        """The weights of this rank's share under a layout; there while it is in force."""

    def plan_hash(self, target: LayoutKind) -> int:
        """Of what ranks send each other of them."""

    def obstacle(self, target: LayoutKind, wait_s: float) -> str:
        """Why those of `target` cannot be had, after as long a wait; empty: they can."""

    def make_whole(self, kind: LayoutKind) -> None:
        """Those of `kind` are to be here, whatever that takes, without a peer. Raises where they cannot be had."""

    def close(self) -> None:
        """Returns the memory; no view of it may be touched from here on."""


class RankMemory:
    """One rank's weights and pools under both layouts. Use from the model thread."""

    def __init__(self, weights: RankWeights, rows: RowPools, wire: Wire | None = None) -> None:
        """`wire`: to the other ranks; None: nothing ever moves between them."""
        self._weights, self.rows, self._wire = weights, rows, wire
        self._tally = Tally() if wire is None else wire.tally
        self._name = "this rank" if wire is None else f"rank {wire.rank}"
        self._plan: tuple[FlipEntry, FlipPlan] | None = None
        self._outcome: Outcome | None = None
        """Of the work that was done last."""

    @property
    def weights_bytes(self) -> int:
        """What this rank maps or owns of the weights."""
        return self._weights.num_bytes

    @property
    def usable(self) -> frozenset[LayoutKind]:
        """Layouts whose weights are here now and whose rows may be written."""
        return self._weights.usable & self.rows.usable

    def weights(self, kind: LayoutKind) -> Weights:
        """The weights of this rank's share under a layout."""
        return self._weights.of(kind)

    def open_pools(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """Pools of `num_blocks` for both layouts, at RESET, of which `kind` is in force; earlier ones are gone."""
        self._weights.make_whole(kind)
        return self.rows.open(num_blocks, kind)

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """What the flip would move; waits within a bound for what is on its way, and never raises."""
        rows = self.rows.plan(flip)
        wait_s = 0.0 if self._wire is None else self._wire.bounds.verdict_wait_s
        refusal = rows.refusal or self._weights.obstacle(flip.target, wait_s)
        plan = FlipPlan(stable_hash([rows.hash, self._weights.plan_hash(flip.target)]), refusal)
        self._plan = (flip, plan)
        return plan

    def obstacle(self, flip: FlipEntry) -> str:
        """Why the flip that was planned could not begin now; empty: it could. Nothing is touched, nobody waits."""
        if self._plan is None or self._plan[0] != flip:
            return f"flip {flip.flip_id} has no plan here"
        return self.rows.obstacle(flip) or self._weights.obstacle(flip.target, 0)

    def work(self, flip: FlipEntry, entered_unix_ns: int) -> Worked | WorkLost:
        """Does a flip's work, from ENTER to what the mover is told."""
        self._tally.clear()
        program = FlipWork(self._weights.kind, self.rows.kind, flip.target, self.rows.num_batches).run()
        self._outcome = carry_out(program, self._performs(flip), self._name)
        match self._outcome:
            case Finished():
                tally = self._tally
                return Worked(
                    flip.flip_id,
                    entered_unix_ns,
                    read_ns=tally.read_ns,
                    seam_ns=tally.seam_ns,
                    write_ns=tally.write_ns,
                    verify_ns=tally.verify_ns,
                    bytes_moved=tally.bytes_moved,
                    rows_moved=tally.rows_moved,
                )
            case Restored(reason):
                return WorkLost(flip.flip_id, reason, restored=True)
            case Broken(reason):
                if self._wire is not None:
                    self._wire.abort()
                return WorkLost(flip.flip_id, reason, restored=False)

    def settle(self, kind: LayoutKind) -> None:
        """Behind a flip's outcome: `kind` is in force from the next entry on.

        Raises:
            NotWholeError: it is not whole here.
        """
        performs = {**self._weights.performs, **self.rows.performs}
        program = settle(self._weights.kind, self.rows.kind, kind, self._outcome)
        outcome = carry_out(program, performs, self._name)
        if isinstance(outcome, Broken):
            raise NotWholeError(outcome.reason)
        self._plan = self._outcome = None

    def close(self) -> None:
        """Returns the memory; no view of it may be touched from here on."""
        self._weights.close()
        self.rows.close()

    def _performs(self, flip: FlipEntry) -> Performs:
        def look(_: LookForRoom) -> None:
            if obstacle := self.obstacle(flip):
                raise NotDoneError(obstacle)

        return {**self._weights.performs, **self.rows.performs, LookForRoom: look, Agree: self._agree}

    def _agree(self, ask: Agree) -> Answer | None:
        """Every rank's word on this very place of this very plan."""
        assert self._wire is not None, "a program in which ranks meet has a wire"
        plan_hash = 0 if self._plan is None else self._plan[1].hash
        with self._tally.timed("verify_ns"):
            return self._wire.agree(ask.failure, stable_hash([plan_hash, ask.about.value, ask.batch]))
