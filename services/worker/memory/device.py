"""Where one rank's tensors are: host memory, or one CUDA device; how memory is taken there and how much is left.

Modes, plans and messages know no device: they get tensors and pages from here. Never moves a rank to another device.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import Backend
from kernels.choice import backend_of
from kernels.cpu.backend import CpuBackend
from services.core.errors import ConfigurationError
from services.core.ids import Rank
from services.mesh.host_memory import HostMemoryReader
from services.models.compute_type import ComputeType
from services.placement.compatibility import Device
from services.placement.staging import POOL_PIECE_BYTES
from services.worker.memory.pages.backing import Pages
from services.worker.memory.pages.cuda_pages import LEAST_PIECE_BYTES, CudaPages
from services.worker.memory.pages.host_pages import HostPages
from services.worker.memory.pages.private_bytes import private_bytes


@dataclass(frozen=True, slots=True)
class RankDevice:
    """One rank's device. `kind` says which products there are, `place` where tensors lie."""

    kind: Device
    place: torch.device
    backend: Backend
    """What computes there, chosen once."""

    @property
    def is_cuda(self) -> bool:
        """Whether tensors are not in host memory."""
        return self.place.type == "cuda"

    def zeros(self, num_bytes: int, *, wants_large_pages: bool = False) -> Tensor:
        """[num_bytes] uint8, zero, at a constant address; on a host taken when it is first touched."""
        if not self.is_cuda:
            return private_bytes(num_bytes, wants_large_pages=wants_large_pages)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.place)

    def pages(self, name: str, num_bytes: int) -> Pages:
        """A range of addresses for a `Backing`. Raises BackingError where it cannot be reserved."""
        if not self.is_cuda:
            return HostPages(name, num_bytes)
        return CudaPages(name, num_bytes, self.place.index)

    def fine_pages(self, name: str, num_bytes: int) -> Pages:
        """The same in the smallest pieces that are worth their calls: for ranges that are cut in many places."""
        if not self.is_cuda:
            return HostPages(name, num_bytes, piece_bytes=POOL_PIECE_BYTES)
        return CudaPages(name, num_bytes, self.place.index, piece_bytes=LEAST_PIECE_BYTES)

    def free_bytes(self) -> int:
        """Memory that is left here, now; of a host by its control groups."""
        if not self.is_cuda:
            return HostMemoryReader().read().left_bytes
        return int(torch.cuda.mem_get_info(self.place)[0])

    def finish(self) -> None:
        """Waits until everything that was begun here has ended; what has failed is raised."""
        if self.is_cuda:
            torch.cuda.synchronize(self.place)


HOST = RankDevice(Device.CPU, torch.device("cpu"), CpuBackend())


def rank_device(kind: Device, rank: Rank) -> RankDevice:
    """The device of one rank: by turns, where ranks outnumber them.

    Raises:
        ConfigurationError: there is none of this kind.
    """
    if kind is Device.CPU:
        return HOST
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise ConfigurationError(
            f'[group] device = "{kind.value}": torch {torch.__version__} finds no CUDA device here: set device = '
            '"cpu", or install torch for CUDA on a machine that has one'
        )
    torch.set_float32_matmul_precision("highest")
    place = torch.device("cuda", rank % count)
    torch.cuda.set_device(place)
    return RankDevice(kind, place, backend_of(place, ComputeType.FLOAT32))
