"""The shared region and one communicator per thread of this process: layout, faults, deadlines, mirror words."""

from __future__ import annotations

import os
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from kernels.cpu import collectives, shm_region
from kernels.cpu.collectives import (
    AbortReason,
    CollectiveError,
    Operation,
    Purpose,
    RegionShape,
    ShmCommunicator,
    ShmRegion,
    Status,
    Wait,
)

HEADER_FILE = Path(collectives.__file__).parent / "native" / "collectives.h"
SHAPE = RegionShape(
    num_ranks=2, max_message_bytes=4096, max_rows=8, num_board_steps=4, stage_bytes=4096, slot_bytes=1024
)
SHORT = 0.05
WITHIN = 10.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Group:
    region: ShmRegion
    ranks: tuple[ShmCommunicator, ...]

    def together(self, program: Callable[[ShmCommunicator], T]) -> list[T]:
        with ThreadPoolExecutor(len(self.ranks)) as threads:
            return list(threads.map(program, self.ranks))


@pytest.fixture
def region() -> Iterator[ShmRegion]:
    created = ShmRegion.create(SHAPE)
    yield created
    created.close()


@pytest.fixture
def group(region: ShmRegion) -> Iterator[Group]:
    ranks = tuple(ShmCommunicator(region, rank) for rank in range(2))
    yield Group(region, ranks)
    for rank in ranks:
        rank.close()


def poke(region: ShmRegion, offset: int, value: int) -> None:
    os.pwrite(region.fd, struct.pack("<Q", value), offset)


def failure_of(call: Callable[[], object]) -> CollectiveError:
    with pytest.raises(CollectiveError) as caught:
        call()
    return caught.value


def summed(rank: ShmCommunicator, size: int = 4, purpose: Purpose = Purpose.TEST, deadline_s: float = WITHIN) -> float:
    x = torch.full((size,), float(rank.rank + 1))
    rank.all_reduce_sum(x, deadline_s=deadline_s, purpose=purpose)
    return float(x[-1])


def test_the_layout_is_pinned(region: ShmRegion) -> None:
    # header 2 lines, per rank 5, per ordered pair 2, board entries in whole lines, a line before each slot's bytes
    assert astuple(region.layout) == (128, 768, 1280, 128, 4096, 20480, 1088, 57344)
    three = ShmRegion.create(RegionShape(num_ranks=3, max_message_bytes=512 * 576 * 4, max_rows=256))
    assert astuple(three.layout) == (128, 1088, 2240, 1088, 73728, 1646592, 65600, 22904832)
    three.close()


def test_python_and_c_have_the_same_words() -> None:
    text = HEADER_FILE.read_text()

    def names(enum: str) -> list[str]:
        return [name.strip() for name in re.search(rf"enum {enum} {{([^}}]*)}}", text)[1].split(",")]  # type: ignore[index]

    assert names("status") == ["OK", *(status.name for status in Status if status is not Status.LOST)]
    short = {"DATA_FLAG": "DATA", "BOARD_ENTRY": "BOARD", "NOTHING": "NONE"}
    spelled = [
        f"AGREE_{wait.name.removeprefix('SAME_')}"
        if wait.name.startswith("SAME_")
        else f"WAIT_{short.get(wait.name, wait.name)}"
        for wait in Wait
    ]
    assert names("wait") == spelled
    assert names("operation_code") == ["NO_OPERATION", *(operation.name for operation in Operation if operation)]


@pytest.mark.parametrize(
    "shape",
    [
        RegionShape(num_ranks=33, max_message_bytes=64, max_rows=8),
        RegionShape(num_ranks=2, max_message_bytes=64, max_rows=8, stage_bytes=100),
        RegionShape(num_ranks=2, max_message_bytes=64, max_rows=0),
    ],
)
def test_a_shape_that_cannot_be_is_refused_with_its_numbers(shape: RegionShape) -> None:
    with pytest.raises(ValueError, match=f"num_ranks={shape.num_ranks}.*stage_bytes={shape.stage_bytes}"):
        ShmRegion.create(shape)


