"""Opening models as they lie on disk: by path, by name, by hub id; whole, split and broken."""

import json
import os
from pathlib import Path

import pytest
import torch

from services.core.errors import ConfigurationError
from services.models.catalogue import cached_path, find_verified, load_catalogue, marker_path, marker_text
from services.models.gguf import GgufMetadata
from services.models.model_files import ModelKind, TokenizerFolder, open_model, resolve_model
from tests.support.gguf_bytes import GgufBytes
from tests.support.small_model import CONFIG, GEOMETRY, METADATA, gguf_tensors
from tests.support.tiny_llama import TinyShape, write_safetensors

TEMPLATE = "{{ messages[0].content }}"


def write_gguf_file(path: Path, **metadata: object) -> Path:
    path.write_bytes(GgufBytes({**METADATA, **metadata}, gguf_tensors()).build())
    return path


def test_a_gguf_file_by_its_path(tmp_path: Path) -> None:
    path = write_gguf_file(
        tmp_path / "small.gguf",
        **{
            "tokenizer.chat_template": TEMPLATE,
            "tokenizer.chat_template.tool_use": "tools",
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.eot_token_id": 5,
            "tokenizer.ggml.eos_token_ids": [2, 7],
        },
    )
    model = open_model(str(path))
    assert (model.kind, model.name, model.paths) == (ModelKind.GGUF, "small", (path,))
    assert model.geometry == GEOMETRY
    assert model.chat_templates == {"default": TEMPLATE, "tool_use": "tools"}
    assert model.stated_end_ids == {2, 5, 7}
    assert isinstance(model.tokenizer, GgufMetadata)
    place = model.tensors["layers.1.ffn_down"]
    assert model.buffers[place.file_index].readonly
    assert place.offset + 4 * place.rows * place.columns <= len(model.buffers[place.file_index])


def test_the_digest_tells_headers_apart(tmp_path: Path) -> None:
    first, same = write_gguf_file(tmp_path / "a.gguf"), write_gguf_file(tmp_path / "b.gguf")
    other = write_gguf_file(tmp_path / "c.gguf", **{"general.name": "x"})
    assert open_model(first).digest == open_model(same).digest != open_model(other).digest


def write_parts(folder: Path) -> tuple[Path, Path]:
    first, second = (folder / f"m-0000{part}-of-00002.gguf" for part in (1, 2))
    split = {"split.count": 2, "split.tensors.count": len(gguf_tensors())}
    first.write_bytes(GgufBytes({**METADATA, **split, "split.no": 0}, gguf_tensors()[:4]).build())
    second.write_bytes(GgufBytes({"split.count": 2, "split.no": 1}, gguf_tensors()[4:]).build())
    return first, second


def test_p4_6_all_parts_are_loaded_from_the_first_path(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path)
    model = open_model(first)
    assert model.paths == (first, second)
    assert {place.file_index for place in model.tensors.values()} == {0, 1}
    with pytest.raises(ConfigurationError, match="part 2 of 2: give the first part's path"):
        open_model(second)


def test_p4_6_a_missing_part_is_named(tmp_path: Path) -> None:
    first, second = write_parts(tmp_path)
    second.unlink()
    with pytest.raises(ConfigurationError, match=r"missing: m-00002-of-00002\.gguf"):
        open_model(first)


def test_a_link_to_a_part_keeps_its_own_name(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "links").mkdir()
    for place, part in enumerate(write_parts(tmp_path / "blobs")):
        blob = part.rename(tmp_path / "blobs" / f"blob{place}")
        (tmp_path / "links" / part.name).symlink_to(blob)
    assert len(open_model(tmp_path / "links" / "m-00001-of-00002.gguf").paths) == 2


