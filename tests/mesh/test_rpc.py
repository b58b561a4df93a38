"""Calls over real gRPC on unix sockets: deadlines, cancellation, bounds, loss and introspection."""

import asyncio
import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anyio
import grpc
import grpc.aio
import pytest
import pytest_asyncio
from flipmesh.common.v1 import introspection_pb2 as pb
from flipmesh.common.v1.introspection_pb2_grpc import IntrospectionServiceStub
from google.protobuf.wrappers_pb2 import BytesValue
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from services.core.errors import (
    ConfigurationError,
    DeadlineExceededError,
    MessageTooLargeError,
    PeerLostError,
    RequestRefusedError,
)
from services.core.ids import Rank
from services.mesh import limits
from services.mesh.grpc_server import SERVER_OPTIONS, GrpcServer, PublicAddress
from services.mesh.identity import identify
from services.mesh.logs.files import PatientOutput
from services.mesh.logs.line import Level
from services.mesh.logs.log import Log
from services.mesh.rpc import CHANNEL_OPTIONS, HEALTH_CHECK, Peers, stream_of_bytes, unary
from services.mesh.settings.paths import StatePaths
from services.mesh.telemetry.introspection import Introspection
from services.mesh.telemetry.metrics import Metrics
from services.mesh.telemetry.progress import Phase, Progress

ECHO = "/test.Echo/Once"
STREAM = "/test.Echo/Many"


