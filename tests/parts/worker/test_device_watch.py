"""The watch of a device: what was enqueued is late, lost or aborted by name, and no such end is taken for success."""

import threading
from collections.abc import Iterator

import pytest

from kernels.cpu.collectives import AbortReason, CollectiveError, Operation, Purpose, Status
from services.worker.dataplane.device_watch import DeviceWatch
from services.worker.dataplane.gloo_watch import Call, GlooAddress, call_of, listen

WITHIN_S = 10.0
SHORT_S = 0.2


class Mark:
    """A point that a device passes when the test says so."""

    def __init__(self) -> None:
        self.passed, self.asked = threading.Event(), threading.Event()

    def query(self) -> bool:
        self.asked.set()
        return self.passed.is_set()

    def elapsed_time(self, end: "Mark") -> float:
        assert self.passed.is_set() and end.passed.is_set()
        return 2.0


class Group:
    """A communicator, which is aborted at most once."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def abort(self) -> None:
        assert not self.aborted.is_set()
        self.aborted.set()


def watch_of(deadline_s: float) -> tuple[DeviceWatch, Group]:
    store = listen("127.0.0.1", 0)
    watch, group = DeviceWatch(store, GlooAddress("127.0.0.1", store.port), 0, 1, deadline_s), Group()
    watch.groups.append(group)
    return watch, group


@pytest.fixture
def patient() -> Iterator[tuple[DeviceWatch, Group]]:
    watch, group = watch_of(WITHIN_S)
    yield watch, group
    watch.close()


@pytest.fixture
def hasty() -> Iterator[tuple[DeviceWatch, Group]]:
    watch, group = watch_of(SHORT_S)
    yield watch, group
    watch.close()


def sum_for(purpose: Purpose) -> Call:
    return call_of(Operation.ALL_REDUCE, purpose, 0, SHORT_S)


def expect(watch: DeviceWatch, purpose: Purpose = Purpose.FFN_OUTPUT) -> Mark:
    begun, ended = Mark(), Mark()
    begun.passed.set()
    watch.expect(sum_for(purpose), begun, ended)
    return ended


def test_the_watermark_grows_by_what_the_device_has_passed(patient: tuple[DeviceWatch, Group]) -> None:
    watch, _ = patient
    marks = [expect(watch) for _ in range(4)]
    for passed, mark in enumerate(marks):
        assert mark.asked.wait(WITHIN_S)
        assert watch.num_operations == passed
        assert watch.waited_ns == passed * 2_000_000
        mark.passed.set()
    watch.check()


def test_what_is_late_is_named_and_ends_the_device(hasty: tuple[DeviceWatch, Group]) -> None:
    watch, group = hasty
    expect(watch, Purpose.LOGITS)
    assert group.aborted.wait(WITHIN_S)
    with pytest.raises(CollectiveError) as error:
        watch.check()
    assert (error.value.status, error.value.purpose) == (Status.DATA_TIMEOUT, Purpose.LOGITS)


def test_a_clock_begins_when_the_operation_before_has_ended(patient: tuple[DeviceWatch, Group]) -> None:
    """What is issued ahead waits behind others: its own time has not begun."""
    watch, _ = patient
    first, second = expect(watch), expect(watch)
    assert first.asked.wait(WITHIN_S)
    assert not second.asked.is_set()
    first.passed.set()
    assert second.asked.wait(WITHIN_S)
    second.passed.set()
    watch.check()


def test_an_abort_is_no_success_of_what_it_ends(patient: tuple[DeviceWatch, Group]) -> None:
    watch, group = patient
    mark = expect(watch)
    assert mark.asked.wait(WITHIN_S)
    watch.abort(AbortReason.PEER_LOST)
    # The device's kernels end now, and whoever waited for them asks.
    with pytest.raises(CollectiveError) as error:
        watch.check()
    assert error.value.status is Status.ABORTED and "PEER_LOST" in str(error.value)
    assert group.aborted.wait(WITHIN_S)
    assert watch.num_operations == 0


def test_a_device_that_fails_is_lost(patient: tuple[DeviceWatch, Group]) -> None:
    watch, group = patient

    class Broken(Mark):
        def query(self) -> bool:
            raise RuntimeError("an illegal memory access was encountered")

    begun = Mark()
    watch.expect(sum_for(Purpose.LOGITS), begun, Broken())
    assert group.aborted.wait(WITHIN_S)
    with pytest.raises(CollectiveError, match=r"LOST.*illegal memory access"):
        watch.check()
