"""Scenarios: a case written by hand and everything that happens in it, as text beside the code.

`python -m tests.sim.scenario --rewrite` writes the transcripts anew; read the difference before it is committed. The
part above the line of dashes is the case:

    ranks 2 | layout pp | seed 1                what is started; times are in ms
    mode dual | exclusive                       where its weights and rows are
    blocks 8 | resident 4 | chunk 16 | batch 32 | context 64 | ahead 2
    slip 1 weights                              in the first flip, also: room, rows, written, unforeseen
    refuse 1.0                                  odds of each rank in each flip, also: withdraw, fail, breaks
    ask NAME at 0 prompt 20 from c output 4     also: stop b, end, priority 1, abort 5
    flip tp at 5
    crash mover at 6 | crash mover when entered | stop rank-0 at 6 for 20 | unlink rank-1 at 6
"""

import argparse
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from services.core.ids import LayoutKind, TokenId
from services.scheduler.batch.limits import BatchLimits
from tests.sim.case import MS, US, Case, Fault, Odds, ToyRequest, Trigger
from tests.sim.processes.group import Group
from tests.sim.processes.memory import Mode, Slip
from tests.sim.processes.toy_model import END_ID, VOCAB
from tests.sim.processes.world import InvariantError

FOLDER = Path(__file__).parent / "scenarios"
LINE = "-" * 8
LIMITS = BatchLimits(
    num_blocks=8,
    max_resident_requests=4,
    max_queued_requests=4,
    max_context_tokens=64,
    chunk_tokens=16,
    max_batch_tokens=32,
    num_vocab=VOCAB,
)
_LIMIT_NAMES = {
    "blocks": "num_blocks",
    "resident": "max_resident_requests",
    "chunk": "chunk_tokens",
    "batch": "max_batch_tokens",
    "context": "max_context_tokens",
    "ahead": "steps_ahead",
}


def parse(text: str) -> tuple[Case, int]:
    """A case and its seed.

    Raises:
        ValueError: a line that is no line of a scenario; it is named.
    """
    given = _Given()
    for line in text.splitlines():
        if words := line.partition("#")[0].split():
            given.take(words, line)
    case = Case(
        num_ranks=given.numbers["ranks"],
        kind=given.kind,
        limits=replace(LIMITS, **given.limits),
        asked=tuple(given.asked),
        triggers=tuple(given.triggers),
        faults=tuple(given.faults),
        odds=Odds(**given.odds),
        slips=tuple(given.slips),
        mode=given.mode,
        is_exclusive=given.is_exclusive,
        control=(200 * US, 200 * US),
        data=(20 * US, 20 * US),
        boot=(1 * MS, 2 * MS),
    )
    return case, given.numbers["seed"]


@dataclass(slots=True)
class _Given:
    """What the lines have said so far."""

    numbers: dict[str, int] = field(default_factory=lambda: {"ranks": 2, "seed": 1})
    kind: LayoutKind = LayoutKind.PP
    mode: Mode = Mode.DUAL
    is_exclusive: bool = False
    limits: dict[str, int] = field(default_factory=dict)
    odds: dict[str, float] = field(default_factory=dict)
    asked: list[ToyRequest] = field(default_factory=list)
    triggers: list[Trigger] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    slips: list[tuple[int, Slip]] = field(default_factory=list)

    def take(self, words: list[str], line: str) -> None:
        """One line."""
        if not (self._take_group(words) or self._take_event(words)):
            raise ValueError(f"not a line of a scenario: {line!r}")

    def _take_group(self, words: list[str]) -> bool:
        match words:
            case [("ranks" | "seed") as name, value]:
                self.numbers[name] = int(value)
            case ["layout", value]:
                self.kind = LayoutKind(value)
            case ["mode", value]:
                self.mode = Mode(value)
            case ["exclusive"]:
                self.is_exclusive = True
            case [name, value] if name in _LIMIT_NAMES:
                self.limits[_LIMIT_NAMES[name]] = int(value)
            case [("refuse" | "withdraw" | "fail" | "breaks") as name, value]:
                self.odds[name] = float(value)
            case _:
                return False
        return True

    def _take_event(self, words: list[str]) -> bool:
        match words:
            case ["slip", rank, value]:
                self.slips.append((int(rank), Slip[value.upper()]))
            case ["ask", name, *rest]:
                self.asked.append(_asked(name, rest))
            case ["flip", target, "at", at]:
                self.triggers.append(Trigger(_ns(at), LayoutKind(target)))
            case [("crash" | "stop" | "unlink" | "unask") as what, who, *rest]:
                self.faults.append(_fault(what, who, rest))
            case _:
                return False
        return True


def _ns(milliseconds: str) -> int:
    return int(float(milliseconds) * MS)


def _words(words: list[str]) -> dict[str, str]:
    names, values = words[::2], words[1::2]
    if len(names) != len(values):
        raise ValueError(f"pairs of a name and a value expected: {' '.join(words)!r}")
    return dict(zip(names, values, strict=True))


def _asked(name: str, words: list[str]) -> ToyRequest:
    ends = "end" in words
    given = _words([word for word in words if word != "end"])
    first = ord(given.pop("from", "b")) - ord("a")
    length = int(given.pop("prompt"))
    asked = ToyRequest(
        name=name,
        at_ns=_ns(given.pop("at", "0")),
        prompt=tuple(TokenId(1 + (first + place - 1) % (VOCAB - 1)) for place in range(length)),
        max_output_tokens=int(given.pop("output")),
        end_ids=frozenset((END_ID,)) if ends else frozenset(),
        stop=given.pop("stop", None),
        priority=int(given.pop("priority", "0")),
        abort_ns=_ns(given.pop("abort")) if "abort" in given else None,
    )
    if given:
        raise ValueError(f"request {name}: unknown words {sorted(given)}")
    return asked


def _fault(what: str, who: str, words: list[str]) -> Fault:
    given = _words(words)
    return Fault(_ns(given.get("at", "0")), what, who, _ns(given.get("for", "0")), given.get("when"))


def transcript(text: str) -> str:
    """Everything that happens, and how it ended."""
    case, seed = parse(text)
    group = Group(case, Random(seed), keeps_all=True)
    try:
        group.run()
    except InvariantError as violation:
        return "\n".join([*group.world.lines(), f"violated: {violation}", ""])
    return "\n".join([*group.world.lines(), ""])


def split(path: Path) -> tuple[str, str]:
    """A file's case and its expected transcript."""
    case, _, expected = path.read_text("utf-8").partition(LINE + "\n")
    return case, expected


def main() -> None:
    """Writes every transcript anew."""
    parser = argparse.ArgumentParser(prog="python -m tests.sim.scenario")
    parser.add_argument("--rewrite", action="store_true", required=True)
    parser.parse_args()
    for path in sorted(FOLDER.glob("*.txt")):
        case, _ = split(path)
        path.write_text(case + LINE + "\n" + transcript(case), "utf-8")
        print(path.name)  # noqa: T201


if __name__ == "__main__":
    main()