class Echo(grpc.GenericRpcHandler):
    """Answers a message with itself; by its content it stalls, fails or answers with more."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.cancelled = asyncio.Event()

    def service(self, handler_call_details: Any) -> Any:
        codec = {"request_deserializer": BytesValue.FromString, "response_serializer": BytesValue.SerializeToString}
        if handler_call_details.method == ECHO:
            return grpc.unary_unary_rpc_method_handler(self.once, **codec)  # type: ignore[arg-type]
        if handler_call_details.method == STREAM:
            return grpc.stream_stream_rpc_method_handler(self.many, **codec)  # type: ignore[arg-type]
        return None

    async def once(self, request: BytesValue, context: Any) -> BytesValue:
        match request.value:
            case b"stall":
                self.entered.set()
                try:
                    await asyncio.Event().wait()
                finally:
                    self.cancelled.set()
            case b"refuse":
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "temperature = -1")
            case b"large":
                return BytesValue(value=bytes(limits.MAX_MESSAGE_BYTES + 1))
        return request

    async def many(self, requests: AsyncIterator[BytesValue], context: Any) -> AsyncIterator[BytesValue]:
        async for request in requests:
            yield request


class Mesh:
    """One served process and the peers that call it."""

    def __init__(self, root: Path, peers: Peers, echo: Echo, log: Log) -> None:
        self.paths, self.peers, self.echo, self.log = StatePaths(root), peers, echo, log

    def server(self, rank: Rank | None = None) -> GrpcServer:
        identity = identify("echo", rank)
        self.progress, self.metrics = Progress(identity.name), Metrics()
        self.introspection = Introspection(identity, self.progress, self.metrics)
        server = GrpcServer(self.paths.socket("echo", rank), self.introspection, self.log)
        server._additions.append(lambda bare: bare.add_generic_rpc_handlers((self.echo,)))
        return server

    def once(self) -> Any:
        return self.peers.channel("echo").unary_unary(
            ECHO, request_serializer=BytesValue.SerializeToString, response_deserializer=BytesValue.FromString
        )


@pytest_asyncio.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    paths = StatePaths(tmp_path)
    paths.create()
    with (tmp_path / "out").open("wb") as output:
        log = Log("test", Level.DEBUG, None, PatientOutput(output.fileno()))
        peers = Peers(paths, log)
        yield Mesh(tmp_path, peers, Echo(), log)
        await peers.close()
        log.close()


def lines(mesh: Mesh) -> str:
    return (mesh.paths.root / "out").read_text()


async def test_answers_over_a_socket_that_only_its_owner_may_open(mesh: Mesh) -> None:
    async with mesh.server().running():
        mode = mesh.paths.socket("echo").stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        assert (await unary(mesh.once(), BytesValue(value=b"x"), timeout_s=5.0)).value == b"x"
    assert not mesh.paths.socket("echo").exists()


async def test_a_timeout_around_a_unary_call_is_anyios_own(mesh: Mesh) -> None:
    async with mesh.server().running():
        with anyio.move_on_after(0.05) as scope:
            await unary(mesh.once(), BytesValue(value=b"stall"), timeout_s=30.0)
        assert scope.cancelled_caught
        with pytest.raises(TimeoutError):
            with anyio.fail_after(0.05):
                await unary(mesh.once(), BytesValue(value=b"stall"), timeout_s=30.0)
        # The far end is told, so it does not work on for nobody.
        await asyncio.wait_for(mesh.echo.cancelled.wait(), 5.0)


async def test_why_there_is_one_awaiter(mesh: Mesh) -> None:
    """Pins what grpc and anyio do without it: the timeout's own cancellation comes out bare. If this fails, the
    libraries have changed and `unary` may have become needless."""
    async with mesh.server().running():
        with pytest.raises(asyncio.CancelledError):
            with anyio.move_on_after(0.05):
                await mesh.once()(BytesValue(value=b"stall"), timeout=30.0)


async def test_a_cancelled_task_group_takes_its_calls_along(mesh: Mesh) -> None:
    async with mesh.server().running():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_stall, mesh)
            await asyncio.wait_for(mesh.echo.entered.wait(), 5.0)
            tasks.cancel_scope.cancel()
        await asyncio.wait_for(mesh.echo.cancelled.wait(), 5.0)


async def _stall(mesh: Mesh) -> None:
    await unary(mesh.once(), BytesValue(value=b"stall"), timeout_s=30.0)


@pytest.mark.parametrize(
    ("content", "error", "text"),
    [
        (b"stall", DeadlineExceededError, "BytesValue: DEADLINE_EXCEEDED"),
        (b"refuse", RequestRefusedError, "temperature = -1"),
        (b"large", MessageTooLargeError, str(limits.MAX_MESSAGE_BYTES)),
        (bytes(limits.MAX_MESSAGE_BYTES + 1), MessageTooLargeError, str(limits.MAX_MESSAGE_BYTES)),
    ],
    ids=["deadline", "refused", "response too large", "request too large"],
)
async def test_failures_come_out_of_the_closed_set(
    mesh: Mesh, content: bytes, error: type[Exception], text: str
) -> None:
    async with mesh.server().running():
        with pytest.raises(error, match=text):
            await unary(mesh.once(), BytesValue(value=content), timeout_s=0.5 if content == b"stall" else 10.0)


async def test_p5_1_a_prompt_of_megabytes_passes(mesh: Mesh) -> None:
    async with mesh.server().running():
        content = os.urandom(12 * 1024 * 1024)
        assert (await unary(mesh.once(), BytesValue(value=content), timeout_s=10.0)).value == content


def test_p5_2_the_server_allows_the_pings_that_clients_send() -> None:
    client, server = dict(CHANNEL_OPTIONS), dict(SERVER_OPTIONS)
    assert client["grpc.keepalive_time_ms"] > server["grpc.http2.min_recv_ping_interval_without_data_ms"]
    assert server["grpc.keepalive_time_ms"] >= server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1


async def test_an_absent_peer_is_waited_for_and_named_once(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.mesh.rpc.FIRST_WAIT_S", 0.05)
    monkeypatch.setattr("services.mesh.rpc.WAIT_AGAIN_S", 0.05)
    with pytest.raises(DeadlineExceededError, match=r"echo at .*echo\.sock: absent for 0\.3 s"):
        await mesh.peers.reach("echo", timeout_s=0.3)
    mesh.log.close()
    assert lines(mesh).count("waiting-for-peer peer=echo") == 1


async def test_a_peer_that_comes_late_is_reached(mesh: Mesh) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(mesh.peers.reach, "echo")
        async with mesh.server().running():
            await mesh.peers.reach("echo", timeout_s=10.0)


async def test_a_peer_that_goes_is_lost_and_one_that_returns_is_found(mesh: Mesh) -> None:
    async with mesh.server().running():
        await unary(mesh.once(), BytesValue(), timeout_s=5.0)
    with pytest.raises(PeerLostError, match="UNAVAILABLE"):
        await unary(mesh.once(), BytesValue(), timeout_s=5.0)
    async with mesh.server().running():
        await mesh.peers.reach("echo", timeout_s=10.0)
        await unary(mesh.once(), BytesValue(), timeout_s=5.0)


async def test_the_same_bytes_go_to_every_rank(mesh: Mesh) -> None:
    plan = BytesValue(value=b"plan" * 1000).SerializeToString()
    async with contextlib.AsyncExitStack() as stack:
        for rank in (Rank(0), Rank(1)):
            await stack.enter_async_context(mesh.server(rank).running())
        for rank in (Rank(0), Rank(1)):
            channel = await mesh.peers.reach("echo", rank, timeout_s=5.0)
            call = stream_of_bytes(channel, STREAM, BytesValue)()
            await call.write(plan)
            response = await call.read()
            assert isinstance(response, BytesValue)
            assert response.value == b"plan" * 1000
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF


async def test_health_follows_the_service(mesh: Mesh) -> None:
    server = mesh.server()
    async with server.running():
        channel = mesh.peers.channel("echo")
        check = channel.unary_unary(
            HEALTH_CHECK,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        name = "flipmesh.common.v1.IntrospectionService"
        for serving in (True, False):
            await server.set_serving(serving)
            answer = await unary(check, health_pb2.HealthCheckRequest(service=name), timeout_s=5.0)
            wanted = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
            assert answer.status == wanted


async def test_reflection_names_every_service(mesh: Mesh) -> None:
    async with mesh.server().running():
        ask = mesh.peers.channel("echo").stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        call = ask(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        (answer,) = [response async for response in call]
    names = {service.name for service in answer.list_services_response.service}
    assert {"flipmesh.common.v1.IntrospectionService", "grpc.health.v1.Health"} <= names


async def test_status_says_what_the_process_is_at(mesh: Mesh) -> None:
    async with mesh.server(Rank(1)).running():
        stub = IntrospectionServiceStub(mesh.peers.channel("echo", Rank(1)))
        mesh.progress.enter(Phase.WAITING, "the scheduler", 30.0)
        mesh.introspection.report(lambda status: status.worker.MergeFrom(pb.WorkerStatus(rank=1, weights_bytes=7)))
        status = await unary(stub.GetStatus, pb.GetStatusRequest(with_memory=True), timeout_s=5.0)
        assert (status.identity.service, status.identity.rank, status.identity.pid) == ("echo", 1, os.getpid())
        assert (status.phase, status.waiting_for) == (pb.PHASE_WAITING, "the scheduler")
        assert status.phase_deadline_ns == 30_000_000_000
        assert status.memory_bytes > 10_000_000
        assert status.worker.weights_bytes == 7
        mesh.metrics.counter("flipmesh_steps", "Steps.").inc(3)
        metrics = await unary(stub.GetMetrics, pb.GetMetricsRequest(), timeout_s=5.0)
        (family,) = metrics.families
        assert (family.name, family.kind, family.samples[0].value) == ("flipmesh_steps", pb.METRIC_KIND_COUNTER, 3.0)


async def test_p5_9_who_binds_chooses_the_port(mesh: Mesh) -> None:
    published = [mesh.paths.address("echo", "grpc"), mesh.paths.address("other", "grpc")]
    async with mesh.server().running(public=PublicAddress("127.0.0.1:0", published[0], None, 4096)):
        address = published[0].read_text().strip()
        async with grpc.aio.insecure_channel(address) as channel:
            call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(ECHO)
            assert await call(BytesValue(value=b"x").SerializeToString(), timeout=5.0)
        with pytest.raises(ConfigurationError, match="cannot be bound"):
            async with mesh.server(Rank(1)).running(public=PublicAddress(address, published[1], None, 4096)):
                pass
    assert not any(path.exists() for path in published)


def test_every_protos_phase_has_its_value() -> None:
    ours = {f"PHASE_{phase.name}": phase.value for phase in Phase}
    assert dict(pb.Phase.items()) == {"PHASE_UNSPECIFIED": 0, **ours}
