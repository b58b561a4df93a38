"""The deployment's settings: one TOML, read once, held as frozen values by their owners.

Each table of the file is one class here and belongs to one owner; nothing receives the whole where a part would do.
Never reads the environment beyond `FLIPMESH_CONFIG`, which names the file. Standard library only: the supervisor reads
it too. Every key is described where it is set, in `deploy/mesh.toml`; here stand its type, its default and its range.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

from services.core.errors import ConfigurationError
from services.core.ids import BLOCK_SLOTS, LayoutKind
from services.mesh.limits import MAX_MESSAGE_BYTES, MAX_UNIX_PATH_BYTES, SHUTDOWN_GRACE_S
from services.mesh.settings.reader import ranged, read_toml

CONFIG_VARIABLE = "FLIPMESH_CONFIG"
DEFAULT_CONFIG = Path(__file__).parents[3] / "deploy" / "mesh.toml"
LONGEST_SOCKET_NAME = "scheduler-9999.sock"


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """`[model]`: what is served. `path` (GGUF file or safetensors directory) wins over `name`."""

    name: str = "SmolLM2-135M-Instruct"
    path: Path | None = None
    context_tokens: int | None = ranged(None, 16, 16_777_216)


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """`[group]`: the ranks and how the model is cut over them at boot."""

    num_ranks: int = ranged(2, 1, 1024)
    layout: LayoutKind = LayoutKind.TP
    mode: Literal["shared", "dual", "exchange", "image"] = "shared"
    cold_image: bool = False
    carrier: Literal["shm", "gloo", "nccl"] = "shm"
    gloo_rendezvous: str = "127.0.0.1:0"
    device: Literal["cpu", "cuda"] = "cpu"
    threads_per_rank: int = ranged(1, 1, 256)
    pp_layers: tuple[int, ...] | None = ranged(None, 0, 100_000)
    tp_weights: tuple[float, ...] | None = ranged(None, 0.0, 1e9)
    kv_sharding: Literal["heads", "tokens"] = "heads"
    kv_tokens: tuple[int, ...] | None = ranged(None, 1, 1_000_000)
    memory_bytes: Literal["auto"] | int | tuple[int, ...] = ranged("auto", 1_048_576, 2**50)
    free_floor_bytes: int = ranged(268_435_456, 0, 2**50)

    @property
    def budgets(self) -> tuple[int, ...] | None:
        """Bytes that each rank may take; None: nobody said."""
        if isinstance(self.memory_bytes, tuple):
            return self.memory_bytes
        return None if isinstance(self.memory_bytes, str) else (self.memory_bytes,) * self.num_ranks

    @property
    def token_vector(self) -> tuple[int, ...] | None:
        """Shares of the KV cache's rows in TP; None: it is cut by heads."""
        if self.kv_sharding == "heads":
            return None
        return (1,) * self.num_ranks if self.kv_tokens is None else self.kv_tokens

    def contradictions(self) -> Iterator[str]:
        """Yields what in this table cannot hold together."""
        lists = {
            "pp_layers": self.pp_layers,
            "tp_weights": self.tp_weights,
            "kv_tokens": self.kv_tokens,
            "memory_bytes": self.budgets,
        }
        for name, shares in lists.items():
            if shares is not None and len(shares) != self.num_ranks:
                yield (
                    f"group.{name} has {len(shares)} entries and group.num_ranks is {self.num_ranks}: "
                    f"give one entry for each rank, or leave {name} out"
                )
        if self.cold_image and self.mode != "image":
            yield (
                f'group.cold_image = true and group.mode = "{self.mode}": only images can lie on disk; '
                'set mode = "image", or leave cold_image out'
            )
        if self.tp_weights is not None and min(self.tp_weights, default=1.0) <= 0.0:
            yield (
                f"group.tp_weights = {list(self.tp_weights)} has a share that is not above 0: "
                "every rank must hold part of every tensor; lower num_ranks instead"
            )
        if self.kv_tokens is not None and self.kv_sharding == "heads":
            yield (
                f'group.kv_tokens = {list(self.kv_tokens)} shares the rows of a cache that group.kv_sharding = "heads" '
                'does not cut by rows: set kv_sharding = "tokens", or leave kv_tokens out'
            )
        if self.pp_layers is not None and min(self.pp_layers, default=1) < 1:
            yield (
                f"group.pp_layers = {list(self.pp_layers)} has a stage without a layer: "
                "every stage needs at least 1; lower num_ranks instead"
            )


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """`[pool]`: the KV pool, in blocks of 16 slots. With neither size given it is sized from free memory."""

    num_blocks: int | None = ranged(None, 2, 2**31)
    kv_bytes: int | None = ranged(None, 65_536, 2**50)
    max_total_tokens: int | None = ranged(None, 16, 2**35)
    backing: Literal["resident", "exclusive"] = "resident"

    def contradictions(self) -> Iterator[str]:
        """Yields what in this table cannot hold together."""
        if self.num_blocks is not None and self.kv_bytes is not None:
            yield (
                f"pool.num_blocks = {self.num_blocks} and pool.kv_bytes = {self.kv_bytes} both size the pool: "
                "keep one of them"
            )
        slots = None if self.num_blocks is None else self.num_blocks * BLOCK_SLOTS
        if slots is not None and self.max_total_tokens is not None and self.max_total_tokens > slots:
            yield (
                f"pool.max_total_tokens = {self.max_total_tokens} is above the {slots} slots of "
                f"pool.num_blocks = {self.num_blocks}: lower it, or raise num_blocks"
            )


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """`[scheduler]`: how much runs at once and how a step is filled."""

    max_resident_requests: int = ranged(64, 1, 65_536)
    max_queued_requests: int = ranged(512, 1, 1_000_000)
    chunk_tokens: int = ranged(256, 1, 1_048_576)
    max_batch_rows: int = ranged(512, 1, 1_048_576)
    steps_ahead: int = ranged(2, 1, 8)

    def contradictions(self) -> Iterator[str]:
        """Yields what in this table cannot hold together."""
        for name, value in (
            ("chunk_tokens", self.chunk_tokens),
            ("max_resident_requests", self.max_resident_requests),
        ):
            if value > self.max_batch_rows:
                yield (
                    f"scheduler.{name} = {value} is above scheduler.max_batch_rows = {self.max_batch_rows}, "
                    f"so a step could not hold it: lower {name}, or raise max_batch_rows"
                )


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """`[router]`: where clients connect and what they may ask for. Port 0 takes a free one and publishes it."""

    http_host: str = "127.0.0.1"
    http_port: int = ranged(8000, 0, 65_535)
    grpc_address: str | None = None
    api_key: str | None = field(default=None, repr=False)
    max_request_bytes: int = ranged(8_388_608, 1024, MAX_MESSAGE_BYTES // 2)
    max_connections: int = ranged(2048, 1, 1_000_000)
    head_s: float = ranged(10.0, 0.1, 600.0)
    body_s: float = ranged(60.0, 0.1, 3600.0)
    max_receiving_bytes: int = ranged(67_108_864, 1024, 2**40)
    max_open_requests: int = ranged(512, 1, 1_000_000)
    max_choices: int = ranged(16, 1, 1024)
    max_stop_strings: int = ranged(16, 1, 1024)
    max_top_logprobs: int = ranged(20, 0, 100)
    literal_content: bool = True
    tokenizer_threads: int = ranged(1, 1, 64)
    drain_s: float = ranged(3.0, 0.0, SHUTDOWN_GRACE_S - 0.5)
    resubmit_budget_s: float = ranged(60.0, 0.0, 3600.0)


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """`[policy]`: who decides on flips, and the numbers of its rule. `pp` and `tp` pin a layout."""

    mode: Literal["auto", "manual", "pp", "tp"] = "auto"
    resting_layout: LayoutKind = LayoutKind.TP
    prefill_threshold_tokens: int = ranged(1024, 1, 2**31)
    release_threshold_tokens: int = ranged(128, 0, 2**31)
    min_dwell_s: float = ranged(3.0, 0.0, 3600.0)
    rest_s: float = ranged(30.0, 0.0, 86_400.0)

    @property
    def is_pinned(self) -> bool:
        """Whether one layout is kept."""
        return self.mode in ("pp", "tp")

    def contradictions(self) -> Iterator[str]:
        """Yields what in this table cannot hold together."""
        if self.release_threshold_tokens >= self.prefill_threshold_tokens:
            yield (
                f"policy.release_threshold_tokens = {self.release_threshold_tokens} is not below "
                f"policy.prefill_threshold_tokens = {self.prefill_threshold_tokens}: the two layouts would chatter; "
                "lower the first, or raise the second"
            )


@dataclass(frozen=True, slots=True)
class DeadlineSettings:
    """`[deadlines]`: how long each wait may last, all in seconds."""

    rpc_s: float = ranged(5.0, 0.01, 600.0)
    boot_s: float = ranged(120.0, 1.0, 86_400.0)
    step_s: float = ranged(60.0, 0.1, 3600.0)
    collective_s: float = ranged(10.0, 0.1, 600.0)
    stall_s: float = ranged(5.0, 0.1, 600.0)
    park_s: float = ranged(30.0, 0.1, 3600.0)
    presence_s: float = ranged(60.0, 0.1, 3600.0)
    flip_data_plane_s: float = ranged(30.0, 0.1, 3600.0)
    mover_silence_s: float = ranged(10.0, 2.5, 600.0)
    scheduler_silence_s: float = ranged(10.0, 3.0, 600.0)

    def contradictions(self) -> Iterator[str]:
        """Yields what in this table cannot hold together."""
        order = (("stall_s", self.stall_s), ("collective_s", self.collective_s), ("park_s", self.park_s))
        for (low_name, low), (high_name, high) in pairwise(order):
            if low >= high:
                yield (
                    f"deadlines.{low_name} = {low} is not below deadlines.{high_name} = {high}: a stall must be "
                    f"named before the wait behind it ends; lower {low_name}, or raise {high_name}"
                )


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """`[telemetry]`: logs, traces and their bounds."""

    traces: Literal["none", "console", "file", "otlp"] = "none"
    otlp_endpoint: str | None = None
    trace_ratio: float = ranged(1.0, 0.0, 1.0)
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    max_file_bytes: int = ranged(8_388_608, 4096, 2**33)
    max_files: int = ranged(3, 1, 100)

    def contradictions(self) -> Iterator[str]:
        """Yields what in this table cannot hold together."""
        if self.traces == "otlp" and self.otlp_endpoint is None:
            yield (
                'telemetry.traces = "otlp" and telemetry.otlp_endpoint is absent: '
                'give the collector, for example otlp_endpoint = "http://127.0.0.1:4317"'
            )


@dataclass(frozen=True, slots=True)
class StateSettings:
    """`[state]`: the directory of sockets, logs and records, relative to the configuration file."""

    dir: Path = Path(".flipmesh")


@dataclass(frozen=True, slots=True)
class DebugSettings:
    """`[debug]`: whether tests may hold processes at points of a flip (`mesh/holds.py`)."""

    enabled: bool = False


@dataclass(frozen=True, slots=True)
class Settings:
    """One deployment. `source` is the file it was read from; paths in it are absolute."""

    source: Path
    model: ModelSettings = field(default_factory=ModelSettings)
    group: GroupSettings = field(default_factory=GroupSettings)
    pool: PoolSettings = field(default_factory=PoolSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    router: RouterSettings = field(default_factory=RouterSettings)
    policy: PolicySettings = field(default_factory=PolicySettings)
    deadlines: DeadlineSettings = field(default_factory=DeadlineSettings)
    telemetry: TelemetrySettings = field(default_factory=TelemetrySettings)
    state: StateSettings = field(default_factory=StateSettings)
    debug: DebugSettings = field(default_factory=DebugSettings)

    def contradictions(self) -> Iterator[str]:
        """Yields what holds in each table but not between them."""
        context, cap = self.model.context_tokens, self.pool.max_total_tokens
        if context is not None and cap is not None and context > cap:
            yield (
                f"model.context_tokens = {context} is above pool.max_total_tokens = {cap}: one such request could "
                "never run; lower context_tokens, or raise max_total_tokens"
            )
        blocks = self.pool.num_blocks
        if context is not None and blocks is not None and context > blocks * BLOCK_SLOTS:
            yield (
                f"model.context_tokens = {context} is above the {blocks * BLOCK_SLOTS} slots of pool.num_blocks = "
                f"{blocks}: one such request could never run; lower context_tokens, or raise num_blocks"
            )
        longest = len(os.fsencode(self.state.dir / "run" / LONGEST_SOCKET_NAME))
        if longest > MAX_UNIX_PATH_BYTES:
            yield (
                f"state.dir = {self.state.dir} makes socket paths of {longest} bytes and the system allows "
                f"{MAX_UNIX_PATH_BYTES}: choose a shorter directory"
            )


def config_path() -> Path:
    """The configuration file: the one that `FLIPMESH_CONFIG` names, or `deploy/mesh.toml` of this tree."""
    return Path(os.environ.get(CONFIG_VARIABLE) or DEFAULT_CONFIG).absolute()


def load_settings(path: Path | None = None) -> Settings:
    """Reads and checks the deployment's settings.

    Raises `ConfigurationError` naming the file, the key and the remedy.
    """
    source = (path or config_path()).absolute()
    settings = read_toml(Settings, source)
    if problems := list(_all_contradictions(settings)):
        raise ConfigurationError("\n".join(f"{source}: {problem}" for problem in problems))
    return settings


def _all_contradictions(settings: Settings) -> Iterator[str]:
    tables = (
        settings.group,
        settings.pool,
        settings.scheduler,
        settings.policy,
        settings.deadlines,
        settings.telemetry,
    )
    for table in tables:
        yield from table.contradictions()
    yield from settings.contradictions()
