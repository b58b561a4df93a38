"""A thousand flips under streams: answers as without, and the last flips cost what the first did."""

import logging
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mesh.support.flipping import ASKS, bench_of, flip_until_ended, hold_answers
from tests.mesh.support.meshes import started
from tools.acceptance.figures import growths, spread
from tools.acceptance.verdict import MAX_DESCRIPTOR_GROWTH, is_flat
from tools.load.load import Heard
from tools.load.observe import FlipSeen, Observer

log = logging.getLogger(__name__)
NUM_FLIPS = 1000


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("mode", "max_median_ms"), [("shared", 60.0), ("exchange", 250.0)])
async def test_a_thousand_flips_under_streams(
    tmp_path: Path, control: list[Heard], mode: str, max_median_ms: float
) -> None:
    """The pool is small, so that every block of it has been used before memory is first compared.

    Bounds of the pause are those of a machine that does other work as well; a quiet one is far below.
    """
    with started(tmp_path, group={"mode": mode}, pool={"num_blocks": 128}, policy={"mode": "manual"}) as mesh:
        async with bench_of(mesh) as bench:
            observer = Observer(bench.client)
            committed: list[int] = []
            while len(committed) < NUM_FLIPS:
                async with bench.streaming(ASKS, 8) as load:
                    committed += await flip_until_ended(bench, load)
                hold_answers(control, load.heard)
                await bench.settled()
                await observer.look()
                await observer.weigh()
            assert statistics.median(hold_flat(observer, committed)) < max_median_ms


def hold_flat(observer: Observer, committed: Sequence[int]) -> list[float]:
    """Pause, memory and descriptors of the end against those of the beginning; figures into the log, pauses out."""
    seen = {flip.flip_id: flip for flip in observer.flips.values()}
    flips = [seen[flip_id] for flip_id in committed]
    assert all(flip.is_committed for flip in flips)
    pauses_ms = [pause_ms for flip in flips if (pause_ms := paused_ms(flip)) is not None]
    fifth = len(pauses_ms) // 5
    first, last = statistics.median(pauses_ms[:fifth]), statistics.median(pauses_ms[-fifth:])
    gaps_ms = [flip.longest_token_gap_ns / 1e6 for flip in flips if flip.longest_token_gap_ns is not None]
    # Shown with --log-cli-level=INFO.
    log.info("%d flips: pause in ms %s, longest token gap %s", len(flips), spread(pauses_ms), spread(gaps_ms))
    log.info("median pause in ms of the first fifth %.1f, of the last %.1f", first, last)
    grown = growths(observer.costs)
    assert grown
    for growth in grown:
        log.info("%s", growth)
        assert is_flat(growth), growth
        assert growth.descriptors_after - growth.descriptors_before <= MAX_DESCRIPTOR_GROWTH, growth
    assert last < 2 * first
    assert (observer.num_restarts, observer.num_resubmitted, observer.num_verdicts) == (0, 0, 0)
    return pauses_ms


def paused_ms(flip: FlipSeen) -> float | None:
    """The pause of a flip that carried requests."""
    return flip.pause_ns / 1e6 if flip.pause_ns is not None and flip.num_carried else None
