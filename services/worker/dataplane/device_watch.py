"""The watch of ranks on devices: follows what was enqueued by events, on a thread that touches no compute stream.

An operation's clock begins when the one before it has ended, so that what is issued ahead is not late. Past its
deadline, or at an abort, NCCL's own abort ends whatever spins on the device; the failure is known before that, so that
nobody takes the end of an aborted kernel for success.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, Final, Protocol

from kernels.cpu.collectives import Status, Wait
from services.worker.dataplane.gloo_watch import Call, GlooAddress, GlooWatch
from services.worker.dataplane.serial_executor import END_S

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

    from kernels.cpu.collectives import AbortReason, CollectiveError

LOOK_S: Final = 0.01
"""How often a device is asked whether it has come further; an abort is heard at once."""
RELEASE_S: Final = 5.0
"""How long giving the communicators back may take."""


class Mark(Protocol):
    """A point in the compute stream, as torch.cuda.Event is."""

    def query(self) -> bool:
        """Whether the device has passed it."""

    def elapsed_time(self, end: Any, /) -> float:
        """Milliseconds to a later one, both passed."""


class DeviceWatch(GlooWatch):
    """See Watch; waits on the host are those of GlooWatch. `waited_ns` is that of whole operations."""

    def __init__(self, store: TCPStore, address: GlooAddress, rank: int, num_ranks: int, deadline_s: float) -> None:
        self.groups: list[Any] = []
        """Of NCCL, each aborted once."""
        self._pending: deque[tuple[Call, Mark, Mark]] = deque()
        self._more, self._is_closed = Event(), False
        self._ending: Thread | None = None
        self._num_followed = self._device_ns = 0
        super().__init__(store, address, rank, num_ranks, deadline_s)
        self._follower = Thread(target=self._follow, name=f"device-watch-{rank}", daemon=True)
        self._follower.start()

    @property
    def num_operations(self) -> int:
        """See Watch."""
        return super().num_operations + self._num_followed

    @property
    def waited_ns(self) -> int:
        """See Watch."""
        return super().waited_ns + self._device_ns

    def expect(self, call: Call, begun: Mark, ended: Mark) -> None:
        """An operation is enqueued between two marks."""
        self._pending.append((call, begun, ended))
        self._more.set()

    def let_go(self, reason: AbortReason) -> None:
        """Ends the waits of this rank, and what its device is in."""
        super().let_go(reason)
        with contextlib.suppress(IndexError):
            call, _, _ = self._pending[0]
            super().fail(self.left_behind(call, "the device did not come to its end"))
        self._release()

    def fail(self, error: CollectiveError) -> CollectiveError:
        """See GlooWatch; the device is ended as well."""
        super().fail(error)
        self._release()
        return error

    def close(self) -> None:
        """Lets the threads go."""
        super().close()
        self._is_closed = True
        self._more.set()
        self._follower.join(END_S)
        if self._ending is not None:
            self._ending.join(RELEASE_S)

    def _follow(self) -> None:
        while not self._is_closed:
            self._more.wait()
            self._more.clear()
            while self._pending and not self._is_closed:
                self._follow_one(*self._pending[0])
                self._pending.popleft()

    def _follow_one(self, call: Call, begun: Mark, ended: Mark) -> None:
        until = time.monotonic() + self.deadline_s
        try:
            while not ended.query():
                if self._failure is not None:
                    return
                if time.monotonic() > until:
                    cause = f"{self._num_followed} operations before it have ended"
                    self.fail(self.error(call, Status.DATA_TIMEOUT, Wait.NOTHING, 0, 0, cause))
                    return
                with contextlib.suppress(TimeoutError):
                    self._aborted.result(LOOK_S)
            self._num_followed += 1
            self._device_ns += int(begun.elapsed_time(ended) * 1e6)
        except RuntimeError as error:
            self.fail(self.error(call, Status.LOST, Wait.NOTHING, 0, 0, str(error).splitlines()[0]))

    def _release(self) -> None:
        """Ends what waits on the device, once, without waiting for that."""
        groups, self.groups = self.groups, []
        if groups:
            self._ending = Thread(target=_abort, args=(groups,), name=f"nccl-abort-{self.rank}", daemon=True)
            self._ending.start()


def _abort(groups: list[Any]) -> None:
    for group in groups:
        # One that never made its communicator has nothing to abort.
        with contextlib.suppress(RuntimeError):
            group.abort()
