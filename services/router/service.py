"""The router process: opens the model, wires the parts together, runs them, and drains at the end."""

import socket
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread
from flipmesh.common.v1 import introspection_pb2
from flipmesh.router.v1 import inference_service_pb2
from flipmesh.router.v1.inference_service_pb2_grpc import (
    add_AdminServiceServicer_to_server,
    add_InferenceServiceServicer_to_server,
)
from flipmesh.scheduler.v1 import scheduler_service_pb2
from flipmesh.scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub

from services.core.errors import MeshError
from services.core.ids import LayoutKind
from services.mesh.codec.common import layout_to_proto
from services.mesh.grpc_server import PublicAddress
from services.mesh.rpc import unary
from services.mesh.settings.paths import write_atomically
from services.mesh.settings.tables import RouterSettings, Settings
from services.mesh.shell import Shell
from services.mesh.telemetry.progress import Phase
from services.models.model_files import ModelFiles, open_model
from services.router.admission import Admission
from services.router.grpc_server import AdminServicer, InferenceServicer
from services.router.health import Health, ProcessWatch
from services.router.http.app import HttpFront
from services.router.http.metrics_page import MetricsPage
from services.router.http.protocol import ConnectionBounds
from services.router.http.server import HttpServer, allow_descriptors, bind
from services.router.openai.wanted import RequestBounds
from services.router.readiness import Readiness
from services.router.request_metrics import RequestMetrics
from services.router.streams.inference import Inference
from services.router.streams.scheduler_client import SchedulerClient
from services.router.text.renderer import open_renderer
from services.router.text.served_model import ServedModel
from services.router.text.tokens import open_tokens

TOKENISING_REQUESTS = 8
"""Prompts of the largest size that may wait for the tokeniser together."""
LOOK_S = 1.0
LAST_WORDS_S = 0.4
"""After the drain: how long the last events may take to reach their sockets."""


@dataclass(frozen=True, slots=True)
class Router:
    """The parts of one router."""

    model: ServedModel
    bounds: RequestBounds
    admission: Admission
    client: SchedulerClient
    inference: Inference
    watch: ProcessWatch
    health: Health
    readiness: Readiness
    server: HttpServer
    metrics: RequestMetrics


async def main(shell: Shell) -> None:
    """The life of the router."""
    settings = shell.settings
    with shell.progress.working("opening the model", settings.deadlines.boot_s):
        files, model = await anyio.to_thread.run_sync(_open_model, settings)
    router = build(shell, model, files.geometry.max_context_tokens)
    allow_descriptors(settings.router.max_connections)
    bound = bind(settings.router.http_host, settings.router.http_port)
    host, port = bound.getsockname()[:2]
    published = shell.paths.address("router", "http")
    grpc_published = shell.paths.address("router", "grpc")
    async with shell.server.running(public=public_address(settings.router, grpc_published)):
        # The port in use, where any free one was asked for.
        grpc_address = grpc_published.read_text("ascii").strip() if grpc_published.exists() else ""
        shell.introspection.report(partial(_report, router, f"{host}:{port}", grpc_address))
        write_atomically(published, f"{host}:{port}\n")
        shell.log.info("serving-http", address=f"{host}:{port}", model=model.name)
        try:
            await serve(shell, router, bound)
        finally:
            published.unlink(missing_ok=True)


def build(shell: Shell, model: ServedModel, max_context_tokens: int) -> Router:
    """Wires the parts; nothing runs yet. `max_context_tokens`: what the model could take, before the group says."""
    settings = shell.settings
    wanted, deadlines = settings.router, settings.deadlines
    bounds = RequestBounds(
        vocabulary_size=model.vocabulary_size,
        max_context_tokens=settings.model.context_tokens or max_context_tokens,
        max_choices=wanted.max_choices,
        max_stop_strings=wanted.max_stop_strings,
        max_top_logprobs=wanted.max_top_logprobs,
    )
    admission = Admission(
        wanted.max_open_requests, TOKENISING_REQUESTS * wanted.max_request_bytes, wanted.max_receiving_bytes
    )
    channel = shell.peers.channel("scheduler")
    client = SchedulerClient(
        channel,
        shell.log,
        max_open=wanted.max_open_requests * wanted.max_choices,
        budget_s=wanted.resubmit_budget_s,
    )
    metrics = RequestMetrics.registered(shell.metrics)
    inference = Inference(model, client, admission, metrics, shell.tracer)
    watch = ProcessWatch(shell.peers, settings.group.num_ranks)
    health = Health(client, watch, admission, step_s=deadlines.step_s)
    page = MetricsPage(shell.introspection, shell.peers, settings.group.num_ranks)
    front = HttpFront(
        inference,
        bounds,
        health,
        page,
        shell.log,
        max_request_bytes=wanted.max_request_bytes,
        api_key=wanted.api_key,
    )
    _add_grpc(shell, inference, bounds, admission)
    flip_to = None if settings.policy.is_pinned else partial(_flip_to, shell, _flip_bound_s(settings))
    readiness = Readiness(model, client, health, shell.log, flip_to, probe_s=deadlines.step_s)
    server = HttpServer(front.app(), ConnectionBounds(wanted.max_connections, wanted.head_s, wanted.body_s))
    return Router(model, bounds, admission, client, inference, watch, health, readiness, server, metrics)


