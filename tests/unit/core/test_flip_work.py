"""The program of a flip's work: its order in each kind of memory, and every way in which it can end."""

from collections.abc import Iterator
from itertools import product

import pytest

from services.core.flip.work import (
    Broken,
    Finished,
    FlipWork,
    Outcome,
    Program,
    Restored,
    RowsKind,
    WeightsKind,
    settle,
)
from services.core.flip.work_asks import (
    GROUP_ASKS,
    About,
    Agree,
    Ask,
    CheckWeights,
    CompareRows,
    FillWeights,
    HaveWeights,
    KeepRows,
    LookForRoom,
    PassRows,
    ReadRows,
    TradePages,
    TrimPages,
    WriteKeptRows,
    WriteRows,
)
from services.core.flip.work_table import WAYS, WELL, Answer, Phase, Verdict, Way
from services.core.ids import LayoutKind

PP, TP = LayoutKind.PP, LayoutKind.TP
KINDS = list(product(WeightsKind, RowsKind))
NUM_BATCHES = 2
FAILED = Answer(Verdict.FAILED_HERE, "a test")
UNKNOWN = Answer(Verdict.UNKNOWN, "a peer is gone")
BOTH = pytest.mark.parametrize(
    ("weights", "rows"), KINDS, ids=[f"{weights.value} {rows.value}" for weights, rows in KINDS]
)


def work(weights: WeightsKind, rows: RowsKind) -> Program:
    return FlipWork(weights, rows, TP, NUM_BATCHES).run()


def alone(program: Program, answers: dict[int, Answer]) -> tuple[list[Ask], Outcome]:
    """What one program asks, each answered well but for those at given places, and what it ends with."""
    asks: list[Ask] = []
    try:
        asks.append(next(program))
        while True:
            asks.append(program.send(answers.get(len(asks) - 1, WELL)))
    except StopIteration as ended:
        return asks, ended.value


class Pair:
    """Two ranks in step: asks are answered well, but for local ones at given places (rank, count of own asks)."""

    def __init__(self, weights: WeightsKind, rows: RowsKind, failing: set[tuple[int, int]]) -> None:
        self._rows, self._failing = rows, failing
        self._programs = [work(weights, rows), work(weights, rows)]
        self.asks: list[list[Ask]] = [[], []]
        self.outcomes: list[Outcome | None] = [None, None]

    def run(self) -> None:
        """To both ends; group asks must be the same ones at the same time."""
        at: list[Ask | None] = [self._sent(rank, None) for rank in (0, 1)]
        while any(at):
            at = [self._up_to_group(rank, ask) for rank, ask in enumerate(at)]
            if None in at:
                assert at == [None, None] or self._is_left_alone(), f"{at} beside {self.outcomes}"
                return
            assert self._key(at[0]) == self._key(at[1]), "ranks meet at one place"
            answers = self._group_answers(at)
            at = [self._sent(rank, answers[rank]) for rank in (0, 1)]

    def _up_to_group(self, rank: int, ask: Ask | None) -> Ask | None:
        while ask is not None and not isinstance(ask, GROUP_ASKS):
            ask = self._sent(rank, FAILED if self._fails(rank) else WELL)
        return ask

    def _is_left_alone(self) -> bool:
        """Whether one waits for another that has said that it is broken: an abort ends that wait."""
        return any(isinstance(outcome, Broken) for outcome in self.outcomes)

    def _key(self, ask: Ask | None) -> object:
        return (ask.about, ask.batch) if isinstance(ask, Agree) else ask

    def _fails(self, rank: int) -> bool:
        return (rank, len(self.asks[rank]) - 1) in self._failing

    def _group_answers(self, at: list[Ask | None]) -> list[Answer]:
        fails = [self._fails(rank) for rank in (0, 1)]
        if isinstance(at[0], CompareRows):
            # Where pools take turns every rank sees every pair; else each sees what came to it.
            seen = [any(fails)] * 2 if self._rows is RowsKind.TURNS else fails
            return [FAILED if wrong else WELL for wrong in seen]
        if isinstance(at[0], Agree):
            wrong = [bool(ask.failure) for ask in at if isinstance(ask, Agree)]
            elsewhere = Answer(Verdict.FAILED_ELSEWHERE, "another")
            return [FAILED if own else elsewhere if any(wrong) else WELL for own in wrong]
        return [WELL, WELL]

    def _sent(self, rank: int, answer: Answer | None) -> Ask | None:
        program = self._programs[rank]
        try:
            ask = next(program) if answer is None else program.send(answer)
        except StopIteration as ended:
            self.outcomes[rank] = ended.value
            return None
        self.asks[rank].append(ask)
        return ask


