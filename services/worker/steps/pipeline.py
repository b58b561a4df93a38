"""A step in three parts: `prepare` makes its inputs ready, `launch` enqueues all of its work, `collect` has its report.

Nothing before `collect` waits for the device: ids that a step samples go to the request table by way of the device, and
are read on the host when the step is collected, so that the next may be launched before. On a host a launch is the work
itself and whoever drives this collects at once. What is captured for a layout and a bucket of sizes replaces the calls
of `launch`, over the same buffers. Never decides which rows run.

Shapes: N sampled rows.
"""

import time
from collections import deque
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.backend import StepInputs
from kernels.cpu.collective_status import Purpose
from services.core.ids import LayoutKind, LogIndex, Rank
from services.core.log import ProtocolError
from services.core.ring import RecordKind
from services.core.step import StepPlan, StepReport
from services.worker.dataplane.carrier import Carrier
from services.worker.memory.device import RankDevice
from services.worker.memory.rank_memory import RankMemory
from services.worker.memory.trimmed_pages import Released, settle_pages
from services.worker.steps.active_layout import ActiveLayout, LayoutView
from services.worker.steps.digest import DigestChain, plan_parts
from services.worker.steps.records import Records
from services.worker.steps.sampler import Sampled, Sampler
from services.worker.steps.table import RequestTable, Rows, check_sampled
from services.worker.steps.words import Int64s

MAX_UNREAD_STEPS = 32
"""How far behind sampled ids may stay unread: half of what the token board keeps, so that none is written over. Older
ones are applied without being asked for; their step is then so long past that nobody waits."""


@dataclass(frozen=True, slots=True)
class StepParts:
    """What a rank's steps are made with, for the life of its process."""

    rank: Rank
    memory: RankMemory
    carrier: Carrier
    device: RankDevice
    sampler: Sampler
    records: Records


@dataclass(frozen=True, slots=True)
class Prepared:
    """A step whose inputs are on their way to the device."""

    sequence: LogIndex
    rows: Rows
    inputs: StepInputs
    plan_digest: int
    released: Released | None
    """What became of blocks that the plan calls dead."""
    began_ns: int
    waited_ns: int
    """For peers, before this step."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A step that is enqueued."""

    prepared: Prepared
    sampled: Sampled | None
    """On the sampling rank, where the step samples."""


@dataclass(frozen=True, slots=True)
class _Unread:
    """A step that sampled, until its ids are applied; [N] arrays."""

    sequence: LogIndex
    request: Int64s
    position: Int64s
    ids: Tensor | None
    """On the rank that sampled them; None: they are on the board."""