def test_a_descriptor_without_a_region_is_refused() -> None:
    fd = os.memfd_create("other")
    os.ftruncate(fd, 8192)
    with pytest.raises(ValueError, match="holds no region"):
        ShmRegion(fd)
    os.close(fd)


def test_a_rank_attaches_once_per_generation(region: ShmRegion) -> None:
    ShmCommunicator(region, 0).close()
    with pytest.raises(RuntimeError, match=f"attached by process {os.getpid()} already"):
        ShmCommunicator(region, 0)
    region.reset()
    ShmCommunicator(region, 0).close()
    with pytest.raises(ValueError, match="rank 2 cannot attach"):
        ShmCommunicator(region, 2)


@pytest.mark.parametrize("one_shot_bytes", [0, 1 << 30])
@pytest.mark.parametrize("size", [1, 15, 17, 1024, 1025, 5000])
def test_both_sums_agree_for_every_size(region: ShmRegion, one_shot_bytes: int, size: int) -> None:
    ranks = tuple(ShmCommunicator(region, rank, one_shot_bytes=one_shot_bytes) for rank in range(2))

    def program(rank: ShmCommunicator) -> torch.Tensor:
        x = torch.arange(size, dtype=torch.float32) * (rank.rank + 1)
        rank.all_reduce_sum(x, deadline_s=WITHIN, purpose=Purpose.TEST)
        return x

    for x in Group(region, ranks).together(program):
        assert torch.equal(x, torch.arange(size, dtype=torch.float32) * 3)


def test_rounds_and_channels_run_over_the_end_of_their_counters(region: ShmRegion) -> None:
    start = 2**64 - 5
    layout = region.layout
    for rank in range(2):
        lines = layout.ranks + rank * shm_region.RANK_BYTES
        for line in (1, 2, 3):
            poke(region, lines + line * 64, start)
    for word in range(0, 4 * shm_region.CHANNEL_BYTES, 64):
        poke(region, layout.channels + word, 2**64 - 8)
    ranks = tuple(ShmCommunicator(region, rank) for rank in range(2))

    def program(rank: ShmCommunicator) -> list[float]:
        sums = []
        for tag in range(24):
            sums.append(summed(rank))
            rank.send(torch.full((3,), float(tag)), 1 - rank.rank, tag, deadline_s=WITHIN, purpose=Purpose.TEST)
            into = torch.empty(3)
            rank.recv(into, 1 - rank.rank, tag, deadline_s=WITHIN, purpose=Purpose.TEST)
            assert into.tolist() == [tag] * 3
        return sums

    assert Group(region, ranks).together(program) == [[3.0] * 24] * 2
    assert region.mirror().ranks[0].acknowledged == (start + 24) % 2**64


def test_a_silent_peer_is_a_data_timeout_that_names_the_wait(group: Group) -> None:
    error = failure_of(lambda: summed(group.ranks[0], deadline_s=SHORT, purpose=Purpose.FFN_OUTPUT))
    assert (error.status, error.wait, error.peer) == (Status.DATA_TIMEOUT, Wait.DATA_FLAG, 1)
    assert (error.waited, error.seen, error.deadline_s) == (1, 0, SHORT)
    assert "ALL_REDUCE for FFN_OUTPUT on rank 0: DATA_TIMEOUT (data flag of rank 1): 1 expected, 0 seen" in str(error)
    mirror = group.region.mirror().ranks[0]
    assert (mirror.operation, mirror.status, mirror.peer) == (Operation.ALL_REDUCE, Status.DATA_TIMEOUT, 1)
    assert (mirror.waited, mirror.seen) == (1, 0)


def test_the_first_failure_is_final(group: Group) -> None:
    first = failure_of(lambda: summed(group.ranks[0], deadline_s=SHORT))
    later = failure_of(lambda: group.ranks[0].send(torch.ones(1), 1, 0, deadline_s=WITHIN, purpose=Purpose.TEST))
    assert (later.status, later.wait, later.waited) == (first.status, first.wait, first.waited)


