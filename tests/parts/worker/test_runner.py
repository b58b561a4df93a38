"""The runner keeps the log's order and its waits are bounded: tokens, flips, faults, over real shared memory."""

from collections.abc import Callable
from dataclasses import replace

import gguf
import pytest
import torch

from kernels.cpu.collective_status import CollectiveError, Status
from services.core.ids import BlockId, FlipId, LayoutKind, RequestIndex, TokenId
from services.core.log import ProtocolError
from services.core.request import SamplingParams
from services.core.step import AbandonEntry, CommitEntry, FlipEntry, StepPlan
from services.models.model_files import ModelFiles, open_model
from services.worker.steps.pipeline import MAX_UNREAD_STEPS, StepPipeline
from tests.support.rank_threads import Group, group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf
from tools.bench.log_driver import RanksDisagreeError

PROMPT = [(7 * i * i + 3 * i) % 131 for i in range(40)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, TinyLlama]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model = write_gguf(path, TinyShape(num_layers=4), gguf.GGMLQuantizationType.Q4_1)
    return open_model(path), model


def steps_of(group: Group) -> list[StepPipeline]:
    return [rank.runner.steps for rank in group.ranks if rank.runner.steps is not None]


def check_greedy(model: TinyLlama, ids: list[int], num_prompt: int, num_output: int) -> None:
    """Every token after the prompt is the reference's most probable one."""
    assert len(ids) == num_prompt + num_output
    assert model.logits(ids[:-1])[num_prompt - 1 :].argmax(-1).tolist() == ids[num_prompt:]


@pytest.mark.parametrize("layout", LayoutKind, ids=lambda kind: kind.value)
def test_steps_issued_ahead_read_tokens_that_are_not_sampled_yet(
    tiny: tuple[ModelFiles, TinyLlama], layout: LayoutKind
) -> None:
    files, model = tiny
    with group_of(files, 2) as group:
        group.log.reset(layout, 64, 8, 256)
        group.log.prefill({0: PROMPT}, 16)
        # All written before the first is answered: ids travel over the board alone.
        group.log.decode([0], 30, ahead=31)
        check_greedy(model, group.log.requests[0], 40, 31)