def places(weights: WeightsKind, rows: RowsKind) -> Iterator[int]:
    """Of the asks at which one rank can fail: its own, and the comparison of what came."""
    for place, ask in enumerate(alone(work(weights, rows), {})[0]):
        if not isinstance(ask, PassRows | TradePages | Agree):
            yield place


# The table.


def test_there_is_a_row_for_every_pair_and_what_is_not_known_is_broken() -> None:
    assert set(WAYS) == set(product(Phase, Verdict))
    assert {way for (_, verdict), way in WAYS.items() if verdict is Verdict.UNKNOWN} == {Way.BROKEN}
    assert {way for (_, verdict), way in WAYS.items() if verdict is Verdict.WELL} == {Way.GO_ON}
    assert all(WAYS[Phase.RETURNING, verdict] is Way.BROKEN for verdict in set(Verdict) - {Verdict.WELL})


# The order.


def test_where_nobody_meets_there_is_one_look() -> None:
    assert alone(work(WeightsKind.KEPT, RowsKind.SHARED), {}) == ([LookForRoom()], Finished())
    assert alone(work(WeightsKind.KEPT, RowsKind.SHARED), {0: FAILED}) == ([LookForRoom()], Restored("a test"))


def test_rows_of_a_pair_then_pages() -> None:
    asks, outcome = alone(work(WeightsKind.EXCHANGED, RowsKind.PAIR), {})
    assert outcome == Finished()
    assert asks == [
        LookForRoom(),
        ReadRows(0, TP),
        Agree(About.READY, ""),
        PassRows(0, TP),
        CompareRows(0, TP),
        Agree(About.ROWS, ""),
        TradePages(TP),
        CheckWeights(TP),
        Agree(About.WEIGHTS, ""),
    ]


def test_batches_in_turns_then_images() -> None:
    asks, outcome = alone(work(WeightsKind.FILLED, RowsKind.TURNS), {})
    assert outcome == Finished()
    batches = [
        [
            ReadRows(batch, TP),
            Agree(About.READ, "", batch),
            PassRows(batch, TP),
            CompareRows(batch, TP),
            TrimPages(batch, PP),
            Agree(About.TRIMMED, "", batch),
            WriteRows(batch, TP),
            Agree(About.WRITTEN, "", batch),
        ]
        for batch in range(NUM_BATCHES)
    ]
    tail = [FillWeights(TP), Agree(About.WEIGHTS, "")]
    assert asks == [LookForRoom(), Agree(About.READY, ""), *batches[0], *batches[1], *tail]


def test_wrong_pages_lead_back_through_pages_and_batches() -> None:
    well, _ = alone(work(WeightsKind.EXCHANGED, RowsKind.TURNS), {})
    place = well.index(Agree(About.WEIGHTS, ""))
    asks, outcome = alone(work(WeightsKind.EXCHANGED, RowsKind.TURNS), {place: FAILED})
    assert outcome == Restored("a test")
    back = asks[place + 1 :]
    assert back[:3] == [TradePages(PP, undoes=True), CheckWeights(PP), HaveWeights(PP)]
    assert [ask.batch for ask in back if isinstance(ask, WriteRows) and ask.toward is PP] == [1, 0]