def test_a_peer_that_never_reads_is_an_acknowledgement_timeout(group: Group) -> None:
    giver, part = group.ranks[0], torch.ones(1, 4)

    def give() -> None:
        giver.all_gather(part, (16, 16), None, deadline_s=SHORT, purpose=Purpose.LOGITS)

    give()
    give()
    error = failure_of(give)
    assert (error.status, error.wait, error.peer) == (Status.ACK_TIMEOUT, Wait.ACKNOWLEDGEMENT, 1)
    assert (error.waited, error.seen) == (1, 0)


def test_a_full_channel_is_an_acknowledgement_timeout_after_its_depth(group: Group) -> None:
    sender, message = group.ranks[0], torch.ones(1024)
    for tag in range(SHAPE.max_messages_in_flight):
        sender.send(message, 1, tag, deadline_s=SHORT, purpose=Purpose.HIDDEN_STATES)
    words = group.region.mirror().channels[0]
    assert (words.from_rank, words.to_rank, words.sent, words.consumed) == (0, 1, SHAPE.num_slots, 0)
    error = failure_of(lambda: sender.send(message, 1, 9, deadline_s=SHORT, purpose=Purpose.HIDDEN_STATES))
    assert (error.status, error.wait, error.peer) == (Status.ACK_TIMEOUT, Wait.CREDIT, 1)


def test_a_flag_ahead_of_its_round_is_a_fault_and_is_not_read(group: Group) -> None:
    lines = group.region.layout.ranks + shm_region.RANK_BYTES
    poke(group.region, lines + 3 * 64, 3)  # rank 1 claims round 3 in the bank of round 1
    error = failure_of(lambda: summed(group.ranks[0]))
    assert (error.status, error.wait, error.peer, error.waited, error.seen) == (Status.AHEAD, Wait.DATA_FLAG, 1, 1, 3)


def test_an_acknowledgement_ahead_of_what_can_be_is_a_fault(group: Group) -> None:
    poke(group.region, group.region.layout.ranks + shm_region.RANK_BYTES + 64, 3)
    error = failure_of(lambda: summed(group.ranks[0]))
    assert (error.status, error.wait) == (Status.AHEAD, Wait.ACKNOWLEDGEMENT)


def test_a_channel_ahead_of_its_credit_is_a_fault(group: Group) -> None:
    poke(group.region, group.region.layout.channels + 2 * shm_region.CHANNEL_BYTES, SHAPE.num_slots + 1)
    error = failure_of(lambda: group.ranks[0].recv(torch.ones(1), 1, 0, deadline_s=WITHIN, purpose=Purpose.TEST))
    assert (error.status, error.wait) == (Status.AHEAD, Wait.MESSAGE)


def outcome(call: Callable[[], object]) -> CollectiveError | None:
    try:
        call()
    except CollectiveError as error:
        return error
    return None


def test_ranks_that_disagree_about_what_they_do_are_stopped_by_name(region: ShmRegion) -> None:
    def operation(rank: ShmCommunicator) -> CollectiveError | None:
        if rank.rank:
            return outcome(lambda: rank.barrier(deadline_s=SHORT, purpose=Purpose.TEST))
        return outcome(lambda: summed(rank, deadline_s=SHORT))

    def purpose(rank: ShmCommunicator) -> CollectiveError | None:
        return outcome(lambda: summed(rank, purpose=Purpose(rank.rank + 3), deadline_s=SHORT))

    def size(rank: ShmCommunicator) -> CollectiveError | None:
        return outcome(lambda: summed(rank, size=rank.rank + 3, deadline_s=SHORT))

    for program, wait in ((operation, Wait.SAME_OPERATION), (purpose, Wait.SAME_PURPOSE), (size, Wait.SAME_BYTES)):
        region.reset()
        errors = Group(region, tuple(ShmCommunicator(region, rank) for rank in range(2))).together(program)
        assert [(error.status, error.wait) for error in errors if error] == [(Status.MISMATCH, wait)] * 2


