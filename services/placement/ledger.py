"""The memory ledger: every term of every rank and of its host, summed before anything is allocated.

Pure arithmetic over layouts and sizes; never reads a machine, never opens a file. A rank's terms lie in the memory that
its budget covers: host memory for a CPU rank, its own for a GPU. Host terms exist once for all ranks.

Invariants: in `shared` mode what ranks map together is counted once, on the host, and charged to budgets in equal
parts; a rank's weights at boot are never more than they are afterwards; a pool priced for N blocks holds every id below
N in both layouts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

from services.core.ids import BLOCK_SLOTS, LayoutKind, Rank
from services.placement.cuts import equalising_token_vector

MAX_POOL_BLOCKS = 1 << 31
"""Ids fit 32 bits with their sign: no pool is larger, whatever memory there is."""


class LedgerError(ValueError):
    """Memory does not suffice; the message has both numbers and what to change."""


class MemoryMode(Enum):
    """How both layouts' weights are kept."""

    SHARED = "shared"
    DUAL = "dual"
    EXCHANGE = "exchange"
    IMAGE = "image"


class PoolBacking(Enum):
    """Whether both layouts' KV pools hold memory at once."""

    RESIDENT = "resident"
    EXCLUSIVE = "exclusive"


@dataclass(frozen=True, slots=True)
class Term:
    """One use of memory."""

    name: str
    num_bytes: int
    is_addressed: bool = True
    """Whether the device that computes must reach it, as weights and rows; a process's own memory it need not."""


@dataclass(frozen=True, slots=True)
class PoolCost:
    """Of one layout on one rank: it holds `held` of every `period` blocks, `block_bytes` each."""

    block_bytes: int
    held: int = 1
    period: int = 1

    def num_bytes(self, num_blocks: int) -> int:
        """At most, for ids below `num_blocks`: a last period that is not whole may be all this rank's."""
        rounds, rest = divmod(num_blocks, self.period)
        return self.block_bytes * (rounds * self.held + min(rest, self.held))


@dataclass(frozen=True, slots=True)
class RankAccount:
    """One rank's memory. `charged_bytes` are its part of what the host's ranks share."""

    rank: Rank
    terms: tuple[Term, ...]
    pools: Mapping[LayoutKind, PoolCost]
    charged_bytes: int

    @property
    def fixed_bytes(self) -> int:
        """Everything but the KV pool."""
        return sum(term.num_bytes for term in self.terms) + self.charged_bytes


