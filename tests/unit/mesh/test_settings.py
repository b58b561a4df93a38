import dataclasses
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.core.errors import ConfigurationError
from services.core.ids import LayoutKind
from services.mesh.settings.tables import CONFIG_VARIABLE, DEFAULT_CONFIG, Settings, config_path, load_settings


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "mesh.toml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str) -> str:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as caught:
        load_settings(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def keys_of(table: type) -> Iterator[str]:
    return (field.name for field in dataclasses.fields(table))


def test_the_embedded_file_states_every_key_and_its_default() -> None:
    text = DEFAULT_CONFIG.read_text()
    stated = load_settings(DEFAULT_CONFIG)
    defaults = Settings(source=stated.source)
    for table in (field.name for field in dataclasses.fields(Settings) if field.name != "source"):
        section = text.split(f"\n[{table}]\n")[1].split("\n[")[0]
        for key in keys_of(type(getattr(defaults, table))):
            assert re.search(rf"^(# )?{key} = ", section, re.MULTILINE), f"[{table}] {key} is not described"
            if table != "state":
                assert getattr(getattr(stated, table), key) == getattr(getattr(defaults, table), key), key


def test_the_examples_in_comments_are_valid(tmp_path: Path) -> None:
    text = re.sub(r"^# (\w+ = )", r"\1", DEFAULT_CONFIG.read_text(), flags=re.MULTILINE)
    text = text.replace("kv_bytes = ", "# kv_bytes = ").replace('kv_sharding = "heads"', 'kv_sharding = "tokens"')
    settings = load_settings(written(tmp_path, text))
    assert settings.group.pp_layers == (15, 15)
    assert settings.group.tp_weights == (1.0, 1.0)
    assert settings.group.token_vector == (1, 1)
    assert settings.model.path == (tmp_path / "../models/some.gguf").resolve()


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, ""))
    assert (settings.group.num_ranks, settings.group.layout) == (2, LayoutKind.TP)
    assert settings.state.dir == tmp_path / ".flipmesh"


@pytest.mark.parametrize(
    ("text", "budgets"),
    [
        ("", None),
        ('memory_bytes = "auto"', None),
        ("memory_bytes = 1073741824", (2**30, 2**30)),
        ("memory_bytes = [1073741824, 2147483648]", (2**30, 2**31)),
    ],
)
def test_p6_6_budgets_are_each_ranks_own(tmp_path: Path, text: str, budgets: tuple[int, ...] | None) -> None:
    assert load_settings(written(tmp_path, f"[group]\n{text}\n")).group.budgets == budgets


def test_rows_are_cut_evenly_where_nothing_else_is_said(tmp_path: Path) -> None:
    by_tokens = load_settings(written(tmp_path, '[group]\nnum_ranks = 3\nkv_sharding = "tokens"\n'))
    assert by_tokens.group.token_vector == (1, 1, 1)
    assert load_settings(written(tmp_path, "")).group.token_vector is None


