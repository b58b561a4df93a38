"""Attention over the blocks that each rank has, merged by log-sum-exp, against whole attention in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.backend import NOT_HERE, Backend
from tests.support.attention_batches import Batch, Case, build


def part_of(batch: Batch, owner: Tensor, rank: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """What one rank computes whose pools hold its own blocks only, in any order."""
    own = (owner == rank).nonzero().flatten()
    own = own[torch.randperm(len(own), generator=generator)]
    places = torch.full((len(owner),), NOT_HERE, dtype=torch.int32)
    places[own] = torch.arange(len(own), dtype=torch.int32)
    out, lse = torch.full_like(batch.q, math.nan), torch.full(batch.q.shape[:2], math.nan)
    replace(batch, pools=(batch.pools[0][own], batch.pools[1][own])).run_into(out, lse, places)
    return out, lse


def merged(backend: Backend, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    out = torch.full_like(parts[0][0], math.nan)
    backend.merge(torch.stack([part for part, _ in parts]), torch.stack([lse for _, lse in parts]), out)
    return out


def error_over_bound(batch: Batch, out: Tensor) -> float:
    """The module's stated bound for merged parts, relative to a row's largest value."""
    want, lse = batch.whole()
    error = ((out.double() - want).abs().amax(-1) / want.abs().amax(-1)).nan_to_num(math.inf).max().item()
    return error / (2 * batch.bound() + 1e-7 * lse.abs().max().item())


MIXED = ((1, 1), (1, 17), (1, 201), (4, 4), (33, 100), (20, 180))
CASES = {
    "smollm2": Case(MIXED, 9, 3, 64),
    "gemma_2": Case(MIXED, 4, 2, 256, window=64, softcap=50.0, spread=8.0),
    "short_window": Case(MIXED, 6, 2, 16, window=20),
    "group_of_7": Case(MIXED, 14, 2, 72, softcap=3.0, num_pool_heads=4, kv_head_begin=1),
    "decode_only": Case(tuple((1, n) for n in (1, 63, 64, 65, 128, 129, 513)), 9, 3, 64),
    "steep": Case(MIXED, 9, 3, 64, spread=30.0),
}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("name", CASES)
def test_any_ownership_merges_to_the_whole(
    backend: Backend, generator: torch.Generator, name: str, num_ranks: int
) -> None:
    batch = build(CASES[name], generator, backend)
    owner = torch.randint(num_ranks, (len(batch.pools[0]),), generator=generator)
    parts = [part_of(batch, owner, rank, generator) for rank in range(num_ranks)]
    assert error_over_bound(batch, merged(backend, parts)) < 1.0


@pytest.mark.parametrize("seed", range(10))
def test_random_batches_and_shares(backend: Backend, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    queries = [1 if draw(0, 2) else draw(1, 60) for _ in range(draw(1, 7))]
    num_kv_heads = draw(1, 4)
    case = Case(
        tuple((num, num + draw(0, 150)) for num in queries),
        num_kv_heads * draw(1, 15),
        num_kv_heads,
        8 * draw(1, 33),
        window=None if draw(0, 2) else draw(1, 100),
        softcap=None if draw(0, 2) else float(draw(2, 60)),
    )
    batch = build(case, generator, backend)
    shares = torch.tensor([draw(0, 4) for _ in range(draw(1, 4))] + [1], dtype=torch.float32)  # some own nothing
    owner = torch.multinomial(shares, len(batch.pools[0]), replacement=True, generator=generator)
    parts = [part_of(batch, owner, rank, generator) for rank in range(len(shares))]
    assert error_over_bound(batch, merged(backend, parts)) < 1.0, case


def test_a_missing_part_is_seen(backend: Backend, generator: torch.Generator) -> None:
    batch = build(Case(((1, 100), (20, 120)), 6, 2, 16), generator, backend)
    owner = torch.arange(len(batch.pools[0])) % 2
    parts = [part_of(batch, owner, rank, generator) for rank in range(2)]
    for part in parts:
        assert error_over_bound(batch, merged(backend, [part])) > 100.0


def test_the_log_sum_exp_beside_the_same_output(backend: Backend, generator: torch.Generator) -> None:
    for case in CASES.values():
        batch = build(case, generator, backend)
        wide = torch.full((len(batch.q), case.num_q_heads + 3), 7.0)
        lse, out = wide[:, 1:-2], torch.full_like(batch.q, math.nan)
        batch.run_into(out, lse)
        assert torch.equal(out, batch.run())
        want = batch.whole()[1]
        assert ((lse - want).abs() / (1.0 + want.abs())).max() < batch.bound()
        assert (wide[:, [0, -2, -1]] == 7.0).all()


def test_every_block_here_is_the_whole_to_the_bit(backend: Backend, generator: torch.Generator) -> None:
    batch = build(CASES["smollm2"], generator, backend)
    out, lse = torch.full_like(batch.q, math.nan), torch.full(batch.q.shape[:2], math.nan)
    batch.run_into(out, lse, torch.arange(len(batch.pools[0]), dtype=torch.int32))
    assert torch.equal(out, batch.run())
    assert torch.equal(merged(backend, [(out, lse)]), out)


def test_nothing_here_is_zeros_and_minus_infinity(backend: Backend, generator: torch.Generator) -> None:
    batch = build(Case(((1, 40), (20, 40), (1, 16)), 6, 2, 16), generator, backend)
    owner = torch.zeros(len(batch.pools[0]), dtype=torch.int64)
    owner[batch.tables[batch.rows[1], :3].long()] = 1
    (first, first_lse), (second, second_lse) = (part_of(batch, owner, rank, generator) for rank in range(2))
    sees = torch.tensor([False] + [True] * 20 + [False])
    for out, lse, seen in ((first, first_lse, ~sees), (second, second_lse, sees)):
        assert (out[~seen] == 0.0).all()
        assert (lse[~seen] == -math.inf).all()
        assert lse[seen].isfinite().all()


def test_a_window_hides_the_blocks_of_a_rank(backend: Backend, generator: torch.Generator) -> None:
    batch = build(Case(((1, 64),), 6, 2, 16, window=16), generator, backend)
    owner = torch.zeros(len(batch.pools[0]), dtype=torch.int64)
    owner[batch.tables[batch.rows[0], 3].long()] = 1  # all that the window shows
    nothing, everything = (part_of(batch, owner, rank, generator) for rank in range(2))
    assert (nothing[0] == 0.0).all()
    assert (nothing[1] == -math.inf).all()
    assert torch.equal(merged(backend, [nothing, everything]), everything[0])


def test_merging_is_stable_where_sums_would_overflow(backend: Backend) -> None:
    parts = torch.tensor([[1.0], [3.0], [100.0]]).repeat(1, 8).view(3, 1, 1, 8)
    for high in (1e4, -1e4, 88.0, 0.0):
        out = torch.empty(1, 1, 8)
        backend.merge(parts, torch.tensor([high, high, high - 1e3]).view(3, 1, 1), out)
        assert (out == 2.0).all()
    backend.merge(parts, torch.full((3, 1, 1), -math.inf), out)
    assert out.isnan().all()


def test_merging_inside_wider_buffers(backend: Backend, generator: torch.Generator) -> None:
    parts, lse = torch.randn(5, 9, 4, 24, generator=generator), torch.randn(5, 9, 4, generator=generator) * 9
    out = torch.full((7, 6, 24), 7.0)
    backend.merge(parts[:3, :7], lse[:3, :7], out[:, 1:5])
    assert (out[:, 1:5] - (parts[:3, :7] * lse[:3, :7].softmax(0)[..., None]).sum(0)).abs().max() < 2e-6
    assert (out[:, [0, 5]] == 7.0).all()


@pytest.mark.parametrize("shape", [(2, 3, 4, 12), (0, 3, 4, 8), (2, 3, 5, 8), (2, 2, 4, 8)])
def test_parts_that_do_not_fit_are_refused(backend: Backend, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="parts"):
        backend.merge(torch.zeros(shape), torch.zeros(shape[0], 3, 4), torch.zeros(3, 4, shape[3]))


@pytest.mark.parametrize(
    ("place", "lse_shape", "said"),
    [
        (99, (4, 6), r"99.* outside the pool's"),
        (0, None, "parts cannot be merged without"),
        (0, (4, 5), "log-sum-exps float32"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    backend: Backend, generator: torch.Generator, place: int, lse_shape: tuple[int, int] | None, said: str
) -> None:
    batch = build(Case(((1, 5), (3, 40)), 6, 2, 16), generator, backend)
    places = torch.full((len(batch.pools[0]),), NOT_HERE, dtype=torch.int32)
    places[batch.tables[batch.rows[1], 2].long()] = place
    out, lse = torch.full_like(batch.q, math.nan), None if lse_shape is None else torch.full(lse_shape, math.nan)
    with pytest.raises(ValueError, match=said):
        batch.run_into(out, lse, places)
    assert out.isnan().all()
    with pytest.raises(ValueError, match="outside the 1 of the table of places"):
        batch.run_into(out, torch.zeros(4, 6), torch.zeros(1, dtype=torch.int32))
    for broken in (places.long(), places[:0]):
        with pytest.raises(ValueError, match="places int32"):
            batch.run_into(out, torch.zeros(4, 6), broken)
    assert out.isnan().all()
