"""The pure parts of the process shell: when to restart, what counts as stalled, whose messages pass."""

import pytest

from services.core.fence import EpochFence
from services.core.ids import Epoch, Generation
from services.mesh.limits import EX_CONFIG, EX_GENERATION_ENDED
from services.mesh.supervisor.restart_policy import (
    HEALTHY_S,
    MAX_DELAY_S,
    MAX_PROMPT_RESTARTS,
    PROMPT_WINDOW_S,
    RestartPolicy,
)
from services.mesh.telemetry.progress import Phase, Progress


def test_delays_double_to_their_cap_and_a_healthy_life_resets_them() -> None:
    policy = RestartPolicy()
    delays = [policy.delay_s([1], 1.0, 0.0) for _ in range(9)]
    assert delays == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, MAX_DELAY_S, MAX_DELAY_S, MAX_DELAY_S]
    assert policy.delay_s([-9], HEALTHY_S - 0.1, 0.0) == MAX_DELAY_S
    assert policy.delay_s([-9], HEALTHY_S, 0.0) == 0.5


@pytest.mark.parametrize("codes", [[EX_CONFIG], [1, EX_CONFIG], [EX_GENERATION_ENDED, EX_CONFIG]])
def test_a_configuration_error_is_final(codes: list[int]) -> None:
    assert RestartPolicy().delay_s(codes, 1000.0, 0.0) is None


def test_ended_generations_are_followed_at_once_within_a_bound() -> None:
    policy = RestartPolicy()
    assert [policy.delay_s([EX_GENERATION_ENDED], 1.0, 1.0) for _ in range(MAX_PROMPT_RESTARTS)] == [0.0] * 6
    assert policy.delay_s([EX_GENERATION_ENDED], 1.0, 0.9 + PROMPT_WINDOW_S) == 0.5
    assert policy.delay_s([EX_GENERATION_ENDED], 1.0, 1.0 + PROMPT_WINDOW_S) == 0.0
    assert policy.delay_s([EX_GENERATION_ENDED, -9], 1.0, 500.0) == 1.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_p1_13_a_declared_phase_may_take_its_time_and_an_undeclared_one_may_not() -> None:
    clock = Clock()
    progress = Progress("worker-1", clock)
    with progress.working("compiling", 60.0):
        clock.now_s += 50.0
        assert progress.overdue(5.0) is None
        clock.now_s += 11.0
        assert progress.overdue(5.0) == "worker-1: WORKING (compiling) for 61.0 s, declared to last 60 s"
    assert progress.mark.phase is Phase.STARTING
    assert progress.overdue(5.0) is None
    clock.now_s += 50.0
    assert progress.overdue(5.0) == "worker-1: STARTING without progress for 50.0 s, allowed 5 s"
    progress.beat()
    assert progress.overdue(5.0) is None


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.READY])
def test_who_waits_or_is_idle_is_not_stalled(phase: Phase) -> None:
    clock = Clock()
    progress = Progress("router", clock)
    progress.enter(phase, "the scheduler")
    clock.now_s += 10_000.0
    assert progress.overdue(5.0) is None
    assert (progress.age_s(), progress.beat_age_s()) == (10_000.0, 10_000.0)


def test_a_phase_comes_back_after_a_failed_operation() -> None:
    progress = Progress("worker-0", Clock())
    progress.enter(Phase.WAITING, "the scheduler", 30.0)
    with pytest.raises(ValueError, match="broken"), progress.working("loading", 60.0):
        raise ValueError("broken")
    assert (progress.mark.phase, progress.mark.detail, progress.mark.deadline_s) == (
        Phase.WAITING,
        "the scheduler",
        30.0,
    )


def test_the_fence_names_both_sides_and_the_next_step() -> None:
    fence = EpochFence(Generation(3), Epoch(7))
    assert fence.admit(Generation(3), Epoch(7), "rank 3") is None
    assert fence.admit(Generation(3), Epoch(6), "rank 3") == (
        "epoch 7 expected, got 6 from rank 3: dropped; the sender must refetch the layout"
    )
    assert fence.admit(Generation(2), Epoch(7), "rank 1") == (
        "generation 3 expected, got 2 from rank 1: dropped; the sender must join the group again"
    )
    assert fence.num_refused == 2


def test_the_fence_moves_forward_only() -> None:
    fence = EpochFence(Generation(3), Epoch(7))
    fence.move(Generation(3), Epoch(8))
    fence.move(Generation(4), Epoch(1))
    assert fence.admit(Generation(4), Epoch(1), "rank 0") is None
    with pytest.raises(AssertionError, match="cannot go back"):
        fence.move(Generation(3), Epoch(9))
