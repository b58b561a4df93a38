"""Ranks of protocols that wedge: each shows one way in which ranks come to wait for each other around a flip.

In these protocols ranks tell each other about a flip by the channels that the model uses, and enter a group operation
by what they see themselves. The shipped rank does neither: the log tells everyone, and nobody enters anything before
the mover has seen all of them at the entry. Each class says which rule it lacks.
"""

from typing import Any

from services.core.flip.messages import AbandonReached, EntryReached
from services.core.ids import LayoutKind, LogIndex
from services.core.step import FlipEntry, LogEntry, StepPlan
from tests.sim.processes.data_plane import WAIT
from tests.sim.processes.memory import Worked
from tests.sim.processes.rank import RankProcess, Work

BOUND_NS = 100_000
"""Of the ranks that walk away: well below what a stage or a peer may take."""
OWN_CLOCK_NS = 4_000_000
CONSENSUS_EVERY = 3
OBSERVED_NS = 5_000_000


class GatedRank(RankProcess):
    """Enters the group operation of the gate as soon as it is at the entry itself."""

    def park(self, flip: FlipEntry) -> Work:
        yield from self.gate(flip)
        yield from super().park(flip)

    def gate(self, flip: FlipEntry) -> Work:
        """Waits inside the group operation for everybody."""
        assert self.plane is not None
        if self.group.case.num_ranks > 1:
            yield (self.plane.join, self.rank, ("gate", flip.flip_id), None)


class OwingRank(RankProcess):
    """What a pass has to send goes out with the pass behind it, or when the rank has nothing else to do."""

    def boot(self) -> None:
        self._owed: tuple[LogIndex, list[int]] | None = None
        super().boot()

    def hand_on(self, sequence: LogIndex, ends: list[int]) -> object:
        self._owed = (sequence, ends)
        if not self._queue:
            self.world.at(self.group.case.data[1], self, self._flush_idle, sequence)
        return None

    def _flush_idle(self, sequence: LogIndex) -> None:
        if self._owed is not None and self._owed[0] == sequence and self._work is None and self.flushes_idle():
            owed, self._owed = self._owed, None
            assert self.plane is not None
            link = self.plane.links[self.rank]
            if link.send(*owed) is WAIT:
                link._blocked = None
                self._owed = owed
                self.world.at(self.group.case.data[1], self, self._flush_idle, sequence)

    def flushes_idle(self) -> bool:
        """Whether it may send now."""
        return True

    def pay(self) -> Work:
        """Sends what is owed."""
        if self._owed is not None:
            owed, self._owed = self._owed, None
            assert self.plane is not None
            yield (self.plane.links[self.rank].send, *owed)

    def _execute(self, entry: LogEntry) -> Work:
        if isinstance(entry.entry, StepPlan) or not self.holds_back(entry):
            yield from self.pay()
        yield from super()._execute(entry)

    def holds_back(self, entry: LogEntry) -> bool:
        """Whether what is owed stays here while it executes `entry`."""
        return isinstance(entry.entry, FlipEntry)


class TopHookRank(OwingRank, GatedRank):
    """Z1: the hook at the top of a pass, while sends of the pass before are owed."""


class QuietFirstRank(OwingRank):
    """G: the first rank that is quiet stops feeding the next, which needs that traffic to become quiet."""

    def flushes_idle(self) -> bool:
        return self.follower.flip is None


class ForwardingRank(GatedRank):
    """A: the arm goes from rank to rank, posted and progressed only by the next pass."""

    def boot(self) -> None:
        self._unarmed: list[LogEntry] = []
        self._posted = False
        super().boot()

    def take_entry(self, entry: LogEntry) -> None:
        if self.rank > 0 and isinstance(entry.entry, FlipEntry):
            self._unarmed.append(entry)
        else:
            super().take_entry(entry)

    def gate(self, flip: FlipEntry) -> Work:
        self._posted = True
        yield from super().gate(flip)

    def _execute(self, entry: LogEntry) -> Work:
        yield from super()._execute(entry)
        if self._posted and isinstance(entry.entry, StepPlan):
            self._posted = False
            for rank in self.group.ranks[self.rank + 1 : self.rank + 2]:
                assert isinstance(rank, ForwardingRank)
                rank.hear_arm()

    def hear_arm(self) -> None:
        """The rank before has told it at last."""
        for entry in self._unarmed:
            super().take_entry(entry)
        self._unarmed.clear()


class SendingRank(OwingRank):
    """B: the arm is sent on and waited for, while the next rank waits for hidden states that are still owed."""

    def boot(self) -> None:
        self.listens = False
        self._teller: SendingRank | None = None
        super().boot()

    def park(self, flip: FlipEntry) -> Work:
        if self.layout is LayoutKind.PP and self.rank + 1 < self.group.case.num_ranks:
            yield (self._tell_next,)
        yield from super().park(flip)
        self.listens = True
        if self._teller is not None:
            teller, self._teller = self._teller, None
            teller.resume(None)

    def _tell_next(self) -> object:
        following = self.group.ranks[self.rank + 1]
        assert isinstance(following, SendingRank)
        if following.listens:
            following.listens = False
            return None
        following._teller = self
        return WAIT

    def flushes_idle(self) -> bool:
        return self.follower.flip is None


class LatePassRank(RankProcess):
    """D: the arm takes effect one pass later, and no pass follows a FLIP."""

    def boot(self) -> None:
        self._late: FlipEntry | None = None
        super().boot()

    def park(self, flip: FlipEntry) -> Work:
        if self.rank == 0:
            yield from super().park(flip)
        else:
            self._late = flip

    def _execute(self, entry: LogEntry) -> Work:
        if self._late is not None and isinstance(entry.entry, StepPlan):
            late, self._late = self._late, None
            yield from super().park(late)
        yield from super()._execute(entry)


