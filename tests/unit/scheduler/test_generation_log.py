"""The generation's log without streams: flips that are asked for before they are armed, and the clocks over them."""

from collections.abc import Iterator

import pytest

from services.core.flip.log_side import FlipAttempts, FlipClocks, PastAttempts
from services.core.flip.messages import FlipOutcome
from services.core.ids import Epoch, FlipId, Generation, LayoutKind, Rank, RequestId, TokenId
from services.core.request import SamplingParams, Submission
from services.core.step import AbandonEntry, CommitEntry, FlipEntry
from services.scheduler.batch.batcher import Batcher
from services.scheduler.inputs import (
    Clock,
    FlipEnded,
    FlipWanted,
    Input,
    MoverDecided,
    MoverSpoke,
    QuestionFailed,
    RankReady,
    Ready,
    Submit,
    fence_of,
)
from services.scheduler.log import STOOD_STILL_NS, GenerationLog, LogDeadlines
from tests.support.toy_rank import layout_of, limits_of

PP, TP = LayoutKind.PP, LayoutKind.TP
MS, S = 1_000_000, 1_000_000_000
CLOCKS = FlipClocks(silence_ns=3 * S, frozen_ns=20 * S)
FIRST = FlipId(1)


class Stand:
    """A log whose two ranks are ready, and everything that it ever had ready."""

    def __init__(self, *, ranks_meet: bool = False, past: PastAttempts | None = None) -> None:
        layouts = {kind: layout_of(kind) for kind in LayoutKind}
        self.now_ns = 0
        self.log = GenerationLog(
            Generation(7),
            Batcher(limits_of(), layouts[TP]),
            layouts,
            TP,
            LogDeadlines(boot_ns=9 * S, step_ns=60 * S),
            FlipAttempts(CLOCKS, ranks_meet=ranks_meet, past=past),
            0,
        )
        self.questions = 0
        self.ended: list[FlipEnded] = []
        self.entries: list[object] = []
        for rank in range(2):
            self.give(RankReady(Rank(rank), rank, fence_of(self.log.fence), 64, "toy"))

    def give(self, given: Input, after_ns: int = 0) -> Ready:
        """One input, so much later."""
        self.now_ns += after_ns
        self.log.step(given, self.now_ns)
        ready = self.log.ready()
        self.entries += [logged.entry for logged in ready.entries]
        self.questions += ready.question is not None
        self.ended += ready.flips
        return ready

    def pass_clocks(self, until_ns: int) -> Iterator[Ready]:
        """Time goes by, and every clock that is asked for comes."""
        while (clock_ns := self.log.clock_ns) is not None and clock_ns <= until_ns:
            yield self.give(Clock(), max(0, clock_ns - self.now_ns))
        self.now_ns = max(self.now_ns, until_ns)

    @property
    def flips(self) -> list[type]:
        """What is written of flips."""
        return [type(e) for e in self.entries if isinstance(e, FlipEntry | CommitEntry | AbandonEntry)]


@pytest.fixture
def stand() -> Stand:
    return Stand()


def test_nothing_stands_still_before_the_mover_has_answered(stand: Stand) -> None:
    """A3: a mover that is not there costs no standstill, only the attempt."""
    ready = stand.give(FlipWanted(PP, "by hand", ticket=5))
    assert ready.question is not None and ready.question.entry is None and not stand.flips
    stand.give(Submit(Submission(RequestId("a"), (TokenId(3),), 1, 4, SamplingParams())))
    assert not stand.log.batcher.is_frozen and stand.log.batcher.num_in_flight == 2
    for _ in stand.pass_clocks(4 * S):
        pass
    assert not stand.flips and stand.ended[0].ticket == 5
    assert (stand.ended[0].outcome, stand.ended[0].reason) == (None, "no mover for 3 s: it said nothing")
    assert stand.log.flips.past == PastAttempts(1, stand.ended[0].reason, 3 * S)


