"""The real model on real processes, its KV cache cut by tokens or its heads on several ranks: logits, bits, answers."""

import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from services.worker.memory.owned_memory import OwnedMode
from services.worker.participation import Worked, WorkLost
from tests.mesh.support.flipping import ASKS, PP, TP, bench_of, hold_answers
from tests.mesh.support.logits_keeper import LogitsKeeper
from tests.mesh.support.meshes import started
from tests.mesh.support.moving import flip_some, moved_prefix
from tests.mesh.support.reference_logits import LIMITS, PROMPT, check
from tests.mesh.support.row_oracle import change_a_byte, everywhere, fill_rows, flip, hold_rows, poison_rows
from tests.support.private_group import runs
from tools.bench.log_driver import LogDriver
from tools.bench.rank_processes import GroupSpec, RankCall, rank_processes
from tools.load.load import Heard

pytestmark = pytest.mark.timeout(300)
NUM_BLOCKS = 70
"""More than the longest period of the vectors here."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Of the default model's 30 layers and 3 KV heads."""

    mode: Literal["shared"] | OwnedMode
    pp_layers: Sequence[int]
    tp_weights: Sequence[float]
    kv_tokens: Sequence[int] | None = None

    def spec(self, model: Path, observer: type[LogitsKeeper] | None = None) -> GroupSpec:
        return GroupSpec(
            model=model,
            num_ranks=len(self.pp_layers),
            limits=LIMITS,
            pp_layers=self.pp_layers,
            tp_weights=self.tp_weights,
            observer=observer,
            kv_tokens=self.kv_tokens,
            mode=self.mode,
        )


TWO = Cut("exchange", [21, 9], [2.0, 1.0], [2, 1])
THREE = Cut("dual", [5, 13, 12], [17.0, 17.0, 30.0], [30, 17, 17])
FOUR = Cut("dual", [4, 10, 9, 7], [1.0, 1.0, 1.0, 1.0], [1, 1, 1, 5])
COPIES = Cut("shared", [4, 10, 9, 7], [1.0, 1.0, 2.0, 1.0])
BY_HEADS = (
    Cut("dual", [21, 9], [2.0, 1.0]),
    Cut("exchange", [5, 13, 12], [30.0, 17.0, 17.0]),
    Cut("dual", [4, 10, 9, 7], [1.0, 1.0, 1.0, 5.0]),
)


def cuts(*those: Cut) -> list[Any]:
    def name(cut: Cut) -> str:
        return f"{cut.mode}, {cut.kv_tokens or f'heads {cut.tp_weights}'}"

    return [pytest.param(cut, id=name(cut)) for cut in those]


@pytest.mark.slow
@pytest.mark.parametrize("cut", cuts(TWO, THREE, FOUR, COPIES))
def test_logits_are_transformers(model: Path, reference: Any, cut: Cut) -> None:
    """Prompts whole and in chunks, decoded in TP, in PP after the rows have moved, and in TP again."""
    with rank_processes(cut.spec(model, LogitsKeeper)) as ranks:
        log = LogDriver(ranks)
        log.reset(PP, NUM_BLOCKS, LIMITS.max_resident_requests, 1024)
        log.prefill({0: PROMPT}, len(PROMPT))
        check(reference, ranks, PROMPT)
        for target in (TP, PP, TP):
            answers = flip(log, ranks, target)
            assert all(isinstance(answer, Worked) for answer in answers), answers
            index = len(log.requests)
            log.prefill({index: PROMPT[:77]}, 32)
            check(reference, ranks, PROMPT[:77])
            log.decode([index, 0], 8)
            check(reference, ranks, log.requests[index][:-1], log.requests[0][:-1])


@pytest.mark.slow
@pytest.mark.parametrize("cut", cuts(TWO, THREE, FOUR, *BY_HEADS))
def test_every_live_row_keeps_its_bits_there_and_back(model: Path, cut: Cut) -> None:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    with rank_processes(cut.spec(model)) as ranks:
        log = LogDriver(ranks)
        log.reset(PP, NUM_BLOCKS, LIMITS.max_resident_requests, 1024)
        for live in (runs(), runs((66, 1)), runs((0, NUM_BLOCKS))):
            everywhere(ranks, RankCall(fill_rows, (PP, seed)))
            for target in (TP, PP):
                everywhere(ranks, RankCall(poison_rows, (target,)))
                answers = flip(log, ranks, target, live)
                assert all(isinstance(answer, Worked) for answer in answers), answers
                everywhere(ranks, RankCall(hold_rows, (target, seed, live)))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["dual", "exchange"])
def test_a_byte_changed_between_processes_is_caught(model: Path, reference: Any, mode: OwnedMode) -> None:
    """The layout before serves on, and the next attempt commits."""
    cut = Cut(mode, [15, 15], [1.0, 1.0], [1, 2])
    with rank_processes(cut.spec(model, LogitsKeeper)) as ranks:
        log = LogDriver(ranks)
        log.reset(TP, NUM_BLOCKS, LIMITS.max_resident_requests, 1024)
        log.prefill({0: PROMPT}, len(PROMPT))
        ranks[1].submit(RankCall(change_a_byte, (2,)))
        ranks[1].result()
        answers = flip(log, ranks, PP)
        lost = answers[1]
        assert isinstance(lost, WorkLost) and lost.restored and "rank 1 are not what was sent" in lost.reason
        log.decode([0], 5)
        check(reference, ranks, log.requests[0][:-1])
        answers = flip(log, ranks, PP)
        assert all(isinstance(answer, Worked) for answer in answers), answers
        log.decode([0], 5)
        check(reference, ranks, log.requests[0][:-1])


GROUPS: dict[str, dict[str, Any]] = {
    "dual": {"mode": "dual", "tp_weights": [2.0, 1.0], "kv_tokens": [1, 2]},
    "exchange": {"mode": "exchange", "num_ranks": 3, "kv_tokens": [2, 1, 1]},
    "exchange over gloo": {"mode": "exchange", "carrier": "gloo", "kv_tokens": [3, 1]},
    "more ranks than heads": {"mode": "dual", "num_ranks": 4, "kv_sharding": "heads"},
}


@pytest.mark.slow
@pytest.mark.parametrize("group", [pytest.param(group, id=name) for name, group in GROUPS.items()])
async def test_answers_across_flips_are_the_controls(
    tmp_path: Path, control: list[Heard], group: dict[str, Any]
) -> None:
    """With prefixes that are hits on rows which moved, either way."""
    with started(tmp_path, group={"kv_sharding": "tokens", **group}, policy={"mode": "manual"}) as mesh:
        async with bench_of(mesh) as bench:
            async with bench.streaming(ASKS, 16) as load:
                records = await flip_some(bench, load)
            hold_answers(control, load.heard)
            assert all(record.bytes_moved > 0 for record in records)
            await moved_prefix(bench, 2000, to_pp=False)
            await moved_prefix(bench, 3000, to_pp=True)
            await bench.settled()
