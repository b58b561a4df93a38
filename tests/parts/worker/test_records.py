"""A group that serves and flips writes every kind of record, with the rank that is waited for."""

from pathlib import Path

import gguf

from services.core.ids import BlockId, FlipId, LayoutKind, Rank
from services.core.ring import RING_BYTES, RecordKind, RingRecord, read_tail
from services.core.step import AbandonEntry, FlipEntry
from services.models.model_files import open_model
from services.worker.ring import RingWriter
from tests.support.private_group import flip, runs
from tests.support.rank_threads import group_of
from tests.support.tiny_llama import TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP
PROMPT = [(7 * i * i + 3 * i) % 131 for i in range(40)]


def test_every_kind_is_written_and_waits_name_their_peer(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, TinyShape(num_layers=3), gguf.GGMLQuantizationType.Q4_1)
    paths = [tmp_path / f"ring-{rank}" for rank in range(3)]
    rings = [RingWriter(path, Rank(rank)) for rank, path in enumerate(paths)]
    with group_of(open_model(path), 3, rings=rings) as group:
        log = group.log
        log.reset(PP, 64, 8, 256)
        log.prefill({0: PROMPT}, 16)
        log.decode([0], 3)
        flip(group, TP, runs((0, 64)))
        log.write(FlipEntry(FlipId(99), PP, ((BlockId(0), 64),)))
        log.answers()
        log.write(AbandonEntry(FlipId(99), "a test"))
        log.answers()
    for ring in rings:
        ring.close()
    written = [_records(path) for path in paths]
    assert {record.kind for records in written for record in records} == set(RecordKind)
    assert _keys(written[0]) == {(RecordKind.HIDDEN_SENT, 1)}
    assert _keys(written[1]) == {(RecordKind.HIDDEN_AWAITED, 0), (RecordKind.HIDDEN_SENT, 2)}
    assert _keys(written[2]) == {(RecordKind.HIDDEN_AWAITED, 1)}
    assert {records[-1].chain for records in written} == {written[0][-1].chain}


def _records(path: Path) -> list[RingRecord]:
    buffer = path.read_bytes()
    assert len(buffer) == RING_BYTES
    return read_tail(buffer, 4096)


def _keys(records: list[RingRecord]) -> set[tuple[RecordKind, int]]:
    named = (RecordKind.HIDDEN_AWAITED, RecordKind.HIDDEN_SENT)
    return {(record.kind, record.key) for record in records if record.kind in named}
