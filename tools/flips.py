"""`flipmesh flips`: the last flips as waterfalls, a line for each rank, drawn to the scale of the flip itself."""

import argparse
import asyncio
import json

from flipmesh.mover.v1 import mover_service_pb2 as pb
from flipmesh.mover.v1.mover_service_pb2_grpc import MoverServiceStub
from google.protobuf.json_format import MessageToDict

from services.mesh.flip_record import layout_name, rank_phases, state_name
from services.mesh.rpc import unary
from tools.mesh_client import CALL_S, add_common, mesh_client

WIDTH = 60
MARKS = {"park": ".", "assemble": "a", "gate": "g", "work": "W", "outcome": "o", "resume": "r"}


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `flips` to the command line."""
    parser = subparsers.add_parser("flips", help="the last flips, what each rank did when")
    parser.add_argument("--last", type=int, default=5, metavar="N", help="how many (default 5; 0: all that are kept)")
    add_common(parser)
    parser.set_defaults(run=lambda arguments: asyncio.run(_run(arguments)))


async def _run(arguments: argparse.Namespace) -> int:
    async with mesh_client(arguments.config) as client:
        request = pb.ListFlipsRequest(max_flips=max(0, arguments.last))
        answer = await unary(MoverServiceStub(client.channel("mover")).ListFlips, request, timeout_s=CALL_S)
    if arguments.json:
        print(
            json.dumps([MessageToDict(record, preserving_proto_field_name=True) for record in answer.flips], indent=2)
        )
    elif not answer.flips:
        print("no flip yet")
    else:
        print("\n\n".join(draw(record) for record in answer.flips))
        print(f"\n{'   '.join(f'{mark} {name}' for name, mark in MARKS.items())}")
    return 0


def draw(record: pb.FlipRecord) -> str:
    """One flip: what it was and how it ended, then each rank's way through it."""
    lines = [_headline(record)]
    phases = {steps.rank: rank_phases(record, steps) for steps in record.ranks}
    ends = [end for rank in phases.values() for _, _, end in rank] or [record.armed_unix_ns]
    span_ns = max(max(ends) - record.armed_unix_ns, 1)
    for rank, steps in phases.items():
        bar = ["·"] * WIDTH
        for name, begin, end in steps:
            first, last = ((at - record.armed_unix_ns) * (WIDTH - 1) // span_ns for at in (begin, end))
            bar[max(first, 0) : last + 1] = MARKS[name] * (last + 1 - max(first, 0))
        lines.append(f"  rank {rank} |{''.join(bar)}| {span_ns / 1e6:.1f} ms")
    return "\n".join(lines)


def _headline(record: pb.FlipRecord) -> str:
    words = [
        f"flip {record.flip_id}",
        f"{layout_name(record.source)} -> {layout_name(record.target)}",
        state_name(record.state),
    ]
    if record.HasField("pause_ns"):
        words.append(f"pause {record.pause_ns / 1e6:.1f} ms")
    words.append(f"{record.num_carried_requests} requests carried ({record.num_partly_prefilled} partly prefilled)")
    words.append(f"{record.bytes_moved} bytes moved")
    if record.HasField("longest_token_gap_ns"):
        words.append(f"longest token gap {record.longest_token_gap_ns / 1e6:.0f} ms")
    headline = ", ".join(words)
    return headline if record.state == pb.FLIP_STATE_COMMITTED else f"{headline}\n  {record.reason}"
