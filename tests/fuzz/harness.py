"""Runs a target in a process of its own and says what ended it; what it found is kept for the default run."""

import hashlib
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.tiny_llama import TinyShape, write_safetensors

SEEDS = Path(__file__).parent / "seeds"
LIMIT_S = 300.0


@dataclass(frozen=True)
class Finding:
    """An input that was read wrongly, and how that ended."""

    raw: bytes
    how: str


def write_base(folder: Path, target: str) -> Path:
    """Good files of a directory with safetensors, for `index` under a name that only an index can tell."""
    base = folder / "base"
    base.mkdir()
    write_safetensors(base, TinyShape(), torch.float32)
    if target == "index":
        whole = (base / "model.safetensors").rename(base / "weights.safetensors")
        raw = whole.read_bytes()
        names = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
        (base / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {name: whole.name for name in names if name != "__metadata__"}})
        )
    return base


def run(target: str, folder: Path, *arguments: str, base: Path | None = None) -> Finding | int:
    """How many inputs were read well, or the first that was not."""
    current = folder / "current"
    base = base or folder
    command = [sys.executable, "-m", "tests.fuzz.child", target, str(base), str(current), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=LIMIT_S)
    if ended.returncode == 0:
        return int(ended.stdout)
    assert current.exists(), f"the child did not begin: {ended.stderr}"
    name = signal.Signals(-ended.returncode).name if ended.returncode < 0 else f"exit {ended.returncode}"
    return Finding(current.read_bytes(), f"{name}\n{ended.stderr[-3000:]}")


def keep(target: str, finding: Finding) -> Path:
    """Puts the input among the seeds, under a name of its content."""
    path = SEEDS / target / hashlib.sha256(finding.raw).hexdigest()[:12]
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(finding.raw)
    return path
