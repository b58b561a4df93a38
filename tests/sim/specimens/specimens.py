"""Faults put back: each is the shipped code but for one rule, and the simulator must find it.

`invariants` are the rules that may be the first to break; a fault found by anything else is found by luck.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tests.sim.focuses import (
    everybody_withdraws,
    indexes_change_hands,
    links_break_as_flips_follow_each_other,
    mover_dies_and_ranks_fail,
    mover_dies_at_enter,
    mover_is_gone_after_enter,
    nobody_is_hurt,
    nothing_fits,
    one_prompt_of_whole_blocks,
    pools_are_full,
    ranks_fail_behind_the_seam,
    rows_are_exchanged,
    rows_are_wrong_before_pages,
    scheduler_dies_as_flips_follow_each_other,
    slow_stages,
    something_unforeseen_happens,
    the_journal_is_full_after_enter,
    the_question_breaks_after_enter,
    weights_are_found_wrong,
    work_fails,
)
from tests.sim.processes.group import SHIPPED, Parts
from tests.sim.run import Focus, unchanged
from tests.sim.specimens.faults_batch import (
    AnyStepPlaces,
    EvictingBatcher,
    ForgetfulBatcher,
    LengthExtentBatcher,
    OneSlotExtentBatcher,
    SecondCopyBatcher,
    StaleTreeBatcher,
    TwiceFreedBatcher,
    UnannouncedBatcher,
    UnfrozenBatcher,
)
from tests.sim.specimens.faults_flip import (
    BoundParticipant,
    DeafCoordinator,
    DoubleCarryLog,
    DroppedCarryLog,
    EagerParticipant,
    ForgivingAttempts,
    HastyCoordinator,
    HastyLog,
    HopefulAttempts,
    ImpatientLog,
    InPlaceRank,
    LiteralParticipant,
    LonelyQuorum,
    RebornNumbers,
    ReorderedScheduler,
    SilentCoordination,
    StaleEpochLog,
    StaleExpiry,
    StaleQuorum,
    StandingMark,
    TwoEaredFlips,
    UnboundRounds,
    UnwrittenEnterMover,
)
from tests.sim.specimens.faults_memory import (
    DraftlessRank,
    DroppedRowsMemory,
    HalfReturnedMemory,
    LonelyReturnMemory,
    ProposerlessRank,
    SmallPoolMemory,
    UnreadSourceMemory,
    UnsettledMemory,
)
from tests.sim.specimens.faults_work import (
    EarlyTradeWork,
    EarlyTrimWork,
    HopefulRank,
    HopefulWork,
    OneBatchBackWork,
    SkippedVerdictWork,
    UncomparedWork,
)
from tests.sim.specimens.old_ranks import (
    ConsensusRank,
    EarlyMarkRank,
    EarlyPoster,
    EmptyBatchRank,
    ForwardingRank,
    HalfSwitchedRank,
    ImpatientReceiver,
    LatePassRank,
    LiveRingRank,
    NonEmptyRank,
    ObservingRank,
    OwnClockRank,
    QuietFirstRank,
    RaisingRank,
    SendingRank,
    TopHookRank,
    WalkingRank,
)

NUM_SEEDS = 2000


@dataclass(frozen=True, slots=True)
class Specimen:
    """One fault."""

    name: str
    parts: Parts
    invariants: frozenset[str]
    seeds: range = range(NUM_SEEDS)
    """It must be found among these."""
    focus: Focus = unchanged
    says: str = ""
    """A pattern of the violation's text: who is seen waiting in what."""


def _specimen(
    name: str, invariants: Sequence[str], focus: Focus = unchanged, says: str = "", first: int = 0, **parts: type
) -> Specimen:
    """`first`: where to begin looking for what is rare."""
    seeds = range(first, first + NUM_SEEDS)
    return Specimen(name, replace(SHIPPED, **parts), frozenset(invariants), seeds, focus, says)


WEDGED = ("wedge", "convergence")
"""Ranks wait for each other: for ever, or until the mover's clock ends what nobody was stopped in."""

