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

from kernels.backend import Rotary, StepInputs
from kernels.cpu.attention import merge_partials, paged_attention
from kernels.cpu.collective_status import Purpose
from kernels.cpu.elementwise import NO_SLOT, rope_and_store
from services.core.ids import BLOCK_SLOTS
from services.core.layout import RankShare
from services.worker.dataplane.peers import Peers
from services.worker.memory.rows.kv_cache import Pool


class TokenAttention:
    """One rank's end, with buffers for the largest step where the rotary table is."""

    def __init__(self, peers: Peers, head_dim: int, max_batch_tokens: int, rotary: Rotary) -> None:
        self.peers, self.head_dim, self.rotary = peers, head_dim, rotary
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
        self._owner, self._batch, self._places = owner, inputs, pool.places
        self._slots = _own_slots(inputs.slots, pool.places)
        shares, dim, n = owner.peers.shares, owner.head_dim, inputs.num_tokens
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
        turned = [self._store(heads, share, keys, values) for heads, share in zip(columns, peers.shares, strict=True)]
        for q_THD, share, part in zip(turned, peers.shares, given, strict=True):
            if len(share.heads):
                self._attend_part(q_THD, share, keys, values, part)
        peers.exchange(self._given, self._sizes, self._taken, Purpose.ATTENTION_PARTS)
        if out_THD.numel():
            merge_partials(self._parts_NTHD, self._lse_NTH, out_THD)

    def _store(self, heads_TW: Tensor, share: RankShare, keys: Tensor, values: Tensor) -> Tensor:
        """Turns one rank's heads, writes the rows that lie here, and returns its queries."""
        counts = (len(share.heads), len(share.kv_heads), len(share.kv_heads))
        n, dim, rotary = self._batch.num_tokens, self._owner.head_dim, self._owner.rotary
        parts = torch.split(heads_TW, [count * dim for count in counts], dim=1)
        q, k, v = (part.view(n, count, dim) for part, count in zip(parts, counts, strict=True))
        rope_and_store(
            q,
            k,
            v,
            self._batch.positions,
            self._slots,
            rotary.table,
            keys,
            values,
            kv_head_begin=share.kv_heads.begin,
            interleaved=rotary.is_interleaved,
        )
        return q

    def _attend_part(self, q_THD: Tensor, share: RankShare, keys: Tensor, values: Tensor, part: Tensor) -> None:
        """One rank's queries over the rows that lie here."""
        inputs, (n, heads, dim) = self._batch, q_THD.shape
        paged_attention(
            q_THD,
            keys,
            values,
            inputs.block_tables,
            inputs.row_of_sequence,
            inputs.query_start,
            inputs.context_tokens,
            part[: n * heads * dim].view(n, heads, dim),
            kv_head_begin=share.kv_heads.begin,
            num_kv_heads=len(share.kv_heads),
            scale=dim**-0.5,
            lse_out=part[n * heads * dim :].view(n, heads),
            places=self._places,
        )


def _own_slots(slots: Tensor, places: Tensor) -> Tensor:
    """[T] int32: where in this rank's planes each token's row goes, NO_SLOT for another rank's."""
    place = places[slots // BLOCK_SLOTS]
    return torch.where(place < 0, NO_SLOT, place * BLOCK_SLOTS + slots % BLOCK_SLOTS).to(torch.int32)
