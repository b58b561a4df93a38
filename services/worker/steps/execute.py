"""Executes the step log, entry after entry, in the one thread that touches tensors.

Never decides: what runs, who finishes and which layout holds is in the log. Both layouts' stages are built at start; an
entry picks the one in force. Waits are for peers alone, each with a deadline, through the carrier; when one fails the
carrier is aborted, so that no peer waits for this rank, and the error goes up: the generation ends.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.backend import StepInputs
from kernels.cpu.collective_status import AbortReason, Purpose
from services.core.ids import Epoch, FlipId, LayoutKind, LogIndex, Rank
from services.core.layout import KvSharding, Layout
from services.core.log import LogFollower, ProtocolError
from services.core.ring import RecordKind
from services.core.step import AbandonEntry, CommitEntry, FlipEntry, LogEntry, ResetEntry, StepPlan, StepReport
from services.mesh.debug.damage import DamageKind
from services.models.geometry import ModelGeometry
from services.worker.damage import damage, rows_here
from services.worker.dataplane.carrier import Carrier
from services.worker.dataplane.peers import Peers
from services.worker.memory.device import HOST, RankDevice
from services.worker.memory.rank_memory import RankMemory, work_on
from services.worker.memory.rows.kv_cache import Pool
from services.worker.memory.trimmed_pages import Released, settle_pages
from services.worker.model.stage import Stage, StageSpec, build_stage
from services.worker.participation import FlipAnswer, Parked, Resumed, Switched, Worked, WorkLost
from services.worker.ring import RingWriter
from services.worker.steps.active_layout import Held, LayoutHolder, switch_all
from services.worker.steps.id_space import check_id_space
from services.worker.steps.inputs import inputs_on, make_inputs
from services.worker.steps.sampler import Sampled, Sampler
from services.worker.steps.table import Int32s, Int64s, RequestTable, Rows, TableLimits
from services.worker.steps.wait_clock import WaitClock

DIGEST_BYTES = 8
MAX_UNREAD_STEPS = 32
"""How far behind sampled ids may stay unread: half of what the token board keeps, so that none is written over. Older
ones are applied without being asked for; their step is then so long past that nobody waits."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What this process was sized for; RESET may ask for less, never for more."""

    max_resident_requests: int
    max_batch_tokens: int
    num_valid_ids: int
    """Ids that may be sampled: a vocabulary may be padded beyond them."""
    deadline_s: float
    """Of every wait for a peer."""


@dataclass(frozen=True, slots=True)
class Opened:
    """RESET is done: pools are there, the data plane is joined."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Unread:
    """A step that sampled, until its ids are applied; [N] arrays."""

    sequence: LogIndex
    request: Int64s
    position: Int64s
    ids: Int32s | None
    """On the rank that sampled them; None: they are on the board."""


@dataclass(slots=True)
class ActiveLayout:
    """The layout that steps run under: its shares and this rank's stage of it."""

    layouts: Mapping[LayoutKind, Layout]
    stages: Mapping[LayoutKind, Stage]
    pools: Mapping[LayoutKind, Pool]
    held: Held

    @property
    def name(self) -> str:
        """For the completeness check."""
        return "the active stage"

    @property
    def layout(self) -> Layout:
        """Which ranks hold what."""
        return self.layouts[self.held[0]]

    @property
    def stage(self) -> Stage:
        """What this rank computes."""
        return self.stages[self.held[0]]

    @property
    def pool(self) -> Pool:
        """Where this rank's rows are."""
        return self.pools[self.held[0]]

    def switch(self, kind: LayoutKind, epoch: Epoch) -> None:
        """The other set of views; no byte moves."""
        self.held = (kind, epoch)


@dataclass(slots=True)
class _StepTimes:
    """What a flip's trace wants of the steps around it; wall clock."""

    last_end_unix_ns: int | None = None
    """None: no step ran in this epoch."""
    switched: tuple[FlipId, int] | None = None
    """The outcome whose first step is still to come, and when it was executed."""


def _unheard(answer: FlipAnswer) -> None:
    """Where nobody listens: a rank driven without a service."""


