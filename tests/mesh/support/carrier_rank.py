"""A rank process of the carrier tests: says it is ready, then reads one JSON order a line and answers with one."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch

from kernels.cpu.collectives import CollectiveError, Purpose, ShmRegion
from services.worker.dataplane.carrier import Carrier
from services.worker.dataplane.device import DeviceCarrier
from services.worker.dataplane.gloo import GlooBounds, GlooCarrier
from services.worker.dataplane.gloo_watch import GlooAddress
from services.worker.dataplane.shm import ShmCarrier
from tests.gpu.on_device import OnDevice
from tests.mesh.support.carrier_scenarios import SCENARIOS, deadline_of


def open_carrier(order: dict[str, Any], rank: int) -> Carrier:
    num_ranks: int = order["num_ranks"]
    deadline_s = deadline_of(order["scenario"])
    if order["carrier"] == "shm":
        return ShmCarrier(ShmRegion(order["fd"]), rank, deadline_s)
    bounds = GlooBounds(max_rows=64, deadline_s=deadline_s, num_board_steps=8)
    members = (GlooAddress("127.0.0.1", order["port"]), rank, num_ranks, num_ranks - 1, bounds)
    match order["carrier"]:
        case "nccl":
            place = torch.device("cuda", rank % torch.cuda.device_count())
            return OnDevice(DeviceCarrier(*members, place=place, backend="nccl"), place)
        case "device":
            return DeviceCarrier(*members, place=torch.device("cpu"), backend="gloo")
        case _:
            return GlooCarrier(*members)


def answer(order: dict[str, Any], rank: int) -> dict[str, Any]:
    carrier = open_carrier(order, rank)
    started = time.monotonic()
    try:
        result: dict[str, Any] = dict(SCENARIOS[order["scenario"]](carrier, order["seed"]))
        if not order["leaves_ragged"]:
            # Nobody closes while another still needs it: gloo's store lives in rank 0.
            carrier.barrier(purpose=Purpose.TEST)
    except CollectiveError as error:
        result = {
            "status": error.status.name,
            "wait": error.wait.name,
            "peer": error.peer,
            "operation": error.operation.name,
            "waited": error.waited,
            "seen": error.seen,
            "message": str(error),
        }
    result["elapsed_s"] = time.monotonic() - started
    carrier.close()
    return result


def main() -> None:
    torch.set_num_threads(1)
    rank = int(sys.argv[1])
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer(json.loads(line), rank)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
