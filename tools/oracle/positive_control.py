"""Shows that the instrument sees damage: rows of scratch requests are damaged on a rank, and each time it must say so.

An instrument that has never been seen to fail proves nothing. For each rank and kind of damage a pair of scratch
requests runs once undamaged and once with one damage when a third of the answer is out; what compares answers must find
a difference after that point. Needs a mesh whose settings say `[debug] enabled`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import anyio
from flipmesh.common.v1 import debug_pb2
from flipmesh.common.v1.debug_pb2_grpc import DebugServiceStub

from services.core.errors import MeshError
from services.core.ids import Rank
from services.mesh.debug.damage import DamageKind
from services.mesh.rpc import unary
from tools.load.load import Heard, Load
from tools.mesh_client import MeshClient
from tools.oracle.asks import asks_of
from tools.oracle.compare import first_difference

NUM_TOKENS = 24
"""Of a scratch request: damage was seen with the next token (24 of 24 kinds and ranks, both layouts)."""
FIRST_STORY = 1000
"""Number of the first scratch prompt: no other prompt begins alike, so that no cached row is damaged for others."""
BOUND_MS = 10_000
MAX_AT_ONCE = 16
"""Streams of the undamaged runs: fewer than a small deployment takes."""


@dataclass(frozen=True, slots=True)
class Shown:
    """What came of one damage."""

    rank: int
    kind: str
    what: str
    """As the rank says it; empty: it had nothing of this kind to damage."""
    seen_after: int | None
    """Tokens from the damage to the first difference; None: not seen."""

    @property
    def is_blind(self) -> bool:
        """Whether damage was done and not seen."""
        return bool(self.what) and self.seen_after is None


async def positive_control(
    client: MeshClient, num_ranks: int, seed: int = 0, kinds: Sequence[DamageKind] = tuple(DamageKind)
) -> list[Shown]:
    """Each kind of damage on every rank, in the layout in force; the mesh serves nothing else meanwhile.

    Raises:
        MeshError: a process does not answer, or damage is not allowed here.
    """
    cases = [(Rank(rank), kind) for rank in range(num_ranks) for kind in kinds]
    asks = asks_of(2 * len(cases), NUM_TOKENS, FIRST_STORY)
    controls = await Load(client.channel("router"), asks, MAX_AT_ONCE).run()
    shown = []
    for number, (rank, kind) in enumerate(cases):
        pair = slice(2 * number, 2 * number + 2)
        load = Load(client.channel("router"), asks[pair])
        shown.append(await _show(client, rank, kind, seed + number, load, controls[pair]))
    return shown


async def _show(
    client: MeshClient, rank: Rank, kind: DamageKind, seed: int, load: Load, control: Sequence[Heard]
) -> Shown:
    what = ""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load.run)
        await load.until(len(load.asks) * NUM_TOKENS // 3)
        begun = [len(heard.token_ids) for heard in load.heard]
        request = debug_pb2.DamageRowsRequest(
            kind=debug_pb2.DamageKind.ValueType(kind.value), seed=seed, bound_ms=BOUND_MS
        )
        stub = DebugServiceStub(client.channel("worker", rank))
        try:
            what = (await unary(stub.DamageRows, request, timeout_s=2e-3 * BOUND_MS)).what
        except MeshError as error:
            if "expected, found" not in str(error):
                raise
    found = [
        difference.position - begun[stream]
        for stream, (one, other) in enumerate(zip(control, load.heard, strict=True))
        if (difference := first_difference(stream, one, other)) is not None
    ]
    return Shown(int(rank), kind.name, what, min(found, default=None))


def blind_spots(shown: Sequence[Shown]) -> list[str]:
    """Why the instrument cannot be believed, if it cannot."""
    blind = [f"rank {one.rank}, {one.kind} ({one.what}) was not seen" for one in shown if one.is_blind]
    if not any(one.what for one in shown):
        blind.append("no damage could be done: nothing is proved")
    return blind


def table(shown: Sequence[Shown]) -> str:
    """A line for each damage."""
    return "\n".join(
        f"rank {one.rank}  {one.kind:<14} "
        + (f"seen after {one.seen_after} tokens" if one.seen_after is not None else "NOT SEEN" if one.what else "-")
        + f"  {one.what}"
        for one in shown
    )
