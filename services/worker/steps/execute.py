"""Executes the step log, entry after entry, in the one thread that touches tensors.

Never decides: what runs, who finishes and which layout holds is in the log. Waits are for peers alone, each with a
deadline; when one fails the carrier is aborted, so that no peer waits for this rank, and the error goes up: the
generation ends.
"""

from collections.abc import Callable, Mapping

from kernels.cpu.collective_status import AbortReason
from services.core.ids import FlipId, LayoutKind, LogIndex, Rank
from services.core.layout import Layout
from services.core.log import LogFollower, ProtocolError
from services.core.ring import RecordKind
from services.core.step import AbandonEntry, CommitEntry, FlipEntry, LogEntry, ResetEntry, StepPlan, StepReport
from services.mesh.debug.damage import DamageKind
from services.models.geometry import ModelGeometry
from services.worker.damage import damage, rows_here
from services.worker.dataplane.carrier import Carrier
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.rank_memory import RankMemory
from services.worker.memory.rows.kv_cache import Pool
from services.worker.memory.trimmed_pages import Released
from services.worker.participation import FlipAnswer, Looked, Worked, WorkLost
from services.worker.ring import RingWriter
from services.worker.steps.flip_side import FlipSide
from services.worker.steps.pipeline import StepParts, StepPipeline
from services.worker.steps.records import Records
from services.worker.steps.reset import Opened, open_steps, table_limits
from services.worker.steps.sampler import Sampler
from services.worker.steps.stages import RunnerLimits, build_stages


def _unheard(answer: FlipAnswer) -> None:
    """Where nobody listens: a rank driven without a service."""


def _unlogged(released: Released) -> None:
    """Where nobody writes a log."""


class Runner:
    """One rank. Use from one thread; `follower` may be read from any."""

    def __init__(
        self,
        rank: Rank,
        geometry: ModelGeometry,
        memory: RankMemory,
        layouts: Mapping[LayoutKind, Layout],
        carrier: Carrier,
        limits: RunnerLimits,
        ring: RingWriter | None = None,
        device: RankDevice = HOST,
    ) -> None:
        self._geometry, self._limits = geometry, limits
        self.follower = LogFollower()
        records = Records(ring, self.follower)
        self.stages = build_stages(rank, geometry, memory, layouts, carrier, limits, device)
        sampler = Sampler(limits.num_valid_ids)
        self.parts = StepParts(rank, memory, carrier, device, sampler, records)
        self.notice: Callable[[FlipAnswer], None] = _unheard
        """Hears, at once and on this thread, where this rank is in a flip."""
        self.on_release: Callable[[Released], None] = _unlogged
        """Hears, on this thread, what was given back."""
        self.steps: StepPipeline | None = None
        """None before RESET."""
        self._flips: FlipSide | None = None

    @property
    def pool(self) -> Pool | None:
        """Of the active layout; None before RESET."""
        return None if self.steps is None else self.steps.active.view.pool

    @property
    def compute_ns(self) -> int:
        """In kernels since the start."""
        return 0 if self.steps is None else self.steps.compute_ns

    @property
    def waited_ns(self) -> int:
        """Spent waiting for peers since the start."""
        return self.parts.carrier.watch.waited_ns

    def execute(self, entry: LogEntry) -> Opened | StepReport | None:
        """Executes the next entry; what it answers with, None for entries of a flip.

        Raises:
            ProtocolError: the log broke a rule.
            CollectiveError: a wait for a peer ended without it.
        """
        try:
            self.follower.follow(entry)
            match entry.entry:
                case ResetEntry() as reset:
                    return self._reset(reset, entry.sequence)
                case StepPlan() as plan:
                    return self._step(plan, entry.sequence)
                case FlipEntry() | CommitEntry() | AbandonEntry() as flip:
                    self._flip(flip, entry.sequence)
        except BaseException:
            self.parts.carrier.watch.abort(AbortReason.STEP_FAILED)
            raise
        return None

    def work(self, flip_id: FlipId) -> Worked | WorkLost:
        """This rank's part of the flip that it is parked for. Raises `ProtocolError` outside a flip."""
        if self._flips is None:
            raise ProtocolError(f"work for flip {flip_id}, and the log has not begun")
        return self._flips.work(flip_id)

    def look(self, flip_id: FlipId) -> Looked:
        """Whether the flip that this rank is parked for could still begin. Raises `ProtocolError` before RESET."""
        if self._flips is None:
            raise ProtocolError(f"a look for flip {flip_id}, and the log has not begun")
        return self._flips.look(flip_id)

    def damage(self, kind: DamageKind, seed: int) -> str:
        """For instruments: damages rows of a running request between two steps; what was damaged.

        Raises:
            NothingToDamageError: no running request has rows enough here.
        """
        assert self.steps is not None, "the log begins with RESET"
        view = self.steps.active.view
        return damage(rows_here(view.pool, self.steps.table, view.layout, self.parts.rank), kind, seed)

    def _reset(self, reset: ResetEntry, sequence: LogIndex) -> Opened:
        parts = self.parts
        limits = table_limits(reset, self._limits, self._geometry)
        self.steps, pools = open_steps(reset, limits, parts, self.stages)
        self._flips = FlipSide(parts.rank, parts.memory, self.follower, parts.records, self.steps, pools)
        parts.records.write(RecordKind.RESET, sequence)
        return Opened(reset.num_blocks)

    def _step(self, plan: StepPlan, sequence: LogIndex) -> StepReport:
        """Collected at once: on a host nothing is gained by issuing ahead, as launching a step is computing it."""
        assert self.steps is not None and self._flips is not None, "the log begins with RESET"
        self._flips.note_first_step(self.notice)
        prepared = self.steps.prepare(plan, sequence)
        if prepared.released is not None:
            self.on_release(prepared.released)
        return self.steps.collect(self.steps.launch(prepared))

    def _flip(self, entry: FlipEntry | CommitEntry | AbandonEntry, sequence: LogIndex) -> None:
        assert self._flips is not None, "the log begins with RESET"
        match entry:
            case FlipEntry():
                self.notice(self._flips.park(entry, sequence))
            case CommitEntry():
                self.notice(self._flips.commit(entry, sequence))
            case AbandonEntry():
                self.notice(self._flips.abandon(entry, sequence))
