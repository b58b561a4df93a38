"""Finds the files of the model that the configuration names, maps them read-only, and says what they are.

Never copies a weight and never reads one: what is handed on is buffers, places in them, and numbers. Router and
workers open the same files; the kernel keeps one copy of the pages. A reference is, in this order: a path that exists,
a name of the catalogue (already fetched), or a hub id `owner/name`.

Invariant: a `ModelFiles` that exists is complete: every tensor of the model is in exactly one place, in its shape.
"""

import hashlib
import json
import mmap
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from services.core.errors import ConfigurationError
from services.core.ids import TokenId
from services.models.catalogue import CATALOGUE_PATH, cache_root, find_verified, load_catalogue
from services.models.geometry import ModelGeometry, geometry_from_config, geometry_from_gguf
from services.models.gguf import GgufArray, GgufMetadata, check_split, parse_gguf, split_part_names
from services.models.model_file import ModelFileError
from services.models.safetensors import INDEX_NAME, check_index, choose_weight_files, parse_index, parse_safetensors
from services.models.tensor_places import TensorPlace, WeightFile, locate_tensors

MAX_JSON_BYTES = 64 * 1024 * 1024
"""Above the largest index or tokenizer configuration met in the wild (a few MB)."""
_HUB_ID = re.compile(r"^[\w.-]+/[\w.-]+$")
_HUB_FILES = ["*.safetensors", INDEX_NAME, "config.json", "generation_config.json", "tokenizer*", "chat_template*"]
_HUB_LEFT_OUT = ["consolidated*", "*/*"]
DEFAULT_TEMPLATE = "default"


class ModelKind(Enum):
    """The format of the weights."""

    GGUF = "gguf"
    SAFETENSORS = "safetensors"


@dataclass(frozen=True, slots=True)
class TokenizerFolder:
    """The tokenizer of a safetensors directory. Its files may be absent; then only workers can use the directory."""

    tokenizer_json: Path
    settings: Mapping[str, object]
    """`tokenizer_config.json`, or empty."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An opened model."""

    kind: ModelKind
    name: str
    """The file's or directory's own name, without suffix."""
    paths: tuple[Path, ...]
    """The files with weights; `TensorPlace.file_index` counts in them."""
    buffers: tuple[memoryview, ...]
    """The same files, mapped read-only."""
    geometry: ModelGeometry
    tensors: Mapping[str, TensorPlace]
    tokenizer: GgufMetadata | TokenizerFolder
    chat_templates: Mapping[str, str]
    """By name, `default` the usual one; empty when the files have none."""
    stated_end_ids: frozenset[TokenId]
    """The ids that the files call an end; the router adds those that are ends by their text."""
    digest: str
    """Of headers and sizes, not of the weights: tells models apart in `status`, costs milliseconds."""
    choice: str
    """Which weight files were taken and why: for the log."""


def open_model(reference: str | Path, *, catalogue: Path = CATALOGUE_PATH, cache: Path | None = None) -> ModelFiles:
    """Resolves `reference` and opens what it names; `cache` is for tests.

    Raises `ConfigurationError`: not found, not fetched, damaged, incomplete or unsupported, with what to do.
    """
    path = resolve_model(reference, catalogue=catalogue, cache=cache)
    try:
        return _open_folder(path) if path.is_dir() else _open_gguf(path)
    except ModelFileError as error:
        raise ConfigurationError(f"the model {path} cannot be used: {error}") from error
    except OSError as error:
        raise ConfigurationError(f"the model {path} cannot be read: {error}") from error


def resolve_model(reference: str | Path, *, catalogue: Path = CATALOGUE_PATH, cache: Path | None = None) -> Path:
    """The GGUF file or safetensors directory that `reference` stands for; a hub id is downloaded if need be.

    Raises `ConfigurationError` if there is none.
    """
    path = Path(reference).expanduser()
    if path.exists():
        # Not resolved: a link's own name says which part of a split model it is.
        return path.absolute()
    name = str(reference)
    if isinstance(reference, Path) or name.endswith(".gguf") or name.startswith(("/", ".", "~")):
        raise ConfigurationError(f"there is no model at {path.absolute()}")
    if _HUB_ID.match(name):
        return _hub_folder(name)
    model = load_catalogue(catalogue).find(name)
    found = find_verified(model, cache or cache_root())
    if found is None:
        raise ConfigurationError(f"the model {model.name} is not fetched yet: run `flipmesh fetch {model.name}`")
    return found


def _open_gguf(first: Path) -> ModelFiles:
    paths = tuple(first.with_name(name) for name in split_part_names(first.name))
    if missing := [path.name for path in paths if not path.exists()]:
        raise ModelFileError(f"{first.name} is one of {len(paths)} parts, missing: {', '.join(missing)}")
    buffers = tuple(_map(path) for path in paths)
    parts = tuple(parse_gguf(buffer, path.name) for buffer, path in zip(buffers, paths, strict=True))
    check_split(parts)
    metadata, geometry = parts[0].metadata, geometry_from_gguf(parts)
    return ModelFiles(
        kind=ModelKind.GGUF,
        name=first.stem,
        paths=paths,
        buffers=buffers,
        geometry=geometry,
        tensors=locate_tensors(parts, geometry),
        tokenizer=metadata,
        chat_templates=_gguf_templates(metadata),
        stated_end_ids=_gguf_end_ids(metadata),
        digest=_digest(parts, b""),
        choice=f"{len(paths)} GGUF file{'s' if len(paths) > 1 else ''}, {first.name} first",
    )


