"""Times sums and messages between processes of this host, over shared memory and over gloo: p50, p99 and mean, in us.

    python -m kernels.bench.collectives [--ranks 2 3] [--carriers shm gloo]

Times are those of rank 0 around the Python call. With more ranks than cores they have two humps (whoever comes last
need not wait), so the mean says more than the p50. Sums are back to back; a message's time is half a round trip between
ranks 0 and 1. `one` and `two` force the one-shot and the two-shot sum, `shm` chooses by ONE_SHOT_BYTES.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from kernels.cpu.collectives import ONE_SHOT_BYTES, Purpose, RegionShape, ShmCommunicator, ShmRegion

if TYPE_CHECKING:
    from collections.abc import Callable

ROWS = (1, 8, 32, 512)
WIDTH = 576
DEADLINE_S = 30.0
ONE_SHOT = {"shm": ONE_SHOT_BYTES, "one": 1 << 40, "two": 0}


def timed(call: Callable[[], object], num_calls: int) -> dict[str, float]:
    """Calls some more than `num_calls` times and drops the first ones; returns microseconds."""
    taken = []
    for _ in range(num_calls + num_calls // 10):
        started = time.perf_counter_ns()
        call()
        taken.append(time.perf_counter_ns() - started)
    ordered = sorted(taken[num_calls // 10 :])
    middle, late = ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
    return {"p50": middle / 1e3, "p99": late / 1e3, "mean": sum(ordered) / len(ordered) / 1e3}


def shm_calls(communicator: ShmCommunicator, tensor: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """The sum, and the round trip between ranks 0 and 1 (nothing on others)."""
    rank, peer = communicator.rank, 1 - communicator.rank

    def total() -> None:
        communicator.all_reduce_sum(tensor, deadline_s=DEADLINE_S, purpose=Purpose.TEST)

    def send() -> None:
        communicator.send(tensor, peer, 0, deadline_s=DEADLINE_S, purpose=Purpose.TEST)

    def recv() -> None:
        communicator.recv(tensor, peer, 0, deadline_s=DEADLINE_S, purpose=Purpose.TEST)

    return total, round_trip(rank, send, recv)


def gloo_calls(group: Any, rank: int, tensor: torch.Tensor) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same over gloo."""
    peer = 1 - rank
    return (
        lambda: group.allreduce([tensor]).wait(),
        round_trip(rank, lambda: group.send([tensor], peer, 0).wait(), lambda: group.recv([tensor], peer, 0).wait()),
    )


def round_trip(rank: int, send: Callable[[], object], recv: Callable[[], object]) -> Callable[[], object]:
    """Rank 0 sends first and rank 1 answers; others do nothing."""

    def there_and_back() -> None:
        if rank < 2:
            (send if rank == 0 else recv)()
            (recv if rank == 0 else send)()

    return there_and_back


def rank_main(rank: int, carrier: str, fd: int, port: int, num_ranks: int) -> None:
    """Runs one rank; rank 0 writes a JSON line per figure."""
    torch.set_num_threads(1)
    communicator, group = None, None
    if carrier == "gloo":
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)  # type: ignore[attr-defined]
        gloo: Any = torch.distributed.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=DEADLINE_S)
        group = gloo(store, rank, num_ranks, options)
    else:
        communicator = ShmCommunicator(ShmRegion(fd), rank, one_shot_bytes=ONE_SHOT[carrier])
    for rows in ROWS:
        tensor = torch.zeros(rows, WIDTH)
        calls = shm_calls(communicator, tensor) if communicator is not None else gloo_calls(group, rank, tensor)
        num_calls = (200 if group is not None else 4_000) // (1 if rows < ROWS[-1] else 10)
        for what, call, divisor in zip(("sum", "message"), calls, (1, 2), strict=True):
            figures = timed(call, num_calls)
            if rank == 0:
                line = {"what": what, "rows": rows, **{name: value / divisor for name, value in figures.items()}}
                sys.stdout.write(json.dumps(line) + "\n")
    if communicator is not None:
        communicator.barrier(deadline_s=DEADLINE_S, purpose=Purpose.TEST)
    elif group is not None:
        group.barrier().wait()  # the store lives in rank 0, which must not leave first


def measure(carrier: str, num_ranks: int) -> list[dict[str, Any]]:
    """Starts the ranks of one group and returns rank 0's figures."""
    region = ShmRegion.create(RegionShape(num_ranks, max_message_bytes=ROWS[-1] * WIDTH * 4, max_rows=64))
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __spec__.name, "--rank", *map(str, (rank, carrier, region.fd, port, num_ranks))],
            stdout=subprocess.PIPE,
            pass_fds=[region.fd],
        )
        for rank in range(num_ranks)
    ]
    written = [rank.communicate()[0] for rank in ranks]
    region.close()
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{carrier} with {num_ranks} ranks failed: {[rank.returncode for rank in ranks]}")
    return [json.loads(line) for line in written[0].splitlines()]


def main() -> None:
    """Prints one line per carrier, group size, operation and size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--carriers", nargs="+", default=["shm", "one", "two", "gloo"], choices=[*ONE_SHOT, "gloo"])
    parser.add_argument("--rank", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank, carrier, *numbers = arguments.rank
        return rank_main(int(rank), carrier, *map(int, numbers))
    sys.stdout.write(f"{'ranks':>5} {'carrier':>7} {'what':>7} {'floats':>9} {'p50':>9} {'p99':>9} {'mean':>9}\n")
    for num_ranks in arguments.ranks:
        for carrier in arguments.carriers:
            for line in measure(carrier, num_ranks):
                cells = " ".join(f"{line[name]:9.1f}" for name in ("p50", "p99", "mean"))
                sys.stdout.write(f"{num_ranks:5} {carrier:>7} {line['what']:>7} {line['rows'] * WIDTH:9} {cells}\n")
                sys.stdout.flush()
    return None


if __name__ == "__main__":
    main()
