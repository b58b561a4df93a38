"""Paged attention against a gathering float64 reference, on both instruction paths; slots nobody may read hold NaN."""

import math
from dataclasses import replace

import pytest
import torch

from kernels.backend import Backend
from tests.support.attention_batches import Batch, Case, build

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
def test_against_float64(backend: Backend, generator: torch.Generator, name: str) -> None:
    batch = build(CASES[name], generator, backend)
    assert batch.error(batch.run()) < batch.bound()


def test_the_error_measure_sees_one_key_too_few_and_one_too_many(backend: Backend, generator: torch.Generator) -> None:
    batch = build(Case(((1, 40), (3, 50)), 6, 2, 16), generator, backend)
    for pool in batch.pools:
        pool.nan_to_num_(0.5)
    for change in (-1, 1):
        assert batch.error(replace(batch, context=batch.context + change).run()) > 100 * batch.bound()


@pytest.mark.parametrize("seed", range(12))
def test_random_batches(backend: Backend, seed: int) -> None:
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
    batch = build(case, generator, backend)
    assert batch.error(batch.run()) < batch.bound(), case


def test_chunks_give_what_the_whole_prompt_gives(backend: Backend, generator: torch.Generator) -> None:
    whole = build(Case(((150, 150),), 9, 3, 64), generator, backend)
    want = whole.run()
    for begin, end in ((0, 1), (1, 50), (50, 149), (149, 150)):
        part = replace(
            whole,
            q=whole.q[begin:end],
            query_start=torch.tensor([0, end - begin], dtype=torch.int32),
            context=torch.tensor([end], dtype=torch.int32),
        )
        assert (part.run() - want[begin:end]).abs().max() < 1e-5


def test_a_sequence_is_the_same_in_any_batch(backend: Backend, generator: torch.Generator) -> None:
    """To the bit: its tiles depend on its own rows only."""
    batch = build(CASES["smollm2"], generator, backend)
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


def test_ranks_heads_together_are_the_whole(backend: Backend, generator: torch.Generator) -> None:
    batch = build(CASES["smollm2"], generator, backend)
    whole = batch.run()
    for begin, num in ((0, 2), (2, 1)):
        heads = slice(begin * 3, (begin + num) * 3)
        part = replace(batch, q=batch.q[:, heads], kv_head_begin=begin, num_kv_heads=num)
        assert torch.equal(part.run(), whole[:, heads])


def test_queries_and_output_inside_wider_rows(backend: Backend, generator: torch.Generator) -> None:
    batch = build(CASES["smollm2"], generator, backend)
    wide = torch.full((len(batch.q), 11, 64), math.nan)
    wide[:, 1:10] = batch.q
    out = torch.full((len(batch.q), 12, 64), 7.0)
    replace(batch, q=wide[:, 1:10]).run_into(out[:, 2:11])
    assert torch.equal(out[:, 2:11], batch.run())
    assert (out[:, [0, 1, 11]] == 7.0).all()


def test_a_nan_reaches_the_rows_that_see_it_and_no_others(backend: Backend, generator: torch.Generator) -> None:
    for index in range(2):  # in K, in V
        batch = build(Case(((10, 30), (10, 30)), 6, 2, 16), generator, backend)
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


def test_an_empty_batch_writes_nothing(backend: Backend, generator: torch.Generator) -> None:
    batch = build(Case(((1, 5),), 6, 2, 16), generator, backend)
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
        ({"query_start": [0, 1, 3]}, "query_start runs from 0 to 3"),
        ({"query_start": [0, 9, 4]}, r"queries \[0, 9\)"),
        ({"tables": 2**31 - 1}, "block 2147483647"),
        ({"tables": -5}, "block -5"),
    ],
)
def test_what_lies_outside_is_refused_before_anything_is_written(
    backend: Backend, generator: torch.Generator, changes: dict[str, list[int] | int], said: str
) -> None:
    batch = build(Case(((1, 5), (3, 40)), 6, 2, 16), generator, backend)
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
    backend: Backend, num_q_heads: int, head_dim: int, begin: int, window: int | None, softcap: float | None
) -> None:
    pool, ints = torch.zeros(4, 2, 16, head_dim), torch.zeros(2, dtype=torch.int32)
    q = torch.zeros(1, num_q_heads, head_dim)
    start = torch.arange(2, dtype=torch.int32)
    batch = Batch(backend, q, (pool, pool), ints[None], ints[:1], start, start[1:], begin, 2, 1.0, window, softcap)
    with pytest.raises(ValueError, match=r"attention cannot take|planes"):
        batch.run()


def test_tables_of_another_type_or_batch_are_refused(backend: Backend, generator: torch.Generator) -> None:
    batch = build(Case(((1, 5), (3, 40)), 6, 2, 16), generator, backend)
    for broken in (
        replace(batch, tables=batch.tables.long()),
        replace(batch, query_start=batch.query_start[:2]),
        replace(batch, context=batch.context[:1]),
    ):
        with pytest.raises(ValueError, match="int32, contiguous, expected"):
            broken.run()
