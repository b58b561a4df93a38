"""Who exchanges with whom, and in which order: every pair of ranks once, and no rank with two at a time.

Pure. Rounds are those of a round-robin tournament: in each, everybody has one partner or none. A rank that waits for
its partner waits for one that is in the same round or an earlier one, so some pair can always go on: no order of
arrival makes a circle of waits.
"""

from collections.abc import Iterator
from enum import Enum

from services.core.ids import Rank


class Turn(Enum):
    """What one of two partners does next."""

    SEND = "send"
    TAKE = "take"


def turns(num_outgoing: int, num_incoming: int) -> Iterator[tuple[Turn, int]]:
    """Yields one partner's steps and the message's number: one sent ahead, then one out and one in by turns.

    With room for two messages each way, one of two partners can always go on: a sender that waits for room has not
    been taken from for two messages, so its partner is behind it and finds something to take.
    """
    for turn in range(-1, max(num_outgoing, num_incoming)):
        if turn + 1 < num_outgoing:
            yield Turn.SEND, turn + 1
        if 0 <= turn < num_incoming:
            yield Turn.TAKE, turn


def partners(rank: Rank, num_ranks: int) -> tuple[Rank, ...]:
    """The others, in the order in which `rank` meets them."""
    num_seats = num_ranks + num_ranks % 2
    fixed, turning = num_seats - 1, num_seats - 1
    met = []
    for turn in range(turning):
        if rank == fixed:
            partner = next(other for other in range(turning) if 2 * other % turning == turn)
        else:
            partner = (turn - rank) % turning
            partner = fixed if partner == rank else partner
        if partner < num_ranks:
            met.append(Rank(partner))
    return tuple(met)
