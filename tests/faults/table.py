"""Results of cells: one line each in a file that only grows, and the table of what clients saw. Pure but for the file.

A sweep that is stopped goes on from the file; of a cell that was run again the last line counts.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median


@dataclass(frozen=True, slots=True)
class Result:
    """One cell as it went."""

    name: str
    is_good: bool
    commit: str
    took_s: float
    flip: str = ""
    reason: str = ""
    """Of the flip, or why the cell is not good."""
    streams: dict[str, int] = field(default_factory=dict)
    gaps_s: list[float] = field(default_factory=list)
    named_s: float | None = None


def read(path: Path) -> dict[str, Result]:
    """The last result of each cell; a line that was not written to its end is none."""
    found: dict[str, Result] = {}
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            try:
                result = Result(**json.loads(line))
            except (json.JSONDecodeError, TypeError):
                continue
            found[result.name] = result
    return found


def append(path: Path, result: Result) -> None:
    """Writes one result behind the others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(result)) + "\n")


def group_of(name: str) -> str:
    """The row of the table: mode, victim and fault of a cell of the matrix, all its states together; else the cell."""
    parts = name.split("/")
    return f"{parts[0]}: {parts[3]}, {parts[4]}" if len(parts) == 5 else name


def as_rows(results: Iterable[Result]) -> list[dict[str, object]]:
    """One row for each group, in order of appearance."""
    groups: defaultdict[str, list[Result]] = defaultdict(list)
    for result in results:
        groups[group_of(result.name)].append(result)
    return [_row(group, members) for group, members in groups.items()]


def _row(group: str, members: list[Result]) -> dict[str, object]:
    flips, streams = Counter(member.flip for member in members if member.flip), Counter[str]()
    for member in members:
        streams.update(member.streams)
    gaps_s = sorted(gap_s for member in members for gap_s in member.gaps_s)
    named_s = [member.named_s for member in members if member.named_s is not None]
    return {
        "group": group,
        "cells": len(members),
        "failed": [member.name for member in members if not member.is_good],
        "flips": dict(sorted(flips.items())),
        "streams": {name: count for name, count in sorted(streams.items()) if count},
        "pause_p50_s": round(median(gaps_s), 3) if gaps_s else None,
        "pause_max_s": round(gaps_s[-1], 3) if gaps_s else None,
        "named_max_s": round(max(named_s), 2) if named_s else None,
        "took_s": round(sum(member.took_s for member in members), 1),
    }


def as_markdown(rows: Iterable[Mapping[str, object]]) -> str:
    """The table; pauses are the longest time between two tokens, over all streams of the row."""
    lines = [
        "| struck, how | cells | failed | flips | streams | pause p50 / max, s | named within, s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        failed = row["failed"]
        assert isinstance(failed, list)
        lines.append(
            f"| {row['group']} | {row['cells']} | {len(failed)} | {_counts(row['flips'])} | {_counts(row['streams'])} "
            f"| {_or_dash(row['pause_p50_s'])} / {_or_dash(row['pause_max_s'])} | {_or_dash(row['named_max_s'])} |"
        )
    return "\n".join(lines) + "\n"


def _counts(value: object) -> str:
    assert isinstance(value, dict)
    return ", ".join(f"{count} {name}" for name, count in value.items()) or "-"


def _or_dash(value: object) -> str:
    return "-" if value is None else str(value)
