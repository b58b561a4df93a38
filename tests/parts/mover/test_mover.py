"""The mover's attempts against real participants over real streams, and over lives of the mover."""

from pathlib import Path

import anyio
import grpc.aio
import pytest
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub

from services.core.flip.records import Concluded, FlipKey, Record
from services.core.ids import FlipId, Generation, Rank
from services.mesh.logs.log import Log
from services.mover import attempts as attempts_module
from services.mover.journal import Journal
from services.worker import participation as participation_module
from services.worker.participation import Switched, WorkLost
from tests.support.mover_stand import FENCE, KEY, OTHER, WAIT_S, MakeStand, S, ScriptedRank, Stand, deadlines, status_of


async def test_a_flip_commits_and_its_record_is_whole(make_stand: MakeStand) -> None:
    stand = await make_stand(deadlines())
    async with stand.mover() as mover:
        asked = stand.ask()
        await asked.until(pb.FLIP_STATE_ARMED)
        for rank in stand.ranks:
            rank.park()
        await asked.until(pb.FLIP_STATE_ENTERED)
        for rank in stand.ranks:
            await rank.work()
        done = await asked.until(pb.FLIP_STATE_COMMITTED)
        assert (done.flip_id, done.bytes_moved, done.rows_moved) == (7, 10, 4)
        for rank in stand.ranks:
            rank.switch(KEY[1])
        with anyio.fail_after(WAIT_S):
            while not all(steps.HasField("first_step_unix_ns") for steps in (await stand.flips())[0].ranks):
                pass
        report = pb.ReportCarryRequest(
            fence=FENCE, flip_id=7, num_carried_requests=3, num_partly_prefilled=1, longest_token_gap_ns=77
        )
        await MoverServiceStub(stand.peers.channel("mover")).ReportCarry(report, timeout=WAIT_S)
        [record] = await stand.flips()
        assert record.state == pb.FLIP_STATE_COMMITTED
        assert record.pause_ns == 3100 - 990, "last step before on any rank, first step after on any rank"
        assert (record.num_carried_requests, record.longest_token_gap_ns) == (3, 77)
        assert status_of(mover).num_committed_total == 1
    names = [span.name for span in stand.spans.get_finished_spans()]
    assert names.count("flip") == 1 and {"rank 0", "rank 1"} <= set(names)


async def test_one_refusal_abandons_for_all(make_stand: MakeStand) -> None:
    """Y"""
    stand = await make_stand(deadlines())
    async with stand.mover() as mover:
        asked = stand.ask()
        stand.ranks[0].park()
        stand.ranks[1].park(fits=False)
        assert (await asked.until(pb.FLIP_STATE_ABANDONED)).reason == "rank 1 refuses: 4 rows too many"
        assert all(rank.started.empty() for rank in stand.ranks)
        status = status_of(mover)
        assert (status.num_abandoned_total, status.last_abandon_reason) == (1, "rank 1 refuses: 4 rows too many")
        for rank in stand.ranks:
            rank.participation.on_answer(Switched(KEY[1], is_committed=False), FENCE)
            rank.park(OTHER)
        asked = stand.ask(OTHER)
        for rank in stand.ranks:
            await rank.work()
        await asked.until(pb.FLIP_STATE_COMMITTED)


