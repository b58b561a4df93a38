"""Hostile input read in bounded processes: what was ever found is read well, and the slow run looks for more."""

import secrets
from pathlib import Path

import pytest

from tests.fuzz.harness import SEEDS, Finding, keep, run, write_base
from tests.fuzz.targets import TARGETS

UNBOUNDED = ("gguf", "config")
"""Counts that are not held to the file's size yet: to be taken out here with the change that does."""
SEARCHED = [
    pytest.param(name, marks=[pytest.mark.xfail(reason="counts are not held to the file's size")] * (name in UNBOUNDED))
    for name in TARGETS
    if name != "stuck"
]
SEARCH_S = 60.0


@pytest.mark.parametrize("target", SEARCHED)
def test_what_was_found_is_read_well_and_a_few_more(target: str, tmp_path: Path) -> None:
    stored = SEEDS / target
    replay = ("--replay", str(stored)) if stored.exists() else ()
    found = run(target, tmp_path, "--seconds", "0.5", *replay, base=write_base(tmp_path, target))
    assert not isinstance(found, Finding), f"{found.how}\n{found.raw[:200]!r}"
    assert found > len(list(stored.glob("*")))


@pytest.mark.slow
@pytest.mark.parametrize("target", SEARCHED)
def test_search(target: str, tmp_path: Path) -> None:
    first = secrets.randbits(62)
    found = run(target, tmp_path, "--seconds", str(SEARCH_S), "--first", str(first), base=write_base(tmp_path, target))
    if isinstance(found, Finding):
        pytest.fail(f"from {first} on: kept as {keep(target, found)}\n{found.how}")


@pytest.mark.parametrize(
    ("raw", "words"), [(b"t", "SIGPROF"), (b"m", "MemoryError"), (b"e", "KeyError"), (b"k", "SIGSEGV")]
)
def test_the_harness_sees_each_kind_of_fault(raw: bytes, words: str, tmp_path: Path) -> None:
    stored, base = tmp_path / "stored", tmp_path / "base"
    stored.mkdir()
    base.mkdir()
    for name, content in (("0", b""), ("1", b"r"), ("2", raw)):
        (stored / name).write_bytes(content)
    found = run("stuck", tmp_path, "--replay", str(stored), base=base)
    assert isinstance(found, Finding)
    assert found.raw == raw
    assert words in found.how
