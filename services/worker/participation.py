"""One rank's part in flips: `RankFlips` between the log, the mover's stream and the model thread.

It carries messages and times, and decides nothing. No torch here: what touches memory is done by the model thread,
which is asked through `start_work` and answers with what it did. Used on the event loop only.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from flipmesh.common.v1 import layout_pb2
from flipmesh.worker.v1 import worker_service_pb2 as pb

from services.core.flip.messages import (
    AbandonReached,
    CommitReached,
    EntryReached,
    ParticipantEffect,
    RoomSeen,
    SayNotReady,
    SayPresent,
    StartWork,
    WorkDone,
    WorkFailed,
)
from services.core.flip.participant import FlipParticipant
from services.core.flip.rank_side import RankFlips
from services.core.ids import FlipId, Rank
from services.mesh.codec.flip import command_from_proto, said_of, said_to_proto

MAX_UNSENT = 64
"""Messages to the mover that may wait; an attempt has a handful, and a mover that reads none is cut."""
NOT_READY_EVERY_S = 1.0
"""A rank that has received FLIP and is still executing what is before it says so this often."""


LOOK_EVERY_S = 1.0
"""A rank that is present looks this often whether the flip could still begin: it has no work, and waits for others."""


@dataclass(frozen=True, slots=True)
class Parked:
    """The model thread is at the FLIP entry: every earlier step is done and every sampled id applied."""

    flip_id: FlipId
    last_step_end_unix_ns: int | None
    parked_unix_ns: int
    fits: bool
    refusal: str
    plan_hash: int


@dataclass(frozen=True, slots=True)
class Worked:
    """The model thread has read, crossed the seam, written and verified; durations of each."""

    flip_id: FlipId
    entered_unix_ns: int
    read_ns: int
    seam_ns: int
    write_ns: int
    verify_ns: int
    bytes_moved: int
    rows_moved: int


@dataclass(frozen=True, slots=True)
class WorkLost:
    """The model thread could not; `restored`: the active layout has its bytes."""

    flip_id: FlipId
    reason: str
    restored: bool


@dataclass(frozen=True, slots=True)
class Looked:
    """The model thread has looked again; `refusal`: why the flip could not begin now, empty: it could."""

    flip_id: FlipId
    refusal: str


@dataclass(frozen=True, slots=True)
class Switched:
    """COMMIT or ABANDON is executed."""

    flip_id: FlipId
    is_committed: bool


@dataclass(frozen=True, slots=True)
class Resumed:
    """The first step after an outcome has begun."""

    flip_id: FlipId
    switched_unix_ns: int
    first_step_unix_ns: int


FlipAnswer = Parked | Looked | Worked | WorkLost | Switched | Resumed


class Participation:
    """The flips of one rank's life. A new stream of the mover takes the place of the one before it."""

    def __init__(self, rank: Rank, start_work: Callable[[FlipId], None], start_look: Callable[[FlipId], None]) -> None:
        """`start_work`, `start_look`: ask the model thread, which answers Worked or WorkLost, and Looked."""
        self._rank = rank
        self._start_work, self._start_look = start_work, start_look
        self._flips = RankFlips(FlipParticipant())
        self._fence = layout_pb2.Fence()
        self._unsent: asyncio.Queue[pb.JoinFlipResponse | None] = asyncio.Queue(MAX_UNSENT + 1)
        """None ends a stream; there is always room for it."""
        self._parked: Parked | None = None
        self._worked: Worked | None = None
        self._behind: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None

    # From the log, as it is received.

    def expect(self, flip_id: FlipId, fence: layout_pb2.Fence, why: Callable[[], str]) -> None:
        """FLIP is received, and entries before it may still run: says so, and why, as long as they do."""

        def say() -> None:
            self._put(said_to_proto(SayNotReady(flip_id, why()), fence, self._rank))
            self._behind = asyncio.get_running_loop().call_later(NOT_READY_EVERY_S, say)

        self.stop_waiting()
        self._behind = asyncio.get_running_loop().call_later(NOT_READY_EVERY_S, say)

    def stop_waiting(self) -> None:
        """Parked, or the log has ended."""
        for timer in (self._behind, self._look):
            if timer is not None:
                timer.cancel()
        self._behind = self._look = None

    def _look_later(self, flip_id: FlipId) -> None:
        """As long as this rank is present in a round, and has not been told to enter."""
        if self._look is not None:
            self._look.cancel()
        self._look = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_again, flip_id)

    def _look_again(self, flip_id: FlipId) -> None:
        if self._flips.is_present(flip_id):
            self._start_look(flip_id)

    # From the model thread, by way of the loop.

    def on_answer(self, answer: FlipAnswer, fence: layout_pb2.Fence) -> None:
        """What the model thread did; `fence` is of the entry it belongs to."""
        match answer:
            case Parked():
                self.stop_waiting()
                self._parked, self._fence = answer, fence
                reached = EntryReached(answer.flip_id, answer.fits, answer.refusal, answer.plan_hash)
                self._carry_out(self._flips.park(reached, fence.generation))
            case Looked():
                self._carry_out(self._flips.on_event(RoomSeen(answer.flip_id, answer.refusal)))
                if self._flips.is_present(answer.flip_id):
                    self._look_later(answer.flip_id)
            case Worked():
                self._worked = answer
                done = WorkDone(answer.flip_id, answer.bytes_moved, answer.rows_moved)
                self._carry_out(self._flips.on_event(done))
            case WorkLost():
                self._carry_out(self._flips.on_event(WorkFailed(answer.flip_id, answer.reason, answer.restored)))
            case Switched():
                outcome = CommitReached if answer.is_committed else AbandonReached
                self._carry_out(self._flips.on_event(outcome(answer.flip_id)))
            case Resumed():
                self._put(self._resumed(answer))

    # The mover's stream.

    async def responses(self, requests: AsyncIterator[pb.JoinFlipRequest]) -> AsyncIterator[pb.JoinFlipResponse]:
        """One stream of the mover, until it ends or another one comes; begins with what holds now."""
        self._put_end()
        unsent = self._unsent = asyncio.Queue(MAX_UNSENT + 1)
        number, effects = self._flips.connect()
        self._carry_out(effects)
        reader = asyncio.create_task(self._read(requests, number))
        try:
            while (message := await unsent.get()) is not None:
                yield message
            if reader.done():
                # What the mover said was against the protocol, or not to be read: its stream ends by that name.
                reader.result()
        finally:
            reader.cancel()

    async def _read(self, requests: AsyncIterator[pb.JoinFlipRequest], number: int) -> None:
        try:
            async for message in requests:
                command = command_from_proto(message)
                self._carry_out(self._flips.on_command(number, message.fence.generation, command))
        finally:
            if number == self._flips.stream:
                self._put_end()

    # Between the two.

    def _carry_out(self, effects: list[ParticipantEffect]) -> None:
        for said in said_of(effects):
            message = said_to_proto(said, self._fence, self._rank)
            self._add_times(message)
            self._put(message)
        for effect in effects:
            if isinstance(effect, StartWork):
                self._start_work(effect.flip_id)
            if isinstance(effect, SayPresent):
                self._look_later(effect.flip_id)

    def _put(self, message: pb.JoinFlipResponse) -> None:
        """Queues for the mover; with none connected the oldest make room: the state is said again on connecting."""
        if self._unsent.qsize() >= MAX_UNSENT:
            self._unsent.get_nowait()
        self._unsent.put_nowait(message)

    def _put_end(self) -> None:
        if not self._unsent.full():
            self._unsent.put_nowait(None)

    def _add_times(self, message: pb.JoinFlipResponse) -> None:
        match message.WhichOneof("event"):
            case "parked" if self._parked is not None:
                message.parked.parked_unix_ns = self._parked.parked_unix_ns
                if self._parked.last_step_end_unix_ns is not None:
                    message.parked.last_step_end_unix_ns = self._parked.last_step_end_unix_ns
            case "present":
                message.present.present_unix_ns = time.time_ns()
            case "verified" if self._worked is not None:
                work = self._worked
                message.verified.entered_unix_ns = work.entered_unix_ns
                message.verified.read_ns, message.verified.seam_ns = work.read_ns, work.seam_ns
                message.verified.write_ns, message.verified.verify_ns = work.write_ns, work.verify_ns
            case _:
                pass

    def _resumed(self, answer: Resumed) -> pb.JoinFlipResponse:
        return pb.JoinFlipResponse(
            fence=self._fence,
            flip_id=answer.flip_id,
            rank=self._rank,
            resumed=pb.ResumedEvent(
                switched_unix_ns=answer.switched_unix_ns, first_step_unix_ns=answer.first_step_unix_ns
            ),
        )
