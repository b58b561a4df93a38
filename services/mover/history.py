"""What each flip did when: kept for `ListFlips` and turned into a trace. Decides nothing; bounded."""

import time
from collections import OrderedDict
from collections.abc import Sequence

from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.worker.v1 import worker_service_pb2

from services.core.flip.messages import FlipOutcome
from services.core.flip.records import FlipKey
from services.mesh.codec.flip import outcome_to_proto

KEEP_FLIPS = 256


class History:
    """The last flips as records; written as events come in, read at any time."""

    def __init__(self) -> None:
        self._records: OrderedDict[FlipKey, pb.FlipRecord] = OrderedDict()
        self._carried_none: set[FlipKey] = set()
        """Flips of an empty group: nobody computed, so nothing was paused."""

    def open(self, key: FlipKey, request: pb.RunFlipRequest, num_ranks: int, armed_unix_ns: int) -> pb.FlipRecord:
        """Begins the record of an attempt."""
        record = pb.FlipRecord(
            fence=request.fence,
            flip_id=request.flip_id,
            source=request.source,
            target=request.target,
            state=pb.FLIP_STATE_ARMED,
            armed_unix_ns=armed_unix_ns,
            ranks=[pb.RankSteps(rank=rank) for rank in range(num_ranks)],
        )
        self._records[key] = record
        while len(self._records) > KEEP_FLIPS:
            self._carried_none.discard(self._records.popitem(last=False)[0])
        return record

    def get(self, key: FlipKey) -> pb.FlipRecord | None:
        """The record of an attempt, while it is kept."""
        return self._records.get(key)

    def newest(self, max_flips: int) -> Sequence[pb.FlipRecord]:
        """The last records, newest first; 0: all that are kept."""
        records = list(reversed(self._records.values()))
        return records[:max_flips] if max_flips else records

    def note(self, key: FlipKey, message: worker_service_pb2.JoinFlipResponse) -> None:
        """Writes what a rank said about its times into the record, where there is one."""
        record = self.get(key)
        if record is None or message.rank >= len(record.ranks):
            return
        _note(record.ranks[message.rank], message)
        if key not in self._carried_none:
            _settle_pause(record)

    def report(self, key: FlipKey, request: pb.ReportCarryRequest) -> pb.FlipRecord | None:
        """Completes the record by what the scheduler saw of the requests; the record, while it is kept."""
        record = self.get(key)
        if record is None:
            return None
        record.num_carried_requests = request.num_carried_requests
        record.num_partly_prefilled = request.num_partly_prefilled
        record.num_live_blocks = request.num_live_blocks
        if request.HasField("longest_token_gap_ns"):
            record.longest_token_gap_ns = request.longest_token_gap_ns
        if request.written not in (record.state, pb.FLIP_STATE_UNSPECIFIED):
            record.reason = f"{record.reason}; the scheduler had given this mover up, and the log says otherwise"
            record.state = request.written
        if request.num_carried_requests == 0:
            self._carried_none.add(key)
            record.ClearField("pause_ns")
        return record


def settle(
    record: pb.FlipRecord, outcome: FlipOutcome, reason: str, *, bytes_moved: int = 0, rows_moved: int = 0
) -> None:
    """Writes the outcome into the record."""
    record.state, record.reason = outcome_to_proto(outcome), reason
    record.concluded_unix_ns = time.time_ns()
    record.bytes_moved, record.rows_moved = bytes_moved, rows_moved


def _note(steps: pb.RankSteps, message: worker_service_pb2.JoinFlipResponse) -> None:
    match message.WhichOneof("event"):
        case "parked":
            steps.parked_unix_ns = message.parked.parked_unix_ns
            if message.parked.HasField("last_step_end_unix_ns"):
                steps.last_step_end_unix_ns = message.parked.last_step_end_unix_ns
        case "present":
            steps.present_unix_ns = message.present.present_unix_ns
        case "not_ready":
            steps.not_ready = message.not_ready.reason
        case "verified":
            done = message.verified
            steps.entered_unix_ns = done.entered_unix_ns
            steps.read_ns, steps.seam_ns = done.read_ns, done.seam_ns
            steps.write_ns, steps.verify_ns = done.write_ns, done.verify_ns
        case "resumed":
            steps.switched_unix_ns = message.resumed.switched_unix_ns
            steps.first_step_unix_ns = message.resumed.first_step_unix_ns
        case _:
            pass


def _settle_pause(record: pb.FlipRecord) -> None:
    """End of the last step before on any rank, to the start of the first one after; once both are known."""
    ended = [steps.last_step_end_unix_ns for steps in record.ranks if steps.HasField("last_step_end_unix_ns")]
    begun = [steps.first_step_unix_ns for steps in record.ranks if steps.HasField("first_step_unix_ns")]
    if ended and begun:
        record.pause_ns = max(0, min(begun) - max(ended))
