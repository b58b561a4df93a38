"""How a flip's record is read: names for people, and each rank's way through it as intervals. Pure."""

from itertools import pairwise

from flipmesh.common.v1 import layout_pb2
from flipmesh.mover.v1 import mover_service_pb2 as pb


def layout_name(layout: "layout_pb2.LayoutKind.ValueType") -> str:
    """PP or TP."""
    return layout_pb2.LayoutKind.Name(layout).removeprefix("LAYOUT_KIND_")


def state_name(state: "pb.FlipState.ValueType") -> str:
    """The state in small letters."""
    return pb.FlipState.Name(state).removeprefix("FLIP_STATE_").lower()


def rank_phases(record: pb.FlipRecord, steps: pb.RankSteps) -> list[tuple[str, int, int]]:
    """(step, begin, end) of one rank in wall-clock nanoseconds, in order; steps it never reached are left out.

    A group that carried no request has nothing to resume: what passes until somebody asks is no part of the flip.
    """
    worked = steps.read_ns + steps.seam_ns + steps.write_ns + steps.verify_ns
    marks = [
        ("park", record.armed_unix_ns),
        ("assemble", steps.parked_unix_ns),
        ("gate", steps.present_unix_ns),
        ("work", steps.entered_unix_ns),
        ("outcome", steps.entered_unix_ns + worked if steps.entered_unix_ns else 0),
        ("resume", steps.switched_unix_ns),
        ("", steps.first_step_unix_ns if record.num_carried_requests else 0),
    ]
    reached = [(name, at) for name, at in marks if at]
    return [(name, at, max(at, end)) for (name, at), (_, end) in pairwise(reached)]
