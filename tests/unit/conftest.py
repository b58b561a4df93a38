"""What tests of kernels share: both instruction sets, and random numbers whose seed is printed."""

import secrets
import sys
from collections.abc import Iterator

import pytest
import torch

from kernels import _native


@pytest.fixture(params=["vector", "portable"])
def each_path(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs with the vector kernels and again with the portable ones."""
    _native.force_portable(request.param == "portable")
    yield
    _native.force_portable(False)


@pytest.fixture
def generator() -> torch.Generator:
    """Fresh numbers each time; the seed stands in the output of a test that fails."""
    seed = secrets.randbits(32)
    sys.stdout.write(f"seed {seed}\n")
    return torch.Generator().manual_seed(seed)
