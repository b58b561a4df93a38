"""What cannot be combined, as a table: mode, carrier, device, pool backing and weight types, each refused by name.

Checked at start, before a byte is loaded: a clean load is no proof of support. Pure. What a model's architecture does
not compute is refused where its files are read (formats.geometry); what the settings have no word for, where they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from services.core.errors import ConfigurationError
from services.core.layout import KvSharding
from services.models.ggml_types import GgmlType
from services.models.tensor_places import TensorPlace
from services.placement.ledger import MemoryMode, PoolBacking


class Device(Enum):
    """What a rank computes on."""

    CPU = "cpu"
    CUDA = "cuda"


class CarrierKind(Enum):
    """What moves bytes between ranks."""

    SHM = "shm"
    GLOO = "gloo"
    NCCL = "nccl"


@dataclass(frozen=True, slots=True)
class Combination:
    """What a deployment asks for together."""

    mode: MemoryMode
    carrier: CarrierKind
    device: Device
    backing: PoolBacking = PoolBacking.RESIDENT
    weight_types: frozenset[GgmlType] = frozenset()
    kv_sharding: KvSharding = KvSharding.HEADS

    def phrase(self) -> str:
        """As it would stand in the settings."""
        return (
            f'mode = "{self.mode.value}", carrier = "{self.carrier.value}", device = "{self.device.value}", '
            f'{self.backing.value} pools, kv_sharding = "{self.kv_sharding.value}"'
        )


@dataclass(frozen=True, slots=True)
class Conflict:
    """A row: it holds where every field that is given is met."""

    reason: str
    remedy: str
    mode: MemoryMode | None = None
    carrier: CarrierKind | None = None
    device: Device | None = None
    backing: PoolBacking | None = None
    kv_sharding: KvSharding | None = None

    def holds(self, asked: Combination) -> bool:
        """Whether this row forbids `asked`."""
        pairs = (
            (self.mode, asked.mode),
            (self.carrier, asked.carrier),
            (self.device, asked.device),
            (self.backing, asked.backing),
            (self.kv_sharding, asked.kv_sharding),
        )
        return all(wanted is None or wanted is found for wanted, found in pairs)


CONFLICTS = (
    Conflict(
        "memory of a GPU belongs to one rank, so ranks cannot map one copy of the weights",
        'set mode = "exchange", "dual" or "image"',
        mode=MemoryMode.SHARED,
        device=Device.CUDA,
    ),
    Conflict(
        "one pool serves both layouts there, so nothing could take turns",
        'leave pools resident, or set mode = "exchange", "dual" or "image"',
        mode=MemoryMode.SHARED,
        backing=PoolBacking.EXCLUSIVE,
    ),
    Conflict(
        "all ranks map one pool there, so that a cut by tokens would free no memory and cost two exchanges a layer",
        'leave kv_sharding at "heads", or set mode = "exchange", "dual" or "image"',
        mode=MemoryMode.SHARED,
        kv_sharding=KvSharding.TOKENS,
    ),
    Conflict(
        "the shared region is host memory, which a GPU's kernels do not reach",
        'set carrier = "nccl"',
        carrier=CarrierKind.SHM,
        device=Device.CUDA,
    ),
    Conflict(
        "gloo sends and receives host memory only",
        'set carrier = "nccl"',
        carrier=CarrierKind.GLOO,
        device=Device.CUDA,
    ),
    Conflict(
        "NCCL moves GPU memory only",
        'set carrier = "shm" on one host, "gloo" across hosts',
        carrier=CarrierKind.NCCL,
        device=Device.CPU,
    ),
)


class Served(Enum):
    """How a device multiplies by a weight type."""

    DIRECT = "direct"
    """On the stored blocks."""
    EXPANDED = "expanded"
    """As float32, made once at load."""


SERVED = MappingProxyType(
    {(Device.CPU, kind): Served.DIRECT for kind in GgmlType}
    | {(Device.CUDA, kind): Served.EXPANDED for kind in GgmlType}
)
"""(device, weight type): a pair that is absent has no kernel."""


def expanded_by(device: Device, tensors: Mapping[str, TensorPlace]) -> frozenset[str]:
    """Tensors that ranks on this device hold as float32, whatever the files have."""
    return frozenset(name for name, place in tensors.items() if SERVED[device, place.ggml_type] is Served.EXPANDED)


def check_combination(asked: Combination) -> None:
    """Raises ConfigurationError naming every conflict, with what to set instead."""
    if problems := list(_problems(asked)):
        raise ConfigurationError("\n".join(problems))


def _problems(asked: Combination) -> Iterator[str]:
    for conflict in CONFLICTS:
        if conflict.holds(asked):
            yield f"[group] {asked.phrase()} cannot be combined: {conflict.reason}; {conflict.remedy}"
    yield from _unserved(asked.device, asked.weight_types)


def _unserved(device: Device, weight_types: Collection[GgmlType]) -> Iterator[str]:
    missing = sorted(kind.name for kind in weight_types if (device, kind) not in SERVED)
    if missing:
        served = ", ".join(kind.name for kind in GgmlType if (device, kind) in SERVED)
        yield (
            f'[group] device = "{device.value}" has no kernel for weights of type {", ".join(missing)}: convert the '
            f"model to one of {served}"
        )