async def test_a_rank_that_gives_anothers_number_is_not_heard(make_stand: MakeStand) -> None:
    """A8: ranks 0 and 7 committed a flip of two."""
    stand = await make_stand(deadlines(park_ns=S // 2))
    stand.ranks[1].participation = ScriptedRank(Rank(7)).participation
    async with stand.mover():
        asked = stand.ask()
        for rank in stand.ranks:
            rank.park()
        reason = (await asked.until(pb.FLIP_STATE_ABANDONED)).reason
        assert reason.startswith("not parked in time: rank 1"), reason
        assert all(rank.started.empty() for rank in stand.ranks)


async def test_an_outcome_that_cannot_be_written_ends_the_mover_and_is_decided_in_its_next_life(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2: the disk is full at the outcome; a mover that goes on from memory would be asked for ever."""
    stand = await make_stand(deadlines())
    append = Journal.append

    def full(journal: Journal, record: Record) -> None:
        if isinstance(record, Concluded):
            raise OSError("no space left")
        append(journal, record)

    with monkeypatch.context() as patched:
        patched.setattr(Journal, "append", full)
        async with stand.mover() as mover:
            asked = stand.ask()
            for rank in stand.ranks:
                rank.park()
            for rank in stand.ranks:
                await rank.work()
            with pytest.raises(grpc.aio.AioRpcError, match="cannot write its journal: no space left"):
                await asked.until(pb.FLIP_STATE_COMMITTED)
            with anyio.fail_after(WAIT_S):
                await mover.journal_failed.wait()
    async with stand.mover():
        await stand.ask().until(pb.FLIP_STATE_COMMITTED)


async def test_plans_that_differ_abandon(make_stand: MakeStand) -> None:
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        for rank in stand.ranks:
            rank.park(plan_hash=rank.rank)
        assert "plans differ" in (await asked.until(pb.FLIP_STATE_ABANDONED)).reason


async def test_a_rank_that_never_parks_is_named_with_its_own_reason(
    make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(participation_module, "NOT_READY_EVERY_S", 0.01)
    stand = await make_stand(deadlines(park_ns=S // 2))
    async with stand.mover():
        asked = stand.ask()
        await asked.until(pb.FLIP_STATE_ARMED)
        stand.ranks[0].park()
        late = stand.ranks[1].participation
        late.expect(KEY[1], FENCE, lambda: "executing entry 9, the flip is entry 12")
        reason = (await asked.until(pb.FLIP_STATE_ABANDONED)).reason
        late.stop_waiting()
        assert reason == "not parked in time: rank 1 (executing entry 9, the flip is entry 12)"
        assert (await stand.flips())[0].ranks[1].not_ready == "executing entry 9, the flip is entry 12"


async def test_a_rank_lost_before_enter_abandons(tmp_path: Path, log: Log) -> None:
    stand = Stand(tmp_path, log, deadlines())
    async with stand.rank(0), stand.mover() as mover:
        async with stand.rank(1):
            asked = stand.ask()
            with anyio.fail_after(WAIT_S):
                while mover.links.num_connected < 2:
                    await anyio.lowlevel.checkpoint()
            stand.ranks[0].park()
            await asked.until(pb.FLIP_STATE_ARMED)
        assert "rank 1 lost" in (await asked.until(pb.FLIP_STATE_ABANDONED)).reason
    await stand.peers.close()


async def test_work_that_fails_and_is_undone_restores(make_stand: MakeStand) -> None:
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        for rank in stand.ranks:
            rank.park()
        await asked.until(pb.FLIP_STATE_ENTERED)
        await stand.ranks[0].work()
        await stand.ranks[1].started.get()
        stand.ranks[1].participation.on_answer(WorkLost(KEY[1], "checksum", restored=True), FENCE)
        assert (await asked.until(pb.FLIP_STATE_RESTORED)).reason == "rank 1 failed: checksum"


@pytest.mark.parametrize("has_worked", [False, True])
async def test_a_mover_that_dies_after_enter_commits_in_its_next_life(make_stand: MakeStand, has_worked: bool) -> None:
    """What ranks have verified they say again, and those that missed ENTER are told again."""
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        for rank in stand.ranks:
            rank.park()
        await asked.until(pb.FLIP_STATE_ENTERED)
        if has_worked:
            await stand.ranks[0].work()
    async with stand.mover() as mover:
        with pytest.raises(grpc.aio.AioRpcError):
            await asked.until(pb.FLIP_STATE_COMMITTED)
        again = stand.ask()
        await again.until(pb.FLIP_STATE_ENTERED)
        for rank in stand.ranks[has_worked:]:
            await rank.work()
        await again.until(pb.FLIP_STATE_COMMITTED)
        third = await stand.ask().until(pb.FLIP_STATE_COMMITTED)
        assert third.flip_id == 7
        assert status_of(mover).num_committed_total == 1, "counted once, however often it is asked for"
        assert all(rank.started.empty() for rank in stand.ranks), "nobody works twice"


async def test_a_mover_that_dies_before_enter_abandons_in_its_next_life(make_stand: MakeStand) -> None:
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        await asked.until(pb.FLIP_STATE_ARMED)
        stand.ranks[0].park()
    async with stand.mover() as mover:
        stand.ranks[1].park()
        abandoned = await stand.ask().until(pb.FLIP_STATE_ABANDONED)
        assert "asked for again before ENTER" in abandoned.reason
        assert all(rank.started.empty() for rank in stand.ranks)
        assert status_of(mover).num_abandoned_total == 1


async def test_two_attempts_are_not_open_at_once(make_stand: MakeStand) -> None:
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        await asked.until(pb.FLIP_STATE_ARMED)
        with pytest.raises(grpc.aio.AioRpcError, match="flip 7 is open, asked for flip 8"):
            await stand.ask(OTHER).until(pb.FLIP_STATE_ARMED)


async def test_the_next_flip_may_be_asked_for_at_once(make_stand: MakeStand) -> None:
    """An outcome that is heard is the end of its attempt: nobody is told to ask again."""
    stand = await make_stand(deadlines())
    async with stand.mover() as mover:
        for number in range(1, 31):
            key: FlipKey = (Generation(9), FlipId(number))
            asked = stand.ask(key)
            for rank in stand.ranks:
                rank.park(key)
            for rank in stand.ranks:
                await rank.work()
            await asked.until(pb.FLIP_STATE_COMMITTED)
            assert status_of(mover).num_committed_total == number
            for rank in stand.ranks:
                rank.switch(key[1])


async def test_a_scheduler_that_leaves_at_any_moment_leaves_the_links_whole(make_stand: MakeStand) -> None:
    """Its call is cancelled wherever the attempt is, also in the middle of a word to a rank."""
    stand = await make_stand(deadlines())
    async with stand.mover():
        for number in range(1, 40):
            key: FlipKey = (Generation(9), FlipId(number))
            asked = stand.ask(key)
            await asked.until(pb.FLIP_STATE_ARMED)
            for rank in stand.ranks:
                rank.park(key)
            for _ in range(number):
                await anyio.lowlevel.checkpoint()
            asked.call.cancel()
            for rank in stand.ranks:
                rank.participation.on_answer(Switched(key[1], is_committed=False), FENCE)
        asked = stand.ask(last := (Generation(9), FlipId(40)))
        for rank in stand.ranks:
            while not rank.started.empty():
                rank.started.get_nowait()
            rank.park(last)
        for rank in stand.ranks:
            await rank.work()
        await asked.until(pb.FLIP_STATE_COMMITTED)


async def test_an_attempt_that_waits_says_so(make_stand: MakeStand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts_module, "BEAT_S", 0.02)
    stand = await make_stand(deadlines())
    async with stand.mover():
        asked = stand.ask()
        for _ in range(3):
            await asked.until(pb.FLIP_STATE_ARMED)
