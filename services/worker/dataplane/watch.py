"""What bounds a rank's waits for its peers: a deadline, a word that ends every wait, and how far this rank has come.

Never on the stream that computes: whoever aborts, another thread, another rank or the sentinel, is not held up by what
that stream waits for. The first failure is final and ends the generation.
"""

from typing import Protocol

from kernels.cpu.collective_status import AbortReason

DEFAULT_DEADLINE_S = 10.0
"""Above the sentinel's 5 s, which names a stall first, and below the 30 s after which a parked step is given up."""


class Watch(Protocol):
    """One rank's; from any thread."""

    @property
    def deadline_s(self) -> float:
        """Of every wait for a peer."""

    @property
    def abort_reason(self) -> AbortReason | None:
        """Why every wait was ended, if it was; the first reason stays."""

    @property
    def num_operations(self) -> int:
        """The watermark: operations that this rank has come through since it joined. Grows."""

    @property
    def waited_ns(self) -> int:
        """Spent waiting for peers since then, all operations together."""

    def abort(self, reason: AbortReason) -> None:
        """Ends every wait of every rank, those of a device as well."""

    def check(self) -> None:
        """After all that was enqueued has ended on the device: raises CollectiveError where that was no success."""
