"""A mover that a test holds: at each of its points ranks hear nothing of what comes after."""

import pytest
from flipmesh.mover.v1 import mover_service_pb2 as pb

from services.mesh.debug.breakpoints import HoldPoint, Holds
from tests.support.mover_stand import MakeStand, deadlines


@pytest.mark.parametrize("point", [point for point in HoldPoint if point.service == "mover"])
async def test_an_attempt_stands_at_its_point_and_commits_when_it_is_let_go(
    make_stand: MakeStand, point: HoldPoint
) -> None:
    stand, holds = await make_stand(deadlines()), Holds()
    late = (HoldPoint.MOVER_CONCLUDING, HoldPoint.MOVER_CONCLUDED)
    async with stand.mover(holds):
        hold = holds.set(point, 30.0)
        assert hold is not None
        asked = stand.ask()
        for rank in stand.ranks:
            rank.park()
        if point in late:
            await asked.until(pb.FLIP_STATE_ENTERED)
            for rank in stand.ranks:
                await rank.work()
        await hold.reached.wait()
        assert all(rank.started.empty() for rank in stand.ranks), "nobody is told before the hold is over"
        hold.release()
        if point not in late:
            for rank in stand.ranks:
                await rank.work()
        await asked.until(pb.FLIP_STATE_COMMITTED)
