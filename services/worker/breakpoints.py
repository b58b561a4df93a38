"""A rank that tests may hold at points of a flip, and whose rows they may damage before a step.

Takes the place of the bare one only where `[debug] enabled` made holds: a rank that serves has no branch for it. Never
changes what passes through.
"""

from collections.abc import AsyncIterator, Callable

from flipmesh.worker.v1 import worker_service_pb2 as pb

from services.core.ids import FlipId
from services.core.step import AbandonEntry, CommitEntry, LogEntry, StepPlan, StepReport
from services.mesh.debug.breakpoints import HoldPoint, Holds
from services.mesh.debug.damage import DamageKind, NothingToDamageError
from services.worker.model_thread import Executes
from services.worker.participation import FlipAnswer, Parked
from services.worker.steps.reset import Opened


class HeldRank:
    """See `Executes`; all of it runs on the model thread."""

    def __init__(self, rank: Executes, holds: Holds, damage: Callable[[DamageKind, int], str]) -> None:
        """`damage`: does one of a kind by a seed, on the model thread, and says what it did."""
        self._rank, self._holds, self._damage = rank, holds, damage

    @property
    def notice(self) -> Callable[[FlipAnswer], None]:
        """See `Executes`."""
        return self._rank.notice

    @notice.setter
    def notice(self, hear: Callable[[FlipAnswer], None]) -> None:
        def hear_in_time(answer: FlipAnswer) -> None:
            if isinstance(answer, Parked):
                self._holds.passing_in_thread(HoldPoint.WORKER_PARKED)
            hear(answer)

        self._rank.notice = hear_in_time

    def execute(self, entry: LogEntry) -> Opened | StepReport | None:
        """See `Executes`."""
        if isinstance(entry.entry, StepPlan):
            self._damage_rows()
        if isinstance(entry.entry, CommitEntry | AbandonEntry):
            self._holds.passing_in_thread(HoldPoint.WORKER_OUTCOME)
        answer = self._rank.execute(entry)
        if isinstance(entry.entry, CommitEntry):
            self._holds.passing_in_thread(HoldPoint.WORKER_SWITCHED)
        return answer

    def _damage_rows(self) -> None:
        for order in self._holds.damage.take():
            try:
                order.answer(self._damage(order.kind, order.seed))
            except NothingToDamageError as error:
                order.refuse(error)

    def look(self, flip_id: FlipId) -> FlipAnswer:
        """See `Executes`."""
        return self._rank.look(flip_id)

    def work(self, flip_id: FlipId) -> FlipAnswer:
        """See `Executes`."""
        self._holds.passing_in_thread(HoldPoint.WORKER_ENTERED)
        answer = self._rank.work(flip_id)
        self._holds.passing_in_thread(HoldPoint.WORKER_VERIFIED)
        return answer


async def held_commands(commands: AsyncIterator[pb.JoinFlipRequest], holds: Holds) -> AsyncIterator[pb.JoinFlipRequest]:
    """What the mover says, in order; on the event loop."""
    async for command in commands:
        if command.HasField("assemble"):
            await holds.passing(HoldPoint.WORKER_ASSEMBLING)
        yield command
