"""When requests come and how long they are: traces of real services scaled to a machine. Pure.

A scaled trace says by how much: its factors are part of every result. Never opens a connection.
"""

import csv
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

MAX_ARRIVALS = 100_000
"""Rows that are read of a trace."""
PREFILL_TOKENS_PER_S = 300.0
DECODE_TOKENS_PER_S = 80.0
"""What a small CPU machine works off, for the choice of a time scale: only the order of magnitude matters."""
TYPICAL_LONG = 0.9
"""The share of prompts that fit once scaled; if a trace's very longest had to, all others would become tiny."""
LAST_AT = 0.95
"""Where in its span a scaled trace's last arrival comes: it must still be sent."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace; `at_s` counts from the trace's first."""

    at_s: float
    prompt_tokens: int
    output_tokens: int

    @property
    def work_s(self) -> float:
        """Roughly how long a small machine works on it."""
        return self.prompt_tokens / PREFILL_TOKENS_PER_S + self.output_tokens / DECODE_TOKENS_PER_S


@dataclass(frozen=True, slots=True)
class Scaled:
    """Arrivals on a machine's scale: lengths and times are the trace's, multiplied by these factors."""

    arrivals: tuple[Arrival, ...]
    length_scale: float
    time_scale: float
    num_cut: int
    """Prompts that were still too long and were cut."""

    def statement(self) -> str:
        """The scale in words."""
        factors = f"lengths x {self.length_scale:.4g}, times x {self.time_scale:.4g}"
        return f"{len(self.arrivals)} arrivals, {factors}, {self.num_cut} prompts cut"


def read_trace(path: Path) -> list[Arrival]:
    """A trace by its form: CSV with TIMESTAMP, ContextTokens, GeneratedTokens, or JSON lines with timestamp
    (milliseconds), input_length, output_length. In order of time, the first at 0.

    Raises:
        ValueError: another form, or nothing in it.
    """
    with path.open(encoding="utf-8") as lines:
        rows = _json_rows(lines) if path.suffix == ".jsonl" else _csv_rows(lines)
        found = sorted(itertools.islice(rows, MAX_ARRIVALS), key=lambda row: row.at_s)
    if not found:
        raise ValueError(f"{path} has no arrivals")
    begin_s = found[0].at_s
    return [Arrival(row.at_s - begin_s, row.prompt_tokens, row.output_tokens) for row in found]


def _csv_rows(lines: Iterable[str]) -> Iterator[Arrival]:
    reader = csv.DictReader(lines)
    needed = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if missing := needed - set(reader.fieldnames or ()):
        raise ValueError(f"a trace in CSV has the columns {sorted(needed)}; missing: {sorted(missing)}")
    for row in reader:
        # Seven digits after the point are one more than datetime reads.
        at_s = datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
        yield Arrival(at_s, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _json_rows(lines: Iterable[str]) -> Iterator[Arrival]:
    for line in lines:
        row = json.loads(line)
        try:
            yield Arrival(row["timestamp"] / 1e3, int(row["input_length"]), int(row["output_length"]))
        except KeyError as error:
            raise ValueError(f"a line of the trace has no {error}") from error


def fit(
    trace: Sequence[Arrival],
    *,
    seconds: float,
    max_prompt_tokens: int,
    max_output_tokens: int,
    utilisation: float = 0.5,
) -> Scaled:
    """The trace's beginning on a small machine: the longest of nine prompts in ten become `max_prompt_tokens`, what is
    longer is cut there, and time is stretched until the arrivals of `seconds` are `utilisation` of what the machine
    works off. Outputs shrink alike and are cut at `max_output_tokens`; nothing is ever made longer.
    """
    lengths = sorted(arrival.prompt_tokens for arrival in trace)
    length_scale = min(1.0, max_prompt_tokens / lengths[int((len(lengths) - 1) * TYPICAL_LONG)])
    shortened = [_shortened(arrival, length_scale, max_prompt_tokens, max_output_tokens) for arrival in trace]
    budget_s, num_taken = seconds * utilisation, 0
    for arrival in shortened:
        budget_s -= arrival.work_s
        if budget_s < 0:
            break
        num_taken += 1
    taken = shortened[: max(num_taken, 1)]
    time_scale = LAST_AT * seconds / max(taken[-1].at_s, 1e-3)
    num_cut = sum(round(arrival.prompt_tokens * length_scale) > max_prompt_tokens for arrival in trace[: len(taken)])
    return Scaled(
        tuple(replace(arrival, at_s=arrival.at_s * time_scale) for arrival in taken), length_scale, time_scale, num_cut
    )


def _shortened(arrival: Arrival, scale: float, max_prompt_tokens: int, max_output_tokens: int) -> Arrival:
    return Arrival(
        arrival.at_s,
        min(max_prompt_tokens, max(1, round(arrival.prompt_tokens * scale))),
        min(max_output_tokens, max(1, round(arrival.output_tokens * scale))),
    )
