"""What the ranks of a group must agree on, as one number a step: a chain of hashes over everything before it.

Ranks that are given different plans, or that make something else of one, have different numbers from that step on.
"""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from services.core.step import StepPlan
from services.worker.steps.table import RequestTable, Rows
from services.worker.steps.words import WordChanges

DIGEST_BYTES = 8


class DigestChain:
    """One chain; zero before its first link."""

    def __init__(self) -> None:
        self._link = bytes(DIGEST_BYTES)

    def extend(self, parts: Iterable[NDArray[np.generic]]) -> int:
        """Adds a link over arrays, whose lengths follow from each other; the number from here on."""
        link = hashlib.blake2b(self._link, digest_size=DIGEST_BYTES)
        for part in parts:
            link.update(part.tobytes())
        self._link = link.digest()
        return int.from_bytes(self._link, "little")


def plan_parts(
    sequence: int, plan: StepPlan, changes: WordChanges, rows: Rows, table: RequestTable
) -> Iterable[NDArray[np.generic]]:
    """All that a plan came to here, before the step: what it changed in the table, and its rows.

    Tokens, block tables and sampling parameters are among the words changed; what of a request is kept on the host
    follows, as the table has it now.
    """
    sizes = (sequence, plan.microbatch, plan.tokens_through or 0, -1 if plan.dead_from is None else plan.dead_from)
    yield np.array((*sizes, len(plan.released), len(changes.addresses), len(rows.request)), np.int64)
    yield np.asarray(plan.released, np.int64)
    yield changes.addresses
    yield changes.values
    for request in plan.admitted:
        index = request.request_index
        yield np.array((index, table.admitted_at[index], table.wants_logprobs[index], table.num_logprobs[index]))
        yield from table.bias.get(index, ())
    yield rows.request
    yield rows.start
    yield rows.row_tokens
    yield rows.sampled
