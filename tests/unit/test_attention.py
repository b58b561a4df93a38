"""Paged attention against a gathering float64 reference, on both instruction paths; slots nobody may read hold NaN."""

import math
import secrets
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace

import kernels._native as _native
import pytest
import torch
from torch import Tensor

from kernels.attention import BLOCK_SLOTS, paged_attention, paged_attention_reference


@pytest.fixture(autouse=True, params=["vector", "portable"])
def _path(request: pytest.FixtureRequest) -> Iterator[None]:
    _native.force_portable(request.param == "portable")
    yield
    _native.force_portable(False)


@pytest.fixture
def generator() -> torch.Generator:
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    return torch.Generator().manual_seed(seed)


@dataclass(frozen=True, slots=True)
class Case:
    """A batch of (queries, context) pairs and the heads it runs with."""

    sequences: tuple[tuple[int, int], ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None
    softcap: float | None = None
    num_pool_heads: int | None = None
    kv_head_begin: int = 0
    spread: float = 1.0  # of q: larger spreads scores


@dataclass(frozen=True, slots=True)
class Batch:
    q: Tensor
    pools: tuple[Tensor, Tensor]
    tables: Tensor
    rows: Tensor
    query_start: Tensor
    context: Tensor
    kv_head_begin: int
    num_kv_heads: int
    scale: float
    window: int | None
    softcap: float | None

    def run(self) -> Tensor:
        out = torch.full_like(self.q, math.nan)
        self.run_into(out)
        return out

    def run_into(self, out: Tensor) -> None:
        paged_attention(
            self.q,
            *self.pools,
            self.tables,
            self.rows,
            self.query_start,
            self.context,
            out,
            kv_head_begin=self.kv_head_begin,
            num_kv_heads=self.num_kv_heads,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )

    def reference(self) -> Tensor:
        return paged_attention_reference(
            self.q,
            self.pools[0].nan_to_num(0.0),
            self.pools[1].nan_to_num(0.0),
            self.tables.clamp(max=len(self.pools[0]) - 1),  # it gathers blocks that windows hide as well
            self.rows,
            self.query_start,
            self.context,
            kv_head_begin=self.kv_head_begin,
            num_kv_heads=self.num_kv_heads,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
        )

    def bound(self) -> float:
        """The module's stated bound, relative to a row's largest value."""
        largest = [float(x.nan_to_num(0.0).square().sum(-1).sqrt().max()) for x in (self.q, self.pools[0])]
        return 2e-6 + 1e-7 * self.scale * largest[0] * largest[1]

    def error(self, out: Tensor) -> float:
        want = self.reference()
        return ((out.double() - want).abs().amax(-1) / want.abs().amax(-1)).nan_to_num(math.inf).max().item()


def _build(case: Case, generator: torch.Generator) -> Batch:
    """Scattered blocks, a table with rows of others between, and NaN wherever nothing was stored."""
    num_pool_heads = case.num_pool_heads or case.num_kv_heads
    blocks_of = [-(-context // BLOCK_SLOTS) for _, context in case.sequences]
    num_blocks, num_rows = sum(blocks_of) + 3, len(case.sequences) + 2
    free = iter(torch.randperm(num_blocks, generator=generator).tolist())
    pools = tuple(torch.full((num_blocks, num_pool_heads, BLOCK_SLOTS, case.head_dim), math.nan) for _ in range(2))
    tables = torch.full((num_rows, max(blocks_of) + 1), 2**31 - 1, dtype=torch.int32)
    rows = torch.randperm(num_rows, generator=generator)[: len(case.sequences)].to(torch.int32)
    heads = slice(case.kv_head_begin, case.kv_head_begin + case.num_kv_heads)
    for row, (num_queries, context) in zip(rows.tolist(), case.sequences, strict=True):
        # No query sees what lies before the first one's window.
        oldest = 0 if case.window is None else max(0, context - num_queries + 1 - case.window)
        for place in range(oldest // BLOCK_SLOTS, -(-context // BLOCK_SLOTS)):
            tables[row, place] = block = next(free)
            begin, end = max(0, oldest - place * BLOCK_SLOTS), min(BLOCK_SLOTS, context - place * BLOCK_SLOTS)
            for pool in pools:
                shape = (case.num_kv_heads, end - begin, case.head_dim)
                pool[block, heads, begin:end] = torch.randn(shape, generator=generator)
    lengths = torch.tensor([0] + [num_queries for num_queries, _ in case.sequences])
    query_start = lengths.cumsum(0).to(torch.int32)
    shape = (int(query_start[-1]), case.num_q_heads, case.head_dim)
    return Batch(
        q=torch.randn(shape, generator=generator) * case.spread,
        pools=(pools[0], pools[1]),
        tables=tables,
        rows=rows,
        query_start=query_start,
        context=torch.tensor([context for _, context in case.sequences], dtype=torch.int32),
        kv_head_begin=case.kv_head_begin,
        num_kv_heads=case.num_kv_heads,
        scale=case.head_dim**-0.5,
        window=case.window,
        softcap=case.softcap,
    )


MIXED = ((1, 1), (1, 16), (1, 17), (1, 301), (4, 4), (33, 100), (65, 321))
CASES = {
    "smollm2": Case(MIXED, 9, 3, 64),
    "one_rank_of_three": Case(MIXED, 3, 1, 64, num_pool_heads=3, kv_head_begin=2),
    "group_of_4": Case(MIXED, 8, 2, 128, num_pool_heads=5, kv_head_begin=1),
    "gemma": Case(MIXED, 4, 1, 256, window=37),
    "gemma_2": Case(MIXED, 4, 2, 256, window=64, softcap=50.0, spread=8.0),
    "no_group": Case(MIXED, 2, 2, 40),
    "group_of_7": Case(MIXED, 14, 2, 72, softcap=3.0),
    "group_of_71": Case(((1, 33), (2, 70), (5, 5)), 71, 1, 8),
    "window_of_one": Case(MIXED, 6, 2, 16, window=1),
    "window_of_a_block": Case(MIXED, 5, 1, 24, window=16),
    "window_beyond": Case(MIXED, 6, 2, 64, window=100_000),
    "decode_only": Case(tuple((1, n) for n in (1, 63, 64, 65, 128, 129, 513)), 9, 3, 64),
    "steep": Case(MIXED, 9, 3, 64, spread=30.0),
}


@pytest.mark.parametrize("name", CASES)
def test_against_float64(generator: torch.Generator, name: str) -> None:
    batch = _build(CASES[name], generator)
    assert batch.error(batch.run()) < batch.bound()


def test_the_error_measure_sees_one_key_too_few_and_one_too_many(generator: torch.Generator) -> None:
    batch = _build(Case(((1, 40), (3, 50)), 6, 2, 16), generator)
    for pool in batch.pools:
        pool.nan_to_num_(0.5)
    for change in (-1, 1):
        assert batch.error(replace(batch, context=batch.context + change).run()) > 100 * batch.bound()


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    sequences = []
    for _ in range(draw(1, 9)):
        num_queries = 1 if draw(0, 2) else draw(1, 60)
        sequences.append((num_queries, num_queries + draw(0, 150)))
    num_kv_heads = draw(1, 4)
    begin = draw(0, 3)
    case = Case(
        tuple(sequences),
        num_kv_heads * draw(1, 15),
        num_kv_heads,
        8 * draw(1, 33),
        window=None if draw(0, 2) else draw(1, 100),
        softcap=None if draw(0, 2) else float(draw(2, 60)),
        num_pool_heads=num_kv_heads + begin + draw(0, 2),
        kv_head_begin=begin,
    )
    batch = _build(case, generator)
    assert batch.error(batch.run()) < batch.bound(), case


def test_chunks_give_what_the_whole_prompt_gives(generator: torch.Generator) -> None:
    whole = _build(Case(((150, 150),), 9, 3, 64), generator)
    want = whole.run()
    for begin, end in ((0, 1), (1, 50), (50, 149), (149, 150)):
        part = replace(
            whole,
            q=whole.q[begin:end],
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            context=torch.tensor([end], dtype=torch.int32),
        )
        assert (part.run() - want[begin:end]).abs().max() < 1e-5


def test_a_sequence_is_the_same_in_any_batch(generator: torch.Generator) -> None:
    """To the bit: its tiles depend on its own rows only."""
    batch = _build(CASES["smollm2"], generator)
    together = batch.run()
    for i in range(len(batch.rows)):
        begin, end = batch.query_start[i : i + 2].tolist()
        alone = replace(
            batch,
            q=batch.q[begin:end],
            rows=batch.rows[i : i + 1],
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            context=batch.context[i : i + 1],
        )
        assert torch.equal(alone.run(), together[begin:end])


def test_ranks_heads_together_are_the_whole(generator: torch.Generator) -> None:
    batch = _build(CASES["smollm2"], generator)
    whole = batch.run()
    for begin, num in ((0, 2), (2, 1)):
        heads = slice(begin * 3, (begin + num) * 3)
        part = replace(batch, q=batch.q[:, heads], kv_head_begin=begin, num_kv_heads=num)
        assert torch.equal(part.run(), whole[:, heads])


def test_queries_and_output_inside_wider_rows(generator: torch.Generator) -> None:
    batch = _build(CASES["smollm2"], generator)
    wide = torch.full((len(batch.q), 11, 64), math.nan)
    wide[:, 1:10] = batch.q
    out = torch.full((len(batch.q), 12, 64), 7.0)
    replace(batch, q=wide[:, 1:10]).run_into(out[:, 2:11])
    assert torch.equal(out[:, 2:11], batch.run())
    assert (out[:, [0, 1, 11]] == 7.0).all()


def test_a_nan_reaches_the_rows_that_see_it_and_no_others(generator: torch.Generator) -> None:
    for index in range(2):  # in K, in V
        batch = _build(Case(((10, 30), (10, 30)), 6, 2, 16), generator)
        block = batch.tables[batch.rows[0], 1]
        batch.pools[index][block, 0, 9] = math.nan  # position 25 of the first sequence: queries 5 to 9, first KV head
        broken = batch.run().isnan().any(-1)
        want = torch.zeros_like(broken)
        want[5:10, :3] = True
        if index == 1:
            assert (broken & want).sum() == want.sum()  # a weight of 0 times NaN may reach the tile's other rows
            assert not broken[10:].any()
            assert not broken[:, 3:].any()
        else:
            assert torch.equal(broken, want)


def test_an_empty_batch_writes_nothing(generator: torch.Generator) -> None:
    batch = _build(Case(((1, 5),), 6, 2, 16), generator)
    empty = replace(
        batch, q=batch.q[:0], rows=batch.rows[:0], query_start=batch.query_start[:1], context=batch.context[:0]
    )
    assert empty.run().shape == (0, 6, 16)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rows": [99, 0]}, "table row 99"),
        ({"rows": [-1, 0]}, "table row -1"),
        ({"context": [5, 10_000]}, "context of 10000"),
        ({"context": [5, 2]}, "context of 2 tokens, but 3 queries"),
        ({"query_start": [0, 1, 3]}, "query_start runs from 0 to 3, but q has 4"),
        ({"query_start": [0, 9, 4]}, r"queries \[0, 9\)"),
        ({"tables": 2**31 - 1}, "block 2147483647"),
        ({"tables": -5}, "block -5"),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_written(
    generator: torch.Generator, changes: dict[str, list[int] | int], said: str
) -> None:
    batch = _build(Case(((1, 5), (3, 40)), 6, 2, 16), generator)
    ((name, value),) = changes.items()
    if isinstance(value, int):
        changed = batch.tables.clone()
        changed[batch.rows[1], 1] = value
    else:
        changed = torch.tensor(value, dtype=torch.int32)
    broken = {
        "tables": lambda: replace(batch, tables=changed),
        "rows": lambda: replace(batch, rows=changed),
        "context": lambda: replace(batch, context=changed),
        "query_start": lambda: replace(batch, query_start=changed),
    }[name]()
    out = torch.full_like(batch.q, math.nan)
    with pytest.raises(ValueError, match=said):
        broken.run_into(out)
    assert out.isnan().all()


@pytest.mark.parametrize(
    ("num_q_heads", "head_dim", "begin", "window", "softcap"),
    [
        (5, 16, 0, None, None),
        (6, 12, 0, None, None),
        (6, 16, 1, None, None),
        (6, 16, 0, 0, None),
        (6, 16, 0, None, 0.0),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    num_q_heads: int, head_dim: int, begin: int, window: int | None, softcap: float | None
) -> None:
    pool, ints = torch.zeros(4, 2, 16, head_dim), torch.zeros(2, dtype=torch.int32)
    q = torch.zeros(1, num_q_heads, head_dim)
    batch = Batch(q, (pool, pool), ints[None], ints[:1], ints, ints[:1], begin, 2, 1.0, window, softcap)
    with pytest.raises(ValueError, match="attention cannot take"):
        batch.run()


def test_tables_of_another_type_or_batch_are_refused(generator: torch.Generator) -> None:
    batch = _build(Case(((1, 5), (3, 40)), 6, 2, 16), generator)
    for broken in (
        replace(batch, tables=batch.tables.long()),
        replace(batch, query_start=batch.query_start[:2]),
        replace(batch, context=batch.context[:1]),
    ):
        with pytest.raises(ValueError, match="2 sequences as int32 expected"):
            broken.run()
