"""What a drawn case is aimed at: moments and loads that chance alone meets too rarely."""

from dataclasses import replace

from services.core.ids import TokenId
from tests.sim.case import MS, US, Case, Fault, Odds, S
from tests.sim.processes.memory import Mode


def mover_dies_at_enter(case: Case) -> Case:
    """Its journal holds ENTER, and ranks may not have heard it."""
    return replace(case, faults=(Fault(0, "crash", "mover", moment="entered"),), eager_flips=3, mode=Mode.DUAL)


def the_journal_is_full_after_enter(case: Case) -> Case:
    """The outcome cannot be written down, in life after life of the mover, for longer than anybody should wait."""
    fault = Fault(0, "fill", "mover", for_ns=4 * S, moment="entered")
    return replace(case, faults=(fault,), odds=Odds(), eager_flips=2)


def links_break_as_flips_follow_each_other(case: Case) -> Case:
    """The mover calls an attempt off while the outcome of the one before is still on its way to a slow rank."""
    faults = tuple(Fault(0, "unlink", f"rank-{case.num_ranks - 1}", moment="armed") for _ in range(6))
    return replace(case, faults=faults, odds=Odds(refuse=0.3), eager_flips=8, slow_share=0.3)


def everybody_withdraws(case: Case) -> Case:
    """A rank that is present takes it back at once."""
    return replace(case, odds=Odds(withdraw=1.0), control=(10 * US, 100 * US), faults=())


def nothing_fits(case: Case) -> Case:
    """Some rank refuses, and nobody is hurt."""
    return replace(case, odds=Odds(refuse=0.5), faults=(), eager_flips=2)


def rows_are_exchanged(case: Case) -> Case:
    """Each layout has its own pool, so ranks meet in a flip; nobody is hurt."""
    return replace(case, mode=Mode.DUAL, faults=(), odds=Odds(), eager_flips=2)


def nobody_is_hurt(case: Case) -> Case:
    """No fault, no odds: flips alone."""
    return replace(case, faults=(), odds=Odds(), eager_flips=3)


def work_fails(case: Case) -> Case:
    """One rank says that it has failed and restored, while a slow one is still at work."""
    slowness = tuple(1.0 + 7.0 * (rank == 0) for rank in range(case.num_ranks))
    odds = Odds(fail=0.4)
    return replace(
        case,
        faults=(),
        odds=odds,
        eager_flips=4,
        mode=Mode.SHARED,
        is_exclusive=False,
        slowness=slowness,
        control=(5 * US, 50 * US),
    )


def slow_stages(case: Case) -> Case:
    """Stages that are far apart in speed, behind links of one message."""
    slowness = tuple(1.0 + 3.0 * (rank == 0) for rank in range(case.num_ranks))
    return replace(nobody_is_hurt(case), slowness=slowness, link_capacity=1)


def scheduler_dies_as_flips_follow_each_other(case: Case) -> Case:
    """Its next life makes flips as well."""
    faults = (Fault(0, "crash", "scheduler", moment="concluded"),)
    return replace(case, faults=faults, odds=Odds(), eager_flips=3)


def the_question_breaks_after_enter(case: Case) -> Case:
    """Some ranks have verified; no link of a rank breaks, and no process."""
    faults = tuple(Fault(0, "unask", "mover", moment="verified") for _ in range(3))
    return replace(case, faults=faults, eager_flips=3, odds=Odds(), control=(50 * US, 1500 * US))


def mover_is_gone_after_enter(case: Case) -> Case:
    """It has told some ranks, which wait for the others inside the exchange, and nobody comes to tell those."""
    faults = (Fault(0, "crash", "mover", 900 * MS, "entered"),)
    return replace(case, faults=faults, mode=Mode.DUAL, eager_flips=2, odds=Odds(), slow_share=0.3)