def public_address(wanted: RouterSettings, publish: Path) -> PublicAddress | None:
    """Where clients reach gRPC besides the unix socket, if anywhere; they may send what HTTP lets them."""
    if wanted.grpc_address is None:
        return None
    return PublicAddress(wanted.grpc_address, publish, wanted.api_key, wanted.max_request_bytes)


def _open_model(settings: Settings) -> tuple[ModelFiles, ServedModel]:
    files = open_model(settings.model.path or settings.model.name)
    num_threads = settings.router.tokenizer_threads
    tokens = open_tokens(files, num_threads)
    model = ServedModel(
        name=settings.model.name,
        digest=files.digest,
        tokens=tokens,
        renderer=open_renderer(
            files,
            tokens.vocabulary,
            num_processes=num_threads,
            literal_content=settings.router.literal_content,
        ),
        created_s=int(time.time()),
    )
    return files, model


def _add_grpc(shell: Shell, inference: Inference, bounds: RequestBounds, admission: Admission) -> None:
    services = inference_service_pb2.DESCRIPTOR.services_by_name
    servicer = InferenceServicer(inference, bounds)
    shell.server.add(add_InferenceServiceServicer_to_server, servicer, services["InferenceService"])

    def drain(why: str) -> int:
        admission.close(why)
        shell.log.info("draining", open=admission.num_open_requests)
        return admission.num_open_requests

    admin = AdminServicer(shell.peers.channel("scheduler"), drain, flip_s=_flip_bound_s(shell.settings))
    shell.server.add(add_AdminServiceServicer_to_server, admin, services["AdminService"])


def _flip_bound_s(settings: Settings) -> float:
    """A flip waits for the park, for presence and for the data plane; the mover has a clock for each."""
    deadlines = settings.deadlines
    return deadlines.park_s + deadlines.presence_s + deadlines.flip_data_plane_s + 2 * deadlines.rpc_s


async def _flip_to(shell: Shell, bound_s: float, target: LayoutKind) -> str | None:
    """Asks the scheduler for a flip; None on a commit, else why there was none."""
    stub = SchedulerServiceStub(shell.peers.channel("scheduler"))
    request = scheduler_service_pb2.RequestFlipRequest(target=layout_to_proto(target))
    try:
        answer = await unary(stub.RequestFlip, request, timeout_s=bound_s)
    except MeshError as error:
        return str(error)
    return None if answer.outcome == scheduler_service_pb2.FLIP_OUTCOME_COMMITTED else answer.reason


async def serve(shell: Shell, router: Router, bound: socket.socket) -> None:
    """Runs the parts until the process is asked to stop, then drains."""
    async with router.model.renderer.running(), anyio.create_task_group() as tasks:
        silence_s = shell.settings.deadlines.scheduler_silence_s
        watches = (partial(_follow, shell, router), partial(_give_up_the_silent, router, silence_s))
        for run in (router.client.run, router.readiness.run, router.watch.run, *watches):
            tasks.start_soon(run)
        http_ended = anyio.Event()
        tasks.start_soon(_serve_http, router.server, bound, http_ended)
        await shell.stop.wait()
        await _drain(router, shell.settings.router.drain_s, http_ended)
        shell.log.info("drained", open=router.admission.num_open_requests)
        tasks.cancel_scope.cancel()


async def _serve_http(server: HttpServer, bound: socket.socket, ended: anyio.Event) -> None:
    await server.serve_on(bound)
    ended.set()


async def _drain(router: Router, drain_s: float, http_ended: anyio.Event) -> None:
    """Lets open requests end by themselves for a while, then ends them with a word that says why."""
    router.admission.close("the server is shutting down")
    router.server.end()
    empty = anyio.Event()
    router.admission.on_empty = empty.set
    if router.admission.num_open_requests:
        with anyio.move_on_after(drain_s):
            await empty.wait()
    router.client.close("the server is shutting down and the answer was cut off")
    with anyio.move_on_after(LAST_WORDS_S):
        await http_ended.wait()


async def _give_up_the_silent(router: Router, allowed_s: float) -> None:
    """A scheduler not heard for so long is stopped, and its stream would hold clients for as long."""
    while True:
        began_s = time.monotonic()
        await anyio.sleep(LOOK_S)
        if time.monotonic() - began_s > 2 * LOOK_S:
            # This process stood still, and could not have heard: first it may listen again.
            continue
        # What it says on its stream is a sign of life as well: of one that goes on it is the first.
        silence_s = min(router.watch.silence_s(("scheduler", None)), router.client.silence_s)
        if router.client.group is not None and silence_s > allowed_s:
            router.client.drop(f"it was not heard for {silence_s:.1f} s")


async def _follow(shell: Shell, router: Router) -> None:
    """Keeps the declared phase in step with the group."""
    while not shell.stop.is_set():
        if router.client.group is None:
            shell.progress.enter(Phase.WAITING, router.client.waiting_for)
        else:
            shell.progress.enter(Phase.READY, f"generation {router.client.group.generation}")
        await router.client.wait_for_change()


def _report(router: Router, http_address: str, grpc_address: str, status: introspection_pb2.GetStatusResponse) -> None:
    admission, group = router.admission, router.client.group
    status.router.num_open_requests = admission.num_open_requests
    status.router.num_streams = admission.num_streams
    status.router.http_address = http_address
    status.router.grpc_address = grpc_address
    status.router.num_requests_total = admission.num_requests_total
    status.router.num_resubmitted_total = router.client.num_resubmitted
    status.router.serving = group is not None and group.generation == router.health.served_generation
    status.router.model_name = router.model.name
