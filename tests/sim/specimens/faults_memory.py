"""Ranks whose memory, or what holds a layout beside it, lacks one rule of a flip: what RESTORED stands on."""

from typing import TYPE_CHECKING

from services.core.flip.work_asks import Agree, CheckWeights, HaveWeights, KeepRows, PassRows, WriteKeptRows
from services.core.flip.work_table import WELL, Answer, Verdict
from services.core.ids import BLOCK_SLOTS, Epoch, LayoutKind
from services.core.step import FlipEntry
from tests.sim.processes.memory import Answering, Held, Holder, Memory, Mode, Rows, Slip
from tests.sim.processes.rank import RankProcess

if TYPE_CHECKING:
    from tests.sim.processes.rank import RankProcess as Rank


class DroppedRowsMemory(Memory):
    """What was packed of a batch is dropped when it is written, although the verdict on it may still be against it."""

    def write_kept(self, rank: "Rank", flip: FlipEntry, ask: WriteKeptRows, slip: Slip | None) -> Answering:
        self._take_pages(ask.layout, self.batch(ask.batch))
        yield from ()
        return WELL


class UnreadSourceMemory(Memory):
    """6: a batch's pages are given back before all of it is packed."""

    def packed(self, kind: LayoutKind, blocks: list[int]) -> Rows:
        if self.is_exclusive and len(blocks) > 1:
            first = super().packed(kind, blocks[:1])
            self._give_up(kind, range(blocks[0], blocks[-1] + 1))
            return first + super().packed(kind, blocks[1:])
        return super().packed(kind, blocks)


class LonelyReturnMemory(Memory):
    """A rank that finds its own pages wrong goes back, and its peers, who found theirs right, do not."""

    def agree(self, rank: "Rank", flip: FlipEntry, ask: Agree, slip: Slip | None) -> Answering:
        assert rank.plane is not None
        yield (rank.plane.join, rank.rank, ("verdict", ask.about.value, ask.batch, flip.flip_id), "")
        return Answer(Verdict.FAILED_HERE, ask.failure) if ask.failure else WELL


class UnsettledMemory(Memory):
    """ABANDON for a rank whose part is done: its weights stay those of the layout that never came."""

    def have(self, rank: "Rank", flip: FlipEntry, ask: HaveWeights, slip: Slip | None) -> Answering:
        yield from ()
        return WELL


class HalfReturnedMemory(Memory):
    """What was exchanged is not exchanged back: RESTORED is said of an arena that holds neither layout."""

    def check(self, rank: "Rank", flip: FlipEntry, ask: CheckWeights, slip: Slip | None) -> Answering:
        if ask.layout is flip.target:
            return (yield from super().check(rank, flip, ask, slip))
        return WELL

    def have(self, rank: "Rank", flip: FlipEntry, ask: HaveWeights, slip: Slip | None) -> Answering:
        if self.active is not None:
            return (yield from super().have(rank, flip, ask, slip))
        return WELL


class SmallPoolMemory(Memory):
    """V: the pool of TP is as large as what is left, and not as the ids that are given out."""

    def __init__(self, mode: Mode, kind: LayoutKind, num_slots: int, *, is_exclusive: bool) -> None:
        super().__init__(mode, kind, num_slots, is_exclusive=is_exclusive)
        self._cut()

    def pass_rows(self, rank: "Rank", flip: FlipEntry, ask: PassRows, slip: Slip | None) -> Answering:
        answer = yield from super().pass_rows(rank, flip, ask, slip)
        self._cut()
        return answer

    def keep(self, rank: "Rank", flip: FlipEntry, ask: KeepRows, slip: Slip | None) -> Answering:
        answer = yield from super().keep(rank, flip, ask, slip)
        self._cut()
        return answer

    def _cut(self) -> None:
        plane = self.planes[LayoutKind.TP]
        if self.mode is not Mode.SHARED:
            del plane[self._num_slots - BLOCK_SLOTS :]


class LeftBehind(Holder):
    """It stays in the layout it began with."""

    def switch(self, kind: LayoutKind, epoch: Epoch) -> None:
        return None


class DraftlessRank(RankProcess):
    """S: the algorithm is switched and its draft is not."""

    def speculation(self, held: Held) -> list[Holder]:
        return [Holder("algorithm", held), LeftBehind("draft", held)]


class ProposerlessRank(RankProcess):
    """S, the reverse, and nobody asks the holders."""

    def speculation(self, held: Held) -> list[Holder]:
        return [LeftBehind("algorithm", held), Holder("draft", held)]

    def switch(self, kind: LayoutKind) -> None:
        assert self.follower.epoch is not None
        for holder in self.holders:
            holder.switch(kind, self.follower.epoch)
