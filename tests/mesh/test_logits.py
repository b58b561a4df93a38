"""The default model's logits on real rank processes are transformers', in both layouts, even and uneven, prompts whole
and in chunks, first token and after 200 steps. Layouts are changed by the log, so requests live through it as well."""

from pathlib import Path
from typing import Any

import pytest

from services.core.ids import BlockId, FlipId, LayoutKind
from services.core.step import CommitEntry, FlipEntry
from tests.mesh.support.logits_keeper import LogitsKeeper
from tests.mesh.support.reference_logits import LIMITS, PROMPT, check
from tools.bench.log_driver import LogDriver
from tools.bench.rank_processes import GroupSpec, rank_processes

pytestmark = pytest.mark.timeout(300)

NUM_STEPS, NUM_QUICK_STEPS = 200, 24
"""Tokens decoded in each layout: in the slow cases, and in the one that always runs."""


def flip(log: LogDriver, target: LayoutKind) -> None:
    flip_id = FlipId(log.sequence)
    for entry in (FlipEntry(flip_id, target, ((BlockId(0), log.num_blocks),)), CommitEntry(flip_id, target)):
        log.write(entry)
        log.answers()
    log.epoch += 1


CUTS = {
    "two, uneven, few steps": (2, [21, 9], [1.0, 2.2]),
    "one rank": (1, None, None),
    "two, uneven": (2, [21, 9], [1.0, 2.2]),
    "three, uneven": (3, [5, 13, 12], [2.0, 1.0, 0.6]),
    "two": (2, None, None),
    "three": (3, None, None),
}
QUICK = "two, uneven, few steps"
"""The others take minutes: they have other shares, and more steps."""


@pytest.mark.parametrize(
    ("cut", "num_steps"),
    [
        pytest.param(
            cut, NUM_QUICK_STEPS if name == QUICK else NUM_STEPS, id=name, marks=[pytest.mark.slow] * (name != QUICK)
        )
        for name, cut in CUTS.items()
    ],
)
def test_logits_are_transformers(
    model: Path, reference: Any, cut: tuple[int, list[int] | None, list[float] | None], num_steps: int
) -> None:
    num_ranks, pp_layers, tp_weights = cut
    spec = GroupSpec(model, num_ranks, LIMITS, pp_layers, tp_weights, LogitsKeeper)
    with rank_processes(spec) as ranks:
        log = LogDriver(ranks)
        log.reset(LayoutKind.PP, 128, LIMITS.max_resident_requests, 1024)
        for index, layout in enumerate((LayoutKind.PP, LayoutKind.TP)):
            if index:
                flip(log, layout)
            whole, chunked = 2 * index, 2 * index + 1
            log.prefill({whole: PROMPT}, len(PROMPT))
            check(reference, ranks, PROMPT)
            log.prefill({chunked: PROMPT[:77]}, 32)
            check(reference, ranks, PROMPT[:77])
            log.decode([chunked, whole], num_steps)
            check(reference, ranks, log.requests[chunked][:-1], log.requests[whole][:-1])
        # Prompts computed under PP, decoded under TP.
        log.decode([0, 1, 2, 3], 3)
        check(reference, ranks, *(log.requests[index][:-1] for index in range(4)))
