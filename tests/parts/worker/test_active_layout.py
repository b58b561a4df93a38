"""On real ranks: whatever of a layout stays behind at a COMMIT, or is not asked, ends the generation by its name."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from kernels.cpu.collective_status import AbortReason
from services.core.ids import BlockId, Epoch, FlipId, LayoutKind
from services.core.step import CommitEntry, FlipEntry
from services.models.model_files import open_model
from services.worker.memory.rank_memory import RankMemory
from services.worker.steps.active_layout import LayoutPart, LayoutView
from services.worker.steps.layout_evidence import HalfSwitchedError, check_parts
from services.worker.steps.pipeline import StepPipeline
from tests.support.rank_threads import Group, group_of
from tests.support.tiny_llama import TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    """Two ranks under TP, parked for a flip to PP."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, TinyShape(num_layers=2), gguf.GGMLQuantizationType.Q4_1)
    with group_of(open_model(path), 2) as group:
        group.log.reset(TP, 16, 8, 256)
        group.log.write(FlipEntry(FlipId(1), PP, ((BlockId(0), 1),)))
        group.log.answers()
        yield group


def steps_of(group: Group, rank: int) -> StepPipeline:
    steps = group.ranks[rank].runner.steps
    assert steps is not None
    return steps


def commit(group: Group) -> None:
    group.log.write(CommitEntry(FlipId(1), PP))
    group.log.answers()


def test_all_parts_of_both_ranks_are_switched(group: Group) -> None:
    commit(group)
    for rank in (0, 1):
        steps, runner = steps_of(group, rank), group.ranks[rank].runner
        assert steps.active.kind is runner.follower.layout is PP
        assert steps.active.view.layout.kind is PP
    assert group.region.abort_reason() is None


STALE: dict[LayoutPart, Callable[[LayoutView, LayoutView], LayoutView]] = {
    LayoutPart.STAGE: lambda view, before: replace(view, spec=replace(view.spec, share=before.spec.share)),
    LayoutPart.PEERS: lambda view, before: replace(view, spec=replace(view.spec, peers=before.spec.peers)),
    LayoutPart.POOL: lambda view, before: replace(view, pool=before.pool),
    LayoutPart.BUFFERS: lambda view, before: replace(view, buffers=before.buffers),
}
"""A view with one part of the one before."""


@pytest.mark.parametrize("part", list(STALE), ids=lambda part: part.name)
def test_a_part_that_stays_behind_ends_the_rank_before_its_next_step(group: Group, part: LayoutPart) -> None:
    """R, F10: the COMMIT itself fails, and no peer is left waiting."""
    active = steps_of(group, 0).active
    active.views = {**active.views, PP: STALE[part](active.views[PP], active.views[TP])}
    with pytest.raises(HalfSwitchedError, match=f"switched to pp in epoch 2, but {part.value} is of tp$"):
        commit(group)
    assert group.region.abort_reason() is AbortReason.STEP_FAILED


def test_a_rank_that_does_not_switch_at_all_is_found(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    active = steps_of(group, 0).active
    monkeypatch.setattr(type(active), "switch", lambda self, kind: None)
    with pytest.raises(HalfSwitchedError, match="the stage is of tp, the stage's peers is of tp, the KV pool is of tp"):
        commit(group)


@pytest.mark.parametrize("part", LayoutPart, ids=lambda part: part.name)
def test_evidence_that_forgets_a_part_does_not_pass(group: Group, part: LayoutPart) -> None:
    steps, parts = steps_of(group, 0), group.ranks[0].runner.parts
    pools = {kind: view.pool for kind, view in steps.active.views.items()}
    evidence = dict(steps.active.evidence(parts.rank, group.ranks[0].runner.follower, parts.memory, pools))
    check_parts(LayoutPart, evidence, TP, Epoch(1))
    del evidence[part]
    with pytest.raises(HalfSwitchedError, match=f"{part.value} was not asked"):
        check_parts(LayoutPart, evidence, TP, Epoch(1))


def test_memory_that_is_not_whole_under_the_layout_ends_the_rank(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankMemory, "usable", frozenset((TP,)))
    with pytest.raises(HalfSwitchedError, match=r"but the memory of weights and rows is of tp$"):
        commit(group)
