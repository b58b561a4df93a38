"""The carrier for ranks that share no memory: gloo over TCP, on addresses given or on loopback.

Gloo's handles never complete by polling, only `wait()` progresses them, and a wait that times out loses the pair. So
nothing here polls, no wait is short, and the first failure is final. Gloo calls run on the lane, a thread of their own,
for which the watch waits.

Never: sends without a bound on what is outstanding, or relies on process-wide torch.distributed state.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch.distributed import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    ReduceOp,
    Work,
)

from kernels.cpu.collectives import Operation, Purpose, Status, Wait
from services.worker.dataplane.gloo_watch import Call, GlooAddress, GlooWatch, call_of, connect
from services.worker.dataplane.serial_executor import SerialExecutor
from services.worker.dataplane.watch import DEFAULT_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch._C._distributed_c10d import TCPStore

HEADER_TAG: Final = 1
PAYLOAD_TAG: Final = 2
TOKENS_TAG: Final = 3
COLUMNS_TAG: Final = 4
PARTS_TAG: Final = 5


@dataclass(frozen=True, slots=True)
class GlooBounds:
    """What bounds a carrier: waits, messages per peer, steps on the token board, ids per step."""

    max_rows: int
    deadline_s: float = DEFAULT_DEADLINE_S
    max_messages_in_flight: int = 2
    num_board_steps: int = 64


class Posted(Protocol):
    """A message under way."""

    def wait(self, timeout: timedelta) -> object:
        """Returns once its tensors are free; RuntimeError where it failed or its time is over."""


@dataclass(frozen=True, slots=True)
class _Message:
    """Handles not yet waited for, and the tensors that must live until then."""

    works: tuple[Posted, ...]
    tensors: tuple[Tensor, ...]


class GlooCarrier:
    """Implements Carrier over gloo. The sampling rank alone publishes tokens."""

    def __init__(
        self,
        address: GlooAddress,
        rank: int,
        num_ranks: int,
        sampling_rank: int,
        bounds: GlooBounds,
        store: TCPStore | None = None,
    ) -> None:
        """Meets the group within the default deadline; RuntimeError or a store error where it cannot.

        `store` is rank 0's, where it listens already (`listen`).
        """
        self.rank = rank
        self.num_ranks = num_ranks
        self._sampling_rank = sampling_rank
        self._bounds = bounds
        self._store = store or connect(address, is_master=rank == 0)
        # Torch's stubs leave out most of what a gloo group has.
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address.bind_host)]
        options._timeout = timedelta(seconds=DEFAULT_DEADLINE_S)
        self._group: Any = gloo(self._store, rank, num_ranks, options)
        self._posted: dict[int, deque[_Message]] = {peer: deque() for peer in range(num_ranks)}
        self._published: deque[_Message] = deque()
        self._board: OrderedDict[int, Tensor] = OrderedDict()
        self._lane = SerialExecutor(f"gloo-{rank}")
        self.watch = self._watch_of(address)

    def _watch_of(self, address: GlooAddress) -> GlooWatch:
        return GlooWatch(self._store, address, self.rank, self.num_ranks, self._bounds.deadline_s)

    def all_reduce(self, tensor: Tensor, *, purpose: Purpose) -> None:
        """See Carrier."""
        call = self._call(Operation.ALL_REDUCE, purpose, self.rank)
        self._run(call, lambda: self._sum(call, tensor), tensor)

    def all_gather_columns(
        self, part_own: Tensor, widths: Sequence[int], *, to_rank: int | None, purpose: Purpose
    ) -> Tensor | None:
        """See Carrier: every share goes straight to the ranks that take it."""
        takers = range(self.num_ranks) if to_rank is None else (to_rank,)
        parts = [
            part_own if rank == self.rank else part_own.new_empty((part_own.shape[0], width))
            for rank, width in enumerate(widths)
        ]
        call = self._call(Operation.ALL_GATHER, purpose, self.rank)
        given = dict.fromkeys(takers, part_own)
        taken = dict(enumerate(parts)) if self.rank in takers else {}
        self._run(call, lambda: self._swap(call, COLUMNS_TAG, given, taken), part_own)
        return torch.cat(parts, dim=1) if self.rank in takers else None

    def all_to_all(self, source: Tensor, sizes: Sequence[int], out: Tensor, *, purpose: Purpose) -> None:
        """See Carrier: pair by pair; what is empty is not sent."""
        given = torch.split(source.view(-1), list(sizes))
        taken = out.view(self.num_ranks, sizes[self.rank])
        call = self._call(Operation.ALL_TO_ALL, purpose, self.rank)
        self._run(call, lambda: self._swap(call, PARTS_TAG, dict(enumerate(given)), dict(enumerate(taken))), source)
        taken[self.rank].copy_(given[self.rank])

    def broadcast(self, tensor: Tensor, from_rank: int, *, purpose: Purpose) -> None:
        """See Carrier."""
        call = self._call(Operation.BROADCAST, purpose, from_rank)
        self._run(call, lambda: self._spread(call, tensor, from_rank), tensor)

    def barrier(self, *, purpose: Purpose) -> None:
        """See Carrier."""
        call = self._call(Operation.BARRIER, purpose, self.rank)
        options = BarrierOptions()
        options.timeout = timedelta(seconds=call.deadline_s)
        self._run(call, lambda: _finish(self._group.barrier(options)))

    def send(self, tensor: Tensor, to_rank: int, tag: int, *, purpose: Purpose) -> None:
        """See Carrier: posted, and waited for only when as many as may be in flight are."""
        call = self._call(Operation.SEND, purpose, to_rank)
        header, payload = torch.tensor([tag, tensor.nbytes], dtype=torch.int64), _bytes_of(tensor).clone()

        def post() -> None:
            _make_room(self._posted[to_rank], self._bounds.max_messages_in_flight, call)
            works = [self._group.send([header], to_rank, HEADER_TAG)]
            if payload.numel():
                works.append(self._ship(payload, to_rank))
            self._posted[to_rank].append(_Message(tuple(works), (header, payload)))

        self._run(call, post)

    def recv(self, into: Tensor, from_rank: int, tag: int, *, purpose: Purpose) -> None:
        """See Carrier."""
        call = self._call(Operation.RECV, purpose, from_rank)

        def take() -> None:
            header = torch.empty(2, dtype=torch.int64)
            self._group.recv([header], from_rank, HEADER_TAG).wait(call.left())
            got_tag, got_bytes = header.tolist()
            if got_tag != tag:
                raise self.watch.error(call, Status.MISMATCH, Wait.SAME_TAG, tag, got_tag)
            if got_bytes != into.nbytes:
                raise self.watch.error(call, Status.MISMATCH, Wait.SAME_BYTES, into.nbytes, got_bytes)
            if got_bytes:
                self._fetch(call, _bytes_of(into), from_rank)

        self._run(call, take)

    def publish_tokens(self, sequence: int, ids: Tensor) -> None:
        """See Carrier: one message to each peer, waited for once the board has gone round."""
        if self.rank != self._sampling_rank or ids.numel() > self._bounds.max_rows:
            raise ValueError(
                f"rank {self.rank} publishes {ids.numel()} ids: rank {self._sampling_rank} publishes, "
                f"at most {self._bounds.max_rows}"
            )
        call = self._call(Operation.PUBLISH, Purpose.TOKENS, self.rank)
        newest = next(reversed(self._board), None)
        if newest is not None and sequence <= newest:
            raise self.watch.fail(self.watch.error(call, Status.AHEAD, Wait.BOARD_ENTRY, sequence, newest))
        message = torch.zeros(2 + self._bounds.max_rows, dtype=torch.int64)
        message[0], message[1] = sequence, ids.numel()
        message[2 : 2 + ids.numel()] = ids

        def post() -> None:
            _make_room(self._published, self._bounds.num_board_steps, call)
            peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
            works = tuple(self._group.send([message], peer, TOKENS_TAG) for peer in peers)
            self._published.append(_Message(works, (message,)))

        self._run(call, post)
        self._keep(sequence, ids.clone())

    def take_tokens(self, sequence: int) -> Tensor:
        """See Carrier: messages are taken in step order until this step's has come."""
        call = self._call(Operation.READ, Purpose.TOKENS, self._sampling_rank)
        while (ids := self._board.get(sequence)) is None:
            newest = next(reversed(self._board), None)
            if newest is not None and newest > sequence:
                raise self.watch.fail(self.watch.error(call, Status.OVERWRITTEN, Wait.BOARD_ENTRY, sequence, newest))
            if self.rank == self._sampling_rank:
                raise ValueError(f"sequence {sequence} is not published and this rank is the one to publish it")
            message = torch.empty(2 + self._bounds.max_rows, dtype=torch.int64)
            self._run(call, lambda into=message: self._receive_tokens(into, call))  # type: ignore[misc]
            self._keep(int(message[0]), message[2 : 2 + int(message[1])].to(torch.int32))
        return ids

    def close(self) -> None:
        """See Carrier: lets the watch and the lane go."""
        self.watch.close()
        self._lane.close()

    # On the lane, and what another kind of group does otherwise.

    def _sum(self, call: Call, tensor: Tensor) -> None:
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        options.timeout = timedelta(seconds=call.deadline_s)
        _finish(self._group.allreduce([tensor], options))

    def _spread(self, call: Call, tensor: Tensor, from_rank: int) -> None:
        options = BroadcastOptions()
        options.rootRank = from_rank
        options.timeout = timedelta(seconds=call.deadline_s)
        _finish(self._group.broadcast([tensor], options))

    def _ship(self, payload: Tensor, peer: int) -> Posted:
        posted: Posted = self._group.send([payload], peer, PAYLOAD_TAG)
        return posted

    def _fetch(self, call: Call, into: Tensor, peer: int) -> None:
        self._group.recv([into], peer, PAYLOAD_TAG).wait(call.left())

    def _swap(self, call: Call, tag: int, given: Mapping[int, Tensor], taken: Mapping[int, Tensor]) -> None:
        """One message to each peer given something, one from each that something is taken from."""
        works = [
            post([tensor], peer, tag)
            for post, tensors in ((self._group.send, given), (self._group.recv, taken))
            for peer, tensor in tensors.items()
            if peer != self.rank and tensor.numel()
        ]
        for work in works:
            work.wait(call.left())

    def _receive_tokens(self, message: Tensor, call: Call) -> None:
        self._group.recv([message], self._sampling_rank, TOKENS_TAG).wait(call.left())

    def _keep(self, sequence: int, ids: Tensor) -> None:
        self._board[sequence] = ids
        if len(self._board) > self._bounds.num_board_steps:
            self._board.popitem(last=False)

    def _call(self, operation: Operation, purpose: Purpose, peer: int) -> Call:
        return call_of(operation, purpose, peer, self._bounds.deadline_s)

    def _run(self, call: Call, work: Callable[[], None], tensor: Tensor | None = None) -> None:
        """Runs on the lane; raises its failure as one of the closed set. `tensor`: of a group's operation, its own."""
        self.watch.wait_for(call, lambda: self._lane.submit(work))


def _finish(work: Work) -> None:
    work.wait()


def _make_room(posted: deque[_Message], bound: int, call: Call) -> None:
    """Waits for the oldest handles until one more may be posted."""
    while len(posted) >= bound:
        for work in posted[0].works:
            work.wait(call.left())
        posted.popleft()


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