def test_the_first_word_arms_and_the_outcome_is_written(stand: Stand) -> None:
    stand.give(FlipWanted(PP, "by hand"))
    stand.give(MoverSpoke(FIRST))
    assert stand.log.batcher.is_frozen
    stand.give(MoverDecided(FIRST, FlipOutcome.COMMITTED, ""))
    assert stand.flips == [FlipEntry, CommitEntry] and (stand.log.layout, stand.log.fence.epoch) == (PP, 2)
    assert stand.ended[0].outcome is FlipOutcome.COMMITTED and stand.log.flips.past.abandoned_in_a_row == 0


def test_first_words_of_questions_that_fail_are_silence(stand: Stand) -> None:
    """A2: a mover that takes the question and fails, again and again, is given up as one that says nothing."""
    stand.give(FlipWanted(PP, "by hand"))
    stand.give(MoverSpoke(FIRST))
    while not stand.ended:
        stand.give(QuestionFailed(FIRST, "its journal is full"), 10 * MS)
        for ready in stand.pass_clocks(stand.now_ns + CLOCKS.again_ns):
            if ready.question is not None:
                stand.give(MoverSpoke(FIRST), MS)
        assert stand.now_ns < 2 * CLOCKS.silence_ns, "it is never given up"
    assert stand.questions > 10 and stand.flips == [FlipEntry, AbandonEntry]
    assert stand.ended[0].reason == "no mover for 3 s: its journal is full"


def test_a_later_word_of_a_question_asked_again_is_none(stand: Stand) -> None:
    stand.give(FlipWanted(PP, "by hand"))
    stand.give(MoverSpoke(FIRST))
    stand.give(QuestionFailed(FIRST, "killed"), 2 * S)
    assert stand.give(Clock(), CLOCKS.again_ns).question is not None
    stand.give(MoverSpoke(FIRST))
    stand.give(MoverSpoke(FIRST), 800 * MS)
    assert [*stand.pass_clocks(5 * S)] == [] and not stand.ended, "its beat counts from there"


def test_a_standstill_is_bounded_whatever_the_mover_says(stand: Stand) -> None:
    stand.give(FlipWanted(PP, "by hand"))
    stand.give(MoverSpoke(FIRST))
    while not stand.ended:
        for _ in stand.pass_clocks(stand.now_ns + S):
            pass
        stand.give(MoverSpoke(FIRST))
        assert stand.now_ns < 2 * CLOCKS.frozen_ns, "it stands still for ever"
    assert stand.ended[0].reason.startswith("no outcome within 20 s of standstill")


def test_a_pause_of_this_process_is_no_silence_of_others(stand: Stand) -> None:
    stand.give(FlipWanted(PP, "by hand"))
    stand.give(MoverSpoke(FIRST))
    stand.give(Clock(), CLOCKS.silence_ns + 2 * STOOD_STILL_NS)
    assert not stand.ended and stand.log.clock_ns == stand.now_ns + STOOD_STILL_NS
    stand.give(MoverDecided(FIRST, FlipOutcome.COMMITTED, ""))
    assert stand.flips == [FlipEntry, CommitEntry]


def test_how_flips_went_outlives_a_generation() -> None:
    """A3: neither a broken flip nor a generation that ends under one makes a policy start afresh."""
    stand = Stand(ranks_meet=True, past=PastAttempts(2, "before", 0))
    stand.give(FlipWanted(PP, "policy"))
    stand.give(MoverSpoke(FIRST))
    lost = [ready.lost for ready in stand.pass_clocks(4 * S) if ready.lost]
    assert lost == ["flip 1: no mover for 3 s: it said nothing"]
    past = stand.log.flips.past
    assert past == PastAttempts(3, "no mover for 3 s: it said nothing", 3 * S)
    assert Stand(past=past).log.flips.past.abandoned_in_a_row == 3


def test_late_advice_is_not_followed(stand: Stand) -> None:
    generation, epoch = fence_of(stand.log.fence)
    stand.give(FlipWanted(PP, "policy", answers=(generation, Epoch(epoch + 1))))
    assert stand.questions == 0 and stand.ended[0].reason == "late, or to stay"
