"""A rank's part in flips, at the messages: what is said when, what is said again, and what stays unsaid."""

import asyncio
from collections.abc import AsyncIterator

import anyio
import pytest
from flipmesh.common.v1 import layout_pb2
from flipmesh.worker.v1 import worker_service_pb2 as pb

from services.core.flip.messages import FlipProtocolError
from services.core.ids import FlipId, Rank
from services.worker import participation as module
from services.worker.participation import (
    MAX_UNSENT,
    Looked,
    Parked,
    Participation,
    Resumed,
    Switched,
    Worked,
    WorkLost,
)

FENCE = layout_pb2.Fence(generation=9, epoch=4)
FLIP = FlipId(7)
PARKED = Parked(FLIP, 100, 110, fits=True, refusal="", plan_hash=5)
WORKED = Worked(FLIP, 200, 1, 2, 3, 4, bytes_moved=10, rows_moved=11)
WAIT_S = 5.0


class Stream:
    """The mover's side of one stream."""

    def __init__(self, rank: Participation) -> None:
        self._into: asyncio.Queue[pb.JoinFlipRequest | None] = asyncio.Queue()
        self.responses = rank.responses(self._requests())

    async def _requests(self) -> AsyncIterator[pb.JoinFlipRequest]:
        while (message := await self._into.get()) is not None:
            yield message

    def say(self, kind: str, flip_id: int = FLIP, round_number: int = 1, generation: int = 9) -> None:
        fence = layout_pb2.Fence(generation=generation, epoch=4)
        message = pb.JoinFlipRequest(fence=fence, flip_id=flip_id, round=round_number)
        getattr(message, kind).SetInParent()
        self._into.put_nowait(message)

    def end(self) -> None:
        self._into.put_nowait(None)

    async def next(self) -> pb.JoinFlipResponse:
        with anyio.fail_after(WAIT_S):
            return await anext(self.responses)

    async def kinds(self, count: int) -> list[str | None]:
        return [(await self.next()).WhichOneof("event") for _ in range(count)]

    async def ended(self) -> None:
        with anyio.fail_after(WAIT_S), pytest.raises(StopAsyncIteration):
            await anext(self.responses)


class Worker:
    """A participation, and what it asked the model thread for."""

    def __init__(self) -> None:
        self.started: list[FlipId] = []
        self.looked: list[FlipId] = []
        self.rank = Participation(Rank(1), self.started.append, self.looked.append)

    async def until_started(self) -> None:
        with anyio.fail_after(WAIT_S):
            while not self.started:
                await anyio.lowlevel.checkpoint()


async def test_a_whole_flip_with_its_times() -> None:
    worker = Worker()
    stream = Stream(worker.rank)
    worker.rank.on_answer(PARKED, FENCE)
    parked = await stream.next()
    assert (parked.fence, parked.flip_id, parked.rank) == (FENCE, FLIP, 1)
    assert (parked.parked.last_step_end_unix_ns, parked.parked.parked_unix_ns) == (100, 110)
    stream.say("assemble")
    present = await stream.next()
    assert (present.round, present.present.fits, present.present.plan_hash) == (1, True, 5)
    stream.say("enter")
    await worker.until_started()
    worker.rank.on_answer(WORKED, FENCE)
    verified = (await stream.next()).verified
    assert (verified.entered_unix_ns, verified.read_ns, verified.verify_ns) == (200, 1, 4)
    assert (verified.bytes_moved, verified.rows_moved) == (10, 11)
    worker.rank.on_answer(Switched(FLIP, is_committed=True), FENCE)
    worker.rank.on_answer(Resumed(FLIP, 300, 310), layout_pb2.Fence(generation=9, epoch=5))
    resumed = await stream.next()
    assert (resumed.fence, resumed.flip_id) == (FENCE, FLIP), "under the fence of its FLIP entry, not the next epoch's"
    assert (resumed.resumed.switched_unix_ns, resumed.resumed.first_step_unix_ns) == (300, 310)
    assert worker.started == [FLIP]
    stream.end()
    await stream.ended()


async def test_what_holds_is_said_again_on_a_new_stream() -> None:
    worker = Worker()
    worker.rank.on_answer(PARKED, FENCE)
    first = Stream(worker.rank)
    assert await first.kinds(1) == ["parked"]
    first.say("assemble")
    assert await first.kinds(1) == ["present"]
    second = Stream(worker.rank)
    assert await second.kinds(2) == ["parked", "present"]
    await first.ended()
    second.say("enter")
    await worker.until_started()
    third = Stream(worker.rank)
    waiting = asyncio.create_task(third.next())
    await anyio.lowlevel.checkpoint()
    worker.rank.on_answer(WORKED, FENCE)
    assert (await waiting).WhichOneof("event") == "verified"
    fourth = Stream(worker.rank)
    assert await fourth.kinds(1) == ["verified"]
    assert worker.started == [FLIP], "told to enter again, it works once"


async def test_a_failure_is_said_and_said_again() -> None:
    worker = Worker()
    stream = Stream(worker.rank)
    worker.rank.on_answer(PARKED, FENCE)
    await stream.kinds(1)
    stream.say("assemble")
    await stream.kinds(1)
    stream.say("enter")
    await worker.until_started()
    worker.rank.on_answer(WorkLost(FLIP, "checksum of rows", restored=True), FENCE)
    for again in (stream, Stream(worker.rank)):
        failed = (await again.next()).failed
        assert (failed.reason, failed.restored) == ("checksum of rows", True)