def test_a_batch_that_does_not_lie_as_it_came_is_written_back_from_what_was_kept() -> None:
    asks, _ = alone(work(WeightsKind.KEPT, RowsKind.TURNS), {})
    place = asks.index(Agree(About.WRITTEN, "", 1))
    asks, outcome = alone(work(WeightsKind.KEPT, RowsKind.TURNS), {place: FAILED})
    assert outcome == Restored("a test")
    assert asks[place + 1 : place + 5] == [
        TrimPages(1, TP),
        Agree(About.TRIMMED_BACK, "", 1),
        WriteKeptRows(1, PP),
        Agree(About.WRITTEN_BACK, "", 1),
    ]
    assert asks[place + 5] == ReadRows(0, PP), "the batch before it comes back from the other ranks"


@BOTH
def test_nothing_is_given_up_before_all_have_agreed(weights: WeightsKind, rows: RowsKind) -> None:
    asks, _ = alone(work(weights, rows), {})
    for place, ask in enumerate(asks):
        before = asks[:place]
        if isinstance(ask, TrimPages):
            assert CompareRows(ask.batch, TP) in before and Agree(About.READ, "", ask.batch) in before
        if isinstance(ask, TradePages | FillWeights):
            verdict = {RowsKind.PAIR: About.ROWS, RowsKind.TURNS: About.WRITTEN, RowsKind.SHARED: About.READY}[rows]
            agreed = [each for each in before if isinstance(each, Agree) and each.about is verdict]
            assert len(agreed) == (NUM_BATCHES if rows is RowsKind.TURNS else 1) and before[-1] == agreed[-1]


# Every way it can end.


@BOTH
def test_what_breaks_off_among_ranks_is_broken_at_once(weights: WeightsKind, rows: RowsKind) -> None:
    asks, _ = alone(work(weights, rows), {})
    for place in range(len(asks)):
        cut, outcome = alone(work(weights, rows), {place: UNKNOWN})
        assert outcome == Broken("a peer is gone") and len(cut) == place + 1


@BOTH
def test_one_failure_anywhere_brings_all_back_together(weights: WeightsKind, rows: RowsKind) -> None:
    for rank, place in product((0, 1), places(weights, rows)):
        pair = Pair(weights, rows, {(rank, place)})
        pair.run()
        outcomes = [type(outcome) for outcome in pair.outcomes]
        alone_may = weights is WeightsKind.KEPT and rows is not RowsKind.TURNS
        allowed = [[Restored, Restored]] + [[Restored, Finished], [Finished, Restored]] * alone_may
        assert outcomes in allowed, (rank, pair.asks[rank][place], pair.outcomes)
        assert outcomes[rank] is Restored


@BOTH
def test_a_second_failure_on_the_way_back_is_broken(weights: WeightsKind, rows: RowsKind) -> None:
    """All but a look that finds damage, which is then repaired."""
    for first in places(weights, rows):
        once = Pair(weights, rows, {(1, first)})
        once.run()
        for second in range(first + 1, len(once.asks[1])):
            ask = once.asks[1][second]
            if isinstance(ask, GROUP_ASKS) and not isinstance(ask, CompareRows):
                continue
            twice = Pair(weights, rows, {(1, first), (1, second)})
            twice.run()
            is_checked_again = isinstance(ask, CheckWeights) and ask.layout is PP
            assert isinstance(twice.outcomes[1], Restored if is_checked_again else Broken), (ask, twice.outcomes)


# Behind the outcome.


@BOTH
def test_an_outcome_asks_no_peer(weights: WeightsKind, rows: RowsKind) -> None:
    asks, outcome = alone(settle(weights, rows, PP, None), {})
    assert outcome == Finished() and not any(isinstance(ask, GROUP_ASKS) for ask in asks)
    wanted: list[Ask] = [HaveWeights(PP)] if weights is not WeightsKind.KEPT else []
    assert asks == wanted + [KeepRows(PP)] * (rows is not RowsKind.SHARED)
    for place in range(len(asks)):
        assert alone(settle(weights, rows, PP, None), {place: FAILED})[1] == Broken("a test")


@BOTH
def test_what_was_broken_stays_so(weights: WeightsKind, rows: RowsKind) -> None:
    asks, outcome = alone(settle(weights, rows, PP, Broken("a test")), {})
    assert asks == [] and isinstance(outcome, Broken)
    assert alone(settle(weights, rows, PP, Restored("a test")), {})[1] == Finished()
