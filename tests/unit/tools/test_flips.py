"""The waterfall of a flip, and what is no part of it."""

from flipmesh.common.v1 import layout_pb2
from flipmesh.mover.v1 import mover_service_pb2 as pb

from services.mesh.flip_record import rank_phases
from tools.flips import WIDTH, draw

MS = 1_000_000
ARMED = 1_000_000 * MS


def a_record(*, num_carried_requests: int, first_step_ms: int) -> pb.FlipRecord:
    steps = pb.RankSteps(
        rank=0,
        parked_unix_ns=ARMED + 2 * MS,
        present_unix_ns=ARMED + 3 * MS,
        entered_unix_ns=ARMED + 4 * MS,
        switched_unix_ns=ARMED + 8 * MS,
        first_step_unix_ns=ARMED + first_step_ms * MS,
    )
    return pb.FlipRecord(
        flip_id=3,
        source=layout_pb2.LAYOUT_KIND_PP,
        target=layout_pb2.LAYOUT_KIND_TP,
        state=pb.FLIP_STATE_COMMITTED,
        armed_unix_ns=ARMED,
        num_carried_requests=num_carried_requests,
        ranks=[steps],
    )


def test_a_flip_is_drawn_to_its_own_scale() -> None:
    headline, bar = draw(a_record(num_carried_requests=2, first_step_ms=10)).splitlines()
    assert headline == "flip 3, PP -> TP, committed, 2 requests carried (0 partly prefilled), 0 bytes moved"
    assert bar.endswith("| 10.0 ms")
    drawn = bar.partition("|")[2][:WIDTH]
    assert [drawn.count(mark) * 10 // WIDTH for mark in ".aor"] == [1, 1, 4, 2]
    assert "".join(sorted(set(drawn), key=drawn.index)) == ".agor"


def test_the_time_until_somebody_asks_is_no_part_of_a_flip() -> None:
    record = a_record(num_carried_requests=0, first_step_ms=54_000)
    assert [name for name, _, _ in rank_phases(record, record.ranks[0])][-1] == "outcome"
    assert draw(record).splitlines()[1].endswith("| 8.0 ms")
