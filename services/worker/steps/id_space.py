"""At RESET: every block id that the log may name has its place in each layout, and all ranks mean the same one.

A row is written by id and read by id. A pool smaller than its ids, or a rank that shares the rows by another vector
than its peers, would answer from what nobody wrote; so it is refused with both numbers before a request is there. Ranks
are asked only where the cache is cut by tokens: elsewhere each has all ids.
"""

from collections.abc import Mapping

import torch

from kernels.cpu.collective_status import Purpose
from services.core.errors import ConfigurationError
from services.core.ids import LayoutKind
from services.core.layout import Layout
from services.placement.rows.transfers import ALL_BLOCKS, BlockShare, block_shares
from services.worker.dataplane.carrier import Carrier
from services.worker.memory.rows.kv_cache import Pool


def check_id_space(
    num_blocks: int,
    layouts: Mapping[LayoutKind, Layout],
    pools: Mapping[LayoutKind, Pool],
    carrier: Carrier,
) -> None:
    """Holds this rank's pools to the ids below `num_blocks`, and its rows to what its peers think of them.

    Raises:
        ConfigurationError: a pool is too small, or ranks share the rows in different ways.
        CollectiveError: a peer did not come.
    """
    for kind, layout in layouts.items():
        shares = (ALL_BLOCKS,) * layout.num_ranks if layout.kv_tokens is None else block_shares(layout.kv_tokens)
        _check_pool(num_blocks, kind, carrier.rank, shares[carrier.rank], layout, pools[kind])
        if layout.kv_tokens is not None:
            _check_vector(layout.kv_tokens, carrier)


def _check_pool(num_blocks: int, kind: LayoutKind, rank: int, share: BlockShare, layout: Layout, pool: Pool) -> None:
    needed, layers = share.count(num_blocks), layout.shares[rank].layers
    for layer in range(layers.begin, layers.end):
        held = min(len(pool.keys[layer]), len(pool.values[layer]))
        if held < needed:
            raise ConfigurationError(
                f"rank {rank} holds {held} blocks of layer {layer} in layout {kind.value}, and of the {num_blocks} ids "
                f"that the scheduler issues {needed} are its own: lower pool.num_blocks or pool.max_total_tokens, or "
                "give the rank a smaller share in group.kv_tokens"
            )


def _check_vector(kv_tokens: tuple[int, ...], carrier: Carrier) -> None:
    own = torch.tensor([kv_tokens], dtype=torch.int64)
    everyone = carrier.all_gather_columns(own, [len(kv_tokens)] * carrier.num_ranks, to_rank=None, purpose=Purpose.BOOT)
    assert everyone is not None
    vectors = everyone.view(carrier.num_ranks, -1).tolist()
    for peer, vector in enumerate(vectors):
        if vector != list(kv_tokens):
            raise ConfigurationError(
                f"rank {peer} shares the rows of the KV cache as {vector}, rank {carrier.rank} as {list(kv_tokens)}: "
                "a row would have two owners or none; give all ranks the same group.kv_tokens"
            )
