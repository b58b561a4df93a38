"""What the mover remembers: its journal over restarts, and its records of flips."""

import time
from pathlib import Path

import pytest
from flipmesh.common.v1 import layout_pb2
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.worker.v1 import worker_service_pb2 as worker_pb

from services.core.flip.attempts import Coordination, decide_again
from services.core.flip.messages import FlipDeadlines, FlipOutcome, RankParked, RankPresent, RankVerified
from services.core.flip.records import Armed, Concluded, Entered, FlipKey, Record
from services.core.ids import FlipId, Generation, Rank
from services.mover import journal as journal_module
from services.mover.attempts import Attempt
from services.mover.history import KEEP_FLIPS, History, settle
from services.mover.journal import Journal

KEY: FlipKey = (Generation(9), FlipId(7))
OTHER: FlipKey = (Generation(9), FlipId(8))
FENCE = layout_pb2.Fence(generation=9, epoch=4)
RECORDS: list[Record] = [
    Armed(KEY),
    Entered(KEY, 2),
    Concluded(KEY, FlipOutcome.ABANDONED, "rank 1 refuses: 4 rows\ntoo many"),
    Armed(OTHER),
]


def written(path: Path, *records: Record) -> None:
    journal = Journal(path)
    for record in records:
        journal.append(record)
    journal.close()


def last_of(path: Path, key: FlipKey) -> Record | None:
    journal = Journal(path)
    journal.close()
    return journal.last(key)


