"""A stand for each test, over a state directory of its own."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from services.core.flip.messages import FlipDeadlines
from services.mesh.logs.log import Log
from services.mesh.settings.paths import StatePaths
from tests.support.mover_stand import MakeStand, Stand
from tests.support.scripted_scheduler import open_log


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    paths = StatePaths(tmp_path)
    paths.create()
    with open_log(paths) as log:
        yield log


@pytest.fixture
async def make_stand(tmp_path: Path, log: Log) -> AsyncIterator[MakeStand]:
    """Both ranks are there until the end of the test."""
    async with contextlib.AsyncExitStack() as stack:

        async def make(bounds: FlipDeadlines) -> Stand:
            stand = Stand(tmp_path, log, bounds)
            for rank in range(2):
                await stack.enter_async_context(stand.rank(rank))
            stack.push_async_callback(stand.peers.close)
            return stand

        yield make
