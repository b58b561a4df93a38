"""What a figure must be read with: machine, commit, versions. Reads, never measures."""

import os
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_tile")
"""Of a processor, those that decide how fast products are."""
PACKAGES = ("flipmesh", "torch", "grpcio", "uvloop", "numpy")


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """One machine and what runs on it."""

    cpu: str
    cores: int
    flags: tuple[str, ...]
    memory_bytes: int
    kernel: str
    load_1min: float
    """Processes that wanted a core at the start, in the mean of a minute: other work makes figures worse."""
    commit: str
    is_changed: bool
    """Whether the tree differs from the commit."""
    versions: dict[str, str]

    def statement(self) -> str:
        """In three lines."""
        packages = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.cpu}, {self.cores} cores ({', '.join(self.flags)}), {self.memory_bytes / 2**30:.1f} GiB, "
            f"Linux {self.kernel}, load {self.load_1min:.1f} at the start\n"
            f"commit {self.commit}{' with changes' if self.is_changed else ''}\n"
            f"Python {platform.python_version()}, {packages}"
        )


def machine_facts(root: Path) -> MachineFacts:
    """Of this machine and the tree at `root`."""
    cpu = Path("/proc/cpuinfo").read_text()
    flags = set(_field(cpu, "flags").split())
    return MachineFacts(
        cpu=_field(cpu, "model name") or platform.machine(),
        cores=os.cpu_count() or 1,
        flags=tuple(flag for flag in FLAGS if flag in flags),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        load_1min=os.getloadavg()[0],
        commit=_git(root, "rev-parse", "--short", "HEAD") or "unknown",
        is_changed=bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        versions={name: number for name in PACKAGES if (number := package_version(name)) is not None},
    )


def package_version(name: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _field(text: str, name: str) -> str:
    return next((line.partition(":")[2].strip() for line in text.splitlines() if line.startswith(name)), "")


def _git(root: Path, *words: str) -> str:
    try:
        found = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, timeout=10, check=False
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""
    return found.stdout.strip()