def test_a_safetensors_directory(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_safetensors(folder, TinyShape(tied=True), torch.bfloat16)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    model = open_model(folder)
    assert (model.kind, model.name) == (ModelKind.SAFETENSORS, "tiny")
    assert model.stated_end_ids == {3, 4}
    assert model.chat_templates == {"default": TEMPLATE}
    assert isinstance(model.tokenizer, TokenizerFolder)
    assert model.tensors["output"] == model.tensors["token_embd"]
    (folder / "chat_template.jinja").write_text("own file")
    assert open_model(folder).chat_templates == {"default": "own file"}


def shard(folder: Path) -> Path:
    """Cuts the one file of a directory in two, with an index."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for part, chosen in enumerate((names[:5], names[5:]), start=1):
        file = f"model-0000{part}-of-00002.safetensors"
        save_file({name: tensors[name] for name in chosen}, folder / file)
        weight_map |= dict.fromkeys(chosen, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_p4_12_and_14_shards_and_their_index(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    write_safetensors(folder, TinyShape(), torch.float32)
    whole = (folder / "model.safetensors").read_bytes()
    shard(folder)
    (folder / "consolidated.safetensors").write_bytes(whole)
    model = open_model(folder)
    assert [path.name for path in model.paths] == [f"model-0000{part}-of-00002.safetensors" for part in (1, 2)]
    assert "passed over: consolidated.safetensors" in model.choice
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigurationError, match=r"missing: model-00002-of-00002\.safetensors"):
        open_model(folder)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no config.json"),
        ({"x.gguf": b"1"}, r"give the path of a file in it: x\.gguf"),
        ({"config.json": b"{"}, "config.json is not valid JSON"),
        ({"config.json": b"\xff"}, "config.json is not UTF-8"),
        ({"config.json": b"[]"}, "an object expected"),
        ({"config.json": json.dumps(CONFIG).encode()}, "no model.safetensors"),
        ({"config.json": json.dumps(CONFIG).encode(), "model.safetensors": b""}, "model.safetensors is empty"),
    ],
)
def test_an_unusable_directory_says_what_it_lacks(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigurationError, match=message):
        open_model(tmp_path)


def test_a_damaged_file_is_a_configuration_error_with_its_name(tmp_path: Path) -> None:
    path = write_gguf_file(tmp_path / "small.gguf")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ConfigurationError, match=r"small\.gguf: tensor .* it is truncated"):
        open_model(path)
    with pytest.raises(ConfigurationError, match=r"there is no model at .*absent\.gguf"):
        open_model(str(tmp_path / "absent.gguf"))


CATALOGUE = """
default = "small"
[models.Small]
description = "a"
license = "b"
file = "small.gguf"
size_bytes = 3
sha256 = "abc"
parts = [{ package = "p", version = "1", member = "m", download_bytes = 5 }]
"""


def test_a_catalogue_name_in_any_case_once_its_file_is_verified(tmp_path: Path) -> None:
    catalogue = tmp_path / "models.toml"
    catalogue.write_text(CATALOGUE)
    model = load_catalogue(catalogue).find("SMALL")
    with pytest.raises(ConfigurationError, match="run `flipmesh fetch small`"):
        resolve_model("Small", catalogue=catalogue, cache=tmp_path)
    path = cached_path(model, tmp_path)
    path.parent.mkdir()
    write_gguf_file(path)
    assert find_verified(model, tmp_path) is None
    marker_path(model, tmp_path).write_text(marker_text(path, model.sha256))
    assert resolve_model("Small", catalogue=catalogue, cache=tmp_path) == path
    os.utime(path, ns=(1, 1))
    assert find_verified(model, tmp_path) is None
    with pytest.raises(ConfigurationError, match="no model 'other' in the catalogue; there are: small"):
        resolve_model("other", catalogue=catalogue, cache=tmp_path)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ('default = "small"', 'default = "x"', "no model 'x'"),
        ('license = "b"', "", "unknown or missing keys: license"),
        ('license = "b"', 'license = "b"\nlicence = "b"', "unknown or missing keys: licence"),
        ("size_bytes = 3", 'size_bytes = "3"', "size_bytes is '3'"),
        ('file = "small.gguf"', 'file = "../small.gguf"', "the plain name of a GGUF file"),
        ('version = "1", ', "", "parts: unknown or missing keys: version"),
        ("default", "default = 1 =", "cannot be read"),
    ],
)
def test_a_wrong_catalogue_is_named_by_key(tmp_path: Path, before: str, after: str, message: str) -> None:
    path = tmp_path / "models.toml"
    path.write_text(CATALOGUE.replace(before, after, 1))
    with pytest.raises(ConfigurationError, match=message):
        load_catalogue(path)


def test_the_shipped_catalogue_is_whole() -> None:
    catalogue = load_catalogue()
    assert catalogue.find(catalogue.default).license == "Apache-2.0"
    assert all(len(model.sha256) == 64 for model in catalogue.models.values())


def hub_snapshot(monkeypatch: pytest.MonkeyPatch, root: Path) -> Path:
    """An empty hub cache, offline, as the hub's library lays it out."""
    constants = pytest.importorskip("huggingface_hub").constants
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = root / "models--maker--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    return repository / "snapshots" / ("0" * 40)


def test_a_hub_id_that_is_on_disk_needs_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = hub_snapshot(monkeypatch, tmp_path)
    snapshot.parent.mkdir()
    write_safetensors(snapshot, TinyShape(), torch.float32)
    assert open_model("maker/tiny").paths == (snapshot / "model.safetensors",)


def test_a_hub_id_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub_snapshot(monkeypatch, tmp_path)
    with pytest.raises(ConfigurationError, match=r"'maker/tiny' is no path here.*without a network, give the path"):
        open_model("maker/tiny")
