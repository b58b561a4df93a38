"""From a deployment and its model's files to the memory ledger: the one place where settings become prices.

Never allocates and never reads a weight: it sees tensor directories and numbers. The constants of processes are
measured (each says how); what a service grows by under load is its own bounds' matter and small beside a model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from services.core.ids import LayoutKind
from services.core.layout import KvSharding, Layout, LayoutError, ShardUnits
from services.models.geometry import ModelGeometry
from services.models.ggml_types import block_bytes, block_length
from services.models.tensor_places import TensorPlace
from services.placement.compatibility import CarrierKind, Combination, Device, check_combination, expanded_by
from services.placement.layouts import both_layouts, cut_within_blocks, shard_units
from services.placement.ledger import Ledger, MemoryMode, PoolBacking, Term
from services.placement.prices import MachineDemand, ModelDemand, make_ledger
from services.placement.shares import CanonicalTensor, canonical_tensor

MIB = 2**20
FLOAT_BYTES = 4
PAGE_BYTES = 4096
WORKER_BYTES = 192 * MIB
"""A rank without its model, torch 2.13 for CPUs: 160 MiB of its own and its part of the libraries (PSS)."""
CUDA_CONTEXT_BYTES = 600 * MIB
"""Assumed, not measured here: context, kernels and NCCL's buffers of one process on one GPU."""
SERVICE_BYTES = {"router": 64 * MIB, "scheduler": 36 * MIB, "policy": 30 * MIB, "mover": 30 * MIB, "sentinel": 30 * MIB}
"""PSS of idle services with SmolLM2-135M, rounded up."""
SUPERVISOR_BYTES = 10 * MIB
"""PSS of one supervisor; there are as many as services and one for the workers."""
STAGE_BYTES, BANKS = 256 * 1024, 2
SLOT_BYTES, SLOT_HEADER_BYTES, MESSAGES_IN_FLIGHT = 64 * 1024, 64, 2
"""The shared region's own sizes (kernels); a test holds the sum to the real region."""


@dataclass(frozen=True, slots=True)
class Model:
    """What prices need of an opened model; its files stay closed."""

    geometry: ModelGeometry
    tensors: Mapping[str, TensorPlace]
    file_bytes: int


@dataclass(frozen=True, slots=True)
class Deployment:
    """A deployment as the ledger sees it."""

    num_ranks: int
    max_batch_rows: int
    max_resident_requests: int
    pp_layers: tuple[int, ...] | None = None
    tp_weights: tuple[float, ...] | None = None
    kv_tokens: tuple[int, ...] | None = None
    context_tokens: int | None = None
    mode: MemoryMode = MemoryMode.SHARED
    cold_image: bool = False
    backing: PoolBacking = PoolBacking.RESIDENT
    carrier: CarrierKind = CarrierKind.SHM
    device: Device = Device.CPU
    kv_element_bytes: int = FLOAT_BYTES
    others_bytes: int = 0
    """Held on this host by processes that are not ours."""


def plan_memory(deployment: Deployment, model: Model) -> Ledger:
    """The ledger of a model under a deployment.

    Raises:
        ConfigurationError: the combination cannot be, or the vectors do not fit the model.
        LayoutError: a share cannot be cut from a tensor.
    """
    types = frozenset(place.ggml_type for place in model.tensors.values())
    kv_sharding = KvSharding.HEADS if deployment.kv_tokens is None else KvSharding.TOKENS
    check_combination(
        Combination(deployment.mode, deployment.carrier, deployment.device, deployment.backing, types, kv_sharding)
    )
    on_host = deployment.device is Device.CPU
    return make_ledger(
        _model_demand(deployment, model), _machine_demand(deployment, model.geometry, on_host), on_host=on_host
    )


def _model_demand(deployment: Deployment, model: Model) -> ModelDemand:
    geometry = model.geometry
    units, layouts = deployed_layouts(deployment, geometry, model.tensors)
    cut = cut_within_blocks(geometry, model.tensors, layouts.values())
    return ModelDemand(
        layouts=layouts,
        units=units,
        tensors=tuple(_tensors(deployment.device, model, cut)),
        file_bytes=model.file_bytes,
        expanded_bytes=sum(_expanded_bytes(model.tensors[name]) for name in cut),
        hidden_size=geometry.hidden_size,
        head_dim=geometry.head_dim,
        kv_element_bytes=deployment.kv_element_bytes,
        max_batch_rows=deployment.max_batch_rows,
        max_resident_requests=deployment.max_resident_requests,
        context_tokens=deployment.context_tokens or geometry.max_context_tokens,
        rotary_tokens=geometry.max_context_tokens,
    )