@dataclass(frozen=True, slots=True)
class Ceiling:
    """A bound on the sum over all ranks of a host. Several may cap the same memory."""

    name: str
    limit_bytes: int
    remedy: str
    addressed_only: bool = False
    """Whether it bounds only what the device must reach."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """How many blocks fit, by whom, and what would raise it."""

    num_blocks: int
    binding: str
    remedy: str
    left_bytes: int
    """Of the binding budget, before the pool; below 0: what it lacks."""

    @property
    def num_tokens(self) -> int:
        """Slots of the pool."""
        return self.num_blocks * BLOCK_SLOTS


@dataclass(frozen=True, slots=True)
class Ledger:
    """All accounts of one host."""

    mode: MemoryMode
    backing: PoolBacking
    ranks: tuple[RankAccount, ...]
    host_terms: tuple[Term, ...]
    """Once for all ranks."""
    block_bytes: int
    """Of one block over all layers and heads."""
    on_host: bool
    """Whether ranks' memory is the host's: CPU ranks and unified memory."""

    def rank_pool_bytes(self, rank: Rank, num_blocks: int) -> int:
        """A rank's pool memory: both layouts' or the larger, and its part of a shared one."""
        return _pool_bytes(self.backing, self.ranks[rank].pools, num_blocks)

    def rank_bytes(self, rank: Rank, num_blocks: int) -> int:
        """All that a rank's budget must hold with a pool of so many blocks."""
        return self.ranks[rank].fixed_bytes + self.rank_pool_bytes(rank, num_blocks)

    def host_bytes(self, num_blocks: int, *, addressed_only: bool = False) -> int:
        """The sum over all that lies in host memory."""
        terms = [term for account in self.ranks if self.on_host for term in account.terms]
        fixed = sum(term.num_bytes for term in (*terms, *self.host_terms) if term.is_addressed or not addressed_only)
        return fixed + (self._host_pool_bytes(num_blocks) if self.on_host else 0)

    def _host_pool_bytes(self, num_blocks: int) -> int:
        if self.mode is MemoryMode.SHARED:
            return num_blocks * self.block_bytes
        return sum(self.rank_pool_bytes(account.rank, num_blocks) for account in self.ranks)

    def capacity(self, budgets: Sequence[int] | None, ceilings: Sequence[Ceiling] = ()) -> Capacity:
        """The most blocks under ranks' budgets and the host's ceilings, with whoever allows the fewest.

        Raises:
            ValueError: neither is given, or not one budget for each rank.
        """
        found = [*self._by_rank(budgets or ()), *self._by_ceiling(ceilings)]
        return min(found, key=lambda capacity: (capacity.num_blocks, capacity.left_bytes))

    def _by_rank(self, budgets: Sequence[int]) -> Iterator[Capacity]:
        for account, budget in zip(self.ranks, budgets, strict=bool(budgets)):
            left = budget - account.fixed_bytes
            blocks = _most(partial(_pool_bytes, self.backing, account.pools), left)
            remedy = f"raise the memory budget of rank {account.rank}"
            if len(self.ranks) > 1 and self.mode is not MemoryMode.SHARED:
                remedy += ", or give it a smaller share in tp_weights, pp_layers or kv_tokens"
            if self.backing is PoolBacking.RESIDENT and self.mode is not MemoryMode.SHARED:
                remedy += ", or back the pools exclusively"
            yield Capacity(blocks, f"rank {account.rank}", remedy, left)

    def _by_ceiling(self, ceilings: Sequence[Ceiling]) -> Iterator[Capacity]:
        for ceiling in ceilings:
            left = ceiling.limit_bytes - self.host_bytes(0, addressed_only=ceiling.addressed_only)
            blocks = _most(self._host_pool_bytes, left) if self.on_host or left < 0 else MAX_POOL_BLOCKS
            yield Capacity(blocks, ceiling.name, ceiling.remedy, left)

    def layout_blocks(self, budgets: Sequence[int], num_blocks: int) -> dict[LayoutKind, tuple[int, ...]]:
        """Ids that each rank could hold in each layout, where the other layout's pool is sized for `num_blocks`."""
        held: dict[LayoutKind, tuple[int, ...]] = {}
        for kind in LayoutKind:
            counts = []
            for account, budget in zip(self.ranks, budgets, strict=True):
                others = {other: cost for other, cost in account.pools.items() if other is not kind}
                taken = 0 if self.backing is PoolBacking.EXCLUSIVE else _pool_bytes(self.backing, others, num_blocks)
                counts.append(_most(account.pools[kind].num_bytes, budget - account.fixed_bytes - taken))
            held[kind] = tuple(counts)
        return held

    def equalising_tokens(self, budgets: Sequence[int]) -> tuple[int, ...]:
        """The token vector under which all ranks would be full at once; raises LayoutError where one has no room.

        Where the PP pool is resident as well, a rank's rows lie in what that leaves at the number of blocks that all of
        them fill together.
        """
        left = [budget - account.fixed_bytes for budget, account in zip(budgets, self.ranks, strict=True)]
        if self.backing is PoolBacking.RESIDENT:
            resident = [account.pools[LayoutKind.PP].block_bytes for account in self.ranks]
            num_blocks = max(sum(left), 0) // (self.block_bytes + sum(resident))
            left = [room - num_blocks * taken for room, taken in zip(left, resident, strict=True)]
        return equalising_token_vector(left, self.block_bytes // BLOCK_SLOTS)


def check_id_space(num_blocks: int, held: Mapping[LayoutKind, Sequence[int]]) -> None:
    """Raises LedgerError unless every rank holds every id below `num_blocks` in every layout."""
    for kind, counts in held.items():
        for rank, count in enumerate(counts):
            if count < num_blocks:
                raise LedgerError(
                    f"the allocator issues block ids below {num_blocks}, and rank {rank} can hold {count} in layout "
                    f"{kind.value}: make the pool smaller, or raise that rank's memory"
                )


def _pool_bytes(backing: PoolBacking, pools: Mapping[LayoutKind, PoolCost], num_blocks: int) -> int:
    costs = [cost.num_bytes(num_blocks) for cost in pools.values()]
    return max(costs) if backing is PoolBacking.EXCLUSIVE else sum(costs)


def _most(cost: Callable[[int], int], room_bytes: int) -> int:
    """The most blocks whose rising cost is within the room; 0 where there is none."""
    low, high = 0, MAX_POOL_BLOCKS
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle) <= room_bytes:
            low = middle
        else:
            high = middle - 1
    return low
