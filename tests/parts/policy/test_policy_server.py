"""The policy's service over a real stream: advice on change, by time alone, by mode, and no more often than that."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import anyio
import grpc.aio
import pytest
from flipmesh.common.v1 import introspection_pb2, layout_pb2
from flipmesh.policy.v1 import policy_service_pb2 as pb
from flipmesh.policy.v1.policy_service_pb2_grpc import PolicyServiceStub, add_PolicyServiceServicer_to_server

from services.core.ids import LayoutKind
from services.mesh.grpc_server import GrpcServer
from services.mesh.identity import identify
from services.mesh.rpc import Peers
from services.mesh.settings.paths import StatePaths
from services.mesh.telemetry.introspection import Introspection
from services.mesh.telemetry.metrics import Metrics
from services.mesh.telemetry.progress import Progress
from services.policy import server as module
from services.policy.decide import PolicyMode, PolicyRules
from services.policy.server import Policy
from tests.support.scripted_scheduler import open_log

PP, TP = layout_pb2.LAYOUT_KIND_PP, layout_pb2.LAYOUT_KIND_TP
WAIT_S = 5.0
S = 1_000_000_000
RULES = PolicyRules(
    prefill_threshold_tokens=1000,
    release_threshold_tokens=250,
    min_dwell_s=3.0,
    rest_s=10.0,
    resting_layout=LayoutKind.TP,
)
LOG_FILE = "router"
"""The log's name in the stand that it is borrowed from."""


class Stand:
    """A policy and one client of it."""

    def __init__(self, policy: Policy, peers: Peers, log_file: Path) -> None:
        self.policy, self._log_file = policy, log_file
        self.stub = PolicyServiceStub(peers.channel("policy"))

    def stream(self) -> "Stream":
        return Stream(self.stub)

    async def set_mode(self, mode: "pb.PolicyMode.ValueType") -> "pb.PolicyMode.ValueType":
        answer = await self.stub.SetMode(pb.SetModeRequest(mode=mode), timeout=WAIT_S)
        return answer.previous

    def status(self) -> introspection_pb2.PolicyStatus:
        status = introspection_pb2.GetStatusResponse()
        self.policy.fill_status(status)
        return status.policy

    def logged(self, event: str) -> list[str]:
        return [line for line in self._log_file.read_text().splitlines() if f" {event} " in line]


class Stream:
    """The scheduler's side of one conversation."""

    def __init__(self, stub: PolicyServiceStub) -> None:
        self.call = stub.AdviseLayout(wait_for_ready=True)
        self._signal = pb.AdviseLayoutRequest(
            fence=layout_pb2.Fence(generation=1, epoch=1),
            layout=TP,
            decode_rows=4,
            since_flip_ns=100 * S,
            since_attempt_ns=100 * S,
        )

    async def tell(self, **changes: object) -> None:
        for name, value in changes.items():
            setattr(self._signal, name, value)
        await self.call.write(self._signal)

    async def tell_epoch(self, epoch: int) -> None:
        self._signal.fence.epoch = epoch
        await self.tell()

    async def next(self) -> pb.AdviseLayoutResponse:
        with anyio.fail_after(WAIT_S):
            advice = await self.call.read()
        assert isinstance(advice, pb.AdviseLayoutResponse), "the stream has ended"
        return advice


@pytest.fixture
async def stand(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Stand]:
    """A policy on auto; a test may change its rules by a parameter of this fixture."""
    paths = StatePaths(tmp_path)
    paths.create()
    rules = replace(RULES, **getattr(request, "param", {}))
    with open_log(paths) as log:
        policy = Policy(PolicyMode.AUTO, rules, log)
        identity = identify("policy", None)
        introspection = Introspection(identity, Progress(identity.name), Metrics())
        server = GrpcServer(paths.socket("policy"), introspection, log)
        server.add(add_PolicyServiceServicer_to_server, policy, pb.DESCRIPTOR.services_by_name["PolicyService"])
        peers = Peers(paths, log)
        async with server.running():
            yield Stand(policy, peers, paths.log_file(LOG_FILE))
            await peers.close()


