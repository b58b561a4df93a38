"""The scheduler's metrics: what the batcher counts and ranks report, published a few times a second at most.

Counts grow over generations. Never on the path of a step beyond a handful of additions.
"""

import time
from collections.abc import Callable

from services.core.request import FinishReason
from services.mesh.telemetry.metrics import Metrics
from services.scheduler.batch.batcher import Batcher
from services.scheduler.batch.step_ledger import StepRecord
from services.scheduler.batch.tally import Tally

PUBLISH_INTERVAL_S = 0.2
NS_PER_S = 1e9
STEP_BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)

COUNTS = {
    "num_steps": ("flipmesh_scheduler_steps", "Steps issued"),
    "num_computed_tokens": ("flipmesh_scheduler_computed_tokens", "Tokens computed, recomputed and dead ones included"),
    "num_emitted_tokens": ("flipmesh_scheduler_emitted_tokens", "Output tokens"),
    "num_dropped_tokens": (
        "flipmesh_scheduler_dropped_tokens",
        "Sampled for requests that had ended or were preempted",
    ),
    "num_prompt_tokens": ("flipmesh_scheduler_prompt_tokens", "Prompt tokens of first admissions"),
    "num_cached_tokens": ("flipmesh_scheduler_cached_tokens", "Prompt tokens found in the prefix cache"),
    "num_resumed_tokens": (
        "flipmesh_scheduler_resumed_tokens",
        "Known tokens of requests that returned after preemption",
    ),
    "num_resumed_cached_tokens": ("flipmesh_scheduler_resumed_cached_tokens", "Of these, found in the prefix cache"),
    "num_preemptions": ("flipmesh_scheduler_preemptions", "Requests sent back to the queue for their blocks or memory"),
    "num_rejected": ("flipmesh_scheduler_rejected_requests", "Requests not taken"),
}
"""Fields of `Tally` and their counters."""


class Meters:
    """Publishes one batcher after another."""

    def __init__(self, metrics: Metrics, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s, self._published_s = clock_s, float("-inf")
        self._last = Tally()
        self._counters = {field: metrics.counter(name, text) for field, (name, text) in COUNTS.items()}
        self._finished = metrics.counter("flipmesh_scheduler_finished_requests", "Requests that ended", ["reason"])
        self._lost = metrics.counter("flipmesh_scheduler_lost_generations", "Generations that ended")
        self._step_s = metrics.histogram(
            "flipmesh_scheduler_step_seconds", "From a step's issue to its last acknowledgement", STEP_BUCKETS_S
        )
        self._compute_s = metrics.counter("flipmesh_scheduler_rank_compute_seconds", "Time in kernels", ["rank"])
        self._wait_s = metrics.counter("flipmesh_scheduler_rank_wait_seconds", "Time waiting for peers", ["rank"])
        self._resident = metrics.gauge("flipmesh_scheduler_resident_requests", "Requests in the batch")
        self._queued = metrics.gauge("flipmesh_scheduler_queued_requests", "Requests waiting for admission")
        self._blocks = metrics.gauge("flipmesh_scheduler_blocks", "Blocks of the pool by state", ["state"])
        self._abandoned = metrics.gauge("flipmesh_scheduler_flips_abandoned_in_a_row", "0 after a commit")
        self._unsound = metrics.counter(
            "flipmesh_scheduler_unsound_censuses", "Counts of blocks after a flip that did not add up"
        )
        self._dropped_advice = metrics.counter(
            "flipmesh_scheduler_dropped_advice", "Advice of the policy that could not be read"
        )

    def on_finished(self, record: StepRecord, batcher: Batcher) -> None:
        """A step is acknowledged by all ranks."""
        assert record.finished_ns is not None, "only finished steps are measured"
        self._step_s.observe((record.finished_ns - record.issued_ns) / NS_PER_S)
        for rank, compute_ns in enumerate(record.compute_ns):
            self._compute_s.labels(rank).inc(compute_ns / NS_PER_S)
            self._wait_s.labels(rank).inc(record.wait_ns[rank] / NS_PER_S)
        if not batcher.num_in_flight or self._clock_s() - self._published_s >= PUBLISH_INTERVAL_S:
            self.publish(batcher)

    def on_dropped_advice(self) -> None:
        """The policy said something that is no advice."""
        self._dropped_advice.inc()

    def on_flip(self, abandoned_in_a_row: int, *, is_sound: bool) -> None:
        """An attempt has ended and the blocks are counted."""
        self._abandoned.set(abandoned_in_a_row)
        self._unsound.inc(not is_sound)

    def on_lost(self, batcher: Batcher) -> None:
        """The generation ended: its last counts, and a fresh start for the next."""
        self.publish(batcher)
        self._lost.inc()
        self._last = Tally()
        for gauge in (self._resident, self._queued):
            gauge.set(0)

    def publish(self, batcher: Batcher) -> None:
        """Brings counters and gauges up to the batcher's state."""
        self._published_s = self._clock_s()
        tally, load = batcher.tally, batcher.load()
        for field, counter in self._counters.items():
            counter.inc(getattr(tally, field) - getattr(self._last, field))
            setattr(self._last, field, getattr(tally, field))
        for reason in FinishReason:
            self._finished.labels(reason.value).inc(tally.num_finished[reason] - self._last.num_finished[reason])
            self._last.num_finished[reason] = tally.num_finished[reason]
        self._resident.set(load.running_requests)
        self._queued.set(load.queued_requests)
        held = batcher.limits.num_blocks - load.free_blocks - load.cached_blocks
        for state, count in (("free", load.free_blocks), ("cached", load.cached_blocks), ("referenced", held)):
            self._blocks.labels(state).set(count)
