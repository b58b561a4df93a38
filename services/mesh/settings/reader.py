"""Turns a TOML document into frozen dataclasses, strictly.

A key that no field has, a value of another type or outside its range is refused with the file, the key and the remedy;
nothing is coerced, save a whole number where a real one is wanted. Knows nothing of what the settings mean.
"""

from __future__ import annotations

import dataclasses
import difflib
import os.path
import tomllib
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, EnumType
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from services.core.errors import ConfigurationError

T = TypeVar("T")
MAX_CONFIG_BYTES = 1_048_576
"""Above this it is not a configuration that somebody wrote, but a wrong path."""


def ranged(default: T, low: float, high: float) -> T:
    """A dataclass field whose value, or each of whose values, lies in [low, high]; None passes where allowed."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high})


def read_toml(cls: type[T], source: Path) -> T:
    """Builds `cls`, whose fields are `source` and one dataclass for each table, from the file.

    Raises `ConfigurationError` if the file cannot be read or says something that `cls` does not have.
    """
    document = _parse(source)
    fields = _settable(cls)
    for key in document:
        if key not in fields:
            raise ConfigurationError(f"{source}: there is no table [{key}]; {_nearest(key, fields, 'tables')}")
    types = get_type_hints(cls)
    tables = {name: _read_table(types[name], document.get(name, {}), name, source) for name in fields}
    build: Callable[..., T] = cls
    return build(source=source, **tables)


def _parse(source: Path) -> dict[str, Any]:
    try:
        if source.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigurationError(f"{source}: larger than {MAX_CONFIG_BYTES} bytes, so not a configuration file")
        return tomllib.loads(source.read_text("utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{source}: cannot be read ({error.strerror}); FLIPMESH_CONFIG names it") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{source}: is not TOML: {error}") from error


def _read_table(cls: type[T], table: object, name: str, source: Path) -> T:
    if not isinstance(table, Mapping):
        raise ConfigurationError(f"{source}: {name} = {table!r} is a value; write it as a table [{name}]")
    fields = _settable(cls)
    types = get_type_hints(cls)
    values = {}
    for key, value in table.items():
        if key not in fields:
            raise ConfigurationError(f"{source}: [{name}] has no key {key}; {_nearest(key, fields, 'keys')}")
        values[key] = _value(value, fields[key], types[key], f"{name}.{key}", source)
    missing = {key: field.default for key, field in fields.items() if key not in values}
    paths = {key: _resolve(default, source) for key, default in missing.items() if isinstance(default, Path)}
    return cls(**values, **paths)


def _settable(cls: type[Any]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(cls) if field.name != "source"}


def _nearest(key: str, known: Mapping[str, object], what: str) -> str:
    if found := difflib.get_close_matches(key, known, n=1, cutoff=0.5):
        return f"did you mean {found[0]}?"
    return f"known {what}: {', '.join(sorted(known))}"


def _value(value: object, field: dataclasses.Field[Any], wanted: Any, key: str, source: Path) -> object:
    converted = _convert(value, wanted, source)
    if converted is _MISMATCH:
        raise ConfigurationError(f"{source}: {key} = {value!r} is not {_describe(wanted)}")
    if "low" in field.metadata:
        low, high = field.metadata["low"], field.metadata["high"]
        for number in converted if isinstance(converted, tuple) else (converted,):
            if not isinstance(number, str) and not low <= number <= high:
                raise ConfigurationError(f"{source}: {key} = {value!r} is outside {low} to {high}")
    return converted


_MISMATCH = object()
_UNIONS = (UnionType, Union)
"""`int | None`, and `Literal["auto"] | int`, whose origin is another one."""


def _members(union: Any) -> list[Any]:
    return [member for member in get_args(union) if member is not NoneType]


def _convert(value: object, wanted: Any, source: Path) -> Any:
    """`value` as `wanted`, or `_MISMATCH`. An absent key is the only way to say None."""
    if get_origin(wanted) in _UNIONS:
        attempts = (_convert(value, member, source) for member in _members(wanted))
        return next((converted for converted in attempts if converted is not _MISMATCH), _MISMATCH)
    if isinstance(wanted, EnumType):
        return _by_value(value, wanted)
    if get_origin(wanted) is Literal:
        return value if isinstance(value, str) and value in get_args(wanted) else _MISMATCH
    if get_origin(wanted) is tuple:
        return _convert_list(value, get_args(wanted)[0], source)
    if wanted is Path:
        return _resolve(Path(value).expanduser(), source) if isinstance(value, str) and value else _MISMATCH
    if wanted is float and type(value) is int:
        return float(value)
    return value if type(value) is wanted else _MISMATCH


def _by_value(value: object, wanted: EnumType) -> Any:
    try:
        return wanted(value)
    except ValueError:
        return _MISMATCH


def _convert_list(value: object, wanted: Any, source: Path) -> Any:
    if not isinstance(value, list):
        return _MISMATCH
    items = tuple(_convert(item, wanted, source) for item in value)
    return _MISMATCH if _MISMATCH in items else items


def _resolve(path: Path, source: Path) -> Path:
    """A relative path is relative to the file that says it; `..` is taken out without following links."""
    return Path(os.path.normpath(source.parent / path))


def _describe(wanted: Any) -> str:
    if get_origin(wanted) in _UNIONS:
        return ", or ".join(_describe(member) for member in _members(wanted))
    if isinstance(wanted, EnumType):
        return _one_of([str(member.value) for member in list[Enum](wanted)])
    if get_origin(wanted) is Literal:
        return _one_of(get_args(wanted))
    if get_origin(wanted) is tuple:
        return f"a list in which each entry is {_describe(get_args(wanted)[0])}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string", Path: "a path"}
    return names[wanted]


def _one_of(choices: Iterable[str]) -> str:
    return "one of " + ", ".join(f'"{choice}"' for choice in choices)
