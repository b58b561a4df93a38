"""Attention in a layout whose KV cache is cut by tokens: a rank has some rows, of all KV heads.

Queries come to the rows and partial results go back. A layer's two collectives: one gathers what all ranks have made of
queries, keys and values, whereupon each rank stores the rows that are its own and attends, with all heads' queries,
over the rows it has; one exchanges the parts, each with its log-sum-exp, whereupon each rank merges those of its own
heads. A rank that has no row that a query sees gives a part of weight 0 (-inf), one without heads gives parts alone.
Never decides whose a row is: the pool's places say.

Shapes: T tokens, N ranks, Hq and Hkv heads of one rank, D head dimension, W = (Hq + 2 Hkv) * D of one rank.
"""

import torch
from torch import Tensor

from kernels.backend import AttentionShape, Backend, Planned, Rotary, StepInputs
from kernels.cpu.collective_status import Purpose
from services.core.layout import RankShare
from services.worker.dataplane.peers import Peers
from services.worker.memory.rows.kv_cache import Pool


class TokenAttention:
    """One rank's end, with buffers for the largest step where the rotary table is."""

    def __init__(self, peers: Peers, backend: Backend, head_dim: int, max_batch_tokens: int, rotary: Rotary) -> None:
        self.peers, self.backend, self.head_dim, self.rotary = peers, backend, head_dim, rotary
        counts = [len(share.heads) for share in peers.shares]
        part = max_batch_tokens * (head_dim + 1)
        self.given = rotary.table.new_zeros(part * sum(counts))
        self.taken = rotary.table.new_zeros(part * len(counts) * counts[peers.rank])

    def step(self, inputs: StepInputs, pool: Pool) -> "TokenStep":
        """One step's views, for all of its layers."""
        return TokenStep(self, inputs, pool)


class TokenStep:
    """Views made once for all layers."""

    def __init__(self, owner: TokenAttention, inputs: StepInputs, pool: Pool) -> None:
        assert pool.places is not None, "the pool of a layout that is cut by tokens says where its blocks lie"
        self._owner, self._num_tokens = owner, inputs.num_tokens
        shares, dim, n = owner.peers.shares, owner.head_dim, inputs.num_tokens
        # Of every rank's heads; None: it has none.
        self._planned = [
            owner.backend.plan(inputs, _shape(share, dim), pool.places) if len(share.heads) else None
            for share in shares
        ]
        self._widths = [(len(share.heads) + 2 * len(share.kv_heads)) * dim for share in shares]
        self._sizes = [n * len(share.heads) * (dim + 1) for share in shares]
        own, own_size = len(shares[owner.peers.rank].heads), self._sizes[owner.peers.rank]
        self._given = owner.given[: sum(self._sizes)]
        self._taken = owner.taken[: len(shares) * own_size].view(len(shares), own_size)
        self._parts_NTHD = self._taken[:, : n * own * dim].view(len(shares), n, own, dim)
        self._lse_NTH = self._taken[:, n * own * dim :].view(len(shares), n, own)

    def attend(self, own_TW: Tensor, keys: Tensor, values: Tensor, out_THD: Tensor) -> None:
        """Writes the attention of this rank's heads.

        `own`: its queries, keys and values side by side, not turned; `keys`, `values`: this layer's planes.
        """
        peers = self._owner.peers
        everyone = peers.gather(own_TW, self._widths, Purpose.ATTENTION_INPUT)
        given = torch.split(self._given, self._sizes)
        columns = torch.split(everyone, self._widths, dim=1)
        ranks = tuple(zip(columns, peers.shares, self._planned, strict=True))
        turned = [self._store(heads, share, planned, keys, values) for heads, share, planned in ranks]
        for q_THD, planned, part in zip(turned, self._planned, given, strict=True):
            if planned is not None:
                self._attend_part(planned, q_THD, keys, values, part)
        peers.exchange(self._given, self._sizes, self._taken, Purpose.ATTENTION_PARTS)
        if out_THD.numel():
            self._owner.backend.merge(self._parts_NTHD, self._lse_NTH, out_THD)

    def _store(
        self, heads_TW: Tensor, share: RankShare, planned: Planned | None, keys: Tensor, values: Tensor
    ) -> Tensor:
        """Turns one rank's heads, writes the rows that lie here, and returns its queries."""
        counts = (len(share.heads), len(share.kv_heads), len(share.kv_heads))
        n, dim, rotary = self._num_tokens, self._owner.head_dim, self._owner.rotary
        parts = torch.split(heads_TW, [count * dim for count in counts], dim=1)
        q, k, v = (part.view(n, count, dim) for part, count in zip(parts, counts, strict=True))
        if planned is not None:
            self._owner.backend.rope_and_store(planned, q, k, v, rotary, keys, values)
        return q

    def _attend_part(self, planned: Planned, q_THD: Tensor, keys: Tensor, values: Tensor, part: Tensor) -> None:
        """One rank's queries over the rows that lie here."""
        n, heads, dim = q_THD.shape
        out, lse = part[: n * heads * dim].view(n, heads, dim), part[n * heads * dim :].view(n, heads)
        self._owner.backend.attend(planned, q_THD, keys, values, out, lse)


def _shape(share: RankShare, dim: int) -> AttentionShape:
    return AttentionShape(len(share.heads), len(share.kv_heads), share.kv_heads.begin, dim, dim**-0.5)
