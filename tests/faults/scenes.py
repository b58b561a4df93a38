"""What the matrix has no place for: load that arrives, leaves or hardly fits around a flip, and journals that are torn.

Each is played on a living mesh and raises where something is not as documented.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio

from services.mesh.debug.breakpoints import HoldPoint
from services.models.model_files import open_model
from services.router.text.tokens import open_tokens
from tests.faults.cell import (
    ASKS,
    CELL_S,
    FLIP_S,
    NUM_FIRST,
    Seen,
    ask_flip,
    calm,
    flip_for_sure,
    hold_streams,
    until_ended,
    without_leaks,
)
from tests.faults.fault_mesh import FaultMesh
from tests.faults.matrix import ABANDONED, ALONE, COMMITTED, LAST, MOVER, RANKS, Expected, Fault, Victim
from tests.faults.strike import holding, until_reborn
from tests.mesh.support.flipping import PP, TP, Bench
from tests.mesh.support.running import gone, open_pid
from tools.load.load import Ask, Heard

Control = Sequence[Heard]
Tables = Mapping[str, dict[str, Any]]
Play = Callable[[FaultMesh, Bench, Control], Awaitable[Seen]]

NUM_BLOCKS = 20
"""Four streams grow to 28 blocks: on the way one is left, then some are preempted."""
CHUNK_TOKENS = 64
NUM_CHUNKS = 6
FLOOD = 12
"""Clients at once that hang up after a token or two, again and again."""
MIN_HUNG_UP = 60


@dataclass(frozen=True, slots=True)
class Scene:
    """One scene, on a mesh with these tables over the usual ones."""

    name: str
    play: Play
    tables: Tables = field(default_factory=dict)
    mode: str = ALONE


async def admission_while_parked(struck: FaultMesh, bench: Bench, control: Control) -> Seen:
    """Requests that come between FLIP and its outcome wait in the queue, and are answered in the next layout."""
    seen, early, late = Seen(), bench.load(ASKS[:2]), bench.load(ASKS[2:])
    async with (
        anyio.create_task_group() as tasks,
        holding(bench, Victim("worker", LAST), HoldPoint.WORKER_PARKED) as held,
    ):
        tasks.start_soon(early.run)
        await early.until(NUM_FIRST)
        flip = asyncio.create_task(ask_flip(bench, PP))
        await held.reached()
        tasks.start_soon(late.run)
        with anyio.fail_after(FLIP_S):
            while (await bench.scheduler()).num_queued_requests < len(late.asks):
                pass
        assert late.num_tokens == 0
        held.release()
        seen.flip, seen.reason = await flip
        await until_ended(early)
        await until_ended(late)
    assert seen.flip == COMMITTED, seen.reason
    hold_streams(seen, Expected(frozenset({COMMITTED})), control, [*early.heard, *late.heard], 0)
    return seen


async def one_free_block(struck: FaultMesh, bench: Bench, control: Control) -> Seen:
    """A flip armed when one block of the pool is left, neither held nor cached, and the next step needs more."""
    seen, load, is_seen = Seen(), bench.load(ASKS), False
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load.run)
        while not load.has_ended and not is_seen:
            status = await bench.scheduler()
            if status.num_free_blocks + status.num_cached_blocks > 1 or not status.num_resident_requests:
                continue
            async with holding(bench, Victim("worker", LAST), HoldPoint.WORKER_PARKED) as held:
                flip = asyncio.create_task(ask_flip(bench, (await bench.layout()).other))
                await held.reached()
                status = await bench.scheduler()
                is_seen = status.num_free_blocks + status.num_cached_blocks == 1
                held.release()
                seen.flip, seen.reason = await flip
                assert seen.flip == COMMITTED, seen.reason
        await until_ended(load)
    assert is_seen, "no flip was armed with one block left"
    hold_streams(seen, Expected(frozenset({COMMITTED})), control, load.heard, 0)
    return seen


async def prompt_at_chunk_borders(struck: FaultMesh, bench: Bench, control: Control) -> Seen:
    """Prompts of whole chunks, and of one token less and more, flipped to and fro while they are computed."""
    seen, asks = (
        Seen(),
        [Ask(await asyncio.to_thread(prompt_of, CHUNK_TOKENS * NUM_CHUNKS + more), 8) for more in (0, -1, 1)],
    )
    answers = [(await bench.ask([ask]))[0] for ask in asks]
    # A fresh generation has computed none of them.
    pid = await bench.pid("worker", LAST)
    struck.note(RANKS[LAST], Fault.KILL)
    os.kill(pid, signal.SIGKILL)
    await until_reborn(bench, RANKS[LAST], pid)
    await calm(bench)
    heard, num_partly = [], 0
    for ask in asks:
        load = bench.load([ask])
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(load.run)
            while not load.has_ended:
                seen.flip, seen.reason = await ask_flip(bench, (await bench.layout()).other)
                assert seen.flip == COMMITTED, seen.reason
        heard += load.heard
        assert load.heard[0].num_cached_tokens < CHUNK_TOKENS
        num_partly += sum(bool(record.num_partly_prefilled) for record in await bench.records())
    assert num_partly, "no flip carried a prompt that was partly computed"
    hold_streams(seen, Expected(frozenset({COMMITTED})), answers, heard, 0)
    return seen


def prompt_of(num_tokens: int) -> str:
    """A text of exactly so many tokens, unlike any other length's from its first block on."""
    tokens = open_tokens(open_model("SmolLM2-135M-Instruct"))
    words = f"{num_tokens}:"
    while (count := len(tokens.encode_text(words))) < num_tokens:
        words += " the sea" if num_tokens - count > 1 else " the"
    assert len(tokens.encode_text(words)) == num_tokens
    return words


