"""Faults of the flip that no schedule shows, because they lie in a library or in memory: shown where they are."""

import re
import threading
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore
from torch.distributed import ProcessGroupGloo

from kernels.cpu.checksum import checksum, checksum_reference

SERVICES = Path(__file__).parents[2] / "services"
POLLED_S = 0.5
SMALL_BYTES, LARGE_BYTES = 64 << 20, 192 << 20
"""A chunk of the shipped sums is 16 MiB and is there a few times over; the fault takes eight times the payload."""


def gloo_pair() -> list[Any]:
    store, groups = HashStore(), dict[int, Any]()

    def join(rank: int) -> None:
        groups[rank] = ProcessGroupGloo(store, rank, 2, timedelta(seconds=20))

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [groups[0], groups[1]]


def test_f_polling_completes_nothing_and_waiting_does() -> None:
    sender, receiver = gloo_pair()
    sent, received = torch.arange(4), torch.zeros(4, dtype=torch.int64)
    handles = [receiver.recv([received], 0, 1), sender.send([sent], 1, 1)]
    until_s = monotonic() + POLLED_S
    polls = next(number for number in count(1) if monotonic() > until_s or all(h.is_completed() for h in handles))
    assert torch.equal(received, sent), "the bytes are there"
    assert not any(handle.is_completed() for handle in handles), f"gloo completes by polling ({polls} polls): drop F"
    for handle in handles:
        handle.wait(timedelta(seconds=20))
    assert all(handle.is_completed() for handle in handles)


def test_f_nothing_shipped_polls_a_handle() -> None:
    sources = list(SERVICES.rglob("*.py"))
    polling = [path.name for path in sources if re.search(r"\.is_completed\(", path.read_text("utf-8"))]
    assert sources and not polling


def transient_bytes(call: Callable[[], object]) -> int:
    """How far resident memory rises above where it was, at most, while `call` runs."""
    Path("/proc/self/clear_refs").write_text("5", "ascii")  # Resets the high-water mark.
    before = memory_kib("VmRSS")
    call()
    return 1024 * (memory_kib("VmHWM") - before)


def memory_kib(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"))
    assert found is not None
    return int(found[1])


def widening_sum(payload: torch.Tensor) -> int:
    """W: every byte becomes a word of eight, and a copy of all of them."""
    return int(payload.to(torch.int64).sum())


@pytest.mark.parametrize("shipped", [checksum, checksum_reference])
def test_w_a_checksum_takes_no_memory_worth_speaking_of(shipped: Callable[[torch.Tensor], int]) -> None:
    payload = torch.ones(LARGE_BYTES, dtype=torch.uint8)
    shipped(payload[:4096])
    assert transient_bytes(lambda: shipped(payload)) < LARGE_BYTES


def test_w_the_fault_is_seen_by_the_same_instrument() -> None:
    payload = torch.ones(SMALL_BYTES, dtype=torch.uint8)
    assert transient_bytes(lambda: widening_sum(payload)) > 7 * SMALL_BYTES