def deployed_layouts(
    deployment: Deployment, geometry: ModelGeometry, tensors: Mapping[str, TensorPlace]
) -> tuple[ShardUnits, dict[LayoutKind, Layout]]:
    """Both layouts of the group, and what they are cut in; raises ConfigurationError where a vector does not fit."""
    units, d = shard_units(geometry, tensors), deployment
    return units, both_layouts(units, d.num_ranks, d.pp_layers, d.tp_weights, d.kv_tokens)


def _tensors(device: Device, model: Model, cut: frozenset[str]) -> list[CanonicalTensor]:
    """As a rank holds them: stored, or float32 where the device or a cut within a block asks for it."""
    found, expanded = [], cut | expanded_by(device, model.tensors)
    for name, place in model.tensors.items():
        tied = name == "output" and model.geometry.tied_embeddings
        tensor = canonical_tensor(
            name,
            place.rows,
            place.columns,
            block_columns=block_length(place.ggml_type),
            block_bytes=block_bytes(place.ggml_type),
            source="token_embd" if tied else None,
        )
        if name in expanded:
            tensor = replace(tensor, block_columns=1, block_bytes=FLOAT_BYTES)
        found.append(tensor)
    return found


def _expanded_bytes(place: TensorPlace) -> int:
    return -(-place.rows * place.columns * FLOAT_BYTES // PAGE_BYTES) * PAGE_BYTES


def _machine_demand(deployment: Deployment, geometry: ModelGeometry, on_host: bool) -> MachineDemand:
    num_ranks = deployment.num_ranks
    message_bytes = deployment.max_batch_rows * geometry.hidden_size * FLOAT_BYTES
    services = sum(SERVICE_BYTES.values()) + (len(SERVICE_BYTES) + 1) * SUPERVISOR_BYTES
    terms = [Term("services and supervisors", services, is_addressed=False)]
    if deployment.carrier is CarrierKind.SHM:
        terms.append(Term("data-plane region", region_bytes(num_ranks, message_bytes)))
    if not on_host:
        terms.append(Term("worker processes", num_ranks * WORKER_BYTES, is_addressed=False))
    if deployment.others_bytes:
        terms.append(Term("held by others", deployment.others_bytes, is_addressed=False))
    return MachineDemand(
        mode=deployment.mode,
        backing=deployment.backing,
        rank_context_bytes=WORKER_BYTES if on_host else CUDA_CONTEXT_BYTES,
        host_terms=tuple(terms),
        message_bytes=message_bytes,
        cold_image=deployment.cold_image,
    )


def region_bytes(num_ranks: int, message_bytes: int) -> int:
    """Of the shared region that the ranks of a host talk through; its diagonal is never touched, hence not priced."""
    slots = max(2, MESSAGES_IN_FLIGHT * max(1, -(-message_bytes // SLOT_BYTES)))
    channels = num_ranks * (num_ranks - 1) * slots * (SLOT_BYTES + SLOT_HEADER_BYTES)
    return channels + num_ranks * BANKS * STAGE_BYTES


def price_line(ledger: Ledger, budgets: Sequence[int] | None, free_bytes: int, num_blocks: int) -> dict[str, object]:
    """The ledger as fields of one log line: every term once, sums, who binds, and the equalising token vector.

    Without budgets each rank is taken to have an equal part of the `free_bytes` of this host.
    """
    num_ranks = len(ledger.ranks)
    rooms = tuple(budgets) if budgets is not None else (free_bytes // num_ranks,) * num_ranks
    try:
        tokens = ",".join(map(str, ledger.equalising_tokens(rooms)))
    except LayoutError as error:
        tokens = str(error)
    return {
        "mode": ledger.mode.value,
        "host_bytes": ledger.host_bytes(num_blocks),
        "free_bytes": free_bytes,
        "left_bytes": free_bytes - ledger.host_bytes(num_blocks),
        "rank_bytes": [ledger.rank_bytes(account.rank, num_blocks) for account in ledger.ranks],
        "binding": ledger.capacity(rooms).binding,
        "equalising_kv_tokens": tokens,
        "terms": {term.name: term.num_bytes for term in (*ledger.host_terms, *ledger.ranks[0].terms)},
    }
