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
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "sanitize"
LIMIT_S = 3600


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
    folder = BUILD / name
    # -g1 after the extension's own -g0 names the lines; -O1 would leave out the code that vectors are made of.
    flags = f"{sanitizer.flags} -fno-omit-frame-pointer"
    environment = {**os.environ, "CFLAGS": flags, "LDFLAGS": flags}
    build = ["setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder / "objects")]
    subprocess.run([sys.executable, *build], cwd=ROOT, env=environment, check=True, timeout=LIMIT_S)
    (module,) = (folder / "kernels").glob("_native*.so")
    library = subprocess.run(
        ["cc", f"-print-file-name={sanitizer.library}"], check=True, capture_output=True, text=True, timeout=60
    )
    environment = {**os.environ, **sanitizer.options, "LD_PRELOAD": library.stdout.strip()}
    run = [sys.executable, "-m", "tests.sanitize.pytest_with", str(module), "--timeout", "600", "-n0", *sanitizer.tests]
    # Without randomised addresses: the thread sanitizer needs its own part of them free.
    return (
        subprocess.run(["setarch", "-R", *run], cwd=ROOT, env=environment, check=False, timeout=LIMIT_S).returncode == 0
    )


def put_in_place(module: Path) -> None:
    """Makes the built file `kernels._native` in this process."""
    name = "kernels._native"
    loader = importlib.machinery.ExtensionFileLoader(name, str(module))
    spec = importlib.util.spec_from_file_location(name, module, loader=loader)
    assert spec is not None, f"{module} is no extension module"
    native = importlib.util.module_from_spec(spec)
    sys.modules[name] = native
    loader.exec_module(native)


if __name__ == "__main__":
    main()
