"""The question that a flip puts to the mover: what it answers, as it comes, until the question is withdrawn. IO only.

A mover that is not there is waited for: how long, its log decides.
"""

import asyncio
from collections.abc import AsyncIterator

import anyio.lowlevel
import grpc.aio
from flipmesh.common.v1 import layout_pb2
from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub

from services.core.ids import FlipId
from services.mesh.codec.common import layout_to_proto
from services.mesh.codec.flip import outcome_from_proto
from services.scheduler.inputs import MoverDecided, MoverSpoke, Question, QuestionFailed

Words = MoverSpoke | MoverDecided | QuestionFailed


class MoverQuestion:
    """One question of one attempt."""

    def __init__(self, channel: grpc.aio.Channel, question: Question) -> None:
        self.asked = question
        self._channel = channel
        self._call: grpc.aio.UnaryStreamCall[pb.RunFlipRequest, pb.RunFlipResponse] | None = None
        self._is_withdrawn = False

    def withdraw(self) -> None:
        """Nobody waits for the answer any more."""
        self._is_withdrawn = True
        if self._call is not None:
            self._call.cancel()

    async def words(self) -> AsyncIterator[Words]:
        """Asks; what the mover says, the last of it an outcome or why there is none; nothing once withdrawn."""
        if self._is_withdrawn:
            return
        flip_id, failure = self.asked.flip_id, "the mover ended its stream without an outcome"
        call = self._call = MoverServiceStub(self._channel).RunFlip(_request(self.asked), wait_for_ready=True)
        try:
            async for response in call:
                word = _word(flip_id, response)
                yield word
                if isinstance(word, MoverDecided):
                    return
        except grpc.aio.AioRpcError as error:
            failure = f"{error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            # grpc's own, or this task's, which it drops the sign of.
            call.cancel()
            await anyio.lowlevel.checkpoint_if_cancelled()
            if not self._is_withdrawn:
                raise
        if not self._is_withdrawn:
            yield QuestionFailed(flip_id, failure)


def _word(flip_id: FlipId, response: pb.RunFlipResponse) -> MoverSpoke | MoverDecided:
    outcome = outcome_from_proto(response.state)
    return MoverSpoke(flip_id) if outcome is None else MoverDecided(flip_id, outcome, response.reason)


def _request(question: Question) -> pb.RunFlipRequest:
    generation, epoch = question.fence
    request = pb.RunFlipRequest(
        fence=layout_pb2.Fence(generation=generation, epoch=epoch),
        flip_id=question.flip_id,
        source=layout_to_proto(question.source),
        target=layout_to_proto(question.target),
        live_run_begin=[begin for begin, _ in question.live_runs],
        live_run_length=[length for _, length in question.live_runs],
    )
    if question.entry is not None:
        request.entry_sequence = question.entry
    return request
