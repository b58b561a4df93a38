"""An attempt that tests may hold at points of a flip: in its place only where `[debug] enabled` made holds."""

import time
from collections.abc import Mapping, Sequence

from flipmesh.mover.v1 import mover_service_pb2 as pb

from services.core.flip.attempts import Opened
from services.core.flip.messages import Conclude, CoordinatorEffect, CoordinatorEvent, JournalEnter, SendAssemble
from services.mesh.debug.breakpoints import HoldPoint, Holds
from services.mover.attempts import Attempt, Send

_BEFORE: Mapping[type, HoldPoint] = {
    SendAssemble: HoldPoint.MOVER_ASSEMBLING,
    JournalEnter: HoldPoint.MOVER_ENTERING,
    Conclude: HoldPoint.MOVER_CONCLUDING,
}
_AFTER: Mapping[type, HoldPoint] = {JournalEnter: HoldPoint.MOVER_ENTERED, Conclude: HoldPoint.MOVER_CONCLUDED}
"""What is passed before an event is taken that leads to such an effect, and after, before ranks are told."""


class HeldAttempt(Attempt):
    """What it says to ranks waits at holds, and what it decides before that."""

    def __init__(
        self, request: pb.RunFlipRequest, record: pb.FlipRecord, opened: Opened, send: Send, holds: Holds
    ) -> None:
        super().__init__(request, record, opened, send)
        self._holds = holds

    async def begin(self) -> None:
        """Tells the ranks, then stands at the hold."""
        await super().begin()
        await self._holds.passing(HoldPoint.MOVER_ARMED)

    async def take(self, event: CoordinatorEvent) -> None:
        """Passes the points of what follows from an event, before it is decided and before it is said."""
        foreseen = self.opened.foresee(event, time.monotonic_ns())
        await self._pass(_BEFORE, foreseen)
        commands = self.decide(event)
        await self._pass(_AFTER, foreseen)
        self.tell(commands)

    async def _pass(self, points: Mapping[type, HoldPoint], effects: Sequence[CoordinatorEffect]) -> None:
        for effect in effects:
            if (point := points.get(type(effect))) is not None:
                await self._holds.passing(point)
