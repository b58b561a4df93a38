"""`flipmesh budget` on a small model's real file: each kind of memory, each mode, tables and JSON, exit codes."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table

from services.core.errors import ConfigurationError
from services.mesh.settings.deployment import deployment_of
from services.mesh.settings.tables import load_settings
from tests.support.gguf_bytes import GgufBytes
from tests.support.small_model import METADATA, gguf_tensors
from tools import budget
from tools.budget import Machine, Measured, as_tables, find, parse_bytes, priced_model

GIB = 2**30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    tokenizer = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{index}" for index in range(10)]}
    path.write_bytes(GgufBytes(METADATA | tokenizer, gguf_tensors()).build())
    (tmp_path / "mesh.toml").write_text(f'[model]\npath = "{path}"\n[state]\ndir = "state"\n')
    return path


def call(model: Path, *words: str) -> int:
    parser = argparse.ArgumentParser()
    budget.register(parser.add_subparsers())
    arguments = parser.parse_args(["budget", "--config", str(model.parent / "mesh.toml"), *words])
    return budget.run(arguments)


def answer(model: Path, capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = call(model, "--json", *words)
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert code == (0 if found["fits"] else 1)
    return found


@pytest.mark.parametrize(
    ("text", "size"), [("1024", 1024), ("8G", 8 * GIB), ("1.5GiB", 3 * GIB // 2), ("512mb", GIB // 2), ("2 K", 2048)]
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "G", "8X", "-1G", "0", "nan", "inf"])
def test_no_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parse_bytes(text)


def test_the_deployment_here_fits_in_every_mode(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(model, capsys)
    assert (found["mode"], found["fits"]) == ("shared", True)
    assert set(found["modes"]) == {"shared", "dual", "exchange", "image"}
    assert all(mode["kv_tokens"] > 0 and mode["remedy"] for mode in found["modes"].values())
    assert found["host"]["weights, mapped by all ranks"] == model.stat().st_size
    assert found["measured_pss_bytes"] == {}, "no mesh runs here"


def test_a_host_too_small_names_what_it_lacks(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(model, capsys, "--host-memory", "512M", "--mode", "dual")
    shown = found["modes"]["dual"]
    assert not found["fits"] and shown["binding"] == "host memory"
    assert shown["left_before_pool_bytes"] == 512 * 2**20 - shown["fixed_host_bytes"] < 0
    assert call(model, "--host-memory", "512M", "--mode", "dual") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "host memory, lacks" in printed and "to raise it, use a host with more memory" in printed


def test_unified_memory_is_one_pool_under_the_tightest_ceiling(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unified = ("--kind", "unified", "--host-memory", "4G")

    def binding(*words: str) -> tuple[str, int]:
        shown = answer(model, capsys, *unified, *words)["modes"]["shared"]
        return shown["binding"], shown["kv_tokens"]

    name, whole = binding()
    assert name == "host memory"
    name, carved = binding("--carve-out", "1G")
    # 4096 bytes a block of 16 tokens.
    assert (name, whole - carved) == ("host memory less firmware carve-out", GIB // 4096 * 16)
    name, limited = binding("--translation-limit", "256M")
    assert name == "translation-table limit" and limited < 256 * 2**20 // 4096 * 16
    assert binding("--translation-limit", "3G", "--cgroup", "2G")[0] == "control group"


def test_gpus_have_a_size_each(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(model, capsys, "--kind", "gpu", "--memory", "700M,2G", "--pools", "exclusive")
    assert (found["mode"], found["budgets"]) == ("exchange", [700 * 2**20, 2 * GIB])
    assert found["modes"]["exchange"]["binding"] == "rank 0"
    assert "belongs to one rank" in found["modes"]["shared"]["refusal"]
    ratio = found["equalising_kv_tokens"]
    assert ratio[1] > 20 * ratio[0]
    image = answer(model, capsys, "--kind", "gpu", "--memory", "2G", "--mode", "image")
    assert any(name.startswith("image of pp") for name in image["host"])


def test_exclusive_pools_hold_twice_as_much(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--memory", "1G", "--mode", "exchange")
    resident = answer(model, capsys, *sizes)["modes"]["exchange"]["kv_tokens"]
    exclusive = answer(model, capsys, *sizes, "--pools", "exclusive")["modes"]["exchange"]["kv_tokens"]
    # Twice, less what a window of rows takes beside the pools.
    assert 1.9 < exclusive / resident < 2.0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--kind", "gpu"), "--kind gpu needs --memory"),
        (("--ranks", "3", "--memory", "1G,2G"), "2 sizes for 3 ranks"),
    ],
)
def test_what_cannot_be_priced(model: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        call(model, *words)


def test_more_ranks_than_layers_say_so(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(model, capsys, "--ranks", "3")
    assert not found["fits"] and "at most 2 ranks" in found["modes"]["shared"]["refusal"]


def test_the_table_has_every_term(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert call(model, "--memory", "1G") == 0
    printed = capsys.readouterr().out
    for term in ("process context", "activations", "resident table", "weights, mapped by all ranks", "kv_tokens that"):
        assert term in printed
    assert "shared: rank 1 binds; to raise it, raise the memory budget of rank 1" in printed


def test_estimates_stand_beside_what_processes_take(model: Path) -> None:
    deployment = deployment_of(load_settings(model.parent / "mesh.toml"))
    found = find(deployment, priced_model(model), Machine("cpu", (GIB, GIB), ()))
    assert found.ledger is not None
    measured = {"router": Measured(60 * 2**20, 0), "worker-1": Measured(300 * 2**20, 64 * 2**20)}
    table = as_tables([found], found, Machine("cpu", None, ()), measured)[-1]
    assert isinstance(table, Table)
    columns = [list(column.cells) for column in table.columns]
    fixed = found.ledger.ranks[1].fixed_bytes / 2**20
    assert columns == [
        ["router", "worker-1"],
        ["", f"{fixed:,.1f} MiB"],
        ["", f"{fixed + 32:,.1f} MiB"],
        ["60.0 MiB", "300.0 MiB"],
    ]


def test_an_explicit_cap_binds_before_memory_does(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = model.parent / "mesh.toml"
    config.write_text(config.read_text() + "[pool]\nmax_total_tokens = 330\n")
    modes = answer(model, capsys)["modes"]
    assert {(mode["binding"], mode["kv_tokens"]) for mode in modes.values()} == {("pool.max_total_tokens", 320)}
    small = answer(model, capsys, "--host-memory", "512M", "--mode", "dual")
    assert small["modes"]["dual"]["binding"] == "host memory"
