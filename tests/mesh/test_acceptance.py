"""Acceptance in small: the whole promise on a real mesh for well under a minute of load; and figures of one layout."""

import json
import re
from functools import partial
from pathlib import Path

import pytest

from services.core.ids import LayoutKind
from services.mesh.settings.tables import load_settings
from tests.mesh.support.meshes import Mesh
from tests.mesh.support.running import python, running
from tools.bench.mesh import LAYOUTS, MeshBench, SampleRefusedError
from tools.load.steering import bring_to
from tools.mesh_client import MeshClient

RUN_S = 160.0


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_promise_is_kept(tmp_path: Path) -> None:
    config, document, page = tmp_path / "mesh.toml", tmp_path / "run.json", tmp_path / "run.html"
    config.write_text(f'[pool]\nnum_blocks = 1024\n[state]\ndir = "{tmp_path / "other"}"\n')
    command = python("-m", "tools.cli", "acceptance", "--config", str(config), "--ranks", "2", "--decoders", "4")
    command += ["--minutes", "0.6", "--control", "6", "--min-flips", "1"]
    with running([*command, "--json", str(document), "--page", str(page)], {}) as process:
        lines = process.rest(RUN_S)
        assert process.code() == 0, "\n".join(lines)
    found = json.loads(document.read_text())
    assert found["passed"] is True
    assert found["run"]["ranks"] == 2
    assert min(found["summary"]["flips"].values()) >= 1
    assert min(found["summary"]["crossings"].values()) >= 1
    assert {load["layout"] for load in found["loads"]} == {"PP", "TP"}
    assert all(check["passed"] for check in found["checks"])
    assert "<svg" in page.read_text()
    assert not (tmp_path / "other").exists(), "a mesh of its own has a state directory of its own"


def test_a_run_without_a_flip_is_not_accepted(mesh: Mesh, tmp_path: Path) -> None:
    """A trace too light to call for a flip: every request is well, and the promise is still not shown."""
    trace = tmp_path / "light.csv"
    rows = [f"2023-11-16 18:17:{second:02d}.0000000,40,12" for second in range(8)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    words = ["--running", "--minutes", "0.1", "--control", "1", "--trace", str(trace)]
    done = mesh.command("acceptance", *words, timeout_s=RUN_S)
    assert done.returncode == 1, done.stderr
    assert "light.csv: 8 arrivals, lengths x 1, times x" in done.stdout
    assert re.search(r"^FAIL flips: 0 TP to PP", done.stdout, re.MULTILINE)
    assert re.search(r"^ok   requests: 8 requests, 0 failed", done.stdout, re.MULTILINE)
    assert done.stdout.rstrip().endswith("not accepted")
    assert mesh.command("policy", "manual").stdout.startswith("manual -> "), "the mode before is set again"


@pytest.mark.slow
async def test_figures_of_one_layout(mesh: Mesh) -> None:
    client = MeshClient(load_settings(mesh.config))
    try:
        bench = MeshBench(client, 1)
        for found in (await bench.prefill(64), await bench.decode(2)):
            assert {layout: len(samples.values) for layout, samples in found.items()} == dict.fromkeys(LAYOUTS, 1)
            assert min(samples.median for samples in found.values()) > 0
        flips = await bench.flips(1)
        assert {way: len(pauses) for way, pauses in flips.pauses_ms.items()} == {"TP to PP": 1, "PP to TP": 1}
        assert flips.num_abandoned == 0
        with pytest.raises(SampleRefusedError, match="something else flips"):
            await bench.samples(partial(_flip_away, client))
    finally:
        await client.close()


async def _flip_away(client: MeshClient) -> float:
    """A sample in the middle of which somebody flips."""
    await bring_to(client, LayoutKind.TP)
    return 1.0
