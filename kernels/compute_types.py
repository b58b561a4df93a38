"""The compute type of settings as torch's: the one place where they meet."""

from types import MappingProxyType

import torch

from services.models.compute_type import ComputeType

_DTYPES = MappingProxyType(
    {
        ComputeType.FLOAT32: torch.float32,
        ComputeType.BFLOAT16: torch.bfloat16,
        ComputeType.FLOAT16: torch.float16,
    }
)


def torch_dtype(compute_type: ComputeType) -> torch.dtype:
    """Of activations and of the KV cache."""
    return _DTYPES[compute_type]
