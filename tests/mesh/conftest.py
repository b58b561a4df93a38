"""One mesh of two ranks for all tests that only talk to it; tests that break a mesh start their own."""

from collections.abc import Iterator

import pytest

from tests.mesh.meshes import Mesh, started


@pytest.fixture(scope="session")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    with started(tmp_path_factory.mktemp("mesh"), policy={"mode": "manual"}) as mesh:
        yield mesh
