"""Batches for attention: scattered blocks with NaN in every slot nobody may read, and the reference's answer."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.attention import BLOCK_SLOTS, paged_attention, paged_attention_reference


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

    def run_into(self, out: Tensor, lse: Tensor | None = None, places: Tensor | None = None) -> None:
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
            lse_out=lse,
            places=places,
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


def build(case: Case, generator: torch.Generator) -> Batch:
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
