"""An automaton of the flag protocol of native/collectives.c that runs every interleaving of a few ranks and rounds.

Every word has one writer and every rank's program is a straight line, so the words follow from the program counters: a
state is one counter per rank. Writing a stage is two steps, with torn bytes in between. Memory is sequentially
consistent here, which release and acquire on the flags give to bytes that only flags order. A rank killed at any point
is a counter that stays: the states after it are among those explored, and since only waits block, it leaves its peers
in a wait, each of which has a deadline.

Never: shares code with the C file; it is a second statement of the same rules, made to disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

TORN = 0


class Variant(Enum):
    """Which rules the ranks follow."""

    EQUALITY = auto()  # one reused line, wait for exactly this round, no acknowledgement
    AT_LEAST = auto()  # one reused line, wait for this round or later, no acknowledgement
    BANKS_ALONE = auto()  # two lines in turn, wait for this round or later, no acknowledgement
    SHIPPED = auto()  # two lines in turn, each written only after its earlier round is acknowledged by all


class Verdict(Enum):
    """What went wrong in some reachable state."""

    DEADLOCK = auto()
    CORRUPT = auto()
    AHEAD = auto()  # a flag or an acknowledgement further on than the protocol's bound


class Step(Enum):
    """One atomic step of a rank."""

    AWAIT_ACKNOWLEDGEMENT = auto()
    BEGIN_WRITE = auto()
    END_WRITE = auto()
    PUBLISH = auto()
    AWAIT_DATA = auto()
    READ = auto()
    ACKNOWLEDGE = auto()


@dataclass(frozen=True, slots=True)
class Topology:
    """Who reads whom in a round: `readers` read all of `sources` but themselves."""

    name: str
    readers: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Instruction:
    """A step with its round and, where it concerns one, its peer."""

    step: Step
    round: int
    peer: int = 0


@dataclass(frozen=True, slots=True)
class Words:
    """What one rank's words hold at one of its program counters."""

    flags: tuple[int, ...]
    stages: tuple[int, ...]
    acknowledged: int


@dataclass(frozen=True, slots=True)
class Exploration:
    """Everything reachable, counted, and every verdict that some state earns."""

    num_states: int
    verdicts: frozenset[Verdict]


def everyone(num_ranks: int) -> Topology:
    """All read all: sums and barriers."""
    return Topology("all", tuple(range(num_ranks)), tuple(range(num_ranks)))


def gather(num_ranks: int, root: int) -> Topology:
    """Only the root reads."""
    return Topology(f"gather to {root}", (root,), tuple(range(num_ranks)))


def broadcast(num_ranks: int, root: int) -> Topology:
    """Only the root is read."""
    return Topology(f"broadcast from {root}", tuple(range(num_ranks)), (root,))


class FlagAutomaton:
    """One variant over one sequence of topologies."""

    def __init__(self, variant: Variant, num_ranks: int, topologies: Iterable[Topology]) -> None:
        self._variant = variant
        self._num_banks = 2 if variant in (Variant.BANKS_ALONE, Variant.SHIPPED) else 1
        self._num_ranks = num_ranks
        rounds = tuple(topologies)
        self._programs = [tuple(self._program(rank, rounds)) for rank in range(num_ranks)]
        self._words = [self._all_words(program) for program in self._programs]

    def explore(self) -> Exploration:
        """Visits every reachable state once."""
        start = (0,) * self._num_ranks
        seen, pending, verdicts = {start}, [start], set[Verdict]()
        while pending:
            state = pending.pop()
            finished = moved = 0
            for rank, counter in enumerate(state):
                if counter == len(self._programs[rank]):
                    finished += 1
                    continue
                verdict, enabled = self._judge(state, self._programs[rank][counter])
                if verdict is not None:
                    verdicts.add(verdict)
                if not enabled:
                    continue
                moved += 1
                following = (*state[:rank], counter + 1, *state[rank + 1 :])
                if following not in seen:
                    seen.add(following)
                    pending.append(following)
            if not moved and finished < self._num_ranks:
                verdicts.add(Verdict.DEADLOCK)
        return Exploration(len(seen), frozenset(verdicts))

    def _program(self, rank: int, rounds: tuple[Topology, ...]) -> Iterator[Instruction]:
        peers = [peer for peer in range(self._num_ranks) if peer != rank]
        for number, topology in enumerate(rounds, start=1):
            sources = [peer for peer in peers if peer in topology.sources and rank in topology.readers]
            if self._variant is Variant.SHIPPED:
                yield from (Instruction(Step.AWAIT_ACKNOWLEDGEMENT, number, peer) for peer in peers)
            yield Instruction(Step.BEGIN_WRITE, number)
            yield Instruction(Step.END_WRITE, number)
            yield Instruction(Step.PUBLISH, number)
            yield from (Instruction(Step.AWAIT_DATA, number, peer) for peer in sources)
            yield from (Instruction(Step.READ, number, peer) for peer in sources)
            yield Instruction(Step.ACKNOWLEDGE, number)

    def _all_words(self, program: tuple[Instruction, ...]) -> list[Words]:
        """The words before each instruction and after the last."""
        flags, stages, acknowledged = [0] * self._num_banks, [TORN] * self._num_banks, 0
        words = [Words(tuple(flags), tuple(stages), acknowledged)]
        for instruction in program:
            bank = instruction.round % self._num_banks
            match instruction.step:
                case Step.BEGIN_WRITE:
                    stages[bank] = TORN
                case Step.END_WRITE:
                    stages[bank] = instruction.round
                case Step.PUBLISH:
                    flags[bank] = instruction.round
                case Step.ACKNOWLEDGE:
                    acknowledged = instruction.round
                case Step.AWAIT_ACKNOWLEDGEMENT | Step.AWAIT_DATA | Step.READ:
                    pass
            words.append(Words(tuple(flags), tuple(stages), acknowledged))
        return words

    def _judge(self, state: tuple[int, ...], instruction: Instruction) -> tuple[Verdict | None, bool]:
        """What the next step of a rank shows, and whether it can be taken."""
        peer = self._words[instruction.peer][state[instruction.peer]]
        bank, number = instruction.round % self._num_banks, instruction.round
        match instruction.step:
            case Step.AWAIT_ACKNOWLEDGEMENT:
                ahead = peer.acknowledged - (number - self._num_banks)
                return (Verdict.AHEAD if ahead > self._num_banks + 1 else None), ahead >= 0
            case Step.AWAIT_DATA:
                ahead = peer.flags[bank] - number
                if self._variant is Variant.EQUALITY:
                    return None, ahead == 0
                return (Verdict.AHEAD if self._variant is Variant.SHIPPED and ahead > 0 else None), ahead >= 0
            case Step.READ:
                return (Verdict.CORRUPT if peer.stages[bank] != number else None), True
            case Step.BEGIN_WRITE | Step.END_WRITE | Step.PUBLISH | Step.ACKNOWLEDGE:
                return None, True
