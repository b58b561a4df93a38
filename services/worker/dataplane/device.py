"""The carrier for ranks whose tensors are on devices: those go over NCCL, everything else over the gloo carrier below.

A group's operation is enqueued on the compute stream, in the log's order, and the watch follows it there. A message is
shipped by a lane of its own once the peer has asked for it, over gloo, after it has seen its header: so no kernel of
NCCL waits on a device for a rank that computes, and tags, sizes and what may be in flight are the gloo carrier's.

Each direction of each pair has a group of its own, since within one group operations wait for each other. `backend`
"gloo" makes those groups of gloo, so that all of this runs where there is no device.
"""

from __future__ import annotations

import contextlib
import os
from concurrent.futures import Future
from concurrent.futures import TimeoutError as WaitTimeoutError
from datetime import timedelta
from itertools import permutations
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import (
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ProcessGroupGloo,
    ReduceOp,
)

from kernels.cpu.collectives import Operation, Purpose
from services.worker.dataplane.device_watch import DeviceWatch, Mark
from services.worker.dataplane.gloo import GlooBounds, GlooCarrier, Posted
from services.worker.dataplane.gloo_watch import WATCH_S, Call, GlooAddress, GlooWatch, call_of, connect
from services.worker.dataplane.serial_executor import SerialExecutor
from services.worker.dataplane.watch import DEFAULT_DEADLINE_S

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch._C._distributed_c10d import TCPStore


