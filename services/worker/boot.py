"""Builds one rank from its settings and the descriptors it inherited: model, weights, data plane, runner.

Runs once, off the event loop. Never waits for a peer: what ranks share is made by whoever comes first, in steps that
any of them may repeat.
"""

import gc
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from kernels import _native
from kernels.cpu.shm_region import HEADER, MAGIC, RegionLayout, RegionShape, ShmRegion
from services.core.errors import ConfigurationError
from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout, LayoutError
from services.mesh.settings.paths import StatePaths
from services.mesh.settings.tables import Settings
from services.models.compute_type import ComputeType
from services.models.geometry import ModelGeometry
from services.models.gguf import GgufMetadata
from services.models.model_files import ModelFiles, open_model
from services.placement.compatibility import Device
from services.placement.layouts import both_layouts, cut_within_blocks, shard_units
from services.placement.ledger import Ledger, PoolBacking
from services.placement.staging import chunk_bytes
from services.worker.dataplane.carrier import Carrier
from services.worker.dataplane.shm import ShmCarrier
from services.worker.memory.device import RankDevice, rank_device
from services.worker.memory.images.cold_image import ColdImageError
from services.worker.memory.ledger_report import priced
from services.worker.memory.owned_memory import OwnedMemorySpec, owned_memory, shared_memory
from services.worker.memory.pages.backing import BackingError
from services.worker.memory.rank_memory import RankMemory
from services.worker.memory.rows.pool_pair import least_message_bytes
from services.worker.memory.weights.mapped import WeightStore
from services.worker.memory.wire import MoveBounds
from services.worker.ring import RingWriter
from services.worker.steps.execute import Runner
from services.worker.steps.pipeline import MAX_UNREAD_STEPS
from services.worker.steps.stages import RunnerLimits

SWITCH_INTERVAL_S = 0.0001
"""How long the event loop's thread may keep the model thread from going on after a kernel. Measured on two cores,
one decode step beside a loop that is busy 4 ms of 5: 74 ms at the interpreter's own 5 ms, 45 at 0.5, 27 at 0.1, 41 at
0.02 (11 with an idle loop); bursts of 0.2 ms cost nothing at any of them."""

COMPUTE_TYPE = ComputeType.FLOAT32
"""Of activations and rows: what both backends of today serve."""
TOKENS_KEY = "tokenizer.ggml.tokens"


@dataclass(frozen=True, slots=True)
class RankRuntime:
    """One rank, ready for its RESET."""

    rank: Rank
    files: ModelFiles
    memory: RankMemory
    device: RankDevice
    layouts: Mapping[LayoutKind, Layout]
    carrier: Carrier
    runner: Runner
    boot_ns: int
    """From the first byte read to ready."""
    num_expanded: int
    """Tensors that this rank expanded; 0: none was missing."""
    ledger: Ledger
    """Estimated before anything was allocated."""


def build_runtime(settings: Settings, rank: Rank, fds: Mapping[str, int], ring: RingWriter) -> RankRuntime:
    """Opens, maps and expands what this rank needs.

    Raises:
        ConfigurationError: the deployment cannot be; it says what to change.
    """
    began_ns = time.perf_counter_ns()
    missing = {"weights", "pool", "flags"} - fds.keys()
    if missing:
        raise ConfigurationError(
            f"a worker needs the regions weights, pool and flags from its supervisor, {sorted(missing)} are absent: "
            "start it as the Procfile does"
        )
    group = settings.group
    if not 0 <= rank < group.num_ranks:
        raise ConfigurationError(f"rank {rank} is not in [0, {group.num_ranks}): group.num_ranks and --rank disagree")
    torch.set_num_threads(group.threads_per_rank)
    files = open_model(settings.model.path or settings.model.name)
    ledger = priced(settings, files)
    units = shard_units(files.geometry, files.tensors)
    layouts = both_layouts(units, group.num_ranks, group.pp_layers, group.tp_weights, group.token_vector)
    device = rank_device(Device(group.device), rank)
    carrier = open_carrier(settings, rank, fds["flags"], files.geometry, device)
    memory, num_expanded = rank_memory(settings, rank, fds, files, layouts, carrier, device)
    runner = Runner(rank, files.geometry, memory, layouts, carrier, runner_limits(settings, files), ring, device)
    settle()
    boot_ns = time.perf_counter_ns() - began_ns
    return RankRuntime(rank, files, memory, device, layouts, carrier, runner, boot_ns, num_expanded, ledger)