class StepPipeline:
    """The steps of one generation on one rank."""

    def __init__(self, parts: StepParts, table: RequestTable, active: ActiveLayout) -> None:
        self._parts, self.table, self.active = parts, table, active
        self._unread: deque[_Unread] = deque()
        self._plans, self._reports = DigestChain(), DigestChain()
        self.compute_ns = 0
        """In kernels, of all steps collected."""
        self.last_end_unix_ns: int | None = None
        """None: no step has ended in this epoch."""

    @property
    def num_unread(self) -> int:
        """Steps whose sampled ids are still to be taken."""
        return len(self._unread)

    def prepare(self, plan: StepPlan, sequence: LogIndex) -> Prepared:
        """Checks a plan, brings the table up to it and fills the step's buffers.

        Raises:
            ProtocolError: the plan broke a rule.
            CollectiveError: ids that it reads did not come.
        """
        parts, began_ns, waited_ns = self._parts, time.perf_counter_ns(), self._parts.carrier.watch.waited_ns
        self.read_tokens(max(plan.tokens_through or 0, sequence - MAX_UNREAD_STEPS), sequence)
        changes = self.table.apply_deltas(plan, sequence)
        released = settle_pages(parts.memory, self.table, plan)
        rows = self.table.rows(plan)
        digest = self._plans.extend(plan_parts(sequence, plan, changes, rows, self.table))
        parts.records.write(RecordKind.STEP_BEGAN, sequence, digest=digest)
        inputs = self.active.view.buffers.fill(rows)
        return Prepared(sequence, rows, inputs, digest, released, began_ns, waited_ns)

    def launch(self, prepared: Prepared) -> Launched:
        """Enqueues the step: what comes from the stage before, the layers, what goes to the stage after, the ids.

        Raises:
            CollectiveError: a peer did not come.
        """
        view = self.active.view
        self._run(view, prepared.inputs, prepared.sequence)
        sampled = self._sample(view, prepared) if prepared.inputs.num_sampled else None
        return Launched(prepared, sampled)

    def collect(self, launched: Launched) -> StepReport:
        """Waits until the device has done the step and reads what it left for the host.

        Raises:
            CollectiveError: something that it waited for there did not come.
        """
        prepared, watch = launched.prepared, self._parts.carrier.watch
        self._parts.device.finish()
        watch.check()
        digest = self._report_digest(prepared)
        waited_ns = watch.waited_ns - prepared.waited_ns
        compute_ns = time.perf_counter_ns() - prepared.began_ns - waited_ns
        self.compute_ns += compute_ns
        self.last_end_unix_ns = time.time_ns()
        self._parts.records.write(RecordKind.STEP_ENDED, prepared.sequence, payload=compute_ns)
        return StepReport(
            sequence=prepared.sequence,
            digest=digest,
            compute_ns=compute_ns,
            wait_ns=waited_ns,
            tokens=None if launched.sampled is None else launched.sampled.tokens(),
        )

    def read_tokens(self, through: int, sequence: LogIndex) -> None:
        """Enqueues what all steps up to `through` sampled into the table; `sequence` is the entry that reads them."""
        parts = self._parts
        parts.records.write(RecordKind.TOKENS_AWAITED, sequence)
        while self._unread and self._unread[0].sequence <= through:
            step = self._unread.popleft()
            ids = self._taken(step.sequence) if step.ids is None else step.ids
            if len(ids) != len(step.request):
                raise ProtocolError(
                    f"step {step.sequence} sampled {len(ids)} ids on the sampling rank and {len(step.request)} rows "
                    "here: the ranks were given different plans"
                )
            self.table.apply_tokens(step.sequence, step.request, step.position, ids)

    def _taken(self, sequence: LogIndex) -> Tensor:
        ids = self._parts.carrier.take_tokens(sequence)
        check_sampled(ids, self.table.limits.vocab_size)
        return ids.to(self.table.state.words.device)

    def _report_digest(self, prepared: Prepared) -> int:
        """Over the plan, and the ids and slots that the step read from the table."""
        inputs = prepared.inputs
        read = (tensor.cpu().numpy() for tensor in (inputs.input_ids, inputs.slots))
        return self._reports.extend((np.array([prepared.plan_digest], np.uint64), *read))

    def _run(self, view: LayoutView, inputs: StepInputs, sequence: LogIndex) -> None:
        parts, stage = self._parts, view.stage
        hidden, rank = stage.hidden(inputs.num_tokens), parts.rank
        is_piped, last = view.layout.kind is LayoutKind.PP, view.layout.num_ranks - 1
        if is_piped and rank > 0:
            parts.records.write(RecordKind.HIDDEN_AWAITED, sequence, key=rank - 1)
            parts.carrier.recv(hidden, rank - 1, sequence, purpose=Purpose.HIDDEN_STATES)
        else:
            stage.embed(inputs)
        parts.records.write(RecordKind.LAYERS_ENTERED, sequence)
        stage.layers(inputs, view.pool)
        if is_piped and rank < last:
            parts.records.write(RecordKind.HIDDEN_SENT, sequence, key=rank + 1)
            parts.carrier.send(hidden, rank + 1, sequence, purpose=Purpose.HIDDEN_STATES)

    def _sample(self, view: LayoutView, prepared: Prepared) -> Sampled | None:
        """Samples on the sampling rank, for all; every rank remembers that these ids are to come."""
        parts, rows, step = self._parts, prepared.rows, prepared.sequence
        request, position = rows.request[rows.sampled], rows.context_tokens[rows.sampled].astype(np.int64)
        parts.records.write(RecordKind.SAMPLING, step)
        logits = self._whole_logits(view, prepared.inputs)
        sampled = ids = None
        if logits is not None:
            sampled = parts.sampler.sample(logits.cpu(), self.table, request, position)
            ids = torch.from_numpy(sampled.ids)
            if view.layout.num_ranks > 1:
                parts.records.write(RecordKind.TOKENS_PUBLISHED, step)
                parts.carrier.publish_tokens(step, ids)
            ids = ids.to(self.table.state.words.device)
        self._unread.append(_Unread(step, request, position, ids))
        return sampled

    def _whole_logits(self, view: LayoutView, inputs: StepInputs) -> Tensor | None:
        """[N, vocab_size] on the sampling rank, None elsewhere."""
        parts, layout = self._parts, view.layout
        samples = parts.rank == layout.sampling_rank
        if layout.kind is LayoutKind.PP or layout.num_ranks == 1:
            return view.stage.logits(inputs) if samples else None
        widths = [len(share.vocab) for share in layout.shares]
        return parts.carrier.all_gather_columns(
            view.stage.logits(inputs), widths, to_rank=layout.sampling_rank, purpose=Purpose.LOGITS
        )
