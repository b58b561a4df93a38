"""The watch of ranks that share no memory: an abort travels through the store that rank 0 holds, where each rank has a
thread blocked.

A gloo wait cannot be interrupted, so all of them are on a thread of their own (the lane), and the caller waits here for
that lane, for the deadline or for the abort, whichever comes first.
"""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import TYPE_CHECKING, Any, Final

import torch
from torch._C._distributed_c10d import TCPStore

from kernels.cpu.collectives import AbortReason, CollectiveError, Operation, Purpose, Status, Wait
from services.worker.dataplane.serial_executor import END_S
from services.worker.dataplane.watch import DEFAULT_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable

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


def call_of(operation: Operation, purpose: Purpose, peer: int, deadline_s: float) -> Call:
    """A call that begins now."""
    return Call(operation, purpose, peer, deadline_s, time.monotonic() + deadline_s)


def listen(host: str, port: int) -> TCPStore:
    """Rank 0's store, in which the group meets; port 0 takes a free one. RuntimeError where it cannot be bound."""
    deadline = timedelta(seconds=DEFAULT_DEADLINE_S)
    return TCPStore(host, port, is_master=True, timeout=deadline, wait_for_workers=False)


def connect(address: GlooAddress, *, is_master: bool = False) -> TCPStore:
    """A connection to the group's store; RuntimeError or a store error where there is none within the deadline."""
    deadline = timedelta(seconds=DEFAULT_DEADLINE_S)
    return TCPStore(
        address.store_host, address.store_port, is_master=is_master, timeout=deadline, wait_for_workers=False
    )


class GlooWatch:
    """See Watch. `waited_ns` is that of whole operations, which gloo does not divide."""

    def __init__(self, store: TCPStore, address: GlooAddress, rank: int, num_ranks: int, deadline_s: float) -> None:
        self._store, self.rank, self._num_ranks = store, rank, num_ranks
        self.deadline_s = deadline_s
        self._num_waits = self._waits_ns = 0
        self._aborted: Future[AbortReason] = Future()
        self._failure: CollectiveError | None = None
        # A connection of its own: it is blocked.
        watched = connect(address)
        self._thread = Thread(target=self._watch, args=(watched,), name=f"gloo-watch-{rank}", daemon=True)
        self._thread.start()

    @property
    def abort_reason(self) -> AbortReason | None:
        """See Watch."""
        return self._aborted.result() if self._aborted.done() else None

    @property
    def num_operations(self) -> int:
        """See Watch."""
        return self._num_waits

    @property
    def waited_ns(self) -> int:
        """See Watch."""
        return self._waits_ns

    def abort(self, reason: AbortReason) -> None:
        """See Watch: this rank at once, the others through the store."""
        self.let_go(reason)
        for peer in range(self._num_ranks):
            # A store that is gone has released every watcher already.
            with contextlib.suppress(RuntimeError):
                self._store.set(f"verdict/{peer}", reason.name)

    def check(self) -> None:
        """See Watch."""
        if self._failure is not None:
            raise self._failure

    def wait_for(self, call: Call, submit: Callable[[], Future[None]]) -> None:
        """Waits for what a lane is given; raises its failure as one of the closed set, or ABORTED without the lane."""
        self.check()
        started = time.monotonic_ns()
        done: Future[None] | None = None
        if not self._aborted.done():
            done = submit()
            either: tuple[Future[Any], ...] = (done, self._aborted)
            wait(either, call.deadline_s + LANE_GRACE_S, FIRST_COMPLETED)
        self._num_waits += 1
        self._waits_ns += time.monotonic_ns() - started
        if done is None or not done.done():
            raise self.fail(self.left_behind(call, "gloo did not return"))
        error = done.exception()
        if error is not None:
            raise self.failed(call, error) from error

    def fail(self, error: CollectiveError) -> CollectiveError:
        """Makes it the failure that every later call ends with."""
        if self._failure is None:
            self._failure = error
        return error

    def failed(self, call: Call, error: BaseException) -> CollectiveError:
        """What a call ended with, as one of the closed set; final."""
        return self.fail(self._translated(call, error))

    def let_go(self, reason: AbortReason) -> None:
        """Ends the waits of this rank."""
        with contextlib.suppress(Exception):
            self._aborted.set_result(reason)

    def left_behind(self, call: Call, why: str) -> CollectiveError:
        """Of a call that was not waited for any longer."""
        if not self._aborted.done():
            return self.error(call, Status.DATA_TIMEOUT, Wait.NOTHING, 0, 0, why)
        reason = self._aborted.result()
        return self.error(call, Status.ABORTED, Wait.NOTHING, 0, int(reason), f"aborted by {reason.name}")

    def error(
        self, call: Call, status: Status, wait_for: Wait, waited: int, seen: int, cause: str = ""
    ) -> CollectiveError:
        """Of a call on this rank."""
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

    def close(self) -> None:
        """Lets the watcher go."""
        self.let_go(AbortReason.SHUTDOWN)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"verdict/{self.rank}", AbortReason.SHUTDOWN.name)
        self._thread.join(END_S)

    def _watch(self, store: TCPStore) -> None:
        """Blocks until a verdict for this rank is in the store, or the store is gone with rank 0."""
        key = f"verdict/{self.rank}"
        try:
            while not self._aborted.done():
                with contextlib.suppress(torch.distributed.DistStoreError):
                    store.wait([key], timedelta(seconds=WATCH_S))
                    self.let_go(AbortReason[store.get(key).decode()])
        except RuntimeError:
            self.let_go(AbortReason.PEER_LOST)

    def _translated(self, call: Call, error: BaseException) -> CollectiveError:
        if isinstance(error, CollectiveError):
            return error
        text = str(error).splitlines()[0]
        if "imed out" not in text:
            return self.error(call, Status.LOST, Wait.NOTHING, 0, 0, text)
        sending = call.operation in (Operation.SEND, Operation.PUBLISH)
        status, wait_for = (Status.ACK_TIMEOUT, Wait.CREDIT) if sending else (Status.DATA_TIMEOUT, Wait.MESSAGE)
        return self.error(call, status, wait_for, 0, 0, text)
