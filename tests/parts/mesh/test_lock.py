"""The lock by which two processes of a kind never share a state directory, over a real file."""

import fcntl
import os
from pathlib import Path

import pytest

from services.core.errors import ConfigurationError
from services.mesh.settings import paths
from services.mesh.settings.paths import hold_lock


@pytest.fixture
def held(tmp_path: Path) -> int:
    fd = os.open(tmp_path / "tiny.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.write(fd, b"4711\n")
    return fd


def test_the_lock_of_a_process_that_is_ending_is_waited_for(
    tmp_path: Path, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths.time, "sleep", lambda _: os.close(held))
    own = hold_lock(tmp_path / "tiny.lock", "tiny")
    assert (tmp_path / "tiny.lock").read_text() == f"{os.getpid()}\n"
    os.close(own)


def test_the_lock_of_a_process_that_lives_is_a_configuration_error(tmp_path: Path, held: int) -> None:
    with pytest.raises(ConfigurationError, match=r"tiny runs already in .* \(process 4711\): stop it, or give"):
        hold_lock(tmp_path / "tiny.lock", "tiny", within_s=0.0)
    os.close(held)
