"""The carrier for ranks that share no memory: gloo over TCP, on addresses given or on loopback.

Gloo's handles never complete by polling, only `wait()` progresses them, and a wait that times out loses the pair. So
nothing here polls, no wait is short, and the first failure is final. Because a gloo wait cannot be interrupted either,
all gloo calls run on one thread of their own (the lane) while the caller waits for the lane or for the abort, whichever
comes first; an abort reaches the others through the store that rank 0 holds, where each rank has a watcher blocked.

Never: sends without a bound on what is outstanding, or relies on process-wide torch.distributed state.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict, deque
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import (
    AllreduceOptions,
    BarrierOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    ReduceOp,
    Work,
)

from kernels.cpu.collectives import AbortReason, CollectiveError, Operation, Purpose, Status, Wait
from services.worker.dataplane.carrier import DEFAULT_DEADLINE_S, CarrierCounters
from services.worker.dataplane.serial_executor import END_S, SerialExecutor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

HEADER_TAG: Final = 1
PAYLOAD_TAG: Final = 2
TOKENS_TAG: Final = 3
COLUMNS_TAG: Final = 4
PARTS_TAG: Final = 5
# A watcher blocks this long at a time; a day keeps it asleep and gloo's millisecond counts in range.
WATCH_S: Final = 86_400
# The lane reports its own timeout first: this much later the caller gives it up.
LANE_GRACE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class GlooAddress:
    """Where the group meets (rank 0 listens there) and the name or address this rank binds for its pairs."""

    store_host: str
    store_port: int
    bind_host: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class GlooBounds:
    """How much may be outstanding: messages per peer, steps on the token board, ids per step."""

    max_rows: int
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


@dataclass(frozen=True, slots=True)
class Call:
    """What a call is, for its error; the deadline is absolute on the monotonic clock."""

    operation: Operation
    purpose: Purpose
    peer: int
    deadline_s: float
    until: float

    def left(self) -> timedelta:
        """Time until the deadline; never zero, which gloo takes as its default."""
        return timedelta(seconds=max(0.001, self.until - time.monotonic()))


def listen(host: str, port: int) -> TCPStore:
    """Rank 0's store, in which the group meets; port 0 takes a free one. RuntimeError where it cannot be bound."""
    deadline = timedelta(seconds=DEFAULT_DEADLINE_S)
    return TCPStore(host, port, is_master=True, timeout=deadline, wait_for_workers=False)


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
        self._store = store or self._connect(address, rank == 0)
        # Torch's stubs leave out most of what a gloo group has.
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=address.bind_host)]
        options._timeout = timedelta(seconds=DEFAULT_DEADLINE_S)
        self._group: Any = gloo(self._store, rank, num_ranks, options)
        self._posted: dict[int, deque[_Message]] = {peer: deque() for peer in range(num_ranks)}
        self._published: deque[_Message] = deque()
        self._board: OrderedDict[int, Tensor] = OrderedDict()
        self._aborted: Future[AbortReason] = Future()
        self._failure: CollectiveError | None = None
        self._num_operations = 0
        self._wait_ns = 0
        self._lane = SerialExecutor(f"gloo-{rank}")
        watched = self._connect(address, False)
        self._watcher = Thread(target=self._watch, args=(watched,), name=f"gloo-watch-{rank}", daemon=True)
        self._watcher.start()

    def all_reduce(self, tensor: Tensor, *, deadline_s: float, purpose: Purpose) -> None:
        """See Carrier."""
        call = self._call(Operation.ALL_REDUCE, purpose, self.rank, deadline_s)
        self._run(call, lambda: self._sum(call, tensor))

    def all_gather_columns(
        self, part_own: Tensor, widths: Sequence[int], *, to_rank: int | None, deadline_s: float, purpose: Purpose
    ) -> Tensor | None:
        """See Carrier: every share goes straight to the ranks that take it."""
        takers = range(self.num_ranks) if to_rank is None else (to_rank,)
        parts = [
            part_own if rank == self.rank else part_own.new_empty((part_own.shape[0], width))
            for rank, width in enumerate(widths)
        ]
        call = self._call(Operation.ALL_GATHER, purpose, self.rank, deadline_s)
        given = dict.fromkeys(takers, part_own)
        taken = dict(enumerate(parts)) if self.rank in takers else {}
        self._run(call, lambda: self._swap(call, COLUMNS_TAG, given, taken))
        return torch.cat(parts, dim=1) if self.rank in takers else None

    def all_to_all(
        self, source: Tensor, sizes: Sequence[int], out: Tensor, *, deadline_s: float, purpose: Purpose
    ) -> None:
        """See Carrier: pair by pair; what is empty is not sent."""
        given = torch.split(source.view(-1), list(sizes))
        taken = out.view(self.num_ranks, sizes[self.rank])
        call = self._call(Operation.ALL_TO_ALL, purpose, self.rank, deadline_s)
        self._run(call, lambda: self._swap(call, PARTS_TAG, dict(enumerate(given)), dict(enumerate(taken))))
        taken[self.rank].copy_(given[self.rank])

    def broadcast(self, tensor: Tensor, from_rank: int, *, deadline_s: float, purpose: Purpose) -> None:
        """See Carrier."""
        call = self._call(Operation.BROADCAST, purpose, from_rank, deadline_s)
        self._run(call, lambda: self._spread(call, tensor, from_rank))

    def barrier(self, *, deadline_s: float, purpose: Purpose) -> None:
        """See Carrier."""
        call = self._call(Operation.BARRIER, purpose, self.rank, deadline_s)
        options = BarrierOptions()
        options.timeout = timedelta(seconds=deadline_s)
        self._run(call, lambda: _finish(self._group.barrier(options)))

    def send(self, tensor: Tensor, to_rank: int, tag: int, *, deadline_s: float, purpose: Purpose) -> None:
        """See Carrier: posted, and waited for only when as many as may be in flight are."""
        call = self._call(Operation.SEND, purpose, to_rank, deadline_s)
        header, payload = torch.tensor([tag, tensor.nbytes], dtype=torch.int64), _bytes_of(tensor).clone()

        def post() -> None:
            _make_room(self._posted[to_rank], self._bounds.max_messages_in_flight, call)
            works = [self._group.send([header], to_rank, HEADER_TAG)]
            if payload.numel():
                works.append(self._ship(payload, to_rank))
            self._posted[to_rank].append(_Message(tuple(works), (header, payload)))

        self._run(call, post)

    def recv(self, into: Tensor, from_rank: int, tag: int, *, deadline_s: float, purpose: Purpose) -> None:
        """See Carrier."""
        call = self._call(Operation.RECV, purpose, from_rank, deadline_s)

        def take() -> None:
            header = torch.empty(2, dtype=torch.int64)
            self._group.recv([header], from_rank, HEADER_TAG).wait(call.left())
            got_tag, got_bytes = header.tolist()
            if got_tag != tag:
                raise self._error(call, Status.MISMATCH, Wait.SAME_TAG, tag, got_tag)
            if got_bytes != into.nbytes:
                raise self._error(call, Status.MISMATCH, Wait.SAME_BYTES, into.nbytes, got_bytes)
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
        call = self._call(Operation.PUBLISH, Purpose.TOKENS, self.rank, DEFAULT_DEADLINE_S)
        newest = next(reversed(self._board), None)
        if newest is not None and sequence <= newest:
            raise self._fail(self._error(call, Status.AHEAD, Wait.BOARD_ENTRY, sequence, newest))
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

    def take_tokens(self, sequence: int, *, deadline_s: float) -> Tensor:
        """See Carrier: messages are taken in step order until this step's has come."""
        call = self._call(Operation.READ, Purpose.TOKENS, self._sampling_rank, deadline_s)
        while (ids := self._board.get(sequence)) is None:
            newest = next(reversed(self._board), None)
            if newest is not None and newest > sequence:
                raise self._fail(self._error(call, Status.OVERWRITTEN, Wait.BOARD_ENTRY, sequence, newest))
            if self.rank == self._sampling_rank:
                raise ValueError(f"sequence {sequence} is not published and this rank is the one to publish it")
            message = torch.empty(2 + self._bounds.max_rows, dtype=torch.int64)
            self._run(call, lambda into=message: self._receive_tokens(into, call))  # type: ignore[misc]
            self._keep(int(message[0]), message[2 : 2 + int(message[1])].to(torch.int32))
        return ids

    def abort(self, reason: AbortReason) -> None:
        """See Carrier: this rank at once, the others through the store."""
        self._let_go(reason)
        for peer in range(self.num_ranks):
            # A store that is gone has released every watcher already.
            with contextlib.suppress(RuntimeError):
                self._store.set(f"verdict/{peer}", reason.name)

    def counters(self) -> CarrierCounters:
        """See Carrier; the time is that of whole operations, which gloo does not divide."""
        reason = self._aborted.result() if self._aborted.done() else None
        return CarrierCounters(self._num_operations, self._wait_ns, reason)

    def close(self) -> None:
        """See Carrier: lets the watcher and the lane go."""
        self._let_go(AbortReason.SHUTDOWN)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"verdict/{self.rank}", AbortReason.SHUTDOWN.name)
        self._watcher.join(END_S)
        self._lane.close()

    def _connect(self, address: GlooAddress, is_master: bool) -> TCPStore:
        deadline = timedelta(seconds=DEFAULT_DEADLINE_S)
        return TCPStore(
            address.store_host, address.store_port, is_master=is_master, timeout=deadline, wait_for_workers=False
        )

    def _watch(self, store: TCPStore) -> None:
        """Blocks until a verdict for this rank is in the store, or the store is gone with rank 0."""
        key = f"verdict/{self.rank}"
        try:
            while not self._aborted.done():
                with contextlib.suppress(torch.distributed.DistStoreError):
                    store.wait([key], timedelta(seconds=WATCH_S))
                    self._let_go(AbortReason[store.get(key).decode()])
        except RuntimeError:
            self._let_go(AbortReason.PEER_LOST)

    def _let_go(self, reason: AbortReason) -> None:
        with contextlib.suppress(Exception):
            self._aborted.set_result(reason)

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

    def _call(self, operation: Operation, purpose: Purpose, peer: int, deadline_s: float) -> Call:
        return Call(operation, purpose, peer, deadline_s, time.monotonic() + deadline_s)

    def _run(self, call: Call, work: Callable[[], None]) -> None:
        """Runs on the lane; raises its failure as one of the closed set, or ABORTED without waiting for the lane."""
        if self._failure is not None:
            raise self._failure
        started = time.monotonic_ns()
        done: Future[None] | None = None
        if not self._aborted.done():
            done = self._lane.submit(work)
            either: tuple[Future[Any], ...] = (done, self._aborted)
            wait(either, call.deadline_s + LANE_GRACE_S, FIRST_COMPLETED)
        self._num_operations += 1
        self._wait_ns += time.monotonic_ns() - started
        if done is None or not done.done():
            raise self._fail(self._left_behind(call))
        error = done.exception()
        if error is not None:
            raise self._fail(self._translated(call, error)) from error

    def _left_behind(self, call: Call) -> CollectiveError:
        if not self._aborted.done():
            return self._error(call, Status.DATA_TIMEOUT, Wait.NOTHING, 0, 0, "gloo did not return")
        reason = self._aborted.result()
        return self._error(call, Status.ABORTED, Wait.NOTHING, 0, int(reason), f"aborted by {reason.name}")

    def _translated(self, call: Call, error: BaseException) -> CollectiveError:
        if isinstance(error, CollectiveError):
            return error
        text = str(error).splitlines()[0]
        if "imed out" not in text:
            return self._error(call, Status.LOST, Wait.NOTHING, 0, 0, text)
        sending = call.operation in (Operation.SEND, Operation.PUBLISH)
        status, wait_for = (Status.ACK_TIMEOUT, Wait.CREDIT) if sending else (Status.DATA_TIMEOUT, Wait.MESSAGE)
        return self._error(call, status, wait_for, 0, 0, text)

    def _fail(self, error: CollectiveError) -> CollectiveError:
        self._failure = error
        return error

    def _error(
        self, call: Call, status: Status, wait_for: Wait, waited: int, seen: int, cause: str = ""
    ) -> CollectiveError:
        return CollectiveError(
            status,
            operation=call.operation,
            purpose=call.purpose,
            rank=self.rank,
            peer=call.peer,
            deadline_s=call.deadline_s,
            wait=wait_for,
            waited=waited,
            seen=seen,
            cause=cause,
        )


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
