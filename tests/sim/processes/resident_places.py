"""What a rank knows of every resident request, and the check of every slot that a row reads.

Chains of a request are computed from its own tokens alone, never from the pool: the pool is compared with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.core.ids import BLOCK_SLOTS, LogIndex, blocks_for
from services.core.step import AdmittedRequest, StepPlan
from tests.sim.processes.toy_model import EMPTY, chained
from tests.sim.processes.world import InvariantError

if TYPE_CHECKING:
    from tests.sim.processes.rank import RankProcess


@dataclass(slots=True)
class Place:
    """One resident request."""

    name: str
    admitted_at: int
    tokens: list[int | None]
    blocks: list[int]
    chains: list[int]
    """Of each prefix, as far as computed here."""

    def extend_chains(self, end: int) -> int:
        """Chain of the first `end` tokens."""
        chains, tokens = self.chains, self.tokens
        if end > len(tokens):
            raise InvariantError("known tokens", f"{self.name} reads token {end - 1}, {len(tokens)} are known here")
        chain = chains[-1] if chains else EMPTY
        for position in range(len(chains), end):
            token = tokens[position]
            if token is None:
                raise InvariantError("known tokens", f"{self.name} reads token {position}, which is not known here")
            chain = chained(chain, token)
            chains.append(chain)
        return chains[end - 1]


class Places:
    """The resident table of one rank."""

    def __init__(self, max_resident_requests: int) -> None:
        self.by_index: dict[int, Place] = {}
        self.poison: dict[str, int] = {}
        """By request, a position whose logits are never finite."""
        self._max_resident_requests = max_resident_requests

    def apply_tokens(self, step: LogIndex, targets: Sequence[tuple[int, int]], ids: Sequence[int]) -> None:
        """Writes what `step` sampled, unless its place was freed or taken again since."""
        for (index, position), token in zip(targets, ids, strict=True):
            place = self.by_index.get(index)
            if place is not None and self.is_of_step(place, step):
                self.put(place, position, token)

    def is_of_step(self, place: Place, step: int) -> bool:
        """Whether a token of `step` is for who has the place now."""
        return place.admitted_at <= step

    def put(self, place: Place, position: int, token: int) -> None:
        """Makes one token known."""
        tokens = place.tokens
        while len(tokens) <= position:
            tokens.append(None)
        tokens[position] = token

    def apply_deltas(self, plan: StepPlan, sequence: LogIndex) -> None:
        """Released, then admitted, then appended blocks."""
        for index in plan.released:
            if self.by_index.pop(index, None) is None:
                raise InvariantError("resident table", f"step {sequence} releases index {index}, which nobody holds")
        for new in plan.admitted:
            self._admit(new, sequence)
        for index, position, block in zip(plan.block_request_index, plan.block_position, plan.block_id, strict=True):
            blocks = self.by_index[index].blocks
            if position != len(blocks):
                raise InvariantError(
                    "block table", f"step {sequence}: block {position} follows {len(blocks)} of {index}"
                )
            blocks.append(block)

    def _admit(self, new: AdmittedRequest, sequence: LogIndex) -> None:
        index = new.request_index
        if index in self.by_index or not 0 <= index < self._max_resident_requests:
            raise InvariantError(
                "resident table", f"step {sequence} admits {new.request_id} at index {index}, not free"
            )
        self.by_index[index] = Place(new.request_id, sequence, list(new.token_ids), list(new.block_ids), [])

    def ends(self, plan: StepPlan) -> list[int]:
        """The chain at the end of every row."""
        indexes = plan.row_request_index
        if not indexes or len(set(indexes)) != len(indexes):
            raise InvariantError("rows", f"a step needs rows, one of a request at most: {indexes}")
        return [
            self.by_index[index].extend_chains(start + length)
            for index, start, length in zip(indexes, plan.row_start, plan.row_num_tokens, strict=True)
        ]

    def non_finite(self, plan: StepPlan) -> frozenset[int]:
        """Which sampled rows have no finite logits: where the next token would have a request's poisoned position."""
        return frozenset(
            place
            for place, row in enumerate(plan.sampled_row)
            if self.poison.get(self.by_index[plan.row_request_index[row]].name.partition("+")[0])
            == plan.row_start[row] + plan.row_num_tokens[row]
        )

    def read_rows(self, rank: "RankProcess", plan: StepPlan, slots: list[int | None], sequence: LogIndex) -> None:
        """Checks that every slot before each row holds exactly the request's own history."""
        for index, start, length in zip(plan.row_request_index, plan.row_start, plan.row_num_tokens, strict=True):
            place = self.by_index[index]
            if len(place.blocks) < blocks_for(start + length):
                raise InvariantError(
                    "block table", f"step {sequence}: {place.name} has no block for token {start + length}"
                )
            for number in range(blocks_for(start)):
                begin = number * BLOCK_SLOTS
                count = min(BLOCK_SLOTS, start - begin)
                slot = place.blocks[number] * BLOCK_SLOTS
                if slots[slot : slot + count] != place.chains[begin : begin + count]:
                    rank.group.checks.on_wrong_context(rank, place, begin, slots[slot : slot + count], sequence)

    def write_rows(self, plan: StepPlan, slots: list[int | None]) -> None:
        """Writes every row's chains into its slots."""
        for index, start, length in zip(plan.row_request_index, plan.row_start, plan.row_num_tokens, strict=True):
            place = self.by_index[index]
            for position in range(start, start + length):
                slots[place.blocks[position // BLOCK_SLOTS] * BLOCK_SLOTS + position % BLOCK_SLOTS] = place.chains[
                    position
                ]
