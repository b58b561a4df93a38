"""The instrument that judges answers sees damaged rows: in each memory mode, in both layouts, on every rank."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.support.flipping import PP, TP, bench_of
from tests.mesh.support.meshes import started
from tools.oracle.positive_control import blind_spots, positive_control, table

log = logging.getLogger(__name__)
MODES: dict[str, dict[str, Any]] = {
    "shared, 3 ranks": {"num_ranks": 3},
    "dual": {"mode": "dual"},
    "dual by tokens": {"mode": "dual", "kv_sharding": "tokens"},
    "exchange": {"mode": "exchange"},
    "exchange, 3 ranks": {"mode": "exchange", "num_ranks": 3},
    "image": {"mode": "image"},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
async def test_damaged_rows_are_seen(mode: str, tmp_path: Path) -> None:
    group = {"num_ranks": 2, **MODES[mode]}
    with started(tmp_path, group=group, policy={"mode": "manual"}, debug={"enabled": True}) as mesh:
        async with bench_of(mesh) as bench:
            for layout in (TP, PP):
                await bench.flip_to(layout)
                shown = await positive_control(bench.client, group["num_ranks"])
                log.info("%s, %s:\n%s", mode, layout.value, table(shown))
                assert blind_spots(shown) == []
                assert len({one.kind for one in shown if one.what}) == 6, "every kind of damage was done somewhere"
