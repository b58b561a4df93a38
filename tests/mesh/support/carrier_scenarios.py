"""What the ranks of a carrier test run: each scenario is one rank's program, and raises where a result is not exact.

Floats are small integers, so that sums are exact in any order. Delays are busy work drawn per rank, never sleeps.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Callable

import torch

from kernels.cpu.collectives import AbortReason, CollectiveError, Purpose
from services.worker.dataplane.carrier import Carrier

WITHIN = 10.0
SOON = 1.0
SIZES = (1, 576, 8 * 576, 12_345, 512 * 576)
Result = dict[str, str | float]


def busy(rng: random.Random) -> None:
    """Does up to a few hundred microseconds of work."""
    value = 0
    for step in range(rng.randrange(8_000)):
        value ^= step * 2_654_435_761


def expect(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    if not torch.equal(got, wanted):
        raise AssertionError(f"{what}: {wanted.flatten()[:8]} expected, got {got.flatten()[:8]}")


def pattern(rank: int, ordinal: int, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * (rank + 3) + ordinal * 17) % 251).float().view(shape)


def reduce_once(carrier: Carrier, ordinal: int, size: int) -> None:
    x = pattern(carrier.rank, ordinal, size)
    carrier.all_reduce(x, purpose=Purpose.TEST)
    wanted = torch.stack([pattern(rank, ordinal, size) for rank in range(carrier.num_ranks)]).sum(0)
    expect(x, wanted, f"sum {ordinal} of {size}")


def gather_once(carrier: Carrier, ordinal: int, rows: int, widths: list[int], to_rank: int | None) -> None:
    part = pattern(carrier.rank, ordinal, rows, widths[carrier.rank])
    got = carrier.all_gather_columns(part, widths, to_rank=to_rank, purpose=Purpose.LOGITS)
    if to_rank not in (None, carrier.rank):
        assert got is None
        return
    assert got is not None
    wanted = torch.cat([pattern(rank, ordinal, rows, width) for rank, width in enumerate(widths)], dim=1)
    expect(got, wanted, f"columns {ordinal}")


def give_once(carrier: Carrier, ordinal: int, sizes: list[int]) -> None:
    parts = [pattern(carrier.rank, ordinal + 31 * peer, size) for peer, size in enumerate(sizes)]
    own = sizes[carrier.rank]
    out = torch.full((carrier.num_ranks, own), torch.nan)
    carrier.all_to_all(torch.cat(parts), sizes, out, purpose=Purpose.ATTENTION_PARTS)
    wanted = [pattern(peer, ordinal + 31 * carrier.rank, own) for peer in range(carrier.num_ranks)]
    expect(out, torch.stack(wanted), f"parts {ordinal} of {sizes}")


def broadcast_once(carrier: Carrier, ordinal: int, size: int, from_rank: int) -> None:
    x = pattern(carrier.rank, ordinal, size)
    carrier.broadcast(x, from_rank, purpose=Purpose.BOOT)
    expect(x, pattern(from_rank, ordinal, size), f"broadcast {ordinal} from {from_rank}")


def pass_once(carrier: Carrier, ordinal: int, size: int) -> None:
    """Every rank sends to the next, then takes from the one before: nobody could if a send waited for its receiver."""
    following, before = (carrier.rank + 1) % carrier.num_ranks, (carrier.rank - 1) % carrier.num_ranks
    x = pattern(carrier.rank, ordinal, size)
    carrier.send(x, following, ordinal, purpose=Purpose.HIDDEN_STATES)
    x.fill_(-1.0)
    carrier.recv(x, before, ordinal, purpose=Purpose.HIDDEN_STATES)
    expect(x, pattern(before, ordinal, size), f"message {ordinal} from {before}")


def sums(carrier: Carrier, seed: int) -> Result:
    rng = random.Random(seed * 100 + carrier.rank)
    for ordinal in range(60):
        busy(rng)
        reduce_once(carrier, ordinal, SIZES[ordinal % len(SIZES)])
    return {}


def columns(carrier: Carrier, seed: int) -> Result:
    rng = random.Random(seed * 100 + carrier.rank)
    uneven = [7, 0, 300][: carrier.num_ranks]
    for ordinal in range(24):
        busy(rng)
        rows = (1, 5, 32)[ordinal % 3]
        widths = ([width + 1 for width in uneven], uneven, [20_000 // (rank + 1) for rank in range(carrier.num_ranks)])
        gather_once(carrier, ordinal, rows, widths[ordinal % 3], (None, 0, carrier.num_ranks - 1)[ordinal // 3 % 3])
    return {}


def parts(carrier: Carrier, seed: int) -> Result:
    """Uneven parts, none for some rank, and more than a stage holds."""
    rng = random.Random(seed * 100 + carrier.rank)
    sizes = ([1, 2, 3], [0, 700, 0], [5, 0, 0], [70_000, 3, 100_000], [0, 0, 0])
    for ordinal in range(25):
        busy(rng)
        give_once(carrier, ordinal, sizes[ordinal % len(sizes)][: carrier.num_ranks])
    return {}


def mixed(carrier: Carrier, seed: int) -> Result:
    """One seed draws the same program for all ranks; each rank draws its own delays."""
    program, delays = random.Random(seed), random.Random(seed * 100 + carrier.rank)
    last = carrier.num_ranks - 1
    for ordinal in range(300):
        if program.random() < 0.3:
            busy(delays)
        size = program.choice((1, 64, 576, 4_000, 70_000))
        match program.randrange(7):
            case 0:
                reduce_once(carrier, ordinal, size)
            case 1:
                to_rank = program.choice((None, *range(carrier.num_ranks)))
                widths = [program.randrange(1, 200) for _ in range(carrier.num_ranks)]
                gather_once(carrier, ordinal, program.randrange(1, 9), widths, to_rank)
            case 2:
                broadcast_once(carrier, ordinal, size, program.randrange(carrier.num_ranks))
            case 3:
                pass_once(carrier, ordinal, size)
            case 4:
                give_once(carrier, ordinal, [program.choice((0, 1, 64, 9_000)) for _ in range(carrier.num_ranks)])
            case 5:
                carrier.barrier(purpose=Purpose.TEST)
            case _:
                ids = torch.arange(ordinal, ordinal + ordinal % 16, dtype=torch.int32)
                if carrier.rank == last:
                    carrier.publish_tokens(ordinal, ids)
                expect(carrier.take_tokens(ordinal), ids, f"tokens {ordinal}")
    return {}


def channel_depth(carrier: Carrier, seed: int) -> Result:
    """Two messages leave rank 0 before anybody takes one: 512 rows each, now and then an empty one."""
    rng = random.Random(seed * 100 + carrier.rank)
    for pair in range(20):
        sizes = (512 * 576, rng.randrange(1) if pair % 3 == 0 else 512 * 576)
        if carrier.rank == 0:
            for index, size in enumerate(sizes):
                carrier.send(pattern(0, pair, size), 1, 2 * pair + index, purpose=Purpose.HIDDEN_STATES)
        carrier.barrier(purpose=Purpose.TEST)
        if carrier.rank == 1:
            busy(rng)
            for index, size in enumerate(sizes):
                into = torch.empty(size)
                carrier.recv(into, 0, 2 * pair + index, purpose=Purpose.HIDDEN_STATES)
                expect(into, pattern(0, pair, size), f"message {pair}.{index}")
    return {}


def wrong_tag(carrier: Carrier, seed: int) -> Result:
    if carrier.rank == 0:
        carrier.send(torch.ones(4), 1, 7, purpose=Purpose.HIDDEN_STATES)
        time_out(0.5)
    if carrier.rank == 1:
        carrier.recv(torch.empty(4), 0, 8, purpose=Purpose.HIDDEN_STATES)
    return {}


def wrong_size(carrier: Carrier, seed: int) -> Result:
    if carrier.rank == 0:
        carrier.send(torch.ones(4), 1, 7, purpose=Purpose.HIDDEN_STATES)
        time_out(0.5)
    if carrier.rank == 1:
        carrier.recv(torch.empty(5), 0, 7, purpose=Purpose.HIDDEN_STATES)
    return {}


def tokens(carrier: Carrier, seed: int) -> Result:
    """Steps with gaps, taken late and taken twice, over many turns of the board."""
    rng = random.Random(seed * 100 + carrier.rank)
    for step in range(0, 600, 3):
        ids = torch.arange(step, step + step % 17, dtype=torch.int32)
        if carrier.rank == carrier.num_ranks - 1:
            carrier.publish_tokens(step, ids)
        busy(rng)
        expect(carrier.take_tokens(step), ids, f"tokens {step}")
        expect(carrier.take_tokens(step), ids, f"tokens {step} again")
        if step % 12 == 0:  # the board of these tests holds eight steps
            carrier.barrier(purpose=Purpose.TEST)
    return {}


def overwritten(carrier: Carrier, seed: int) -> Result:
    """The board goes round more than once before a peer asks for its first step."""
    last = carrier.num_ranks - 1
    for step in range(20):
        if carrier.rank == last:
            carrier.publish_tokens(step, torch.tensor([step], dtype=torch.int32))
    if carrier.rank != last:
        carrier.take_tokens(19)
        carrier.take_tokens(3)
    time_out(0.5)
    return {}


def die_at(carrier: Carrier, wait: Callable[[], object]) -> Result:
    """Rank 1 is killed after ten rounds; the others must end in a named failure within the deadline."""
    for ordinal in range(10):
        reduce_once(carrier, ordinal, 576)
    if carrier.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait()
    return {}


def die_in_sum(carrier: Carrier, seed: int) -> Result:
    return die_at(carrier, lambda: carrier.all_reduce(torch.ones(576), purpose=Purpose.TEST))


def die_before_send(carrier: Carrier, seed: int) -> Result:
    into = torch.empty(576)
    return die_at(carrier, lambda: carrier.recv(into, 1, 0, purpose=Purpose.HIDDEN_STATES))


def die_before_recv(carrier: Carrier, seed: int) -> Result:
    def fill() -> None:
        for tag in range(1_000):
            carrier.send(torch.ones(512 * 576), 1, tag, purpose=Purpose.HIDDEN_STATES)

    return die_at(carrier, fill)


def die_in_gather(carrier: Carrier, seed: int) -> Result:
    widths = [50_000] * carrier.num_ranks
    part = torch.ones(8, 50_000)

    def gather() -> None:
        for _ in range(3):
            carrier.all_gather_columns(part, widths, to_rank=1, purpose=Purpose.LOGITS)

    return die_at(carrier, gather)


def no_tokens(carrier: Carrier, seed: int) -> Result:
    """Nobody publishes; every rank but the sampling one is told so by its deadline."""
    if carrier.rank != carrier.num_ranks - 1:
        carrier.take_tokens(5)
    else:
        time_out(1.5)
    return {}


def time_out(seconds: float) -> None:
    """Stays alive and busy past the deadline of the others, so that it is a silent peer and not a dead one."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        hashlib.sha256(bytes(65_536)).digest()