async def test_advice_follows_the_load(stand: Stand) -> None:
    stream = stand.stream()
    await stream.tell()
    first = await stream.next()
    assert (first.advised, first.mode) == (TP, pb.POLICY_MODE_AUTO) and first.reason.startswith("decode: 4 rows")
    await stream.tell(uncomputed_prefill_tokens=1500)
    second = await stream.next()
    assert second.advised == PP and second.reason.startswith("prefill: 1500")
    assert (stand.status().advice, stand.status().reason) == (PP, second.reason)


async def test_what_only_counts_differently_is_not_said_again(stand: Stand) -> None:
    stream = stand.stream()
    await stream.tell()
    await stream.next()
    for rows in range(5, 60):
        await stream.tell(decode_rows=rows)
    await stream.tell(uncomputed_prefill_tokens=1500)
    assert (await stream.next()).reason.startswith("prefill"), "nothing was said in between"


@pytest.mark.parametrize("stand", [{"min_dwell_s": 0.2}], indirect=True)
async def test_dwell_ends_by_time_alone(stand: Stand) -> None:
    stream = stand.stream()
    await stream.tell(uncomputed_prefill_tokens=1500, since_flip_ns=S // 100)
    held = await stream.next()
    assert held.advised == TP and held.reason.startswith("dwell")
    assert (await stream.next()).advised == PP


@pytest.mark.parametrize("stand", [{"rest_s": 0.2}], indirect=True)
async def test_an_idle_group_is_sent_to_rest_by_time_alone(stand: Stand) -> None:
    stream = stand.stream()
    await stream.tell(layout=PP, decode_rows=0)
    assert (await stream.next()).reason == "idle"
    rest = await stream.next()
    assert rest.advised == TP and rest.reason.startswith("rest")


async def test_an_attempt_that_ended_makes_the_same_advice_new(stand: Stand) -> None:
    stream = stand.stream()
    await stream.tell(uncomputed_prefill_tokens=1500)
    assert (await stream.next()).advised == PP
    await stream.tell(abandoned_in_a_row=1)
    assert (await stream.next()).advised == PP, "its backoff is over: again"
    await stream.tell_epoch(2)
    again = await stream.next()
    assert (again.advised, again.fence) == (PP, layout_pb2.Fence(generation=1, epoch=2))


async def test_modes_change_at_run_time(stand: Stand) -> None:
    stream = stand.stream()
    await stream.tell()
    await stream.next()
    assert await stand.set_mode(pb.POLICY_MODE_PINNED_PP) == pb.POLICY_MODE_AUTO
    pinned = await stream.next()
    assert (pinned.advised, pinned.mode, pinned.reason) == (PP, pb.POLICY_MODE_PINNED_PP, "pinned to PP")
    assert await stand.set_mode(pb.POLICY_MODE_MANUAL) == pb.POLICY_MODE_PINNED_PP
    assert (await stream.next()).advised == TP
    await stream.tell(uncomputed_prefill_tokens=10_000)
    assert await stand.set_mode(pb.POLICY_MODE_AUTO) == pb.POLICY_MODE_MANUAL
    assert (await stream.next()).advised == PP
    assert stand.status().mode == "auto"


async def test_a_mode_that_is_none_is_refused(stand: Stand) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stand.set_mode(pb.POLICY_MODE_UNSPECIFIED)
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert stand.status().mode == "auto"


async def test_a_new_stream_begins_with_its_own_signal(stand: Stand) -> None:
    """A scheduler that came back is not advised by what its predecessor saw."""
    old = stand.stream()
    await old.tell(uncomputed_prefill_tokens=1500)
    await old.next()
    old.call.cancel()
    new = stand.stream()
    await new.tell()
    assert (await new.next()).advised == TP


async def test_the_end_of_the_signals_ends_the_advice(stand: Stand) -> None:
    stream = stand.stream()
    await stream.tell()
    await stream.next()
    await stream.call.done_writing()
    with anyio.fail_after(WAIT_S):
        assert await stream.call.read() is grpc.aio.EOF


async def test_reasons_are_logged_when_their_kind_changes(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REASON_LOG_S", 1000.0)
    stream = stand.stream()
    for rows in range(4, 40):
        await stream.tell(decode_rows=rows)
    await stream.next()
    await stream.tell(uncomputed_prefill_tokens=1500)
    await stream.next()
    with anyio.fail_after(WAIT_S):
        while len(lines := stand.logged("advice")) < 2:
            await anyio.lowlevel.checkpoint()
    assert ["decode" in lines[0], "prefill" in lines[1], len(lines)] == [True, True, 2]