async def flood_of_aborts(struck: FaultMesh, bench: Bench, control: Control) -> Seen:
    """Clients hang up all the time while flips go to and fro; who stays is answered right, and no block is lost."""
    seen, load, num_hung_up = Seen(), bench.load(ASKS), 0

    async def hang_up(number: int) -> None:
        nonlocal num_hung_up
        turn = 0
        while not load.has_ended or num_hung_up < MIN_HUNG_UP:
            turn += 1
            gone_soon = bench.load([Ask(f"{number} and {turn} are", 40)])
            async with anyio.create_task_group() as stream:
                stream.start_soon(gone_soon.run)
                await gone_soon.until(turn % 3)
                stream.cancel_scope.cancel()
            num_hung_up += 1

    async def flip_all_the_time() -> None:
        while not load.has_ended:
            seen.flip, seen.reason = await ask_flip(bench, (await bench.layout()).other)
            assert seen.flip == COMMITTED, seen.reason

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(load.run)
        await load.until(NUM_FIRST)
        for number in range(FLOOD):
            tasks.start_soon(hang_up, number)
        await flip_all_the_time()
    hold_streams(seen, Expected(frozenset({COMMITTED})), control, load.heard, 0)
    seen.streams["hung up"] = num_hung_up
    return seen


# Journals.

Tear = Callable[[Path], None]


def garbage_at_the_end(journal: Path) -> None:
    with journal.open("ab") as file:
        file.write(b"9d2c5680 1796033 concluded \x00\xff\xfe half a line")


def torn_last_line(journal: Path) -> None:
    written = journal.read_bytes()
    journal.write_bytes(written[: written.rindex(b"\n", 0, -1) + 15])


def torn_in_the_middle(journal: Path) -> None:
    """A record of an attempt before this one is not whole; what is behind it is."""
    lines = journal.read_bytes().split(b"\n")
    lines[1] = lines[1][:9] + b"\x00" * (len(lines[1]) - 9)
    journal.write_bytes(b"\n".join(lines))


def all_gone(journal: Path) -> None:
    journal.unlink()


async def torn_journal(
    point: HoldPoint, tear: Tear, outcomes: frozenset[str], struck: FaultMesh, bench: Bench, control: Control
) -> Seen:
    """The mover is killed at the point, and its journal torn before its next life reads it."""
    seen, load = Seen(), bench.load(ASKS)
    pid = await bench.pid("mover")
    pidfd = open_pid(pid)
    struck.note(MOVER, Fault.KILL)
    async with anyio.create_task_group() as tasks, holding(bench, MOVER, point) as held:
        tasks.start_soon(load.run)
        await load.until(NUM_FIRST)
        flip = asyncio.create_task(ask_flip(bench, PP))
        await held.reached()
        os.kill(pid, signal.SIGKILL)
        # Its supervisor starts the next one half a second later.
        assert await asyncio.to_thread(gone, pidfd, FLIP_S)
        tear(bench.mesh.state / "flips.journal")
        await until_reborn(bench, MOVER, pid)
        seen.flip, seen.reason = await flip
        await until_ended(load)
    assert seen.flip in outcomes, f"{seen.flip} ({seen.reason}), {sorted(outcomes)} expected"
    hold_streams(seen, Expected(outcomes), control, load.heard, 0)
    return seen


async def play(scene: Scene, struck: FaultMesh, bench: Bench, control: Control) -> Seen:
    """Plays a scene between two looks at what the mesh holds; afterwards the next flip commits.

    Raises:
        AssertionError: something was not as documented.
        TimeoutError: something hung.
    """
    with anyio.fail_after(CELL_S):
        await calm(bench)
        await flip_for_sure(bench, TP)
        before = struck.holdings()
        seen = await scene.play(struck, bench, control)
        await calm(bench)
        for _ in range(2):
            await flip_for_sure(bench, (await bench.layout()).other)
        await bench.settled()
        await without_leaks(struck, before)
    return seen


ENTERED, CONCLUDING = HoldPoint.MOVER_ENTERED, HoldPoint.MOVER_CONCLUDING
COMMITS, ABANDONS = frozenset({COMMITTED}), frozenset({ABANDONED})
TORN: tuple[tuple[str, HoldPoint, Tear, frozenset[str]], ...] = (
    ("garbage-behind-enter", ENTERED, garbage_at_the_end, COMMITS),
    ("garbage-after-the-work", CONCLUDING, garbage_at_the_end, COMMITS),
    # As if the process had died while it wrote ENTER: nobody was told.
    ("enter-half-written", ENTERED, torn_last_line, ABANDONS),
    ("torn-in-the-middle", ENTERED, torn_in_the_middle, COMMITS),
    ("torn-in-the-middle-after-the-work", CONCLUDING, torn_in_the_middle, COMMITS),
    # Nothing is known of the attempt: it may be made anew, or given up.
    ("gone", ENTERED, all_gone, COMMITS | ABANDONS),
    ("gone-after-the-work", CONCLUDING, all_gone, COMMITS | ABANDONS),
)
SCENES = (
    *(Scene(f"journal/{name}", partial(torn_journal, point, tear, outcomes)) for name, point, tear, outcomes in TORN),
    Scene("load/admission-while-parked", admission_while_parked),
    Scene("load/flood-of-aborts", flood_of_aborts),
    Scene("load/one-free-block", one_free_block, {"pool": {"num_blocks": NUM_BLOCKS}}),
    Scene("load/prompt-at-chunk-borders", prompt_at_chunk_borders, {"scheduler": {"chunk_tokens": CHUNK_TOKENS}}),
)