def _gguf_templates(metadata: GgufMetadata) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): metadata.text(key) for key in metadata if key.startswith(prefix)}
    default = metadata.text_or_none("tokenizer.chat_template")
    return named if default is None else {**named, DEFAULT_TEMPLATE: default}


def _gguf_end_ids(metadata: GgufMetadata) -> frozenset[TokenId]:
    keys = [f"tokenizer.ggml.{kind}_token_id" for kind in ("eos", "eot", "eom")]
    ids = {metadata.whole_or_none(key) for key in keys}
    several = metadata.get("tokenizer.ggml.eos_token_ids")
    if isinstance(several, GgufArray):
        ids |= {int(number) for number in several.numbers()}
    return frozenset(TokenId(number) for number in ids if number is not None)


def _open_folder(folder: Path) -> ModelFiles:
    if not (folder / "config.json").exists():
        ggufs = sorted(path.name for path in folder.glob("*.gguf"))
        hint = f"; give the path of a file in it: {', '.join(ggufs[:4])}" if ggufs else ""
        raise ModelFileError(f"the directory has no config.json{hint}")
    config = _read_json(folder / "config.json")
    index_path = folder / INDEX_NAME
    index = parse_index(_read_text(index_path)) if index_path.exists() else None
    chosen = choose_weight_files({path.name for path in folder.iterdir()}, index)
    paths = tuple(folder / name for name in chosen.names)
    buffers = tuple(_map(path) for path in paths)
    files = tuple(parse_safetensors(buffer, path.name) for buffer, path in zip(buffers, paths, strict=True))
    check_index(index if index and set(index.values()) == set(chosen.names) else {}, files)
    geometry = geometry_from_config(config, {tensor.name for file in files for tensor in file.tensors})
    settings = _read_json_if_there(folder / "tokenizer_config.json")
    return ModelFiles(
        kind=ModelKind.SAFETENSORS,
        name=folder.name,
        paths=paths,
        buffers=buffers,
        geometry=geometry,
        tensors=locate_tensors(files, geometry),
        tokenizer=TokenizerFolder(folder / "tokenizer.json", settings),
        chat_templates=_folder_templates(folder, settings),
        stated_end_ids=_end_ids(config, _read_json_if_there(folder / "generation_config.json")),
        digest=_digest(files, (folder / "config.json").read_bytes()),
        choice=chosen.rule,
    )


def _folder_templates(folder: Path, settings: Mapping[str, object]) -> dict[str, str]:
    """A file of its own wins over the tokenizer's configuration, as it does for those who write such directories."""
    own = folder / "chat_template.jinja"
    if own.exists():
        return {DEFAULT_TEMPLATE: _read_text(own)}
    stated = _read_json_if_there(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(stated, str):
        return {DEFAULT_TEMPLATE: stated}
    entries = [entry for entry in stated if isinstance(entry, dict)] if isinstance(stated, list) else []
    return {str(entry["name"]): str(entry["template"]) for entry in entries if {"name", "template"} <= set(entry)}


def _end_ids(*configs: Mapping[str, object]) -> frozenset[TokenId]:
    ids: set[TokenId] = set()
    for config in configs:
        stated = config.get("eos_token_id")
        ids |= {TokenId(number) for number in (stated if isinstance(stated, list) else [stated]) if type(number) is int}
    return frozenset(ids)


def _digest(files: Sequence[WeightFile], extra: bytes) -> str:
    digest = hashlib.sha256(extra)
    for file in files:
        digest.update(len(file.buffer).to_bytes(8, "little"))
        digest.update(file.buffer[: file.data_offset])
    return digest.hexdigest()[:16]


def _map(path: Path) -> memoryview:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise ModelFileError(f"{path.name} is empty")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _read_text(path: Path) -> str:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ModelFileError(f"{path.name} has {path.stat().st_size} bytes, at most {MAX_JSON_BYTES} expected")
    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as error:
        raise ModelFileError(f"{path.name} is not UTF-8: {error.reason}") from error


def _read_json(path: Path) -> dict[str, object]:
    try:
        values = json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ModelFileError(f"{path.name} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{path.name} holds a {type(values).__name__}, an object expected")
    return values


def _read_json_if_there(path: Path) -> dict[str, object]:
    return _read_json(path) if path.exists() else {}


def _hub_folder(hub_id: str) -> Path:
    """The directory of a hub model: the complete copy that is on disk, else a download."""
    # Imported here: it costs half a second that only hub models need to pay.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    def folder(is_local: bool) -> Path:
        patterns, left_out = _HUB_FILES, _HUB_LEFT_OUT
        found = snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=left_out, local_files_only=is_local)
        return Path(found)

    try:
        if _is_complete(found := folder(is_local=True)):
            return found
    except LocalEntryNotFoundError:
        pass
    except HFValidationError as error:
        raise ConfigurationError(f"{hub_id!r} is neither a path nor a hub id: {error}") from error
    try:
        return folder(is_local=False)
    # Wide, because the library lets the errors of its transport through, and those change with its version.
    except Exception as error:
        raise ConfigurationError(
            f"{hub_id!r} is no path here, and could not be downloaded from the hub ({_first_line(error)}); without a "
            "network, give the path of a GGUF file or safetensors directory, or a name from `flipmesh fetch --list`"
        ) from error


def _is_complete(folder: Path) -> bool:
    names: Collection[str] = {path.name for path in folder.iterdir()}
    try:
        choose_weight_files(names, parse_index(_read_text(folder / INDEX_NAME)) if INDEX_NAME in names else None)
    except ModelFileError:
        return False
    return "config.json" in names


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
