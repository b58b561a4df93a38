"""A log for each test, in a state directory of its own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from services.mesh.logs.log import Log
from services.mesh.settings.paths import StatePaths
from tests.support.scripted_scheduler import open_log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    paths = StatePaths(tmp_path)
    paths.create()
    with open_log(paths) as log:
        yield log
