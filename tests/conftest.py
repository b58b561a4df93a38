"""How all tests run: drawn examples have no clock, and `make test` spreads them over two processes by file."""

import pytest
from hypothesis import settings

settings.register_profile("flipmesh", deadline=None)
settings.load_profile("flipmesh")

WHOLE_MESHES = ("tests/faults/", "tests/mesh/")
OF_ONE_PROCESS = ("carriers.py", "process.py", "rpc.py", "scheduler_loop.py", "supervisor.py")
"""Files of `tests/mesh` that start processes, but no whole mesh."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One file's tests share what they set up; whole meshes run one after the other, since each wants every core."""
    for item in items:
        path = item.nodeid.partition("::")[0]
        is_mesh = path.startswith(WHOLE_MESHES) and not path.endswith(OF_ONE_PROCESS)
        item.add_marker(pytest.mark.xdist_group("meshes" if is_mesh else path))
