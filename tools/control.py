"""`flipmesh flip` and `flipmesh policy`: an operator's hand on the layout. Success is a commit, never a status code."""

import argparse
import asyncio
import json

from flipmesh.policy.v1 import policy_service_pb2
from flipmesh.policy.v1.policy_service_pb2_grpc import PolicyServiceStub
from flipmesh.router.v1 import inference_service_pb2 as router_pb
from flipmesh.router.v1.inference_service_pb2_grpc import AdminServiceStub

from services.core.ids import LayoutKind
from services.mesh.codec.common import layout_to_proto
from services.mesh.codec.policy import MODE_NAMES, mode_from_proto, mode_to_proto
from services.mesh.rpc import unary
from tools.mesh_client import CALL_S, MeshClient, add_common, mesh_client

FLIP_MARGIN_S = 10.0
"""Beyond the flip's own deadlines, for the calls around it."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `flip` and `policy` to the command line."""
    flip = subparsers.add_parser("flip", help="change the layout now; exit 0 only on a commit")
    flip.add_argument("target", choices=[kind.value for kind in LayoutKind], help="pp for prompts, tp for generation")
    add_common(flip)
    flip.set_defaults(run=lambda arguments: asyncio.run(_flip(arguments)))
    policy = subparsers.add_parser("policy", help="who decides on flips from now on")
    policy.add_argument(
        "mode",
        choices=list(MODE_NAMES),
        help="auto: the policy flips when it pays; manual: only `flipmesh flip` does; pp, tp: go there and stay",
    )
    add_common(policy)
    policy.set_defaults(run=lambda arguments: asyncio.run(_policy(arguments)))


async def flip_by_hand(client: MeshClient, target: LayoutKind) -> router_pb.FlipResponse:
    """Asks for a flip and waits for what becomes of it, committed or not.

    Raises:
        MeshError: the router did not answer in time.
    """
    deadlines = client.settings.deadlines
    bound_s = deadlines.park_s + deadlines.presence_s + deadlines.flip_data_plane_s + FLIP_MARGIN_S
    request = router_pb.FlipRequest(target=layout_to_proto(target))
    return await unary(AdminServiceStub(client.channel("router")).Flip, request, timeout_s=bound_s)


async def _flip(arguments: argparse.Namespace) -> int:
    async with mesh_client(arguments.config) as client:
        answer = await flip_by_hand(client, LayoutKind(arguments.target))
    if arguments.json:
        facts = {"committed": answer.committed, "flip_id": answer.flip_id, "epoch": answer.epoch}
        print(json.dumps({**facts, "target": arguments.target, "reason": answer.reason}))
    elif answer.committed:
        print(f"flip {answer.flip_id} to {arguments.target.upper()} committed: epoch {answer.epoch}")
    else:
        print(f"not flipped: {answer.reason}")
    return 0 if answer.committed else 1


async def _policy(arguments: argparse.Namespace) -> int:
    async with mesh_client(arguments.config) as client:
        request = policy_service_pb2.SetModeRequest(mode=mode_to_proto(arguments.mode))
        answer = await unary(PolicyServiceStub(client.channel("policy")).SetMode, request, timeout_s=CALL_S)
    previous = mode_from_proto(answer.previous)
    print(
        json.dumps({"mode": arguments.mode, "previous": previous})
        if arguments.json
        else f"{previous} -> {arguments.mode}"
    )
    return 0
