"""Ranges and the arena's own code on a CUDA device: only the pages differ."""

from collections.abc import Callable

import pytest
import torch

from services.core.ids import Rank
from services.placement.exchange import PageMove, Place
from services.worker.memory.pages.backing import Backing, BackingError, MissingMemoryError
from services.worker.memory.pages.cuda_pages import CudaPages
from services.worker.memory.weights.arena import Arena

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIB = 1 << 20
PIECE = 2 * MIB


def free_bytes() -> int:
    """Without what torch keeps for its own temporary tensors, which are larger than what is looked at here."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(0)[0]


def plenty() -> int:
    return 1 << 50


def range_of(name: str, num_bytes: int, free: Callable[[], int] = free_bytes) -> Backing:
    return Backing(name, CudaPages(name, num_bytes, 0, PIECE), free, 0)


def test_memory_comes_and_goes_under_one_address() -> None:
    num_bytes = 1024 * MIB
    backing = range_of("pool", num_bytes)
    view = backing.tensor(torch.float32, (1024, 1024), 64 * MIB)
    address, before = view.data_ptr(), None
    for _ in range(4):
        if before is not None:
            assert before - free_bytes() < PIECE, "what was released is free again"
        assert backing.back(0, num_bytes) == num_bytes
        assert before is None or before - free_bytes() >= num_bytes
        assert not backing.flat.count_nonzero()
        backing.flat.fill_(3)
        assert view.view(torch.uint8).eq(3).all()
        assert backing.release(0, num_bytes) == num_bytes
        before = before or free_bytes()  # Only now: the first use of a kernel loads it.
    assert view.data_ptr() == address == backing.address + 64 * MIB
    backing.back(0, num_bytes)
    backing.close()
    assert before is not None and before - free_bytes() < PIECE


def test_a_captured_graph_stays_valid() -> None:
    backing = range_of("pool", 8 * PIECE)
    backing.back(0, 8 * PIECE)
    view = backing.tensor(torch.float32, (1024,), PIECE)
    torch.add(view, 1, out=view)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(view, 1, out=view)
    backing.release(0, 8 * PIECE)
    backing.back(0, 8 * PIECE)
    graph.replay()
    graph.replay()
    assert view.eq(2).all()
    backing.close()


def test_a_full_device_changes_nothing() -> None:
    total = torch.cuda.mem_get_info(0)[1]
    backing = Backing("pool", CudaPages("pool", 2 * total // (1024 * MIB) * 1024 * MIB, 0, 1024 * MIB), plenty, 0)
    backing.back(0, 1024 * MIB)
    backing.flat[: 1024 * MIB].fill_(7)
    before = free_bytes()
    with pytest.raises(MissingMemoryError, match="but the system has none"):
        backing.back(0, backing.num_bytes)
    assert abs(before - free_bytes()) < 64 * MIB and backing.backed_bytes == 1024 * MIB
    assert backing.flat[: 1024 * MIB].eq(7).all()
    backing.close()


def test_an_arena_runs_unchanged() -> None:
    arena = Arena(Rank(0), range_of("arena", 8 * PIECE), range_of("staging", 8 * PIECE), PIECE)
    arena.flat.copy_(torch.arange(8, dtype=torch.uint8, device="cuda").repeat_interleave(PIECE))
    ring = [PageMove(Place(Rank(0), False, page), Place(Rank(0), False, (page + 1) % 8), 1) for page in range(8)]
    arena.move_within(ring)
    assert arena.flat[::PIECE].tolist() == [7, 0, 1, 2, 3, 4, 5, 6]


def test_pieces_that_the_device_cannot_map_are_refused() -> None:
    with pytest.raises(BackingError, match="the device maps 2097152 at a time"):
        CudaPages("pool", MIB, 0, 4096)