class WalkingRank(RankProcess):
    """C: a bound inside the group operation; who walks away takes every peer down."""

    def move(self, flip: FlipEntry) -> Worked:
        self._inside = True
        self.world.at(BOUND_NS, self, self._walk_away)
        outcome = yield from super().move(flip)
        self._inside = False
        return outcome

    def _walk_away(self) -> None:
        if self._inside:
            self.world.note(self.name, "walks-away")
            self.group.crash(self)


class OwnClockRank(RankProcess):
    """E: each rank counts from the arm, and abandons by itself when its own clock says so."""

    def boot(self) -> None:
        self._expired = 0
        super().boot()

    def take_entry(self, entry: LogEntry) -> None:
        if isinstance(entry.entry, FlipEntry):
            self.world.at(OWN_CLOCK_NS, self, self._expire, entry.entry.flip_id)
        super().take_entry(entry)

    def say_parked(self, reached: EntryReached) -> None:
        super().say_parked(reached)
        if reached.flip_id <= self._expired:
            self._to_loop.send(AbandonReached(reached.flip_id))

    def _expire(self, flip_id: Any) -> None:
        self._expired = flip_id
        if self.participant.flip_id == flip_id and self.participant.state.value in ("parked", "present"):
            self._tell(AbandonReached(flip_id))


class EmptyBatchRank(RankProcess):
    """L: quiet means empty, so nobody can flip while anything decodes."""

    def say_parked(self, reached: EntryReached) -> None:
        assert self.places is not None
        if not self.places.by_index:
            super().say_parked(reached)


class LiveRingRank(RankProcess):
    """M: the neighbour is looked up in the group of the layout that was in force at the last flip."""

    def receive(self, sequence: LogIndex, ends: list[int]) -> object:
        assert self.plane is not None
        if self.follower.epoch == 1:
            return super().receive(sequence, ends)
        return self.plane.links[min(self.rank, len(self.plane.links) - 1)].recv(sequence)


class EarlyMarkRank(RankProcess):
    """Q: presence is said when FLIP arrives, a pass or more before the rank is there."""

    def take_entry(self, entry: LogEntry) -> None:
        flip = entry.entry
        if isinstance(flip, FlipEntry):
            self._to_loop.send(EntryReached(flip.flip_id, True, "", hash((flip.target.value == "tp", flip.live_runs))))
        super().take_entry(entry)

    def say_parked(self, reached: EntryReached) -> None:
        """It has been said already."""


class HalfSwitchedRank(RankProcess):
    """R: one rank keeps the groups it began with."""

    def boot(self) -> None:
        self._held: LayoutKind | None = None
        super().boot()

    @property
    def layout(self) -> LayoutKind:
        if self.rank:
            return super().layout
        self._held = self._held or super().layout
        return self._held


class NonEmptyRank(RankProcess):
    """X: the first of the live rows is looked at before their number."""

    def move(self, flip: FlipEntry) -> Worked:
        begin, _ = flip.live_runs[0]
        assert begin >= 0
        return (yield from super().move(flip))


class RaisingRank(RankProcess):
    """Y: a flip that does not fit is an exception, and the exception is the process."""

    def say_parked(self, reached: EntryReached) -> None:
        if reached.fits:
            super().say_parked(reached)
        else:
            self.world.at(0, None, self.group.crash, self)


class ConsensusRank(RankProcess):
    """Z2: a group operation every few passes, armed or not, on rounds that drift from rank to rank."""

    def boot(self) -> None:
        self._passes = int(self.rank)
        super().boot()

    def _execute(self, entry: LogEntry) -> Work:
        yield from super()._execute(entry)
        self._passes += isinstance(entry.entry, StepPlan)
        if self._passes == CONSENSUS_EVERY and self.group.case.num_ranks > 1:
            self._passes = 0
            assert self.plane is not None
            yield (self.plane.join, self.rank, ("consensus",), None)


class ObservingRank(RankProcess):
    """Z3: each rank arms from what it has seen itself."""

    def boot(self) -> None:
        self._armed = False
        super().boot()

    def _execute(self, entry: LogEntry) -> Work:
        yield from super()._execute(entry)
        waits_long = isinstance(entry.entry, StepPlan) and self.world.now_ns % OBSERVED_NS < OBSERVED_NS // 4
        if waits_long and not self._armed and self.group.case.num_ranks > 1:
            self._armed = True
            assert self.plane is not None
            yield (self.plane.join, self.rank, ("gate", entry.sequence), None)


class ImpatientReceiver(RankProcess):
    """Z4: a bound on the receive of the chain: one send is never consumed."""

    def receive(self, sequence: LogIndex, ends: list[int]) -> object:
        hidden = super().receive(sequence, ends)
        if hidden is WAIT:
            self.world.at(BOUND_NS, self, self._give_up, sequence, ends)
        return hidden

    def _give_up(self, sequence: LogIndex, ends: list[int]) -> None:
        assert self.plane is not None
        link = self.plane.links[self.rank - 1]
        if link._awaited == sequence:
            link._awaited = None
            self.resume(ends)


class EarlyPoster(RankProcess):
    """Z8: a message is posted before the groups are formed anew, for whoever reads first afterwards."""

    def park(self, flip: FlipEntry) -> Work:
        yield from super().park(flip)
        if flip.target is LayoutKind.PP and self.rank + 1 < self.group.case.num_ranks:
            assert self.plane is not None
            yield (self.plane.links[self.rank].send, self.follower.sequence, [])