def test_a_journal_tells_its_next_life_the_newest_of_each(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    for count, expected in enumerate([*RECORDS[:2]], start=1):
        written(path, expected)
        assert last_of(path, KEY) == expected, count
    written(path, *RECORDS[2:])
    assert last_of(path, KEY) == Concluded(KEY, FlipOutcome.ABANDONED, "rank 1 refuses: 4 rows too many")
    assert last_of(path, OTHER) == Armed(OTHER)
    assert last_of(path, (Generation(10), FlipId(7))) is None, "another generation's flip 7"


@pytest.mark.parametrize("cut", range(2, 40, 3))
def test_a_torn_tail_is_dropped_and_written_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "journal"
    written(path, *RECORDS[:2], Concluded(KEY, FlipOutcome.COMMITTED, "all ranks verified"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert last_of(path, KEY) == RECORDS[1]
    written(path, RECORDS[3])
    assert (last_of(path, KEY), last_of(path, OTHER)) == (RECORDS[1], RECORDS[3])


def test_a_flipped_bit_costs_one_record_and_none_behind_it(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    written(path, *RECORDS[:2], RECORDS[3])
    for word, expected in ((b"armed", RECORDS[1]), (b"entered", None)):
        damaged = bytearray(path.read_bytes())
        damaged[damaged.index(word)] ^= 1
        path.write_bytes(damaged)
        assert (last_of(path, KEY), last_of(path, OTHER)) == (expected, RECORDS[3])


def test_a_journal_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journal_module, "KEEP_RECORDS", 10)
    path = tmp_path / "journal"
    written(path, *(Armed((Generation(1), FlipId(number))) for number in range(100)))
    journal = Journal(path)
    journal.close()
    assert len(path.read_bytes().splitlines()) == 10
    assert [journal.last((Generation(1), FlipId(number))) is None for number in (89, 90)] == [True, False]


def test_a_full_disk_is_an_error_and_nothing_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "journal")
    monkeypatch.setattr(journal_module.os, "write", lambda fd, line: len(line) - 1)
    with pytest.raises(OSError, match="is the disk full"):
        journal.append(Armed(KEY))
    assert journal.last(KEY) is None
    journal.close()


@pytest.mark.parametrize(
    ("records", "decided"),
    [
        ([], None),
        (RECORDS[:1], FlipOutcome.ABANDONED),
        (RECORDS[:2], None),
        ([*RECORDS[:2], Concluded(KEY, FlipOutcome.COMMITTED, "")], FlipOutcome.COMMITTED),
    ],
)
def test_what_is_decided_when_asked_again(tmp_path: Path, records: list[Record], decided: FlipOutcome | None) -> None:
    """H: armed and not entered is abandoned, and that is journalled before it is said."""
    path = tmp_path / "journal"
    written(path, *records)
    journal = Journal(path)
    outcome = decide_again(journal, KEY)
    journal.close()
    assert (None if outcome is None else outcome.outcome) is decided
    if decided is not None:
        assert last_of(path, KEY) == outcome


def test_a_flip_of_nobody_has_no_pause_whatever_comes_first() -> None:
    for reported_first in (True, False):
        history = History()
        record = history.open(KEY, pb.RunFlipRequest(fence=FENCE, flip_id=7), 1, 500)
        told = [
            worker_pb.JoinFlipResponse(rank=0, parked=worker_pb.ParkedEvent(parked_unix_ns=9, last_step_end_unix_ns=5)),
            worker_pb.JoinFlipResponse(
                rank=0, resumed=worker_pb.ResumedEvent(switched_unix_ns=20, first_step_unix_ns=9000)
            ),
        ]
        report = pb.ReportCarryRequest(fence=FENCE, flip_id=7)
        if reported_first:
            history.report(KEY, report)
        for message in told:
            history.note(KEY, message)
        if not reported_first:
            assert record.pause_ns == 8995
            history.report(KEY, report)
        assert not record.HasField("pause_ns")


def test_records_are_bounded_and_the_newest_come_first() -> None:
    history = History()
    for number in range(KEEP_FLIPS + 5):
        key: FlipKey = (Generation(9), FlipId(number))
        settle(
            history.open(key, pb.RunFlipRequest(fence=FENCE, flip_id=number), 1, 0),
            FlipOutcome.BROKEN,
            "r",
            bytes_moved=1,
        )
    assert len(history.newest(0)) == KEEP_FLIPS
    assert [record.flip_id for record in history.newest(2)] == [KEEP_FLIPS + 4, KEEP_FLIPS + 3]
    assert history.get((Generation(9), FlipId(4))) is None
    assert (history.newest(1)[0].state, history.newest(1)[0].bytes_moved) == (pb.FLIP_STATE_BROKEN, 1)
    assert history.report((Generation(9), FlipId(4)), pb.ReportCarryRequest()) is None


def test_a_rank_that_does_not_exist_writes_nothing() -> None:
    history = History()
    record = history.open(KEY, pb.RunFlipRequest(fence=FENCE, flip_id=7), 1, 0)
    history.note(KEY, worker_pb.JoinFlipResponse(rank=5, not_ready=worker_pb.NotReadyEvent(reason="x")))
    history.note(KEY, worker_pb.JoinFlipResponse(rank=0, not_ready=worker_pb.NotReadyEvent(reason="y")))
    assert [steps.not_ready for steps in record.ranks] == ["y"]


def test_the_record_says_what_the_log_says() -> None:
    history = History()
    record = history.open(KEY, pb.RunFlipRequest(fence=FENCE, flip_id=7), 1, 0)
    settle(record, FlipOutcome.COMMITTED, "all ranks verified")
    history.report(KEY, pb.ReportCarryRequest(fence=FENCE, flip_id=7, written=pb.FLIP_STATE_ABANDONED))
    assert record.state == pb.FLIP_STATE_ABANDONED
    assert "given this mover up" in record.reason


async def test_what_came_during_a_pause_counts_before_the_clock_that_ran_out_in_it(tmp_path: Path) -> None:
    def told(message: worker_pb.JoinFlipRequest) -> None:
        assert message.flip_id == 7

    history, journal = History(), Journal(tmp_path / "journal")
    deadlines = FlipDeadlines(park_ns=0, presence_ns=10**12, data_plane_ns=10**12)
    opened = Coordination(1, deadlines, journal).ask(KEY, time.monotonic_ns())
    assert not isinstance(opened, Concluded)
    request = pb.RunFlipRequest(fence=FENCE, flip_id=7)
    attempt = Attempt(request, history.open(KEY, request, 1, 0), opened, told)
    for event in (RankParked(Rank(0)), RankPresent(Rank(0), 1, True, "", 0), RankVerified(Rank(0), 0, 0)):
        await attempt.hear(event)
    states = [response.state async for response in attempt.run()]
    assert states[-1] == pb.FLIP_STATE_COMMITTED
    journal.close()