def mover_dies_and_ranks_fail(case: Case) -> Case:
    """Its next life calls off what the one before had begun, while the word of that one is still on its way."""
    faults = (Fault(0, "crash", "mover", moment="entered"),)
    return replace(
        case,
        faults=faults,
        mode=Mode.SHARED,
        is_exclusive=False,
        eager_flips=3,
        odds=Odds(fail=0.5),
        slow_share=0.3,
        boot=(100 * US, 1 * MS),
    )


def indexes_change_hands(case: Case) -> Case:
    """Few places, many who come and go."""
    limits = replace(case.limits, max_resident_requests=2, max_queued_requests=12, steps_ahead=3)
    asked = tuple(
        replace(asked, name=f"r{number}", max_output_tokens=1 + number % 4, abort_ns=(3 * MS if number % 2 else None))
        for number, asked in enumerate(case.asked * 3)
    )
    return replace(case, limits=limits, asked=asked)


def one_prompt_of_whole_blocks(case: Case) -> Case:
    """Everybody asks the same, and the pool has one block more than the prompt."""
    limits = replace(case.limits, num_blocks=4, max_context_tokens=64)
    prompt = tuple(TokenId(1 + place % 5) for place in range(48))
    return replace(case, limits=limits, asked=tuple(replace(asked, prompt=prompt) for asked in case.asked))


def a_rank_sleeps_in_the_gate(case: Case) -> Case:
    """It is told that the gate is open, and says nothing until a clock has expired."""
    faults = (Fault(0, "stop", f"rank-{case.num_ranks - 1}", 900 * MS, "parked"),)
    return replace(case, faults=faults, eager_flips=2, odds=Odds(), control=(1 * MS, 2 * MS))


def a_rank_is_far_behind(case: Case) -> Case:
    """Its steps take so long that others wait for it at the FLIP entry."""
    slowness = tuple(1.0 + 11.0 * (rank == 0) for rank in range(case.num_ranks))
    return replace(nobody_is_hurt(case), slowness=slowness, step_ns=1 * MS, control=(50 * US, 200 * US))


def links_break_where_work_is_done(case: Case) -> Case:
    """The mover's stream to a rank ends once its part is done, and opens again."""
    faults = tuple(Fault(0, "unlink", "rank-0", moment=moment) for moment in ("parked", "present", "verified"))
    return replace(case, faults=faults, eager_flips=4, odds=Odds(fail=0.2))


def weights_are_found_wrong(case: Case) -> Case:
    """In an exchange, on one rank or another."""
    return replace(case, mode=Mode.EXCHANGE, faults=(), odds=Odds(fail=0.5), eager_flips=4)


def ranks_fail_behind_the_seam(case: Case) -> Case:
    """Each block has pages in one layout at a time, and a batch is found wrong."""
    return replace(case, mode=Mode.DUAL, is_exclusive=True, faults=(), odds=Odds(fail=0.4), eager_flips=4)


def pools_are_full(case: Case) -> Case:
    """Each layout has its own pool, and requests take all of it."""
    limits = replace(case.limits, num_blocks=4)
    return replace(rows_are_exchanged(case), limits=limits, is_exclusive=False)


def rows_are_wrong_before_pages(case: Case) -> Case:
    """Weights follow rows from pool to pool, and rows may not be what was sent."""
    return replace(case, mode=Mode.EXCHANGE, is_exclusive=False, faults=(), odds=Odds(fail=0.5), eager_flips=4)


def something_unforeseen_happens(case: Case) -> Case:
    """Within what ranks do together, behind a seam or in an exchange."""
    odds = Odds(fail=0.5, breaks=0.3)
    mode = Mode.DUAL if case.num_ranks % 2 else Mode.EXCHANGE
    return replace(case, mode=mode, is_exclusive=True, faults=(), odds=odds, eager_flips=4)


def looks_come_late(case: Case) -> Case:
    """Ranks look whether there is room, and see that there is none, when others or they themselves have entered."""
    odds = Odds(fail=0.6, withdraw=0.5)
    return replace(
        case, mode=Mode.SHARED, is_exclusive=False, faults=(), odds=odds, control=(5 * US, 4 * MS), eager_flips=4
    )
