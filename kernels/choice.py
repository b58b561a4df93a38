"""Which backend computes where: chosen once, when a rank takes its device."""

import torch

from kernels.backend import Backend
from kernels.compute_types import torch_dtype
from kernels.cpu.backend import CpuBackend
from kernels.reference.backend import ReferenceBackend
from services.models.compute_type import ComputeType


def backend_of(device: torch.device, compute_type: ComputeType) -> Backend:
    """The backend of a device.

    Raises:
        ValueError: nothing computes in this type there.
    """
    if device.type != "cpu":
        return ReferenceBackend(device, torch_dtype(compute_type))
    if compute_type is not ComputeType.FLOAT32:
        raise ValueError(f"the kernels of a CPU compute in float32, not in {compute_type.value}: set that, or a device")
    return CpuBackend()