def rank_memory(
    settings: Settings,
    rank: Rank,
    fds: Mapping[str, int],
    files: ModelFiles,
    layouts: Mapping[LayoutKind, Layout],
    carrier: Carrier,
    device: RankDevice,
) -> tuple[RankMemory, int]:
    """Weights and pools as the mode keeps them, and how many tensors this rank expanded for all.

    Raises:
        ConfigurationError: a layout cuts a tensor where it cannot be cut, or there is no memory for the weights.
    """
    group, geometry = settings.group, files.geometry
    message_bytes = region_shape(settings, geometry).max_message_bytes
    bounds = MoveBounds(chunk_bytes(message_bytes))
    try:
        if group.mode != "shared":
            cold = StatePaths(settings.state.dir).create_images() if group.cold_image else None
            spec = OwnedMemorySpec(
                group.mode,
                group.layout,
                bounds,
                device.free_bytes,
                cold_directory=cold,
                device=device,
                backing=PoolBacking(settings.pool.backing),
                margin_bytes=group.free_floor_bytes,
            )
            return owned_memory(files, layouts, carrier, spec), 0
    except (LayoutError, BackingError, ColdImageError) as error:
        raise ConfigurationError(f"[group] does not fit this model or this host: {error}") from error
    cut = cut_within_blocks(geometry, files.tensors, layouts.values())
    store = WeightStore(files, fds["weights"], cut)
    num_expanded = store.expand(rank, group.num_ranks)
    return shared_memory(rank, store, fds["pool"], geometry, layouts), num_expanded


def open_carrier(settings: Settings, rank: Rank, flags_fd: int, geometry: ModelGeometry, device: RankDevice) -> Carrier:
    """The data plane that the settings name.

    Raises:
        ConfigurationError: the ranks cannot meet.
    """
    group, deadline_s = settings.group, settings.deadlines.collective_s
    if group.carrier == "shm":
        return ShmCarrier(open_region(flags_fd, region_shape(settings, geometry)), rank, deadline_s)
    # Only here: torch's distributed package costs a start that does not use it half a second.
    from services.worker.dataplane.gloo import GlooBounds, GlooCarrier
    from services.worker.dataplane.rendezvous import meet

    address, store = meet(flags_fd, rank, group.gloo_rendezvous, settings.deadlines.boot_s)
    bounds = GlooBounds(settings.scheduler.max_resident_requests, deadline_s, num_board_steps=2 * MAX_UNREAD_STEPS)
    members = (address, rank, group.num_ranks, group.num_ranks - 1, bounds, store)
    if group.carrier == "gloo":
        return GlooCarrier(*members)
    from services.worker.dataplane.device import DeviceCarrier

    return DeviceCarrier(*members, place=device.place, backend="nccl")


def runner_limits(settings: Settings, files: ModelFiles) -> RunnerLimits:
    """What configuration and model size a rank for."""
    return RunnerLimits(
        max_resident_requests=settings.scheduler.max_resident_requests,
        max_batch_tokens=settings.scheduler.max_batch_rows,
        num_valid_ids=num_valid_ids(files),
    )


def num_valid_ids(files: ModelFiles) -> int:
    """Ids that the tokenizer knows, where the files say so; the head may have more rows."""
    vocab_size, tokenizer = files.geometry.vocab_size, files.tokenizer
    if isinstance(tokenizer, GgufMetadata) and TOKENS_KEY in tokenizer:
        return min(vocab_size, len(tokenizer.array(TOKENS_KEY)))
    return vocab_size


def region_shape(settings: Settings, geometry: ModelGeometry) -> RegionShape:
    """The data plane's sizes, the same on every rank because they follow from configuration and model alone."""
    message_bytes = settings.scheduler.max_batch_rows * geometry.hidden_size * COMPUTE_TYPE.num_bytes
    if settings.group.mode != "shared":
        message_bytes = max(message_bytes, least_message_bytes(geometry))
    return RegionShape(
        num_ranks=settings.group.num_ranks,
        max_message_bytes=message_bytes,
        max_rows=settings.scheduler.max_resident_requests,
        num_board_steps=2 * MAX_UNREAD_STEPS,
    )


def open_region(fd: int, shape: RegionShape) -> ShmRegion:
    """The region on an inherited memfd: sized and headed by whichever rank comes first.

    Every rank may do both at any time, because size and header follow from `shape` alone and a fresh memfd is zero.
    """
    os.ftruncate(fd, RegionLayout(*_native.collectives_layout(*shape.words())).total_bytes)
    os.pwrite(fd, HEADER.pack(MAGIC, *shape.words()), 0)
    return ShmRegion(fd)


def settle() -> None:
    """Takes what start-up made out of the collector's way and lets the model thread win the interpreter back soon."""
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
