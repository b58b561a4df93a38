"""The number format that a rank computes in: of activations and of the KV cache. One value, chosen once, threaded."""

from enum import Enum


class ComputeType(Enum):
    """Named as settings and logs write it."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"

    @property
    def num_bytes(self) -> int:
        """Of one number."""
        return 4 if self is ComputeType.FLOAT32 else 2
