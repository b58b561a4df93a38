"""A generation that tests may hold at points of a flip: in its place only where `[debug] enabled` made holds."""

from collections.abc import Sequence

import anyio

from services.mesh.debug.breakpoints import HoldPoint, Holds
from services.scheduler.generation import GenerationRun, Surroundings
from services.scheduler.inputs import MoverDecided, MoverSpoke
from services.scheduler.log import GenerationLog
from services.scheduler.streams.mover_question import MoverQuestion
from services.scheduler.streams.rank_stream import RankStream

BEAT_S = 1.0
"""While an outcome is held: it is no silence of the mover."""


class HeldGeneration(GenerationRun):
    """Words of the mover wait at holds; everything else goes on."""

    def __init__(self, log: GenerationLog, streams: Sequence[RankStream], around: Surroundings, holds: Holds) -> None:
        super().__init__(log, streams, around)
        self._holds = holds

    async def listen_to_mover(self, question: MoverQuestion) -> None:
        """Takes the mover's words, each after its point is passed."""
        is_first = question.asked.entry is None
        if is_first:
            await self._holds.passing(HoldPoint.SCHEDULER_ASKING)
        async for word in question.words():
            if is_first and isinstance(word, MoverSpoke):
                await self._holds.passing(HoldPoint.SCHEDULER_ARMING)
                is_first = False
            elif isinstance(word, MoverDecided):
                await self._pass_outcome(word)
            self.give(word)

    async def _pass_outcome(self, word: MoverDecided) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._beat, MoverSpoke(word.flip_id))
            await self._holds.passing(HoldPoint.SCHEDULER_OUTCOME)
            tasks.cancel_scope.cancel()

    async def _beat(self, word: MoverSpoke) -> None:
        while True:
            await anyio.sleep(BEAT_S)
            self.give(word)
