"""After a switch every part that is of one layout is asked what it was made for; what disagrees ends the generation.

A rank that is half in the old layout answers wrong or waits for itself. Pure: who asks gathers the evidence, and says
apart from it which parts there are, so that one that was forgotten is as wrong as one that stayed behind.
"""

from collections.abc import Iterable, Mapping, Set

from services.core.ids import Epoch, LayoutKind

Evidence = Mapping[str, Set[LayoutKind]]
"""Which layouts each part is right for: with equal shares a part may be right for both."""


class HalfSwitchedError(RuntimeError):
    """Something is not of the layout that the log made active; the message names it."""


def check_parts(parts: Iterable[str], evidence: Evidence, kind: LayoutKind, epoch: Epoch) -> None:
    """Holds every part to the layout that is active from `epoch` on.

    Raises:
        HalfSwitchedError: one of them is of another layout, or nobody asked it.
    """
    wrong = [_said(part, evidence.get(part)) for part in parts if kind not in evidence.get(part, ())]
    if wrong:
        raise HalfSwitchedError(f"switched to {kind.value} in epoch {epoch}, but {', '.join(wrong)}")


def _said(part: str, kinds: Set[LayoutKind] | None) -> str:
    if kinds is None:
        return f"{part} was not asked"
    return f"{part} is of {' and '.join(sorted(kind.value for kind in kinds)) or 'no layout'}"