def test_two_threads_in_one_communicator_are_refused(group: Group) -> None:
    entered = threading.Event()

    def first() -> CollectiveError:
        entered.set()
        return failure_of(lambda: summed(group.ranks[0]))

    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(first)
        entered.wait(WITHIN)
        while group.region.rank_words(0).wait is not Wait.DATA_FLAG:
            pass
        with pytest.raises(RuntimeError, match="two threads at once"):
            summed(group.ranks[0])
        with pytest.raises(RuntimeError, match="1 operations in flight"):
            group.ranks[0].close()
        group.region.abort(AbortReason.OPERATOR)
        assert waiting.result().status is Status.ABORTED


def test_a_closed_communicator_raises(group: Group, region: ShmRegion) -> None:
    group.ranks[0].close()
    with pytest.raises(ValueError, match="closed"):
        summed(group.ranks[0])


def test_the_first_abort_stays_and_is_named(group: Group) -> None:
    group.region.abort(AbortReason.WEDGED)
    group.region.abort(AbortReason.SHUTDOWN)
    error = failure_of(lambda: group.ranks[1].read(0, torch.empty(8, dtype=torch.int32), deadline_s=WITHIN))
    assert error.status is Status.ABORTED
    assert "aborted by WEDGED" in str(error)
    assert group.region.mirror().abort_reason is AbortReason.WEDGED


def test_a_long_wait_sleeps(group: Group) -> None:
    """A wait that spins would use the processor for as long as it lasts."""
    used = time.thread_time()
    error = failure_of(lambda: group.ranks[0].recv(torch.ones(1), 1, 0, deadline_s=0.5, purpose=Purpose.TEST))
    assert error.status is Status.DATA_TIMEOUT
    assert time.thread_time() - used < 0.25
    assert group.region.rank_words(0).wait_ns >= 450_000_000


def test_the_board_keeps_its_last_steps_and_refuses_older_ones(group: Group) -> None:
    for sequence in range(6):
        group.ranks[1].publish(sequence, torch.arange(sequence, dtype=torch.int32))
    out = torch.empty(8, dtype=torch.int32)
    for sequence in (2, 5, 3, 3):
        assert group.ranks[0].read(sequence, out, deadline_s=SHORT) == sequence
        assert out[:sequence].tolist() == list(range(sequence))
    error = failure_of(lambda: group.ranks[0].read(1, out, deadline_s=SHORT))
    assert (error.status, error.wait) == (Status.OVERWRITTEN, Wait.BOARD_ENTRY)


def test_a_step_is_published_once(group: Group) -> None:
    ids = torch.zeros(1, dtype=torch.int32)
    group.ranks[1].publish(5, ids)
    assert failure_of(lambda: group.ranks[1].publish(5, ids)).status is Status.AHEAD


def test_tensors_that_do_not_fit_are_refused(group: Group) -> None:
    rank = group.ranks[0]
    with pytest.raises(ValueError, match="wants float32, got"):
        rank.all_reduce_sum(torch.ones(2, dtype=torch.float64), deadline_s=SHORT, purpose=Purpose.TEST)
    with pytest.raises(ValueError, match="contiguous"):
        rank.all_reduce_sum(torch.ones(4, 4).t(), deadline_s=SHORT, purpose=Purpose.TEST)
    with pytest.raises(ValueError, match="16 bytes in and 32 out expected, got 8"):
        rank.all_gather(torch.ones(1, 2), (16, 16), None, deadline_s=SHORT, purpose=Purpose.TEST)
    with pytest.raises(ValueError, match=r"of \[1, 1\]: 2 elements in and 2 out of one type expected, got 2 .* and 3"):
        rank.all_to_all(torch.ones(2), (1, 1), torch.ones(3), deadline_s=SHORT, purpose=Purpose.TEST)
    with pytest.raises(ValueError, match="9 ids for a board of 8 rows"):
        rank.publish(0, torch.zeros(9, dtype=torch.int32))
    with pytest.raises(ValueError, match="int32"):
        rank.publish(0, torch.zeros(1))
    with pytest.raises(ValueError, match="peer 0"):
        rank.send(torch.ones(1), 0, 0, deadline_s=SHORT, purpose=Purpose.TEST)
    with pytest.raises(ValueError, match="peer 2"):
        rank.broadcast(torch.ones(1), 2, deadline_s=SHORT, purpose=Purpose.TEST)
