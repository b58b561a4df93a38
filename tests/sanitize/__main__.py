"""`python -m tests.sanitize`: the C kernels built with sanitizers, in a folder of their own, and their tests on them.

The build that serves stays as it is: the instrumented one is put in its place for one pytest alone. Addresses and
undefined behaviour are looked at in all kernels, data races in the collectives, which are what shares memory between
threads here (the tests run ranks as threads).
"""

import importlib.machinery
import importlib.util
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import kernels

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "sanitize"
LIMIT_S = 3600
FLAGS = ("-fPIC", "-std=gnu11", "-O1", "-g1", "-fno-omit-frame-pointer", "-fno-math-errno", "-Wno-psabi", "-pthread")


@dataclass(frozen=True)
class Sanitizer:
    """One instrumented build: the compiler's flags, the library that must come first, and the tests that it runs."""

    flags: str
    library: str
    options: dict[str, str]
    tests: tuple[str, ...]


# Leaks are not looked for: an interpreter never gives back all that it took. What of a report may be recovered from
# ends the process all the same, so that no finding passes as a line in a log.
SANITIZERS = {
    "address": Sanitizer(
        "-fsanitize=address,undefined -fno-sanitize-recover=all",
        "libasan.so",
        {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1"},
        ("tests/parts/kernels",),
    ),
    "thread": Sanitizer(
        "-fsanitize=thread",
        "libtsan.so",
        {"TSAN_OPTIONS": "halt_on_error=1:report_signal_unsafe=0"},
        ("tests/parts/kernels/test_collectives.py",),
    ),
}


def main() -> None:
    """Builds and runs each, and leaves with 1 if one found something."""
    names = sys.argv[1:] or list(SANITIZERS)
    failed = [name for name in names if not _is_clean(name, SANITIZERS[name])]
    print(f"sanitizers with findings: {', '.join(failed) or 'none'} of {', '.join(names)}")
    sys.exit(bool(failed))


def _is_clean(name: str, sanitizer: Sanitizer) -> bool:
    module = _built(BUILD / name, sanitizer.flags.split())
    library = subprocess.run(
        ["cc", f"-print-file-name={sanitizer.library}"], check=True, capture_output=True, text=True, timeout=60
    )
    environment = {**os.environ, **sanitizer.options, "LD_PRELOAD": library.stdout.strip()}
    run = [sys.executable, "-m", "tests.sanitize.pytest_with", str(module), "--timeout", "600", *sanitizer.tests]
    # Without randomised addresses: the thread sanitizer needs its own part of them free.
    ended = subprocess.run(["setarch", "-R", *run], cwd=ROOT, env=environment, check=False, timeout=LIMIT_S)
    return ended.returncode == 0


def _built(folder: Path, flags: list[str]) -> Path:
    """The extension from its sources. What `setup.py` asks for would take the compiler half an hour here."""
    folder.mkdir(parents=True, exist_ok=True)
    compiler = ["cc", *FLAGS, *flags, "-I", sysconfig.get_path("include")]

    def compiled(source: Path) -> str:
        made = str(folder / f"{source.stem}.o")
        subprocess.run([*compiler, "-c", str(source), "-o", made], cwd=ROOT, check=True, timeout=LIMIT_S)
        return made

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        objects = list(threads.map(compiled, sorted((ROOT / "kernels" / "cpu" / "native").glob("*.c"))))
    module = folder / "_native.so"
    subprocess.run([*compiler, "-shared", *objects, "-o", str(module), "-lm"], check=True, timeout=LIMIT_S)
    return module


def put_in_place(module: Path) -> None:
    """Makes the built file `kernels._native` in this process."""
    name = "kernels._native"
    loader = importlib.machinery.ExtensionFileLoader(name, str(module))
    spec = importlib.util.spec_from_file_location(name, module, loader=loader)
    assert spec is not None, f"{module} is no extension module"
    native = importlib.util.module_from_spec(spec)
    sys.modules[name] = native
    loader.exec_module(native)
    # What an import of a submodule does as well.
    vars(kernels)["_native"] = native


if __name__ == "__main__":
    main()
