"""What holds a layout is switched together, and one that is forgotten or stays behind ends the generation by name."""

from pathlib import Path

import gguf
import pytest

from kernels.cpu.collective_status import AbortReason
from services.core.ids import BlockId, Epoch, FlipId, LayoutKind
from services.core.step import CommitEntry, FlipEntry
from services.models.model_files import open_model
from services.worker.steps.active_layout import HalfSwitchedError, Held, switch_all
from tests.support.rank_threads import group_of
from tests.support.tiny_llama import TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP


class Groups:
    """Something that keeps what belongs to a layout, and may stay behind."""

    def __init__(self, name: str, *, follows: bool = True) -> None:
        self.name = name
        self.held: Held = (TP, Epoch(1))
        self._follows = follows

    def switch(self, kind: LayoutKind, epoch: Epoch) -> None:
        if self._follows:
            self.held = (kind, epoch)


def test_all_are_switched() -> None:
    holders = [Groups("sampler"), Groups("graphs")]
    switch_all(iter(holders), PP, Epoch(2))
    assert [holder.held for holder in holders] == [(PP, 2)] * 2


def test_one_that_stays_behind_is_named() -> None:
    """R, F10"""
    holders = [Groups("sampler"), Groups("process groups", follows=False), Groups("graphs", follows=False)]
    with pytest.raises(HalfSwitchedError) as error:
        switch_all(holders, PP, Epoch(2))
    text = str(error.value)
    assert "switched to pp in epoch 2" in text
    assert "process groups holds" in text and "graphs holds" in text and "sampler" not in text


def test_the_right_layout_of_another_epoch_is_stale() -> None:
    late = Groups("speculation", follows=False)
    late.held = (PP, Epoch(1))
    with pytest.raises(HalfSwitchedError, match="speculation"):
        switch_all([late], PP, Epoch(2))


@pytest.mark.parametrize("follows", [True, False])
def test_a_rank_that_is_half_switched_ends_before_its_next_step(tmp_path: Path, follows: bool) -> None:
    """R, F10: on a real runner the COMMIT itself fails, and no peer is left waiting."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, TinyShape(num_layers=2), gguf.GGMLQuantizationType.Q4_1)
    with group_of(open_model(path), 1) as group:
        [rank] = group.ranks
        holder = Groups("process groups", follows=follows)
        rank.runner.holders.append(holder)
        group.log.reset(TP, 16, 8, 256)
        group.log.write(FlipEntry(FlipId(1), PP, ((BlockId(0), 1),)))
        group.log.answers()
        group.log.write(CommitEntry(FlipId(1), PP))
        if follows:
            group.log.answers()
            assert (holder.held, group.region.abort_reason()) == ((PP, 2), None)
        else:
            with pytest.raises(HalfSwitchedError, match="process groups holds"):
                group.log.answers()
            assert group.region.abort_reason() is AbortReason.STEP_FAILED
