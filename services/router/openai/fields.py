"""Reads one JSON object field by field: types, ranges and nothing else.

Never repeats a value that the client sent, a small number apart. `null` means absent everywhere, as in OpenAI's API.
Keys that nobody asked for are known at the end, so that unknown fields are tolerated and yet told to the operator.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from services.router.openai.refusal import RefusalError, invalid

_JSON_TYPES: Mapping[type, str] = {
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
_LARGEST_SHOWN = 10**12


def shown(value: object) -> str:
    """`value` for an error message: a small number as it is, all else by its JSON type."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST_SHOWN:
        return f"{value:.12g}"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return "a number far outside"
    return _JSON_TYPES.get(type(value), "something else")


class Fields:
    """One object of a request. Every getter raises `RefusalError` naming the field."""

    __slots__ = ("_body", "_read", "_where")

    def __init__(self, body: Mapping[str, object], where: str = "") -> None:
        self._body = body
        self._read: set[str] = set()
        self._where = where

    def path(self, name: str) -> str:
        """The name of a field as the client sees it."""
        return f"{self._where}.{name}" if self._where else name

    def value(self, name: str) -> object:
        """The raw value; None where absent or null."""
        self._read.add(name)
        return self._body.get(name)

    def unread(self) -> Collection[str]:
        """Keys that were sent and never asked for."""
        return self._body.keys() - self._read

    def integer(self, name: str, low: int, high: int) -> int | None:
        """An integer in [low, high], or None; a float without a fraction counts."""
        value = self.value(name)
        if value is None:
            return None
        return integer(value, self.path(name), low, high)

    def number(self, name: str, low: float, high: float, *, above: bool = False) -> float | None:
        """A finite number in [low, high] (in (low, high] with `above`), or None."""
        value = self.value(name)
        if value is None:
            return None
        return number(value, self.path(name), low, high, above=above)

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise invalid(self.path(name), f"must be true or false, got {shown(value)}")
        return value

    def string(self, name: str) -> str | None:
        """A string, or None."""
        value = self.value(name)
        if value is not None and not isinstance(value, str):
            raise invalid(self.path(name), f"must be a string, got {shown(value)}")
        return value

    def object(self, name: str) -> "Fields | None":
        """An object, or None."""
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise invalid(self.path(name), f"must be an object, got {shown(value)}")
        return Fields(value, self.path(name))


def integer(value: object, path: str, low: int, high: int) -> int:
    """`value` as an integer in [low, high]."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise invalid(path, f"must be an integer, got {shown(value)}")
    if not low <= value <= high:
        raise _out_of_range(path, "an integer", low, high, value)
    return value


def number(value: object, path: str, low: float, high: float, *, above: bool = False) -> float:
    """`value` as a finite number in [low, high], or in (low, high]."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise invalid(path, f"must be a number, got {shown(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise invalid(path, "must be a finite number")
    if not low <= value <= high or (above and value == low):
        raise _out_of_range(path, "a number", low, high, value, above=above)
    return float(value)


def sequence(value: object, path: str, max_items: int) -> Sequence[object]:
    """`value` as a list of at most `max_items`."""
    if not isinstance(value, list):
        raise invalid(path, f"must be a list, got {shown(value)}")
    if len(value) > max_items:
        raise invalid(path, f"must have at most {max_items} entries, got {len(value)}")
    return value


def _out_of_range(path: str, what: str, low: float, high: float, value: float, *, above: bool = False) -> RefusalError:
    least = "above" if above else "at least"
    return invalid(
        path, f"must be {what}, {least} {low:g} and at most {high:.12g}, got {shown(value)}", "value_out_of_range"
    )
