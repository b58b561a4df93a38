"""Real worker processes, started as their supervisor starts them, and a step log over their real sockets."""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio
from flipmesh.worker.v1 import worker_service_pb2 as pb

from services.core.ids import Epoch, Generation, LogIndex
from services.core.step import Entry, LogEntry
from services.mesh.codec.worker import entry_to_proto
from services.mesh.settings.tables import CONFIG_VARIABLE

EXECUTE_STEPS = "/flipmesh.worker.v1.WorkerService/ExecuteSteps"
ANSWER_S = 60.0
EXIT_S = 10.0


@dataclass(slots=True)
class Workers:
    """The processes of one group."""

    folder: Path
    processes: list[subprocess.Popen[str]]

    def socket(self, rank: int) -> Path:
        return self.folder / "state" / "run" / f"worker-{rank}.sock"

    def exit_codes(self) -> list[int]:
        return [process.wait(EXIT_S) for process in self.processes]

    def log(self, rank: int) -> str:
        return (self.folder / "state" / "log" / f"worker-{rank}.log").read_text()


@contextmanager
def workers(folder: Path, model: Path, num_ranks: int, *, group: str = "", extra: str = "") -> Iterator[Workers]:
    """Ranks of one group over fresh regions; those still alive are killed on the way out."""
    config = folder / "mesh.toml"
    tables = [
        f'[model]\npath = "{model}"',
        f"[group]\nnum_ranks = {num_ranks}\n{group}",
        '[state]\ndir = "state"',
        extra,
    ]
    config.write_text("\n".join(tables))
    fds = {name: os.memfd_create(name) for name in ("weights", "pool", "flags")}
    processes = []
    try:
        for rank in range(num_ranks):
            words = ["--rank", str(rank), "--supervisor-pid", str(os.getpid())]
            words += ["--fds", ",".join(f"{name}={fd}" for name, fd in fds.items())]
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "services.worker", *words],
                    stdout=subprocess.DEVNULL,
                    stdin=subprocess.DEVNULL,
                    pass_fds=tuple(fds.values()),
                    env={**os.environ, CONFIG_VARIABLE: str(config)},
                    text=True,
                )
            )
        yield Workers(folder, processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
        for fd in fds.values():
            os.close(fd)


Stream = grpc.aio.StreamStreamCall[bytes, pb.ExecuteStepsResponse]


@dataclass(slots=True)
class Log:
    """A scheduler's end of every rank's stream."""

    streams: Sequence[Stream]
    sequence: int = 0
    unread: list[list[pb.StepReport]] = field(default_factory=list)

    async def write(self, entry: Entry, *, epoch: int = 1, sequence: int | None = None) -> None:
        """Serialises one entry once and sends it to every rank."""
        self.sequence = self.sequence + 1 if sequence is None else sequence
        log_entry = LogEntry(Generation(1), Epoch(epoch), LogIndex(self.sequence), entry)
        data = entry_to_proto(log_entry).SerializeToString()
        for stream in self.streams:
            await stream.write(data)

    async def read(self, rank: int) -> pb.ExecuteStepsResponse:
        """The next message of one rank."""
        message = await asyncio.wait_for(self.streams[rank].read(), ANSWER_S)
        assert isinstance(message, pb.ExecuteStepsResponse), f"rank {rank} ended its stream"
        return message

    async def ready(self) -> list[pb.WorkerReady]:
        """Every rank's readiness."""
        return [(await self.read(rank)).ready for rank in range(len(self.streams))]

    async def reports(self, rank: int, count: int) -> list[pb.StepReport]:
        """The next `count` reports of one rank, however they are packed."""
        found: list[pb.StepReport] = []
        while len(found) < count:
            message = await self.read(rank)
            assert message.WhichOneof("message") == "reports", message
            found.extend(message.reports.reports)
        return found


@asynccontextmanager
async def channels_to(group: Workers) -> AsyncIterator[list[grpc.aio.Channel]]:
    """Channels to every rank, once the ranks serve."""
    channels = [grpc.aio.insecure_channel(f"unix:{group.socket(rank)}") for rank in range(len(group.processes))]
    try:
        for channel in channels:
            await asyncio.wait_for(channel.channel_ready(), ANSWER_S)
        yield channels
    finally:
        for channel in channels:
            await channel.close()


@asynccontextmanager
async def step_log(group: Workers) -> AsyncIterator[Log]:
    """Streams to every rank."""
    async with channels_to(group) as channels:
        streams = []
        for channel in channels:
            call: grpc.aio.StreamStreamMultiCallable[bytes, pb.ExecuteStepsResponse] = channel.stream_stream(
                EXECUTE_STEPS, response_deserializer=pb.ExecuteStepsResponse.FromString
            )
            streams.append(call())
        yield Log(streams)
