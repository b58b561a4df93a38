"""What measurements ask of a running mesh beyond a status: a policy's mode, the layout now, a flip that must commit."""

from dataclasses import dataclass

from flipmesh.common.v1 import introspection_pb2
from flipmesh.common.v1.introspection_pb2_grpc import IntrospectionServiceStub
from flipmesh.policy.v1 import policy_service_pb2
from flipmesh.policy.v1.policy_service_pb2_grpc import PolicyServiceStub

from services.core.ids import LayoutKind
from services.mesh.codec.common import layout_from_proto
from services.mesh.codec.policy import mode_from_proto, mode_to_proto
from services.mesh.rpc import unary
from tools.control import flip_by_hand
from tools.mesh_client import CALL_S, MeshClient


class NotSteeredError(Exception):
    """The mesh did not go where a measurement needs it."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a group is: figures of one layout are only good while this stays the same."""

    layout: LayoutKind
    generation: int
    epoch: int


async def scheduler_status(client: MeshClient) -> introspection_pb2.SchedulerStatus:
    """The scheduler's own part of its status."""
    stub = IntrospectionServiceStub(client.channel("scheduler"))
    return (await unary(stub.GetStatus, introspection_pb2.GetStatusRequest(), timeout_s=CALL_S)).scheduler


async def place_now(client: MeshClient) -> Place:
    """Layout, generation and epoch."""
    status = await scheduler_status(client)
    return Place(layout_from_proto(status.layout, "layout"), status.generation, status.epoch)


async def set_mode(client: MeshClient, mode: str) -> str:
    """Sets the policy's mode; returns the one before."""
    request = policy_service_pb2.SetModeRequest(mode=mode_to_proto(mode))
    answer = await unary(PolicyServiceStub(client.channel("policy")).SetMode, request, timeout_s=CALL_S)
    return mode_from_proto(answer.previous)


async def bring_to(client: MeshClient, layout: LayoutKind) -> Place:
    """Flips by hand unless the group is there already.

    Raises:
        NotSteeredError: the flip did not commit, with the mover's reason.
    """
    now = await place_now(client)
    if now.layout is layout:
        return now
    answer = await flip_by_hand(client, layout)
    if not answer.committed:
        raise NotSteeredError(f"no flip to {layout.value.upper()}: {answer.reason}")
    return await place_now(client)