def test_the_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, str(written(tmp_path, "[group]\nnum_ranks = 5\n")))
    assert load_settings().group.num_ranks == 5
    monkeypatch.delenv(CONFIG_VARIABLE)
    assert config_path() == DEFAULT_CONFIG


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[group]\nnum_rank = 2", "[group] has no key num_rank; did you mean num_ranks?"),
        ("[groups]\nnum_ranks = 2", "no table [groups]; did you mean group?"),
        ("[router]\nzzz = 2", "[router] has no key zzz; known keys: api_key, "),
        ("group = 2", "group = 2 is a value; write it as a table [group]"),
        ("[group]\nnum_ranks = 0", "group.num_ranks = 0 is outside 1 to 1024"),
        ("[group]\nnum_ranks = 2.0", "group.num_ranks = 2.0 is not a whole number"),
        ("[group]\nnum_ranks = true", "group.num_ranks = True is not a whole number"),
        ('[group]\nnum_ranks = "2"', "group.num_ranks = '2' is not a whole number"),
        ('[group]\nlayout = "ep"', 'group.layout = \'ep\' is not one of "pp", "tp"'),
        ('[group]\ncarrier = "mpi"', 'group.carrier = \'mpi\' is not one of "shm", "gloo", "nccl"'),
        ('[group]\npp_layers = [1, "2"]', "is not a list in which each entry is a whole number"),
        (
            '[group]\nmemory_bytes = "most"',
            "memory_bytes = 'most' is not one of \"auto\", or a whole number, or a list",
        ),
        ("[group]\nmemory_bytes = 4096", "group.memory_bytes = 4096 is outside 1048576 to"),
        ("[group]\ntp_weights = 1.0", "group.tp_weights = 1.0 is not a list in which each entry is a number"),
        ('[group]\nkv_sharding = "rows"', 'group.kv_sharding = \'rows\' is not one of "heads", "tokens"'),
        ('[group]\nkv_sharding = "tokens"\nkv_tokens = [1, 0]', "group.kv_tokens = [1, 0] is outside 1 to 1000000"),
        (
            "[group]\nkv_tokens = [1.5, 1]",
            "group.kv_tokens = [1.5, 1] is not a list in which each entry is a whole number",
        ),
        ("[router]\nhttp_port = 70000", "router.http_port = 70000 is outside 0 to 65535"),
        ("[telemetry]\ntrace_ratio = nan", "telemetry.trace_ratio = nan is outside 0.0 to 1.0"),
        ("[model]\npath = ''", "model.path = '' is not a path"),
        ("[group\n", "is not TOML"),
    ],
)
def test_what_no_field_can_take_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[group]\nnum_ranks = 3\npp_layers = [15, 15]", ["2 entries", "num_ranks is 3", "one entry for each rank"]),
        ("[group]\ntp_weights = [1.0, 0.0]", ["[1.0, 0.0]", "lower num_ranks"]),
        ("[group]\nmemory_bytes = [1073741824]", ["memory_bytes has 1 entries", "num_ranks is 2"]),
        ('[group]\nkv_sharding = "tokens"\nkv_tokens = [1, 2, 3]', ["kv_tokens has 3 entries", "num_ranks is 2"]),
        ("[group]\nkv_tokens = [1, 2]", ["[1, 2]", 'kv_sharding = "heads"', "leave kv_tokens out"]),
        ("[group]\npp_layers = [30, 0]", ["[30, 0]", "at least 1"]),
        ("[group]\ncold_image = true", ["cold_image = true", 'mode = "shared"', 'set mode = "image"']),
        ("[pool]\nnum_blocks = 8\nkv_bytes = 65536", ["= 8", "= 65536", "keep one"]),
        ("[pool]\nnum_blocks = 8\nmax_total_tokens = 129", ["129", "128 slots", "raise num_blocks"]),
        ("[scheduler]\nchunk_tokens = 4096\nmax_batch_rows = 2048", ["4096", "2048", "lower chunk_tokens"]),
        ("[scheduler]\nmax_resident_requests = 600", ["600", "512", "raise max_batch_rows"]),
        ("[model]\ncontext_tokens = 4096\n[pool]\nmax_total_tokens = 2048", ["4096", "2048", "could never run"]),
        ("[model]\ncontext_tokens = 4096\n[pool]\nnum_blocks = 128", ["4096", "2048 slots", "raise num_blocks"]),
        ("[deadlines]\nstall_s = 10.0", ["stall_s = 10.0", "collective_s = 10.0", "lower stall_s"]),
        ('[telemetry]\ntraces = "otlp"', ["otlp_endpoint is absent", "http://127.0.0.1:4317"]),
        (f'[state]\ndir = "{"x" * 100}"', ["107", "choose a shorter directory"]),
    ],
)
def test_p3_15_contradictions_name_both_sides_and_the_remedy(tmp_path: Path, text: str, parts: list[str]) -> None:
    message = refusal(tmp_path, text)
    assert [part for part in parts if part not in message] == []


def test_every_contradiction_is_said_at_once(tmp_path: Path) -> None:
    message = refusal(tmp_path, "[scheduler]\nchunk_tokens = 4096\n[deadlines]\nstall_s = 20.0\n")
    assert len(message.splitlines()) == 2


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"absent\.toml: cannot be read \(No such file or directory\)"):
        load_settings(tmp_path / "absent.toml")


def test_a_key_for_clients_is_not_shown(tmp_path: Path) -> None:
    settings = load_settings(written(tmp_path, '[router]\napi_key = "sesame"\n'))
    assert settings.router.api_key == "sesame"
    assert "sesame" not in repr(settings)


def test_the_embedded_file_is_plain_toml() -> None:
    assert set(tomllib.loads(DEFAULT_CONFIG.read_text())) == set(keys_of(Settings)) - {"source"}
