"""Flips of a mesh whose ranks own their memory, under test: some under streams, and prefixes that moved."""

import logging
import statistics
from collections.abc import Sequence

from flipmesh.mover.v1 import mover_service_pb2

from tests.mesh.support.flipping import PP, TP, Bench, long_ask
from tools.load.load import Load

log = logging.getLogger(__name__)
HEAD_BLOCK_BYTES = 2 * 16 * 64 * 4
"""Of SmolLM2-135M: one block of one KV head in one layer; it has 30 layers of 3 heads."""
MOVED_TOKENS = 400
"""Of a prompt whose rows are hits after they have moved."""
NUM_FLIPS = 6
"""While streams run: where weights are copied or exchanged besides, more would only take longer."""


def reported(records: Sequence[mover_service_pb2.FlipRecord]) -> None:
    """The figures of these flips, into the log."""
    for record in records:
        parts = [(work.read_ns / 1e6, work.write_ns / 1e6, work.verify_ns / 1e6) for work in record.ranks]
        log.info(
            "flip %d to %d: %d blocks, %d bytes; read, write, verify by rank in ms: %s",
            record.flip_id,
            record.target,
            record.num_live_blocks,
            record.bytes_moved,
            [tuple(round(part, 2) for part in rank) for rank in parts],
        )
    paused = [record.pause_ns / 1e6 for record in records if record.HasField("pause_ns")]
    if paused:
        log.info("pauses: %s, median %.1f ms", [round(pause, 1) for pause in paused], statistics.median(paused))


async def moved_prefix(bench: Bench, first: int, *, to_pp: bool) -> None:
    """Asks in one layout, flips, asks again: the second time the rows are those that moved."""
    ask = long_ask(first, max_tokens=16, num_tokens=MOVED_TOKENS)
    before, after = (TP, PP) if to_pp else (PP, TP)
    await bench.flip_to(before)
    [cold] = await bench.ask([ask])
    answer = await bench.flip(after)
    assert answer.committed
    [warm] = await bench.ask([ask])
    assert (cold.num_cached_tokens, warm.token_ids) == (0, cold.token_ids)
    assert warm.num_cached_tokens >= MOVED_TOKENS // 2
    record = await bench.record(answer.flip_id)
    assert record.bytes_moved >= MOVED_TOKENS // 2 // 16 * 15 * 3 * HEAD_BLOCK_BYTES
    reported([record])


async def flip_some(bench: Bench, load: Load) -> list[mover_service_pb2.FlipRecord]:
    """Flips to and fro while the streams run, both ways; the flips' records."""
    records = []
    for _ in range(NUM_FLIPS):
        assert not load.has_ended
        answer = await bench.flip((await bench.layout()).other)
        assert answer.committed, answer.reason
        records.append(await bench.record(answer.flip_id))
    reported(records)
    return records
