"""The policy's service: keeps the group's latest signal and advises whenever the advice or its kind of reason changes.

It looks again by itself only while something waits for time to pass (dwell, backoff, rest); otherwise it sleeps until a
signal or a change of mode comes. It never acts: the scheduler writes the log.
"""

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import anyio
import grpc.aio
from flipmesh.common.v1 import introspection_pb2
from flipmesh.policy.v1 import policy_service_pb2 as pb
from flipmesh.policy.v1.policy_service_pb2_grpc import PolicyServiceServicer

from services.mesh.codec.common import CodecError, layout_from_proto, layout_to_proto
from services.mesh.codec.policy import mode_from_proto, mode_to_proto
from services.mesh.logs.log import Log
from services.policy.decide import Advice, LoadSignal, PolicyMode, PolicyRules, advise

LOOK_AGAIN_S = 0.25
"""While a clock of the rule runs; four looks a second cost nothing that can be measured."""
REASON_LOG_S = 10.0
"""A reason of the same shape is logged at most this often."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """The latest signal and when it came: its ages grow until the next one."""

    message: pb.AdviseLayoutRequest
    at_s: float
    idle_since_s: float | None

    def at(self, now_s: float) -> LoadSignal:
        """The signal as of `now_s`."""
        message, age_s = self.message, now_s - self.at_s
        return LoadSignal(
            layout=layout_from_proto(message.layout, "layout"),
            uncomputed_prefill_tokens=message.uncomputed_prefill_tokens,
            decode_rows=message.decode_rows,
            queued_requests=message.queued_requests,
            since_flip_s=message.since_flip_ns * 1e-9 + age_s,
            since_attempt_s=message.since_attempt_ns * 1e-9 + age_s,
            abandoned_in_a_row=message.abandoned_in_a_row,
            idle_s=0.0 if self.idle_since_s is None else now_s - self.idle_since_s,
        )


class Policy(PolicyServiceServicer):
    """Serves one group. A new stream of the scheduler replaces the one before it."""

    def __init__(self, mode: PolicyMode, rules: PolicyRules, log: Log) -> None:
        self.mode = mode
        self.advice: Advice | None = None
        """The last one given; None until a signal came."""
        self._rules = rules
        self._log = log
        self._heard: _Heard | None = None
        self._news = anyio.Event()
        self._logged_shape = ""
        self._logged_s = float("-inf")

    async def AdviseLayout(  # noqa: N802 (the proto's name)
        self,
        request_iterator: AsyncIterator[pb.AdviseLayoutRequest],
        context: grpc.aio.ServicerContext[pb.AdviseLayoutRequest, pb.AdviseLayoutResponse],
    ) -> AsyncIterator[pb.AdviseLayoutResponse]:
        """Advice for one stream of signals; ends when the scheduler ends it."""
        self._heard = None
        ended = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._hear, request_iterator, ended)
            said: tuple[object, ...] = ()
            while not ended.is_set():
                news = self._news
                advice = self._look()
                if advice is not None and (saying := self._said(advice)) != said:
                    said = saying
                    yield self._response(advice)
                with anyio.move_on_after(LOOK_AGAIN_S if advice is not None and advice.waits else None):
                    await news.wait()
            tasks.cancel_scope.cancel()

    async def SetMode(  # noqa: N802 (the proto's name)
        self, request: pb.SetModeRequest, context: grpc.aio.ServicerContext[pb.SetModeRequest, pb.SetModeResponse]
    ) -> pb.SetModeResponse:
        """Changes who decides, from the next look on."""
        try:
            mode = PolicyMode(mode_from_proto(request.mode))
        except CodecError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        previous, self.mode = self.mode, mode
        self._log.info("mode", previous=previous.value, mode=mode.value)
        self._wake()
        return pb.SetModeResponse(previous=mode_to_proto(previous.value))

    def fill_status(self, status: introspection_pb2.GetStatusResponse) -> None:
        """The policy's part of a status."""
        status.policy.mode = self.mode.value
        if self.advice is not None:
            status.policy.advice = layout_to_proto(self.advice.layout)
            status.policy.reason = self.advice.reason

    async def _hear(self, requests: AsyncIterator[pb.AdviseLayoutRequest], ended: anyio.Event) -> None:
        try:
            async for message in requests:
                now_s = time.monotonic()
                self._heard = _Heard(message, now_s, self._idle_since(message, now_s))
                self._wake()
        except grpc.aio.BaseError:
            # This process stops while the scheduler still listens: the stream ends, nobody is wrong.
            return
        finally:
            ended.set()
            self._wake()

    def _idle_since(self, message: pb.AdviseLayoutRequest, now_s: float) -> float | None:
        if message.decode_rows or message.uncomputed_prefill_tokens or message.queued_requests:
            return None
        before = self._heard.idle_since_s if self._heard else None
        return now_s if before is None else before

    def _wake(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    def _look(self) -> Advice | None:
        if self._heard is None:
            return None
        now_s = time.monotonic()
        self.advice = advise(self.mode, self._rules, self._heard.at(now_s))
        if self.advice.shape != self._logged_shape or now_s - self._logged_s >= REASON_LOG_S:
            self._logged_shape, self._logged_s = self.advice.shape, now_s
            self._log.info("advice", layout=self.advice.layout.value, reason=self.advice.reason)
        return self.advice

    def _said(self, advice: Advice) -> tuple[object, ...]:
        """What makes an advice a new one; an attempt that ended, however it ended, makes it new as well."""
        assert self._heard is not None, "an advice follows a signal"
        message = self._heard.message
        attempts = (message.fence.generation, message.fence.epoch, message.abandoned_in_a_row)
        return advice.layout, advice.shape, self.mode, attempts

    def _response(self, advice: Advice) -> pb.AdviseLayoutResponse:
        assert self._heard is not None, "an advice follows a signal"
        return pb.AdviseLayoutResponse(
            advised=layout_to_proto(advice.layout),
            reason=advice.reason,
            mode=mode_to_proto(self.mode.value),
            fence=self._heard.message.fence,
        )
