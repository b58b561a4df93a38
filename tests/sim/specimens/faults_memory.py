"""Ranks whose memory, or what holds a layout beside it, lacks one rule of a flip: what RESTORED stands on."""

from typing import TYPE_CHECKING

from services.core.ids import BLOCK_SLOTS, Epoch, LayoutKind
from services.core.step import FlipEntry
from tests.sim.processes.memory import Held, Holder, Memory, Mode, RestorableError, Rows, Slip, Work
from tests.sim.processes.rank import RankProcess

if TYPE_CHECKING:
    from tests.sim.processes.rank import RankProcess as Rank


class DroppedRowsMemory(Memory):
    """What was packed of a window is dropped when it is written, although the verdict on it may still be against it."""

    def restore(self, kind: LayoutKind, window: range, live: list[int], packed: Rows) -> None:
        super().restore(kind, window, [], [])


class UnreadSourceMemory(Memory):
    """6: a window's pages are given back before all of it is packed."""

    def packed(self, kind: LayoutKind, blocks: list[int]) -> Rows:
        if self.is_exclusive and len(blocks) > 1:
            first = super().packed(kind, blocks[:1])
            self.turn(kind.other, range(blocks[0], blocks[-1] + 1))
            return first + super().packed(kind, blocks[1:])
        return super().packed(kind, blocks)


class LonelyReturnMemory(Memory):
    """A rank that finds its own pages wrong goes back, and its peers, who found theirs right, do not."""

    def agree(self, rank: "Rank", what: tuple[object, ...], failure: Slip | None) -> Work:
        assert rank.plane is not None
        yield (rank.plane.join, rank.rank, what, None)
        if failure is not None:
            raise RestorableError(failure.value)


class UnsettledMemory(Memory):
    """ABANDON for a rank whose part is done: its weights stay those of the layout that never came."""

    def _settle_weights(self, rank: "Rank", kind: LayoutKind) -> None:
        return None


class HalfReturnedMemory(Memory):
    """What was exchanged is not exchanged back: RESTORED is said of an arena that holds neither layout."""

    def _take_back(self, rank: "Rank", kind: LayoutKind, *, is_damaged: bool) -> None:
        return None

    def _settle_weights(self, rank: "Rank", kind: LayoutKind) -> None:
        if self.held is not None:
            super()._settle_weights(rank, kind)


class SmallPoolMemory(Memory):
    """V: the pool of TP is as large as what is left, and not as the ids that are given out."""

    def __init__(self, mode: Mode, kind: LayoutKind, num_slots: int, *, is_exclusive: bool) -> None:
        super().__init__(mode, kind, num_slots, is_exclusive=is_exclusive)
        self._cut()

    def _move_rows(self, rank: "Rank", flip: FlipEntry, blocks: list[int], slip: Slip | None) -> Work:
        yield from super()._move_rows(rank, flip, blocks, slip)
        self._cut()

    def settle(self, rank: "Rank", flip: FlipEntry, kind: LayoutKind) -> Work:
        yield from super().settle(rank, flip, kind)
        self._cut()

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
