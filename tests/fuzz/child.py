"""`python -m tests.fuzz.child TARGET BASE CURRENT ...`: reads inputs until one is read wrongly, within bounds.

An input lies in CURRENT before it is read, so that whoever started this knows what ended it, whatever did.
"""

import argparse
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from random import Random

from tests.fuzz.targets import TARGETS, Target

CASE_S = 2.0
"""Of a processor, for one input: the slowest good one takes a hundredth."""
CASE_BYTES = 1024 * 1024 * 1024
"""Of address space beyond what the process has when it begins."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("base", type=Path)
    parser.add_argument("current", type=Path)
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=0.0)
    asked = parser.parse_args()
    target = TARGETS[asked.target]
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + CASE_BYTES, used + CASE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stored = [] if asked.replay is None else _stored(asked.replay)
    inputs = chain(stored, _drawn(target, asked.base, asked.first, asked.seconds))
    num_read = 0
    for raw in inputs:
        asked.current.write_bytes(raw)
        _read(target, raw, asked.base)
        num_read += 1
    print(num_read)


def _drawn(target: Target, base: Path, first: int, seconds: float) -> Iterator[bytes]:
    end_s, seed = time.monotonic() + seconds, first
    while time.monotonic() < end_s:
        yield target.draw(Random(seed), base)
        seed += 1


def _stored(folder: Path) -> Iterator[bytes]:
    for path in sorted(folder.iterdir()):
        yield path.read_bytes()


def _read(target: Target, raw: bytes, base: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "m"
        folder.mkdir()
        for path in base.iterdir():
            (folder / path.name).symlink_to(path)
        signal.setitimer(signal.ITIMER_PROF, CASE_S)
        try:
            target.read(raw, folder)
        except target.refusals:
            pass
        except BaseException:
            traceback.print_exc()
            sys.exit(1)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0.0)


if __name__ == "__main__":
    main()
