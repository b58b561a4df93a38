"""A few cells of the sweep, as it runs them; all of them are `make faults`."""

import asyncio
from collections.abc import Iterator

import pytest

from services.mesh.debug.damage import DamageKind
from tests.faults.__main__ import control_of, run_on
from tests.faults.fault_mesh import FaultMesh, fault_mesh
from tests.faults.matrix import ALONE, cells
from tests.faults.scenes import SCENES
from tools.load.load import Heard

CHOSEN = (
    "shared/mover-entered/tp-pp/mover/kill",
    "shared/scheduler-outcome/tp-pp/worker-0/pause",
    "shared/worker-parked/pp-tp/worker-1/kill",
)
SHOWN = (DamageKind.BLOCK, DamageKind.ROW)
"""Damages that the instrument is shown here; the sweep shows it all."""
STARTING_S = 300
"""A mesh, its control and the damages on a machine that has other work."""
Struck = tuple[FaultMesh, list[Heard]]


@pytest.fixture(scope="module")
def struck() -> Iterator[Struck]:
    with fault_mesh(ALONE) as mesh:
        yield mesh, asyncio.run(control_of(mesh, SHOWN))


@pytest.mark.timeout(STARTING_S)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_fault_in_a_flip_is_seen_as_documented(struck: Struck, name: str) -> None:
    [job] = [job for job in (*SCENES, *cells()) if job.name == name]
    seen = asyncio.run(run_on(job, *struck))
    assert seen.streams["unchanged"] + seen.streams["answered again"] == len(struck[1])
