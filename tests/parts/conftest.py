"""What tests of kernels share: each way a kernel can go, and random numbers whose seed is printed."""

import secrets
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels import _native
from kernels.backend import Backend
from kernels.cpu import paths
from kernels.cpu.backend import CpuBackend
from kernels.reference.backend import ReferenceBackend


@pytest.fixture(params=["vector", "portable"])
def each_native_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs with the vector kernels and again with the portable ones."""
    _native.force_portable(request.param == "portable")
    yield
    _native.force_portable(False)


@pytest.fixture(params=["vector", "portable", "torch"])
def each_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both of C's, and what a device would take, over host memory."""
    _native.force_portable(request.param == "portable")
    if request.param == "torch":
        take_torch(monkeypatch)
    yield
    _native.force_portable(False)


def take_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on every kernel takes its torch path: that of a device, over host memory."""
    monkeypatch.setattr(paths, "takes_torch", lambda tensor: True)


@pytest.fixture(params=["cpu vector", "cpu portable", "reference"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """Every backend over host memory, in float32; C's with and without vectors."""
    _native.force_portable(request.param == "cpu portable")
    yield ReferenceBackend(torch.device("cpu"), torch.float32) if request.param == "reference" else CpuBackend()
    _native.force_portable(False)


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh numbers each time; the seed stands in the output of a test that fails."""
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    return torch.Generator().manual_seed(seed)