def _unlogged(released: Released) -> None:
    """Where nobody writes a log."""


class Runner:
    """One rank. Use from one thread; `state` may be read from any."""

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
        self._rank, self._geometry, self._layouts, self._device = rank, geometry, layouts, device
        self._carrier, self._memory, self._limits = carrier, memory, limits
        self._clock = WaitClock()
        self._stages: dict[LayoutKind, Stage] = {
            kind: build_stage(self._spec(layout), memory.weights(kind)) for kind, layout in layouts.items()
        }
        self._sampler = Sampler(limits.num_valid_ids)
        self._ring = ring
        self._active: ActiveLayout | None = None
        self._times = _StepTimes()
        self.notice: Callable[[FlipAnswer], None] = _unheard
        """Hears, at once and on this thread, where this rank is in a flip."""
        self.on_release: Callable[[Released], None] = _unlogged
        """Hears, on this thread, what was given back."""
        self.holders: list[LayoutHolder] = []
        """What is switched by a COMMIT besides the stage."""
        self.follower = LogFollower()
        self.resident: RequestTable | None = None
        self._unread: deque[_Unread] = deque()
        self._digest = bytes(DIGEST_BYTES)
        self.compute_ns = 0
        """In kernels since the start; read by status."""

    def _spec(self, layout: Layout) -> StageSpec:
        summed = layout.kind is LayoutKind.TP and layout.num_ranks > 1
        return StageSpec(
            geometry=self._geometry,
            share=layout.shares[self._rank],
            keeps_residual=not summed or self._rank == 0,
            peers=Peers(self._carrier, layout.shares, self._clock, self._limits.deadline_s) if summed else None,
            max_batch_tokens=self._limits.max_batch_tokens,
            max_context_tokens=self._geometry.max_context_tokens,
            place=self._device.place,
            cut_by_tokens=summed and layout.kv_sharding is KvSharding.TOKENS,
        )

    @property
    def pool(self) -> Pool | None:
        """Of the layout in force; None before RESET."""
        return None if self._active is None else self._active.pool

    @property
    def waited_ns(self) -> int:
        """Spent waiting for peers since the start."""
        return self._clock.waited_ns

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
                    return self._reset(reset)
                case StepPlan() as plan:
                    return self._step(plan, entry.sequence)
                case FlipEntry() as flip:
                    self._park(flip, entry.sequence)
                case CommitEntry() as commit:
                    self._commit(commit, entry.sequence)
                case AbandonEntry() as abandon:
                    self._record(RecordKind.ABANDONED, entry.sequence)
                    self._switched(abandon.flip_id, is_committed=False)
        except BaseException:
            self._carrier.abort(AbortReason.STEP_FAILED)
            raise
        return None

    def work(self, flip_id: FlipId) -> Worked | WorkLost:
        """Read, seam, write and verify of a flip, between FLIP and its outcome.

        Raises `ProtocolError` outside a flip.
        """
        began_unix_ns = time.time_ns()
        flip = self.follower.flip
        if flip is None or flip.flip_id != flip_id:
            raise ProtocolError(f"work for flip {flip_id}, parked for {flip.flip_id if flip else 'none'}")
        assert self.follower.sequence is not None
        self._record(RecordKind.FLIP_WORK, self.follower.sequence)
        assert flip.target in self._stages, "both layouts' stages are built at start"
        answer = work_on(self._memory, flip, began_unix_ns)
        self._record(RecordKind.FLIP_DONE, self.follower.sequence)
        return answer

    def damage(self, kind: DamageKind, seed: int) -> str:
        """For instruments: damages rows of a running request between two steps; what was damaged.

        Raises:
            NothingToDamageError: no running request has rows enough here.
        """
        assert self._active is not None and self.resident is not None
        return damage(rows_here(self._active.pool, self.resident, self._active.layout, self._rank), kind, seed)

    def _park(self, flip: FlipEntry, sequence: LogIndex) -> None:
        """Every earlier step is done; takes what is still to be taken, so that all channels are empty."""
        assert self.resident is not None
        self._apply_tokens(self.resident, sequence)
        plan = self._memory.plan(flip)
        self._record(RecordKind.PARKED, sequence)
        parked_unix_ns, last_end = time.time_ns(), self._times.last_end_unix_ns
        self.notice(Parked(flip.flip_id, last_end, parked_unix_ns, not plan.refusal, plan.refusal, plan.hash))

    def _commit(self, commit: CommitEntry, sequence: LogIndex) -> None:
        assert self._active is not None and self.follower.epoch is not None
        switch_all([self._active, *self.holders], commit.layout, self.follower.epoch)
        self._record(RecordKind.COMMITTED, sequence)
        self._switched(commit.flip_id, is_committed=True)

    def _switched(self, flip_id: FlipId, *, is_committed: bool) -> None:
        assert self._active is not None
        self._memory.settle(self._active.held[0])
        self._times = _StepTimes(switched=(flip_id, time.time_ns()))
        self.notice(Switched(flip_id, is_committed))

    def _note_first_step(self) -> None:
        if self._times.switched is not None:
            flip_id, switched_unix_ns = self._times.switched
            self._times.switched = None
            self.notice(Resumed(flip_id, switched_unix_ns, time.time_ns()))

    def _record(self, kind: RecordKind, sequence: LogIndex, key: int = 0, payload: int = 0, digest: int = 0) -> None:
        if self._ring is not None:
            assert self.follower.epoch is not None
            self._ring.write(kind, sequence, self.follower.epoch, key, payload, digest)

    def _reset(self, reset: ResetEntry) -> Opened:
        limits, geometry = self._limits, self._geometry
        if reset.max_resident_requests > limits.max_resident_requests:
            raise ProtocolError(
                f"RESET asks for {reset.max_resident_requests} resident requests, this rank was started for "
                f"{limits.max_resident_requests}: give scheduler and workers the same configuration"
            )
        if reset.max_context_tokens > geometry.max_context_tokens or reset.num_blocks < 1:
            raise ProtocolError(
                f"RESET asks for a context of {reset.max_context_tokens} tokens and {reset.num_blocks} blocks; at most "
                f"{geometry.max_context_tokens} tokens and at least one block expected"
            )
        self.resident = RequestTable(
            TableLimits(
                max_resident_requests=reset.max_resident_requests,
                max_context_tokens=reset.max_context_tokens,
                num_blocks=reset.num_blocks,
                vocab_size=geometry.vocab_size,
                max_batch_tokens=limits.max_batch_tokens,
            )
        )
        pools = self._memory.open_pools(reset.num_blocks, reset.layout)
        check_id_space(reset.num_blocks, self._layouts, pools, self._carrier, limits.deadline_s)
        assert self.follower.epoch is not None
        self._active = ActiveLayout(self._layouts, self._stages, pools, (reset.layout, self.follower.epoch))
        assert self.follower.sequence is not None
        self._record(RecordKind.RESET, self.follower.sequence)
        return Opened(reset.num_blocks)

    def _step(self, plan: StepPlan, sequence: LogIndex) -> StepReport:
        began_ns, waited_ns = time.perf_counter_ns(), self._clock.waited_ns
        resident, active = self.resident, self._active
        assert resident is not None
        assert active is not None
        self._note_first_step()
        self._record(RecordKind.TOKENS_AWAITED, sequence)
        self._apply_tokens(resident, max(plan.tokens_through or 0, sequence - MAX_UNREAD_STEPS))
        resident.apply_deltas(plan, sequence)
        if (released := settle_pages(self._memory, resident, plan)) is not None:
            self.on_release(released)
        rows = resident.rows(plan)
        input_ids = resident.input_ids(rows)
        self._chain(sequence, rows, input_ids)
        digest = int.from_bytes(self._digest, "little")
        self._record(RecordKind.STEP_BEGAN, sequence, digest=digest)
        inputs = inputs_on(make_inputs(resident, rows, input_ids), self._device.place)
        self._run(active, inputs, sequence)
        sampled = self._sample(active, resident, rows, inputs, sequence) if inputs.num_sampled else None
        self._device.finish()
        waited_ns = self._clock.waited_ns - waited_ns
        compute_ns = time.perf_counter_ns() - began_ns - waited_ns
        self.compute_ns += compute_ns
        self._times.last_end_unix_ns = time.time_ns()
        self._record(RecordKind.STEP_ENDED, sequence, payload=compute_ns)
        return StepReport(
            sequence=sequence,
            digest=digest,
            compute_ns=compute_ns,
            wait_ns=waited_ns,
            tokens=None if sampled is None else sampled.tokens(),
        )

    def _apply_tokens(self, resident: RequestTable, through: int) -> None:
        """Applies what all steps up to `through` sampled, waiting for those on the board."""
        while self._unread and self._unread[0].sequence <= through:
            step = self._unread.popleft()
            ids = step.ids
            if ids is None:
                ids = self._clock.timed(
                    self._carrier.take_tokens, step.sequence, deadline_s=self._limits.deadline_s
                ).numpy()
            if len(ids) != len(step.request):
                raise ProtocolError(
                    f"step {step.sequence} sampled {len(ids)} ids on the sampling rank and {len(step.request)} rows "
                    "here: the ranks were given different plans"
                )
            resident.apply_tokens(step.sequence, step.request, step.position, ids)

    def _chain(self, sequence: LogIndex, rows: Rows, input_ids: Int32s) -> None:
        chain = hashlib.blake2b(self._digest, digest_size=DIGEST_BYTES)
        chain.update(sequence.to_bytes(8, "little"))
        for values in (rows.request, rows.start, rows.row_tokens, rows.sampled, input_ids):
            chain.update(values.tobytes())
        self._digest = chain.digest()

    def _run(self, active: ActiveLayout, inputs: StepInputs, sequence: LogIndex) -> None:
        layout, stage = active.layout, active.stage
        last = layout.num_ranks - 1
        piped = layout.kind is LayoutKind.PP
        hidden = stage.hidden(inputs.num_tokens)
        deadline_s, purpose, timed = self._limits.deadline_s, Purpose.HIDDEN_STATES, self._clock.timed
        if piped and self._rank > 0:
            timed(self._carrier.recv, hidden, self._rank - 1, sequence, deadline_s=deadline_s, purpose=purpose)
        else:
            stage.embed(inputs)
        self._record(RecordKind.LAYERS_ENTERED, sequence)
        stage.layers(inputs, active.pool)
        if piped and self._rank < last:
            self._record(RecordKind.HIDDEN_SENT, sequence, key=self._rank + 1)
            timed(self._carrier.send, hidden, self._rank + 1, sequence, deadline_s=deadline_s, purpose=purpose)

    def _sample(
        self, active: ActiveLayout, resident: RequestTable, rows: Rows, inputs: StepInputs, step: LogIndex
    ) -> Sampled | None:
        """Samples on the sampling rank, for all; every rank remembers that these ids are to come."""
        request, position = rows.request[rows.sampled], rows.context_tokens[rows.sampled].astype(np.int64)
        self._record(RecordKind.SAMPLING, step)
        logits = self._whole_logits(active, inputs)
        sampled = None
        if logits is not None:
            sampled = self._sampler.sample(logits.cpu(), resident, request, position)
            if active.layout.num_ranks > 1:
                self._record(RecordKind.TOKENS_PUBLISHED, step)
                self._carrier.publish_tokens(step, torch.from_numpy(sampled.ids))
        self._unread.append(_Unread(step, request, position, None if sampled is None else sampled.ids))
        return sampled

    def _whole_logits(self, active: ActiveLayout, inputs: StepInputs) -> Tensor | None:
        """[N, vocab_size] on the sampling rank, None elsewhere."""
        layout = active.layout
        samples = self._rank == layout.sampling_rank
        if layout.kind is LayoutKind.PP or layout.num_ranks == 1:
            return active.stage.logits(inputs) if samples else None
        return self._clock.timed(
            self._carrier.all_gather_columns,
            active.stage.logits(inputs),
            [len(share.vocab) for share in layout.shares],
            to_rank=layout.sampling_rank,
            deadline_s=self._limits.deadline_s,
            purpose=Purpose.LOGITS,
        )
