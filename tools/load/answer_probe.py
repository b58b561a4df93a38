"""Answers held against themselves while a mesh flips on its own: streams of free text, a control without a flip first.

A difference from the control, in ids or in margins, counts as wrong unless the control's two best tokens were nearly
equal where the ids part. The oracle does the same around one flip by hand; this runs beside a load until it is told to
stop. Damaged rows must have been seen first (positive_control), or the probe proves nothing.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tools.load.load import Ask, Heard, Load
from tools.load.observe import FlipSeen
from tools.mesh_client import MeshClient
from tools.oracle.asks import asks_of
from tools.oracle.compare import Difference, first_difference

NUM_STREAMS = 2
NUM_TOKENS = 72


@dataclass(frozen=True, slots=True)
class Probed:
    """One probing stream: when it ran (wall-clock nanoseconds of its first and last token) and how it compares."""

    stream: int
    begin_unix_ns: int
    end_unix_ns: int
    difference: Difference | None
    error: str

    @property
    def is_wrong(self) -> bool:
        """Whether rounding cannot explain it."""
        return bool(self.error) or (self.difference is not None and not self.difference.is_near_tie)

    def crosses(self, flip: FlipSeen) -> bool:
        """Whether tokens came before the flip's pause and after it."""
        begin, end = flip.pause_begin_unix_ns, flip.pause_end_unix_ns
        return (
            flip.is_committed
            and begin is not None
            and end is not None
            and self.begin_unix_ns < begin < end < self.end_unix_ns
        )


@dataclass(slots=True)
class AnswerProbe:
    """The probe; `control_faults` empty: the instrument is valid."""

    client: MeshClient
    asks: Sequence[Ask] = field(default_factory=lambda: asks_of(NUM_STREAMS, NUM_TOKENS))
    control: list[Heard] = field(default_factory=list)
    control_faults: list[str] = field(default_factory=list)
    probed: list[Probed] = field(default_factory=list)

    async def take_control(self) -> None:
        """The answers without a flip, twice: a control that differs from itself shows nothing."""
        self.control = await self._stream()
        again = await self._stream()
        for stream, (one, other) in enumerate(zip(self.control, again, strict=True)):
            if one.error or other.error:
                self.control_faults.append(f"control stream {stream}: {one.error or other.error}")
            elif (difference := first_difference(stream, one, other)) is not None:
                self.control_faults.append(f"stream {stream} differs from itself at token {difference.position}")

    async def run(self, until_s: float) -> None:
        """Probes again and again; begins none after `until_s` (monotonic)."""
        while time.monotonic() < until_s:
            offset_ns = time.time_ns() - time.monotonic_ns()
            for stream, heard in enumerate(await self._stream()):
                self.probed.append(compare(stream, self.control[stream], heard, offset_ns))

    async def _stream(self) -> list[Heard]:
        return await Load(self.client.channel("router"), self.asks).run()


def compare(stream: int, control: Heard, heard: Heard, offset_ns: int) -> Probed:
    """One answer against the control's; `offset_ns` takes its times to the wall clock."""
    difference = None if heard.error else first_difference(stream, control, heard)
    arrived = heard.arrived_ns or [0]
    return Probed(stream, arrived[0] + offset_ns, arrived[-1] + offset_ns, difference, heard.error)
