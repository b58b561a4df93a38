"""A scheduler at the wire: a real gRPC server that speaks the proto and whose model is a script.

What the model would write after a prompt is given as bytes; each byte is one token of the byte vocabulary below, which
is the hardest case for text: every character beyond ASCII is split over tokens.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import grpc.aio
from flipmesh.common.v1 import introspection_pb2, layout_pb2
from flipmesh.common.v1.introspection_pb2_grpc import (
    IntrospectionServiceServicer,
    add_IntrospectionServiceServicer_to_server,
)
from flipmesh.scheduler.v1 import scheduler_service_pb2 as pb
from flipmesh.scheduler.v1.scheduler_service_pb2_grpc import (
    SchedulerServiceServicer,
    add_SchedulerServiceServicer_to_server,
)
from opentelemetry.trace import NoOpTracer, Tracer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from services.core.ids import RequestId, TokenId
from services.core.request import (
    Admitted,
    Emitted,
    Finished,
    FinishReason,
    Rejected,
    RequestEvent,
    Submission,
    TokenLogprobs,
)
from services.mesh.codec.scheduler import event_to_proto, submission_from_proto
from services.mesh.grpc_server import SERVER_OPTIONS, GrpcServer
from services.mesh.identity import identify
from services.mesh.logs.files import PatientOutput, RotatedFile
from services.mesh.logs.line import Level
from services.mesh.logs.log import Log
from services.mesh.rpc import Peers
from services.mesh.settings.paths import StatePaths
from services.mesh.settings.tables import Settings
from services.mesh.shell import Shell
from services.mesh.telemetry.introspection import Introspection
from services.mesh.telemetry.metrics import Metrics
from services.mesh.telemetry.progress import Progress
from services.router.text.renderer import ChatRenderer
from services.router.text.served_model import ServedModel
from services.router.text.tokens import Tokens
from services.router.text.vocabulary import byte_alphabet, vocabulary_from_tokenizer

MODEL = "scripted"
WINDOW = 512
START_ID, END_ID = TokenId(256), TokenId(257)
CHATML = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_tokens() -> Tokens:
    """A tokenizer of the real class whose id is the byte, and two control tokens."""
    vocabulary = dict(byte_alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|im_start|>", special=True), AddedToken("<|im_end|>", special=True)])
    return Tokens(tokenizer, vocabulary_from_tokenizer(tokenizer, {}, frozenset({END_ID})))


def scripted_model() -> ServedModel:
    tokens = byte_tokens()
    renderer = ChatRenderer({"default": CHATML}, {}, sorted(tokens.vocabulary.control_texts.values()))
    return ServedModel(MODEL, "digest", tokens, renderer, created_s=1)


@contextmanager
def open_log(paths: StatePaths) -> Iterator[Log]:
    """A log that writes to its file alone."""
    with Path("/dev/null").open("wb") as nowhere:
        file = RotatedFile(paths.log_file("router"), 1 << 20, 1)
        log = Log("router", Level.DEBUG, file, PatientOutput(nowhere.fileno()))
        try:
            yield log
        finally:
            log.close()


@asynccontextmanager
async def shell_in(folder: Path, settings: Settings, tracer: Tracer | None = None) -> AsyncIterator[Shell]:
    """A shell of the real parts, whose state lies in `folder` and whose log is a file in it."""
    paths = StatePaths(folder)
    paths.create()
    identity = identify("router", None)
    with open_log(paths) as log:
        progress, metrics = Progress("router"), Metrics()
        introspection = Introspection(identity, progress, metrics)
        peers = Peers(paths, log)
        try:
            yield Shell(
                identity=identity,
                settings=settings,
                paths=paths,
                fds={},
                log=log,
                tracer=tracer or NoOpTracer(),
                metrics=metrics,
                progress=progress,
                introspection=introspection,
                server=GrpcServer(paths.socket("router"), introspection, log),
                peers=peers,
                stop=anyio.Event(),
            )
        finally:
            await peers.close()


class ScriptedScheduler(SchedulerServiceServicer, IntrospectionServiceServicer):
    """Serves every submission by `write`: the bytes that follow a prompt.

    `gate_at` holds each request before that output token until `open_gate`; `refuse` may reject a submission;
    `mark` is set whenever anything arrived, for `until`.
    """

    def __init__(self, write: Callable[[bytes], bytes], *, tokens_per_message: int = 1) -> None:
        self.write, self.tokens_per_message = write, tokens_per_message
        self.gate_at: int | None = None
        self.refuse: Callable[[Submission], Rejected | None] = lambda submission: None
        self.logprob = -0.5
        self.num_cached = 3
        self.submitted: list[Submission] = []
        self.aborted: list[RequestId] = []
        self.finished: list[tuple[RequestId, int]] = []
        self.generation = 1
        self.num_streams = 0
        self.flips: list[int] = []
        self.is_stopped = False
        self._gate = asyncio.Event()
        self._mark = asyncio.Event()
        self._outgoing: asyncio.Queue[pb.ServeRequestsResponse | None] | None = None
        self._tasks: dict[RequestId, asyncio.Task[None]] = {}

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds`, looking whenever something arrives."""
        while not holds():
            self._mark.clear()
            await asyncio.wait_for(self._mark.wait(), 10)

    def requests(self) -> list[Submission]:
        """What clients asked for, the router's own probes left out."""
        return [submission for submission in self.submitted if not submission.request_id.startswith("probe")]

    def open_gate(self) -> None:
        self.gate_at = None
        self._gate.set()

    def lose(self, reason: str) -> None:
        """The generation ends: its requests are gone."""
        self._stop_all()
        assert self._outgoing is not None
        self._outgoing.put_nowait(pb.ServeRequestsResponse(lost=pb.GroupLost(reason=reason)))

    def reopen(self) -> None:
        """The next generation is ready."""
        self.generation += 1
        assert self._outgoing is not None
        self._outgoing.put_nowait(self._opened())

    def hang_up(self) -> None:
        """Ends the stream, as a scheduler that is restarted."""
        assert self._outgoing is not None
        self._outgoing.put_nowait(None)

    async def ServeRequests(self, request_iterator, context):  # type: ignore[no-untyped-def]  # noqa: N802
        outgoing: asyncio.Queue[pb.ServeRequestsResponse | None] = asyncio.Queue()
        self._outgoing = outgoing
        self.num_streams += 1
        outgoing.put_nowait(self._opened())
        reading = asyncio.ensure_future(self._read(request_iterator))
        self._mark.set()
        try:
            while (message := await outgoing.get()) is not None:
                yield message
        finally:
            reading.cancel()
            self._stop_all()

    async def RequestFlip(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        self.flips.append(request.target)
        return pb.RequestFlipResponse(
            outcome=pb.FLIP_OUTCOME_COMMITTED,
            flip_id=7,
            layout=request.target,
            fence=layout_pb2.Fence(generation=self.generation, epoch=2),
        )

    async def GetStatus(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        if self.is_stopped:
            await asyncio.Event().wait()
        return introspection_pb2.GetStatusResponse()

    async def GetMetrics(self, request, context):  # type: ignore[no-untyped-def]  # noqa: N802
        return introspection_pb2.GetMetricsResponse(
            identity=introspection_pb2.ProcessIdentity(service="scheduler", incarnation="one")
        )

    def _opened(self) -> pb.ServeRequestsResponse:
        return pb.ServeRequestsResponse(
            opened=pb.GroupOpened(
                fence=layout_pb2.Fence(generation=self.generation, epoch=1),
                layout=layout_pb2.LAYOUT_KIND_TP,
                max_context_tokens=WINDOW,
            )
        )

    async def _read(self, messages: AsyncIterator[pb.ServeRequestsRequest]) -> None:
        async for message in messages:
            match message.WhichOneof("message"):
                case "submit":
                    submission = submission_from_proto(message.submit)
                    assert submission.request_id not in self._tasks, "an open id was submitted again"
                    self.submitted.append(submission)
                    self._tasks[submission.request_id] = asyncio.ensure_future(self._serve(submission))
                case "abort":
                    self.aborted.append(RequestId(message.abort.request_id))
                    self._stop(RequestId(message.abort.request_id))
                case "finish":
                    self.finished.append((RequestId(message.finish.request_id), message.finish.num_output_tokens))
                    self._stop(RequestId(message.finish.request_id))
            self._mark.set()

    async def _serve(self, submission: Submission) -> None:
        if (rejected := self.refuse(submission)) is not None:
            self._tasks.pop(submission.request_id)
            self._send(rejected)
            return
        self._send(Admitted(submission.request_id, self.num_cached))
        prompt = bytes(token for token in submission.token_ids[: submission.num_prompt_tokens] if token < 256)
        output = [*map(TokenId, self.write(prompt)), END_ID]
        at = len(submission.token_ids) - submission.num_prompt_tokens
        most = min(submission.max_output_tokens, WINDOW - submission.num_prompt_tokens)
        while at < most:
            end = min(at + self.tokens_per_message, most)
            if self.gate_at is not None and at >= self.gate_at:
                self._mark.set()
                await self._gate.wait()
            ids = tuple(output[index % len(output)] for index in range(at, end))
            stop = next((place for place, token in enumerate(ids) if token in submission.stop_token_ids), None)
            ids = ids if stop is None else ids[: stop + 1]
            self._send(Emitted(submission.request_id, at, ids, self._logprobs(submission, ids)))
            at += len(ids)
            if stop is not None:
                self._finish(submission, FinishReason.STOP, at)
                return
            await asyncio.sleep(0)
        self._finish(submission, FinishReason.LENGTH, at)

    def _logprobs(self, submission: Submission, ids: tuple[TokenId, ...]) -> tuple[TokenLogprobs, ...]:
        if submission.num_logprobs is None:
            return ()
        top = tuple((TokenId(ord("x") + place), -math.inf) for place in range(submission.num_logprobs))
        return tuple(TokenLogprobs(self.logprob, top) for _ in ids)

    def _finish(self, submission: Submission, reason: FinishReason, num_output_tokens: int) -> None:
        self._tasks.pop(submission.request_id)
        self._send(Finished(submission.request_id, reason, num_output_tokens, self.num_cached))

    def _send(self, event: RequestEvent) -> None:
        assert self._outgoing is not None
        events = pb.RequestEvents(events=[event_to_proto(event)])
        self._outgoing.put_nowait(pb.ServeRequestsResponse(events=events))

    def _stop(self, request_id: RequestId) -> None:
        if (task := self._tasks.pop(request_id, None)) is not None:
            task.cancel()

    def _stop_all(self) -> None:
        for request_id in list(self._tasks):
            self._stop(request_id)


@asynccontextmanager
async def scheduler_at(socket: Path, scheduler: ScriptedScheduler) -> AsyncIterator[None]:
    """Serves the scheduler on its socket."""
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add_SchedulerServiceServicer_to_server(scheduler, server)
    add_IntrospectionServiceServicer_to_server(scheduler, server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)
