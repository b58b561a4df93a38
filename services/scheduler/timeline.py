"""What a generation's flips came to, for status, metrics and the process' log."""

import time
from dataclasses import dataclass

from flipmesh.common.v1 import introspection_pb2

from services.core.flip.messages import FlipOutcome
from services.core.ids import LayoutKind
from services.mesh.codec.common import layout_to_proto
from services.mesh.logs.log import Log
from services.scheduler.inputs import FlipEnded
from services.scheduler.meters import Meters

MANY_ABANDONED = 3
"""In a row: from then on it is an error, so that a server cannot stop flipping silently."""
MAX_TIMELINE = 32
"""Layouts kept for `status`."""


@dataclass(frozen=True, slots=True)
class LayoutSpan:
    """One layout of this generation, from when, and why."""

    layout: LayoutKind
    began_unix_ns: int
    reason: str


class Timeline:
    """Of one generation."""

    def __init__(self, layout: LayoutKind) -> None:
        self.spans = [LayoutSpan(layout, time.time_ns(), "start of the generation")]
        self.num_unsound_censuses = 0

    def on_flip_ended(self, ended: FlipEnded, abandoned_in_a_row: int, log: Log, meters: Meters) -> None:
        """An attempt has ended; an imbalance of blocks is said, and serving goes on."""
        outcome = "not made" if ended.outcome is None else ended.outcome.value
        log.info("flip-ended", flip=ended.flip_id, outcome=outcome, reason=ended.reason, cause=ended.cause)
        if ended.outcome is FlipOutcome.COMMITTED:
            self.spans.append(LayoutSpan(ended.target, time.time_ns(), ended.cause))
            del self.spans[:-MAX_TIMELINE]
        elif abandoned_in_a_row >= MANY_ABANDONED:
            log.error("flips-do-not-commit", in_a_row=abandoned_in_a_row, reason=ended.reason)
        is_sound = ended.census is None or ended.census.is_sound
        meters.on_flip(abandoned_in_a_row, is_sound=is_sound)
        if not is_sound:
            self.num_unsound_censuses += 1
            log.error("census-unsound", flip=ended.flip_id, census=ended.census)

    def fill_status(self, status: introspection_pb2.SchedulerStatus) -> None:
        """Its part of a status."""
        status.num_unsound_censuses = self.num_unsound_censuses
        for span in self.spans:
            status.timeline.add(
                layout=layout_to_proto(span.layout), began_unix_ns=span.began_unix_ns, reason=span.reason
            )