Backend = Literal["nccl", "gloo"]
ASK_TAG: Final = 6
MESSAGE_TAG: Final = 7
MEET_S: Final = 60.0
"""For all communicators together, which take some seconds."""
SENDER, TAKER = 0, 1
"""Ranks in the group of one direction of a pair."""
NCCL_SETTINGS: Final = MappingProxyType(
    {
        # NVLink multicast can put a host's GPUs out of service for all who share them.
        "NCCL_NVLS_ENABLE": "0",
        # Deadlines are this carrier's: torch's watchdog would end the process instead of the wait.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    }
)
"""Set in this process before its first communicator, unless they are set already."""


class _Delivery:
    """A message that its lane has yet to hand over."""

    def __init__(self, done: Future[None]) -> None:
        self._done = done

    def wait(self, timeout: timedelta) -> None:
        """See Posted."""
        try:
            self._done.result(timeout.total_seconds())
        except WaitTimeoutError:
            raise RuntimeError(
                f"timed out after {timeout.total_seconds():g} s: the peer has not asked for it"
            ) from None


class DeviceCarrier(GlooCarrier):
    """Implements Carrier for tensors of one device and of host memory."""

    def __init__(
        self,
        address: GlooAddress,
        rank: int,
        num_ranks: int,
        sampling_rank: int,
        bounds: GlooBounds,
        store: TCPStore | None = None,
        *,
        place: torch.device,
        backend: Backend,
    ) -> None:
        """Meets like GlooCarrier, and on the devices; CollectiveError where that takes more than `MEET_S`."""
        self._place, self._backend, self._address = place, backend, address
        self._is_cuda = place.type == "cuda"
        self._ways: dict[tuple[int, int], Any] = {}
        super().__init__(address, rank, num_ranks, sampling_rank, bounds, store)
        self._whole = self._group_of("all", rank, num_ranks)
        for sender, taker in permutations(range(num_ranks), 2):
            if rank in (sender, taker):
                own = SENDER if rank == sender else TAKER
                self._ways[sender, taker] = self._group_of(f"{sender}-{taker}", own, 2)
        if num_ranks > 1:
            self._run(call_of(Operation.BARRIER, Purpose.BOOT, rank, MEET_S), self._meet)
        cuda: Any = torch.cuda
        # Made once: torch hands out 32 streams by turns, and one that NCCL has as well would order what must not be.
        self._beside = {peer: cuda.Stream(place) for peer in range(num_ranks) if peer != rank and self._is_cuda}
        self._shippers = {peer: SerialExecutor(f"ship-{rank}-{peer}") for peer in range(num_ranks) if peer != rank}

    def _watch_of(self, address: GlooAddress) -> GlooWatch:
        self._device_watch = DeviceWatch(self._store, address, self.rank, self.num_ranks, self._bounds.deadline_s)
        return self._device_watch

    def _group_of(self, name: str, rank: int, size: int) -> Any:
        # A connection of its own: a wait for a peer must not hold up an abort.
        store = PrefixStore(f"device/{name}", connect(self._address))
        if self._backend == "gloo":
            gloo: Any = ProcessGroupGloo
            options = gloo._Options()
            options._devices = [gloo.create_device(hostname=self._address.bind_host)]
            options._timeout = timedelta(seconds=DEFAULT_DEADLINE_S)
            return gloo(store, rank, size, options)
        for variable, value in NCCL_SETTINGS.items():
            os.environ.setdefault(variable, value)
        nccl: Any = torch.distributed.ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = timedelta(seconds=WATCH_S)
        group = nccl(store, rank, size, options)
        self._device_watch.groups.append(group)
        return group

    def _meet(self) -> None:
        """Every operation once, one after the other and in one order on all ranks.

        The first use of a communicator, or of a kernel, may wait for all that its device is doing; while a message is
        under way each direction could then wait for the other for ever.
        """
        probe = torch.ones(self.num_ranks, device=self._place)
        ones, byte = [1] * self.num_ranks, torch.ones(1, dtype=torch.uint8, device=self._place)
        self._end(self._whole.allreduce([probe], AllreduceOptions()))
        self._end(self._whole.broadcast([probe], BroadcastOptions()))
        self._end(self._whole.alltoall_base(torch.empty_like(probe), probe, ones, ones, AllToAllOptions()))
        for (sender, _), group in self._ways.items():
            pass_on, peer = (group.send, TAKER) if sender == self.rank else (group.recv, SENDER)
            self._end(pass_on([byte], peer, MESSAGE_TAG))

    def _is_own(self, tensor: Tensor) -> bool:
        return tensor.device == self._place

    def _sum(self, call: Call, tensor: Tensor) -> None:
        if not self._is_own(tensor):
            super()._sum(call, tensor)
            return
        options = AllreduceOptions()
        options.reduceOp = ReduceOp(ReduceOp.SUM)
        options.timeout = self._timeout(call)
        self._enqueue(call, self._whole.allreduce, [tensor], options)

    def _spread(self, call: Call, tensor: Tensor, from_rank: int) -> None:
        if not self._is_own(tensor):
            super()._spread(call, tensor, from_rank)
            return
        options = BroadcastOptions()
        options.rootRank = from_rank
        options.timeout = self._timeout(call)
        self._enqueue(call, self._whole.broadcast, [tensor], options)

    def _swap(self, call: Call, tag: int, given: Mapping[int, Tensor], taken: Mapping[int, Tensor]) -> None:
        """All of it in one operation of the group, also for ranks that have nothing to give and nothing to take."""
        some = next(iter({**given, **taken}.values()), None)
        if some is not None and not self._is_own(some):
            super()._swap(call, tag, given, taken)
            return
        like = torch.empty(0, device=self._place) if some is None else some
        nothing = like.new_empty(0)
        outgoing, incoming = (
            [nothing if peer == self.rank else tensors.get(peer, nothing) for peer in range(self.num_ranks)]
            for tensors in (given, taken)
        )
        sizes_out, sizes_in = ([tensor.numel() for tensor in tensors] for tensors in (outgoing, incoming))
        arrived = like.new_empty(sum(sizes_in))
        options = AllToAllOptions()
        options.timeout = self._timeout(call)
        packed = torch.cat([tensor.reshape(-1) for tensor in outgoing])
        self._enqueue(call, self._whole.alltoall_base, arrived, packed, sizes_in, sizes_out, options)
        for tensor, part in zip(incoming, torch.split(arrived, sizes_in), strict=True):
            tensor.copy_(part.view(tensor.shape))

    def _ship(self, payload: Tensor, peer: int) -> Posted:
        if not self._is_own(payload):
            return super()._ship(payload, peer)
        written = torch.cuda.current_stream(self._place).record_event() if self._is_cuda else None
        return _Delivery(self._shippers[peer].submit(lambda: self._deliver(payload, peer, written)))

    def _deliver(self, payload: Tensor, peer: int, written: Any) -> None:
        """On the peer's lane and a stream beside the model's, which must not wait for a peer."""
        self._group.recv([torch.empty(1, dtype=torch.int64)], peer, ASK_TAG).wait(timedelta(seconds=WATCH_S))
        cuda: Any = torch.cuda
        with cuda.stream(self._beside[peer]) if self._is_cuda else contextlib.nullcontext():
            if self._is_cuda:
                cuda.current_stream(self._place).wait_event(written)
            self._end(self._ways[self.rank, peer].send([payload], TAKER, MESSAGE_TAG))

    def _fetch(self, call: Call, into: Tensor, peer: int) -> None:
        if not self._is_own(into):
            super()._fetch(call, into, peer)
            return
        self._group.send([torch.ones(1, dtype=torch.int64)], peer, ASK_TAG).wait(call.left())
        self._enqueue(call, self._ways[peer, self.rank].recv, [into], SENDER, MESSAGE_TAG)

    def _timeout(self, call: Call) -> timedelta:
        """NCCL's operations are ended by this carrier and not by their own clock."""
        return timedelta(seconds=WATCH_S if self._backend == "nccl" else call.deadline_s)

    def _run(self, call: Call, work: Callable[[], None], tensor: Tensor | None = None) -> None:
        """What is of the device alone is enqueued by the caller; the rest has the lane."""
        if tensor is None or not self._is_own(tensor):
            super()._run(call, work)
            return
        self.watch.check()
        if self.watch.abort_reason is not None:
            raise self.watch.fail(self.watch.left_behind(call, ""))
        try:
            work()
        except Exception as error:
            raise self.watch.failed(call, error) from error

    def _enqueue(self, call: Call, operation: Callable[..., Any], *arguments: Any) -> None:
        """On the current stream, between two marks that the watch follows."""
        begun = self._mark()
        # Of NCCL this lets the stream wait, not the host; of gloo it is the wait itself.
        operation(*arguments).wait()
        ended = self._mark()
        if begun is not None and ended is not None:
            self._device_watch.expect(call, begun, ended)

    def _mark(self) -> Mark | None:
        if not self._is_cuda:
            return None
        cuda: Any = torch.cuda
        mark: Mark = cuda.Event(enable_timing=True)
        mark.record()  # type: ignore[attr-defined]  # torch.cuda.Event
        return mark

    def _end(self, work: Any) -> None:
        """Returns when the device has done it: for what is beside the compute stream, and before there is one."""
        work.wait()
        if self._is_cuda:
            torch.cuda.current_stream(self._place).synchronize()

    def close(self) -> None:
        """See Carrier: communicators are given back as well."""
        super().close()
        for shipper in self._shippers.values():
            shipper.close()
