"""Which of the two implementations of every kernel takes a tensor: C for host memory, torch for a CUDA device.

Asked by the kernels' faces and by nobody else; callers never choose. Both take the same arguments, refuse the same and
are held to the same bounds.
"""

from torch import Tensor


def takes_torch(tensor: Tensor) -> bool:
    """Whether the C kernels cannot reach this tensor."""
    return tensor.is_cuda
