"""Everything on a rank that holds a layout, switched together, and the check that nothing was forgotten.

A rank that is half in the old layout answers wrong or waits for itself; so after a switch every holder is asked what it
holds, and one that disagrees ends the generation before the next step runs.
"""

from collections.abc import Iterable
from typing import Protocol

from services.core.ids import Epoch, LayoutKind

Held = tuple[LayoutKind, Epoch]


class HalfSwitchedError(RuntimeError):
    """Something still holds the layout before; the message names it."""


class LayoutHolder(Protocol):
    """Something that keeps what belongs to one layout."""

    @property
    def name(self) -> str:
        """For the message, should it be stale."""

    @property
    def held(self) -> Held:
        """The layout and epoch it works under."""

    def switch(self, kind: LayoutKind, epoch: Epoch) -> None:
        """Works under another layout from now on."""


def switch_all(holders: Iterable[LayoutHolder], kind: LayoutKind, epoch: Epoch) -> None:
    """Switches every holder, then asks each.

    Raises:
        HalfSwitchedError: one of them holds something else.
    """
    everyone = list(holders)
    for holder in everyone:
        holder.switch(kind, epoch)
    stale = [f"{holder.name} holds {holder.held}" for holder in everyone if holder.held != (kind, epoch)]
    if stale:
        raise HalfSwitchedError(f"switched to {kind.value} in epoch {epoch}, but {', '.join(stale)}")