SPECIMENS = (
    _specimen("freed block stays findable (P3.8)", ("census", "context", "raised"), batcher=StaleTreeBatcher),
    _specimen("second copy kept (P3.9)", ("liveness",), one_prompt_of_whole_blocks, batcher=SecondCopyBatcher),
    _specimen("blocks freed twice", ("raised", "census", "frozen blocks"), batcher=TwiceFreedBatcher),
    _specimen("freed while frozen (Z6)", ("frozen blocks",), batcher=UnfrozenBatcher),
    _specimen("tokens_through left out", ("known tokens",), batcher=ForgetfulBatcher),
    _specimen("releases not announced", ("resident table",), batcher=UnannouncedBatcher),
    _specimen("extent from lengths (J2)", ("context", "frozen blocks"), batcher=LengthExtentBatcher),
    _specimen("extent from one microbatch (J1)", ("context", "frozen blocks"), batcher=OneSlotExtentBatcher),
    _specimen(
        "index without admitted_at",
        ("known tokens", "context", "agreement", "answers"),
        indexes_change_hands,
        places=AnyStepPlaces,
    ),
    _specimen("evicted while parked (T)", ("frozen blocks",), batcher=EvictingBatcher),
    _specimen("presence of the attempt (P)", ("stale quorum",), coordinator=StaleQuorum),
    _specimen("mark left standing (H)", ("stale quorum",), everybody_withdraws, coordinator=StandingMark),
    _specimen("one rank's quiet (I)", ("stale quorum",), coordinator=LonelyQuorum),
    _specimen(
        "clock set back by every gate (O)",
        ("liveness", "frozen time", "convergence"),
        everybody_withdraws,
        coordinator=UnboundRounds,
    ),
    _specimen("expiry before the gate sets it (Z5)", ("convergence",), coordinator=StaleExpiry),
    _specimen("commit at the first verified", ("commit after all verified",), coordinator=HastyCoordinator),
    _specimen("ENTER said once", ("convergence",), mover_dies_at_enter, coordinator=DeafCoordinator),
    _specimen(
        "ENTER not journalled",
        ("journal, then speak",),
        mover_dies_at_enter,
        mover=UnwrittenEnterMover,
    ),
    _specimen(
        "ENTER not said again",
        ("convergence",),
        the_question_breaks_after_enter,
        says="not verified in time",
        coordination=SilentCoordination,
    ),
    _specimen("a rank enters alone", ("raised", "wedge", "convergence"), participant=EagerParticipant),
    _specimen("no ABANDON while entered", ("raised",), work_fails, first=300, participant=BoundParticipant),
    _specimen(
        "no later DISARM while parked",
        ("raised",),
        links_break_as_flips_follow_each_other,
        participant=LiteralParticipant,
    ),
    _specimen("carry dropped (J3, K)", ("wedge", "resident table", "liveness"), log=DroppedCarryLog),
    _specimen("carry twice (Z7)", ("raised", "wedge", "census", "rows", "liveness"), log=DoubleCarryLog),
    _specimen(
        "numbers that begin again (N)",
        ("one log", "commit after all verified", "raised", "fence", "one number, one generation"),
        scheduler_dies_as_flips_follow_each_other,
        scheduler=RebornNumbers,
    ),
    _specimen(
        "ABANDON while ranks may have met",
        ("collective order", "wedge"),
        mover_is_gone_after_enter,
        attempts=ForgivingAttempts,
    ),
    _specimen("frozen before the mover has answered (A3)", ("asked, then frozen",), log=HastyLog),
    _specimen(
        "a question's first word ends a silence (A2)",
        ("frozen time",),
        the_journal_is_full_after_enter,
        attempts=HopefulAttempts,
    ),
    _specimen("commit before reports", ("fence", "raised"), log=ImpatientLog),
    _specimen("old epoch after COMMIT", ("raised",), log=StaleEpochLog),
    _specimen("entries reordered", ("raised",), scheduler=ReorderedScheduler),
    _specimen("source written before verified", ("source untouched", "context"), rank=InPlaceRank),
    _specimen(
        "arm posted for the next pass (A)",
        WEDGED,
        nobody_is_hurt,
        says=r"rank-0 in group operation \('gate'",
        rank=ForwardingRank,
    ),
    _specimen(
        "arm sent before what is owed (B)", WEDGED, slow_stages, says=r"in the receive of step", rank=SendingRank
    ),
    _specimen("bound inside the group operation (C)", ("generation lost",), rows_are_exchanged, rank=WalkingRank),
    _specimen(
        "arm acts one pass later (D)", WEDGED, nobody_is_hurt, says=r"not parked in time: rank 1", rank=LatePassRank
    ),
    _specimen("clock of each rank from the arm (E)", ("raised", *WEDGED), nobody_is_hurt, rank=OwnClockRank),
    _specimen(
        "first quiet stops feeding (G)", WEDGED, slow_stages, says=r"in the receive of step", rank=QuietFirstRank
    ),
    _specimen("quiet is empty (L)", WEDGED, nobody_is_hurt, says=r"not parked in time: rank 0", rank=EmptyBatchRank),
    _specimen(
        "ring of the live layout (M)",
        ("framing", "channels empty", *WEDGED),
        nobody_is_hurt,
        says=r"in the receive of step",
        rank=LiveRingRank,
    ),
    _specimen("present a pass early (Q)", ("channels empty", "context", *WEDGED), slow_stages, rank=EarlyMarkRank),
    _specimen(
        "one rank half switched (R)",
        ("collective order", "agreement", "context", "framing", *WEDGED),
        nobody_is_hurt,
        says=r"in the receive of step .* in group operation",
        rank=HalfSwitchedRank,
    ),
    _specimen(
        "draft left behind (S)", ("raised",), nobody_is_hurt, says="HalfSwitchedError.*draft", rank=DraftlessRank
    ),
    _specimen("algorithm left behind, nobody asks", ("half armed",), nobody_is_hurt, rank=ProposerlessRank),
    _specimen("pool smaller than the ids (V)", ("context", "raised"), pools_are_full, memory=SmallPoolMemory),
    _specimen(
        "packed rows dropped before the verdict",
        ("source untouched",),
        ranks_fail_behind_the_seam,
        memory=DroppedRowsMemory,
    ),
    _specimen(
        "source released before it is read",
        ("half a layout",),
        ranks_fail_behind_the_seam,
        memory=UnreadSourceMemory,
    ),
    _specimen(
        "back alone from an exchange",
        ("collective order", *WEDGED),
        weights_are_found_wrong,
        memory=LonelyReturnMemory,
    ),
    _specimen(
        "ABANDON leaves the other layout's weights",
        ("half a layout",),
        weights_are_found_wrong,
        memory=UnsettledMemory,
    ),
    _specimen(
        "RESTORED said of an arena that is not", ("half a layout",), weights_are_found_wrong, memory=HalfReturnedMemory
    ),
    _specimen(
        "a verdict skipped (W1)",
        ("collective order", *WEDGED),
        ranks_fail_behind_the_seam,
        work=SkippedVerdictWork,
    ),
    _specimen(
        "pages traded before all agreed (W2)",
        ("collective order", *WEDGED),
        rows_are_wrong_before_pages,
        work=EarlyTradeWork,
    ),
    _specimen(
        "RESTORED said without evidence (W3)",
        ("half a layout", "source untouched", "collective order", *WEDGED),
        something_unforeseen_happens,
        work=HopefulWork,
    ),
    _specimen(
        "RESTORED said of what nobody foresaw (W3)",
        ("half a layout", "source untouched"),
        something_unforeseen_happens,
        rank=HopefulRank,
    ),
    _specimen(
        "trimmed before it was verified (W4)",
        ("half a layout",),
        ranks_fail_behind_the_seam,
        work=EarlyTrimWork,
    ),
    _specimen("rows not compared (W5)", ("context", "agreement"), ranks_fail_behind_the_seam, work=UncomparedWork),
    _specimen(
        "batches before it stay (W6)",
        ("half a layout",),
        ranks_fail_behind_the_seam,
        work=OneBatchBackWork,
    ),
    _specimen("empty live set (X)", ("raised",), rank=NonEmptyRank),
    _specimen("refusal raised (Y)", ("generation lost",), nothing_fits, rank=RaisingRank),
    _specimen(
        "hook before what is owed (Z1)",
        WEDGED,
        slow_stages,
        says=r"in the receive of step .* in group operation \('gate'",
        rank=TopHookRank,
    ),
    _specimen(
        "consensus on drifting rounds (Z2)",
        ("collective order", *WEDGED),
        nobody_is_hurt,
        says=r"consensus",
        rank=ConsensusRank,
    ),
    _specimen(
        "each rank arms itself (Z3)", ("collective order", *WEDGED), nobody_is_hurt, says=r"gate", rank=ObservingRank
    ),
    _specimen("bound on the chain (Z4)", ("framing", *WEDGED), slow_stages, rank=ImpatientReceiver),
    _specimen(
        "two streams heard, ENTER not said again",
        ("raised",),
        mover_dies_and_ranks_fail,
        first=3600,
        flips=TwoEaredFlips,
        coordination=SilentCoordination,
    ),
    _specimen("message across the groups (Z8)", ("channels empty", "framing"), nobody_is_hurt, rank=EarlyPoster),
)