async def test_another_generations_words_are_not_heard() -> None:
    """N"""
    worker = Worker()
    stream = Stream(worker.rank)
    worker.rank.on_answer(PARKED, FENCE)
    await stream.kinds(1)
    stream.say("assemble", generation=8)
    stream.say("assemble", round_number=2)
    present = await stream.next()
    assert (present.WhichOneof("event"), present.round) == ("present", 2)


async def test_words_against_the_protocol_end_the_stream_by_name() -> None:
    worker = Worker()
    stream = Stream(worker.rank)
    worker.rank.on_answer(PARKED, FENCE)
    await stream.kinds(1)
    stream.say("enter")
    with anyio.fail_after(WAIT_S), pytest.raises(FlipProtocolError, match="EnterReceived"):
        await anext(stream.responses)
    assert worker.started == []


async def test_a_stream_that_another_has_replaced_is_not_heard() -> None:
    worker = Worker()
    worker.rank.on_answer(PARKED, FENCE)
    first = Stream(worker.rank)
    await first.kinds(1)
    first.say("assemble")
    await first.kinds(1)
    second = Stream(worker.rank)
    assert await second.kinds(2) == ["parked", "present"]
    second.say("disarm")
    second.say("assemble", round_number=2)
    assert await second.kinds(1) == ["present"]
    first.say("enter", round_number=2)
    for _ in range(5):
        # The old stream's reader may run before its handler ends it.
        await anyio.lowlevel.checkpoint()
    await first.ended()
    second.say("assemble", round_number=3)
    assert (await second.next()).round == 3
    assert worker.started == []


async def test_with_no_mover_what_is_unsaid_is_bounded_and_the_state_is_not_lost() -> None:
    worker = Worker()
    for number in range(3 * MAX_UNSENT):
        worker.rank.on_answer(Resumed(FlipId(number), 1, 2), FENCE)
    worker.rank.on_answer(PARKED, FENCE)
    stream = Stream(worker.rank)
    assert await stream.kinds(1) == ["parked"]


async def test_a_mover_that_reads_nothing_gets_the_newest() -> None:
    worker = Worker()
    stream = Stream(worker.rank)
    worker.rank.on_answer(PARKED, FENCE)
    await stream.kinds(1)
    for number in range(3 * MAX_UNSENT):
        worker.rank.on_answer(Resumed(FlipId(number), 1, 2), FENCE)
    heard = [(await stream.next()).flip_id for _ in range(MAX_UNSENT)]
    assert heard == list(range(2 * MAX_UNSENT, 3 * MAX_UNSENT))


async def test_a_rank_behind_its_flip_says_why_until_it_has_parked(monkeypatch: pytest.MonkeyPatch) -> None:
    """NOT_READY, throttled."""
    monkeypatch.setattr(module, "NOT_READY_EVERY_S", 0.01)
    worker = Worker()
    stream = Stream(worker.rank)
    steps = iter(range(50, 60))
    worker.rank.expect(FLIP, FENCE, lambda: f"executing entry {next(steps)}, the flip is entry 60")
    for entry in (50, 51):
        message = await stream.next()
        assert (message.fence, message.flip_id) == (FENCE, FLIP)
        assert message.not_ready.reason == f"executing entry {entry}, the flip is entry 60"
    worker.rank.on_answer(PARKED, FENCE)
    kinds = await stream.kinds(1)
    while kinds[-1] == "not_ready":
        kinds = await stream.kinds(1)
    assert kinds == ["parked"]
    with anyio.move_on_after(0.05) as scope:
        await anext(stream.responses)
    assert scope.cancelled_caught, "parked: nothing more to explain"


async def test_room_that_is_gone_before_enter_is_a_withdrawal_and_the_next_rounds_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    worker = Worker()
    worker.rank.on_answer(PARKED, FENCE)
    stream = Stream(worker.rank)
    stream.say("assemble")
    assert await stream.kinds(2) == ["parked", "present"]
    for looks in (1, 2):
        with anyio.fail_after(WAIT_S):
            while len(worker.looked) < looks:
                await anyio.lowlevel.checkpoint()
        worker.rank.on_answer(Looked(FLIP, "" if looks == 1 else "64 bytes are free"), FENCE)
    withdrawn = await stream.next()
    assert (withdrawn.flip_id, withdrawn.round, withdrawn.withdraw.reason) == (FLIP, 1, "64 bytes are free")
    stream.say("assemble", round_number=2)
    present = await stream.next()
    assert (present.round, present.present.fits, present.present.refusal) == (2, False, "64 bytes are free")


async def test_nobody_looks_once_the_work_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.0)
    worker = Worker()
    worker.rank.on_answer(PARKED, FENCE)
    stream = Stream(worker.rank)
    stream.say("assemble")
    stream.say("enter")
    assert await stream.kinds(2) == ["parked", "present"]
    await worker.until_started()
    seen = len(worker.looked)
    worker.rank.on_answer(Looked(FLIP, "late: the work looks for itself"), FENCE)
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
    assert len(worker.looked) == seen
    worker.rank.on_answer(WORKED, FENCE)
    assert await stream.kinds(1) == ["verified"]
