"""The resident table: who is in the batch, at which index, and which indexes ranks have yet to hear are free. Pure.

Invariant: every index is free or belongs to one request that still holds its blocks; an index freed here is in
`released` of the next plan, before any plan admits somebody at it.
"""

from bisect import insort
from collections.abc import Iterator

from services.core.ids import RequestIndex
from services.scheduler.batch.running_request import Request


class RunningRequests:
    """Requests in the batch in their order: the first is preempted last."""

    __slots__ = ("_free", "_requests", "_unannounced")

    def __init__(self, max_resident_requests: int) -> None:
        self._requests: list[Request] = []
        self._free = [RequestIndex(index) for index in range(max_resident_requests - 1, -1, -1)]
        self._unannounced: list[RequestIndex] = []

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def num_free(self) -> int:
        """Requests that could enter as far as indexes go."""
        return len(self._free)

    @property
    def youngest(self) -> Request:
        """Who is preempted first."""
        return self._requests[-1]

    def enter(self, request: Request) -> RequestIndex:
        """Gives it an index; the caller has seen that one is free."""
        request.index = self._free.pop()
        insort(self._requests, request, key=lambda resident: resident.order)
        return request.index

    def leave(self, request: Request) -> None:
        """No step takes it from here on; its index stays its own until `free`."""
        self._requests.remove(request)

    def free(self, request: Request) -> None:
        """Its index may be used again, and the next plan says so first."""
        assert request.index is not None, f"request {request.request_id} has no index to free"
        self._unannounced.append(request.index)
        self._free.append(request.index)
        request.index = None

    def announce(self) -> list[RequestIndex]:
        """Indexes freed since the last plan, for the one being written."""
        released, self._unannounced = self._unannounced, []
        return released
