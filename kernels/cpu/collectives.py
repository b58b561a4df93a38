"""One rank's end of a shared region: collectives, channels and the token board between the ranks of one host.

How they work is said in native/collectives.c. Takes tensors by their address and never imports torch. Never retries:
the first failure is final for a communicator and ends the generation; the next one starts with a zeroed region.

Shape suffixes: R rows, C columns of one rank.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import kernels._native as _native
from kernels.cpu.collective_status import AbortReason, CollectiveError, Operation, Purpose, Status, Wait
from kernels.cpu.shm_region import RegionShape, ShmRegion

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = [
    "AbortReason",
    "CollectiveError",
    "Operation",
    "Purpose",
    "RegionShape",
    "ShmCommunicator",
    "ShmRegion",
    "Status",
    "Wait",
]

# Up to here every rank reads every other's floats at once; above, each sums a share. At 18 KB two shots had the better
# p50 with 2 ranks (by 0.7 us) and the worse mean with 3 ranks on 2 cores (by 1 to 4 us); at 73 KB they had the better
# p50 with both. All on a shared machine with other load: run bench_collectives on a quiet one before trusting it.
ONE_SHOT_BYTES: Final = 32 * 1024
# A waiter with a core to itself spins a few us before it yields: under other load, longer spins had the worse means;
# with more ranks than cores spinning only delays the rank it waits for. How long to yield before sleeping is a choice,
# not measured: longer than the work between two collectives of a small model, short against an idle wait.
SPIN_TURNS: Final = 30
CROWDED_SPIN_TURNS: Final = 0
YIELD_NS: Final = 200_000
NS_PER_S: Final = 1_000_000_000


class ShmCommunicator:
    """One rank's end of a region. Tensors are contiguous and on the CPU; every call releases the interpreter lock.

    Raises CollectiveError with its status on failure, ValueError for a tensor that does not fit the call, RuntimeError
    where two threads use the collectives (or one end of a channel) at once.
    """

    def __init__(
        self,
        region: ShmRegion,
        rank: int,
        *,
        spin_turns: int | None = None,
        yield_ns: int = YIELD_NS,
        one_shot_bytes: int = ONE_SHOT_BYTES,
    ) -> None:
        crowded = region.num_ranks > len(os.sched_getaffinity(0))
        spins = spin_turns if spin_turns is not None else CROWDED_SPIN_TURNS if crowded else SPIN_TURNS
        self.region = region
        self.rank = rank
        self.num_ranks = region.num_ranks
        self._handle = _native.collectives_attach(
            region.address, region.num_bytes, rank, spins, yield_ns, one_shot_bytes
        )

    def all_reduce_sum(self, tensor: Tensor, *, deadline_s: float, purpose: Purpose) -> None:
        """Sums float32 `tensor` over ranks in place, in rank order: the same bits everywhere."""
        if tensor.element_size() != 4 or not tensor.is_floating_point():
            raise ValueError(f"all_reduce_sum wants float32, got {tensor.dtype}")
        failure = _native.collectives_all_reduce(
            self._handle, _address(tensor), tensor.numel(), int(deadline_s * NS_PER_S), purpose
        )
        if failure is not None:
            raise self._error(failure, Operation.ALL_REDUCE, purpose, deadline_s)

    def all_gather(
        self, part: Tensor, row_bytes: Sequence[int], out: Tensor | None, *, deadline_s: float, purpose: Purpose
    ) -> None:
        """Puts every rank's part [R, C_rank] side by side into `out` [R, sum C], for the ranks that pass an `out`.

        `row_bytes` has each rank's bytes per row, zero included; with one row it is a plain gather of uneven shares.
        """
        rows, own, wide = part.shape[0], row_bytes[self.rank], sum(row_bytes)
        if part.nbytes != rows * own or (out is not None and out.nbytes != rows * wide):
            raise ValueError(
                f"all_gather of {rows} rows: {rows * own} bytes in and {rows * wide} out expected, "
                f"got {part.nbytes} and {out.nbytes if out is not None else None}"
            )
        failure = _native.collectives_all_gather(
            self._handle,
            _address(part),
            rows,
            tuple(row_bytes),
            0 if out is None else _address(out),
            int(deadline_s * NS_PER_S),
            purpose,
        )
        if failure is not None:
            raise self._error(failure, Operation.ALL_GATHER, purpose, deadline_s)

    def all_to_all(
        self, source: Tensor, sizes: Sequence[int], out: Tensor, *, deadline_s: float, purpose: Purpose
    ) -> None:
        """Gives `sizes[rank]` elements of `source` to each rank; `out` takes what all have for this one."""
        own = sizes[self.rank]
        if source.numel() != sum(sizes) or out.numel() != self.num_ranks * own or source.dtype != out.dtype:
            raise ValueError(
                f"all_to_all of {list(sizes)}: {sum(sizes)} elements in and {self.num_ranks * own} out of one type "
                f"expected, got {source.numel()} {source.dtype} and {out.numel()} {out.dtype}"
            )
        failure = _native.collectives_all_to_all(
            self._handle,
            _address(source),
            tuple(size * source.element_size() for size in sizes),
            _address(out),
            int(deadline_s * NS_PER_S),
            purpose,
        )
        if failure is not None:
            raise self._error(failure, Operation.ALL_TO_ALL, purpose, deadline_s)

    def broadcast(self, tensor: Tensor, from_rank: int, *, deadline_s: float, purpose: Purpose) -> None:
        """Copies `tensor` of one rank over `tensor` of all."""
        failure = _native.collectives_broadcast(
            self._handle, _address(tensor), tensor.nbytes, from_rank, int(deadline_s * NS_PER_S), purpose
        )
        if failure is not None:
            raise self._error(failure, Operation.BROADCAST, purpose, deadline_s)

    def barrier(self, *, deadline_s: float, purpose: Purpose) -> None:
        """Returns once every rank has entered."""
        failure = _native.collectives_barrier(self._handle, int(deadline_s * NS_PER_S), purpose)
        if failure is not None:
            raise self._error(failure, Operation.BARRIER, purpose, deadline_s)

    def send(self, tensor: Tensor, to_rank: int, tag: int, *, deadline_s: float, purpose: Purpose) -> None:
        """Copies `tensor` into the channel; waits only while `max_messages_in_flight` messages are not yet taken."""
        failure = _native.collectives_send(
            self._handle, _address(tensor), tensor.nbytes, to_rank, tag, int(deadline_s * NS_PER_S), purpose
        )
        if failure is not None:
            raise self._error(failure, Operation.SEND, purpose, deadline_s)

    def recv(self, into: Tensor, from_rank: int, tag: int, *, deadline_s: float, purpose: Purpose) -> None:
        """Takes the next message of the channel, which must have this tag and exactly the bytes of `into`."""
        failure = _native.collectives_recv(
            self._handle, _address(into), into.nbytes, from_rank, tag, int(deadline_s * NS_PER_S), purpose
        )
        if failure is not None:
            raise self._error(failure, Operation.RECV, purpose, deadline_s)

    def publish(self, sequence: int, ids: Tensor) -> None:
        """Writes a step's ids (int32) on the token board; never waits. One rank of the group publishes."""
        _check_ids(ids)
        failure = _native.collectives_publish(self._handle, sequence, _address(ids), ids.numel(), Purpose.TOKENS)
        if failure is not None:
            raise self._error(failure, Operation.PUBLISH, Purpose.TOKENS, 0.0)

    def read(self, sequence: int, out: Tensor, *, deadline_s: float) -> int:
        """Waits for a step's ids and copies them into `out` (int32); returns how many. May be read again."""
        _check_ids(out)
        outcome = _native.collectives_read(
            self._handle, sequence, _address(out), out.numel(), int(deadline_s * NS_PER_S), Purpose.TOKENS
        )
        if isinstance(outcome, int):
            return outcome
        raise self._error(outcome, Operation.READ, Purpose.TOKENS, deadline_s)

    def close(self) -> None:
        """Makes every later call raise; RuntimeError while another thread is inside one (abort first)."""
        _native.collectives_close(self._handle)

    def _error(
        self, failure: tuple[int, int, int, int, int], operation: Operation, purpose: Purpose, deadline_s: float
    ) -> CollectiveError:
        status, wait, peer, waited, seen = failure
        return CollectiveError(
            Status(status),
            operation=operation,
            purpose=purpose,
            rank=self.rank,
            peer=peer,
            deadline_s=deadline_s,
            wait=Wait(wait),
            waited=waited,
            seen=seen,
            cause=f"aborted by {AbortReason(seen).name}" if status == Status.ABORTED else "",
        )


def _address(x: Tensor) -> int:
    if not x.is_contiguous() or x.is_cuda:
        raise ValueError(f"contiguous CPU tensor wanted, got {tuple(x.shape)}, strides {x.stride()}, {x.device}")
    return x.data_ptr()


def _check_ids(ids: Tensor) -> None:
    if ids.element_size() != 4 or ids.is_floating_point():
        raise ValueError(f"token ids are int32, got {ids.dtype}")