def abort(carrier: Carrier, seed: int) -> Result:
    """Rank 0 lets go while all others are asleep in a wait; they say when they were released."""
    carrier.barrier(purpose=Purpose.TEST)
    if carrier.rank == 0:
        time_out(0.3)
        at = time.monotonic()
        carrier.watch.abort(AbortReason.STEP_FAILED)
        return {"aborted_at": at}
    try:
        carrier.recv(torch.empty(4), 0, 1, purpose=Purpose.HIDDEN_STATES)
    except CollectiveError as error:
        return {"status": error.status.name, "released_at": time.monotonic(), "message": str(error)}
    raise AssertionError("nothing was sent")


def bits(carrier: Carrier, seed: int) -> Result:
    """Random floats: the digest says whether all ranks hold the same bits, and those of a sum in rank order."""
    digest = hashlib.sha256()
    for ordinal, size in enumerate(SIZES):
        parts = [
            torch.randn(size, generator=torch.Generator().manual_seed(seed * 1_000 + ordinal * 10 + rank))
            for rank in range(carrier.num_ranks)
        ]
        wanted = parts[0].clone()
        for part in parts[1:]:
            wanted += part
        mine = parts[carrier.rank]
        carrier.all_reduce(mine, purpose=Purpose.TEST)
        expect(mine, wanted, f"bits of {size}")
        digest.update(mine.numpy().tobytes())
    return {"digest": digest.hexdigest()}


SCENARIOS: dict[str, Callable[[Carrier, int], Result]] = {
    scenario.__name__: scenario
    for scenario in (
        sums,
        columns,
        parts,
        mixed,
        channel_depth,
        wrong_tag,
        wrong_size,
        tokens,
        overwritten,
        die_in_sum,
        die_before_send,
        die_before_recv,
        die_in_gather,
        no_tokens,
        abort,
        bits,
    )
}

WITHOUT_PEER = frozenset(
    scenario.__name__
    for scenario in (wrong_tag, wrong_size, die_in_sum, die_before_send, die_before_recv, die_in_gather, no_tokens)
)
"""Scenarios in which a wait ends by its deadline, which is short there."""


def deadline_of(scenario: str) -> float:
    """Of every wait in it."""
    return SOON if scenario in WITHOUT_PEER else WITHIN