def test_ids_that_nobody_reads_do_not_pile_up(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    with group_of(tiny[0], 2) as group:
        log = group.log
        log.reset(LayoutKind.PP, 64, 8, 256)
        log.prefill({0: PROMPT}, 40)
        for _ in range(5 * MAX_UNREAD_STEPS):
            log.step([(0, 39, 1)], sampled=[0])
            log.settle()
        assert all(steps.num_unread <= MAX_UNREAD_STEPS for steps in steps_of(group))


def flip(log: Group, target: LayoutKind, *, commit: bool) -> None:
    driver, flip_id = log.log, FlipId(log.log.sequence)
    driver.write(FlipEntry(flip_id, target, ((BlockId(0), 64),)))
    driver.answers()
    driver.write(CommitEntry(flip_id, target) if commit else AbandonEntry(flip_id, "a test"))
    driver.answers()
    driver.epoch += commit


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_a_request_lives_across_committed_and_abandoned_flips(
    tiny: tuple[ModelFiles, TinyLlama], num_ranks: int
) -> None:
    files, model = tiny
    with group_of(files, num_ranks) as group:
        group.log.reset(LayoutKind.PP, 64, 8, 256)
        group.log.prefill({0: PROMPT}, 16)
        flip(group, LayoutKind.TP, commit=True)
        group.log.decode([0], 6)
        flip(group, LayoutKind.PP, commit=False)
        group.log.decode([0], 3)
        flip(group, LayoutKind.PP, commit=True)
        group.log.decode([0], 6)
        check_greedy(model, group.log.requests[0], 40, 16)


def test_every_sampled_id_is_taken_when_a_flip_parks(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    """Law 4: nothing is owed on any channel."""
    with group_of(tiny[0], 2) as group:
        group.log.reset(LayoutKind.PP, 64, 8, 256)
        group.log.prefill({0: PROMPT}, 16)
        group.log.decode([0], 3)
        assert all(steps.num_unread for steps in steps_of(group))
        group.log.write(FlipEntry(FlipId(1), LayoutKind.TP, ((BlockId(0), 64),)))
        group.log.answers()
        for steps in steps_of(group):
            assert steps.num_unread == 0
            known = int(steps.table.num_tokens[0])
            assert steps.table.tokens_RC[0, :known].tolist() == group.log.requests[0]


def test_an_outcome_with_ids_still_to_be_taken_ends_the_rank(
    tiny: tuple[ModelFiles, TinyLlama], monkeypatch: pytest.MonkeyPatch
) -> None:
    with group_of(tiny[0], 1) as group:
        group.log.reset(LayoutKind.PP, 64, 8, 256)
        group.log.prefill({0: PROMPT}, 40)
        monkeypatch.setattr(StepPipeline, "read_tokens", lambda *arguments: None)
        with pytest.raises(AssertionError, match="every sampled id is taken"):
            flip(group, LayoutKind.TP, commit=False)


def test_a_block_that_one_rank_has_otherwise_is_noticed_when_it_is_written(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    with group_of(tiny[0], 2) as group:
        group.log.reset(LayoutKind.PP, 64, 8, 256)
        group.log.prefill({0: PROMPT}, 16)
        steps_of(group)[1].table.blocks_RB[0, 2] ^= 1
        with pytest.raises(RanksDisagreeError, match="equal ones expected"):
            group.log.decode([0], 1)


def test_a_step_while_parked_is_refused(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    with group_of(tiny[0], 1) as group:
        group.log.reset(LayoutKind.PP, 64, 8, 256)
        group.log.write(FlipEntry(FlipId(1), LayoutKind.TP, ()))
        group.log.answers()
        group.log.step([(0, 0, 40)], admitted=[group.log.admit(0, PROMPT)])
        with pytest.raises(ProtocolError, match="parked takes CommitEntry or AbandonEntry, got StepPlan"):
            group.log.answers()


@pytest.mark.parametrize("layout", LayoutKind, ids=lambda kind: kind.value)
def test_a_rank_that_fails_releases_those_that_wait_for_it(
    tiny: tuple[ModelFiles, TinyLlama], layout: LayoutKind
) -> None:
    with group_of(tiny[0], 2) as group:
        group.log.reset(layout, 64, 8, 256)
        first = group.ranks[0]
        # Rank 0 alone is given a step that it must refuse; rank 1 waits for it in a collective.
        good = StepPlan(
            admitted=[group.log.admit(0, PROMPT)],
            row_request_index=[RequestIndex(0)],
            row_start=[0],
            row_num_tokens=[40],
        )
        submit = first.submit
        first.submit = lambda entry: submit(  # type: ignore[method-assign]
            replace(entry, entry=replace(good, row_request_index=[RequestIndex(7)]))
        )
        group.log.write(good)
        with pytest.raises(ProtocolError, match="request index 7 has a row, but nobody has it"):
            first.answer()
        with pytest.raises(CollectiveError) as caught:
            group.ranks[1].answer()
        assert caught.value.status is Status.ABORTED


def test_a_peer_that_never_comes_is_a_named_deadline(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    with group_of(tiny[0], 2, deadline_s=0.2) as group:
        group.log.reset(LayoutKind.TP, 64, 8, 256)
        group.ranks[1].submit = lambda entry: None  # type: ignore[method-assign]
        group.log.step([(0, 0, 40)], admitted=[group.log.admit(0, PROMPT)])
        with pytest.raises(CollectiveError) as caught:
            group.ranks[0].answer()
        assert caught.value.status in (Status.DATA_TIMEOUT, Status.ACK_TIMEOUT)
        assert caught.value.peer == 1


RESETS: dict[str, Callable[[Group], None]] = {
    "more requests than it was started for": lambda group: group.log.reset(LayoutKind.PP, 64, 9, 256),
    "a context longer than the model's": lambda group: group.log.reset(LayoutKind.PP, 64, 8, 257),
    "no block": lambda group: group.log.reset(LayoutKind.PP, 0, 8, 256),
}


@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
def test_a_reset_beyond_what_the_rank_was_sized_for_is_refused(
    tiny: tuple[ModelFiles, TinyLlama], reset: Callable[[Group], None]
) -> None:
    with group_of(tiny[0], 1) as group, pytest.raises(ProtocolError):
        reset(group)


def test_one_non_finite_row_leaves_its_neighbours_alone(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    files, model = tiny
    with group_of(files, 1) as group:
        log = group.log
        log.reset(LayoutKind.PP, 64, 8, 256)
        log.prefill({0: PROMPT, 1: PROMPT[:20]}, 40)
        pool = group.ranks[0].runner.pool
        assert pool is not None
        pool.values[0][63].fill_(torch.nan)
        log.step([(0, 40, 1), (1, 20, 1)], sampled=[0, 1], tokens_through=log.sequence)
        tokens = log.settle()[-1].tokens
        assert tokens is not None and tokens.non_finite == {0}
        check_greedy(model, log.requests[1], 20, 2)


def test_two_readings_of_one_log_are_the_same_draws(tiny: tuple[ModelFiles, TinyLlama]) -> None:
    hot = SamplingParams(temperature=1.0, top_p=0.9, seed=2**63 + 5)
    outputs = []
    for layout, num_ranks in ((LayoutKind.PP, 1), (LayoutKind.PP, 2), (LayoutKind.TP, 2)):
        with group_of(tiny[0], num_ranks) as group:
            log = group.log
            log.reset(layout, 64, 8, 256)
            log.step([(3, 0, 40)], admitted=[log.admit(3, PROMPT, hot)], sampled=[0])
            log.settle()
            log.decode([3], 20)
            outputs.append(log.requests[3])
    assert outputs[0] == outputs[1] == outputs[2]
    assert len({TokenId(token) for token in outputs[0][40:]}) > 10
