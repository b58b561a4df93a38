"""Batches for attention: scattered blocks with NaN in every slot nobody may read, and the reference's answer."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import AttentionShape, Backend, Planned, StepInputs
from services.core.ids import BLOCK_SLOTS


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
    backend: Backend
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
        self.backend.attend(self.plan(places), self.q, *self.pools, out, lse)

    def plan(self, places: Tensor | None = None) -> Planned:
        """Positions and slots follow from nothing else here, and are nobody's."""
        num_tokens = len(self.q)
        nothing = self.rows.new_zeros(num_tokens)
        inputs = StepInputs(
            num_tokens=num_tokens,
            input_ids=nothing,
            positions=nothing,
            slots=nothing,
            block_tables=self.tables,
            row_of_sequence=self.rows,
            query_start=self.query_start,
            context_tokens=self.context,
            sampled_tokens=nothing[:0].long(),
        )
        return self.backend.plan(inputs, self.shape(), places)

    def shape(self) -> AttentionShape:
        return AttentionShape(
            num_heads=self.q.shape[1],
            num_kv_heads=self.num_kv_heads,
            kv_head_begin=self.kv_head_begin,
            head_dim=self.q.shape[2],
            scale=self.scale,
            window=self.window,
            soft_cap=self.softcap,
        )

    def reference(self) -> Tensor:
        return self.whole()[0]

    def whole(self) -> tuple[Tensor, Tensor]:
        """Output `[T, Hq, D]` and log-sum-exp `[T, Hq]` in float64, with a gather."""
        out_THD = torch.empty(self.q.shape, dtype=torch.float64)
        lse_TH = torch.empty(self.q.shape[:2], dtype=torch.float64)
        for sequence, row in enumerate(self.rows.tolist()):
            begin, end = self.query_start[sequence : sequence + 2].tolist()
            out_THD[begin:end], lse_TH[begin:end] = self._sequence(row, int(self.context[sequence]), self.q[begin:end])
        return out_THD, lse_TH

    def _sequence(self, row: int, context: int, q_THD: Tensor) -> tuple[Tensor, Tensor]:
        heads = slice(self.kv_head_begin, self.kv_head_begin + self.num_kv_heads)
        # Blocks that windows hide are gathered as well, whatever their id.
        blocks = self.tables[row, : -(-context // BLOCK_SLOTS)].long().clamp(max=len(self.pools[0]) - 1)
        # [blocks, Hkv, 16, D] -> [Hq, context, D]
        group = q_THD.shape[1] // self.num_kv_heads
        k_HCD, v_HCD = (
            pool[blocks][:, heads].nan_to_num(0.0).transpose(0, 1).flatten(1, 2)[:, :context].double()
            for pool in self.pools
        )
        scores_HTC = q_THD.double().transpose(0, 1) @ k_HCD.repeat_interleave(group, 0).transpose(1, 2) * self.scale
        if self.softcap is not None:
            scores_HTC = self.softcap * torch.tanh(scores_HTC / self.softcap)
        position_T, key_C = torch.arange(context - len(q_THD), context)[:, None], torch.arange(context)[None, :]
        hidden_TC = key_C > position_T
        if self.window is not None:
            hidden_TC = hidden_TC | (key_C <= position_T - self.window)
        scores_HTC = scores_HTC.masked_fill(hidden_TC, -torch.inf)
        out_HTD = scores_HTC.softmax(-1) @ v_HCD.repeat_interleave(group, 0)
        return out_HTD.transpose(0, 1), scores_HTC.logsumexp(-1).T

    def bound(self) -> float:
        """The module's stated bound, relative to a row's largest value."""
        largest = [float(x.nan_to_num(0.0).square().sum(-1).sqrt().max()) for x in (self.q, self.pools[0])]
        return 2e-6 + 1e-7 * self.scale * largest[0] * largest[1]

    def error(self, out: Tensor) -> float:
        want = self.reference()
        return ((out.double() - want).abs().amax(-1) / want.abs().amax(-1)).nan_to_num(math.inf).max().item()


def build(case: Case, generator: torch.Generator, backend: Backend) -> Batch:
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
        backend=backend,
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


def one_sequence(
    backend: Backend, positions: Tensor, slots: Tensor, heads: tuple[int, int, int], begin: int = 0
) -> Planned:
    """A step of one sequence whose attention is not run; `heads`: of queries, of keys, and their dimension."""
    num_tokens = len(positions)
    device = positions.device
    numbers = torch.arange(num_tokens + 1, dtype=torch.int32, device=device)
    inputs = StepInputs(
        num_tokens=num_tokens,
        input_ids=numbers[:-1],
        positions=positions,
        slots=slots,
        block_tables=torch.zeros(1, 5, dtype=torch.int32, device=device),
        row_of_sequence=torch.zeros(1, dtype=torch.int32, device=device),
        query_start=torch.tensor([0, num_tokens], dtype=torch.int32, device=device),
        context_tokens=torch.tensor([num_tokens], dtype=torch.int32, device=device),
        sampled_tokens=torch.zeros(0, dtype=torch.int64, device=device),
    )
    return backend.plan(inputs, AttentionShape(heads[0], heads[1], begin, heads[2], 1.0))
