"""A flip's record as OpenTelemetry spans: one for the flip, one for each rank, one for each of a rank's steps."""

from flipmesh.mover.v1 import mover_service_pb2 as pb
from opentelemetry.trace import Span, Status, StatusCode, Tracer, set_span_in_context

from services.mesh.flip_record import layout_name, rank_phases, state_name


def emit(tracer: Tracer, record: pb.FlipRecord) -> None:
    """Writes the spans of a flip that has gone its way; their times are the record's."""
    ends = [end for steps in record.ranks for _, _, end in rank_phases(record, steps)]
    flip = tracer.start_span("flip", start_time=record.armed_unix_ns, attributes=attributes(record))
    if record.state != pb.FLIP_STATE_COMMITTED:
        flip.set_status(Status(StatusCode.ERROR, record.reason))
    for steps in record.ranks:
        _emit_rank(tracer, flip, record, steps)
    flip.end(max([*ends, record.concluded_unix_ns]))


def attributes(record: pb.FlipRecord) -> dict[str, str | int | float]:
    """What the flip's span says."""
    found: dict[str, str | int | float] = {
        "flipmesh.flip_id": record.flip_id,
        "flipmesh.generation": record.fence.generation,
        "flipmesh.epoch": record.fence.epoch,
        "flipmesh.direction": f"{layout_name(record.source)}->{layout_name(record.target)}",
        "flipmesh.outcome": state_name(record.state),
        "flipmesh.reason": record.reason,
        "flipmesh.live_blocks": record.num_live_blocks,
        "flipmesh.carried_requests": record.num_carried_requests,
        "flipmesh.partly_prefilled": record.num_partly_prefilled,
        "flipmesh.rows_moved": record.rows_moved,
        "flipmesh.bytes_moved": record.bytes_moved,
    }
    if record.HasField("pause_ns"):
        found["flipmesh.pause_ns"] = record.pause_ns
        found["flipmesh.bytes_per_s"] = record.bytes_moved / max(record.pause_ns, 1) * 1e9
    if record.HasField("longest_token_gap_ns"):
        found["flipmesh.longest_token_gap_ns"] = record.longest_token_gap_ns
    return found


def _emit_rank(tracer: Tracer, flip: Span, record: pb.FlipRecord, steps: pb.RankSteps) -> None:
    phases = rank_phases(record, steps)
    if not phases:
        return
    labels = {"flipmesh.rank": steps.rank, "flipmesh.flip_id": record.flip_id, "flipmesh.epoch": record.fence.epoch}
    rank = tracer.start_span(
        f"rank {steps.rank}", set_span_in_context(flip), start_time=phases[0][1], attributes=labels
    )
    for name, begin, end in phases:
        tracer.start_span(name, set_span_in_context(rank), start_time=begin, attributes=labels).end(end)
    rank.end(phases[-1][2])
