"""One mesh of two ranks for all tests that only talk to it; tests that break a mesh start their own. One oracle."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from services.core.errors import ConfigurationError
from services.models.model_files import resolve_model
from tests.mesh.support.flipping import ASKS, bench_of
from tests.mesh.support.meshes import Mesh, started
from tools.load.load import Heard
from tools.oracle.compare import control_faults

RULES = {"min_dwell_s": 0.5, "rest_s": 1.0, "prefill_threshold_tokens": 512, "release_threshold_tokens": 64}
"""The policy's numbers for a test: a flip within a second of its cause."""


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with started(tmp_path_factory.mktemp("mesh"), policy={"mode": "manual", **RULES}, debug={"enabled": True}) as mesh:
        yield mesh


@pytest.fixture(scope="session")
def control(mesh: Mesh) -> list[Heard]:
    """The answers to `ASKS` with no flip; asked twice, since a control that differs from itself proves nothing."""

    async def ask() -> tuple[list[Heard], list[Heard]]:
        async with bench_of(mesh) as bench:
            return await bench.ask(ASKS), await bench.ask(ASKS)

    first, second = asyncio.run(ask())
    assert not (faults := control_faults(first, second)), faults
    return first


@pytest.fixture(scope="session")
def model() -> Path:
    """The default model's file."""
    try:
        return resolve_model("SmolLM2-135M-Instruct")
    except ConfigurationError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def reference(model: Path) -> Iterator[Any]:
    """The default model as transformers' own, in float32."""
    import torch

    from tools.bench.transformers_llama import load_llama

    threads = torch.get_num_threads()
    yield load_llama(model)
    torch.set_num_threads(threads)
