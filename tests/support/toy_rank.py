"""A rank whose model is arithmetic, and the loop around a batcher: shows that a plan's rows read what they should.

The toy executes plans in log order and keeps, for every slot, which token with which whole prefix was written there. A
row whose context is not exactly its request's own prefix fails, so a block reused too early, found wrongly, or a token
read before it is there cannot go unnoticed. The next token is a function of the whole prefix: an answer is right if it
equals `answer`, whatever happened on the way.
"""

from collections import deque
from dataclasses import dataclass, field

from services.core.ids import BLOCK_SLOTS, LayoutKind, LogIndex, RequestId, RequestIndex, TokenId
from services.core.layout import Layout, ShardUnits
from services.core.request import (
    Admitted,
    Emitted,
    Finished,
    Rejected,
    RequestEvent,
    SamplingParams,
    Submission,
)
from services.core.step import SampledTokens, StepPlan
from services.placement.cuts import pp_layout, tp_layout
from services.scheduler.batch.batcher import Batcher, BatchLimits

VOCAB = 997
UNITS = ShardUnits(num_layers=8, num_heads=8, num_kv_heads=8, ffn=64, ffn_unit=8, vocab=VOCAB)


def layout_of(kind: LayoutKind, num_ranks: int = 2) -> Layout:
    return pp_layout(UNITS, num_ranks) if kind is LayoutKind.PP else tp_layout(UNITS, num_ranks)


def limits_of(**changes: int | None) -> BatchLimits:
    values: dict[str, int | None] = {
        "num_blocks": 64,
        "max_resident_requests": 16,
        "max_queued_requests": 64,
        "max_context_tokens": 512,
        "chunk_tokens": 32,
        "max_batch_tokens": 64,
    }
    return BatchLimits(**(values | changes))  # type: ignore[arg-type]


def chained(chain: int, token: int) -> int:
    return hash((chain, token))


def next_token(chain: int) -> TokenId:
    return TokenId(chain % VOCAB)


def answer(prompt: list[int], num_tokens: int) -> list[int]:
    """What the toy model says after `prompt`, computed apart from blocks and batches."""
    chain, output = 0, []
    for token in prompt:
        chain = chained(chain, token)
    for _ in range(num_tokens):
        output.append(next_token(chain))
        chain = chained(chain, output[-1])
    return output


@dataclass
class Place:
    admitted_at: int
    tokens: dict[int, int]
    blocks: list[int]


@dataclass
class ToyRank:
    places: dict[int, Place] = field(default_factory=dict)
    slots: dict[int, tuple[int, int]] = field(default_factory=dict)
    board: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(sequence, index, position, token), not yet applied."""

    def execute(self, sequence: int, plan: StepPlan) -> SampledTokens:
        self._apply_deltas(sequence, plan)
        self._apply_board(plan.tokens_through)
        assert plan.row_request_index and len(set(plan.row_request_index)) == len(plan.row_request_index)
        written: dict[int, tuple[int, int]] = {}
        sampled = []
        for row, index in enumerate(plan.row_request_index):
            end = plan.row_start[row] + plan.row_num_tokens[row]
            chain = self._compute(self.places[index], plan.row_start[row], end, written)
            if row in plan.sampled_row:
                sampled.append(next_token(chain))
                self.board.append((sequence, index, end, sampled[-1]))
        self.slots.update(written)
        return SampledTokens(tuple(sampled))

    def _apply_deltas(self, sequence: int, plan: StepPlan) -> None:
        for index in plan.released:
            del self.places[index]
        for new in plan.admitted:
            assert new.request_index not in self.places
            self.places[new.request_index] = Place(sequence, dict(enumerate(new.token_ids)), list(new.block_ids))
        blocks = zip(plan.block_request_index, plan.block_position, plan.block_id, strict=True)
        for index, position, block in blocks:
            assert position == len(self.places[index].blocks)
            self.places[index].blocks.append(block)

        if plan.dead_from is not None:
            self.slots = {slot: held for slot, held in self.slots.items() if slot < plan.dead_from * BLOCK_SLOTS}

    def _apply_board(self, through: LogIndex | None) -> None:
        left = []
        for sequence, index, position, token in self.board:
            if through is None or sequence > through:
                left.append((sequence, index, position, token))
            elif index in self.places and self.places[index].admitted_at <= sequence:
                self.places[index].tokens[position] = token
        self.board = left

    def _compute(self, place: Place, start: int, end: int, written: dict[int, tuple[int, int]]) -> int:
        chain = 0
        for position in range(end):
            slot = place.blocks[position // BLOCK_SLOTS] * BLOCK_SLOTS + position % BLOCK_SLOTS
            token = place.tokens[position]
            chain = chained(chain, token)
            if position < start:
                assert self.slots.get(slot) == (token, chain), f"position {position} finds another prefix in its slot"
            else:
                assert slot not in written, f"slot {slot} is written by two rows of one step"
                written[slot] = (token, chain)
        return chain


class Bench:
    """A batcher, a toy rank and the log between them. Reports wait until asked for, in order."""

    def __init__(self, limits: BatchLimits, layout: Layout) -> None:
        self.batcher = Batcher(limits, layout)
        self.rank = ToyRank()
        self.sequence = 1
        self.plans: dict[int, StepPlan] = {}
        self.unreported: deque[tuple[LogIndex, SampledTokens]] = deque()
        self.outputs: dict[str, list[int]] = {}
        self.ends: dict[str, Finished | Rejected] = {}
        self.cached: dict[str, int] = {}

    def submit(self, name: str, prompt: list[int], max_output: int = 8, **options: object) -> None:
        emitted = options.pop("emitted", [])
        assert isinstance(emitted, list)
        submission = Submission(
            request_id=RequestId(name),
            token_ids=tuple(map(TokenId, [*prompt, *emitted])),
            num_prompt_tokens=len(prompt),
            max_output_tokens=max_output,
            sampling=SamplingParams(),
            **options,  # type: ignore[arg-type]
        )
        self.outputs[name] = list(emitted)
        self.take(self.batcher.submit(submission, now_ns=0))

    def take(self, events: list[RequestEvent]) -> None:
        for event in events:
            name = event.request_id
            assert name not in self.ends, f"{event} after the end of {name}"
            match event:
                case Admitted():
                    assert name not in self.cached, "admitted twice"
                    self.cached[name] = event.num_cached_tokens
                case Emitted():
                    assert event.first_output_index == len(self.outputs[name])
                    self.outputs[name].extend(event.token_ids)
                case Finished() | Rejected():
                    self.ends[name] = event

    def issue(self) -> StepPlan | None:
        plan = self.batcher.next_step(LogIndex(self.sequence))
        if plan is None:
            return None
        self.take(self.batcher.take_events())
        self.plans[self.sequence] = plan
        self.unreported.append((LogIndex(self.sequence), self.rank.execute(self.sequence, plan)))
        self.sequence += 1
        return plan

    def issue_all(self) -> int:
        num_issued = 0
        while self.issue() is not None:
            num_issued += 1
        return num_issued

    def report(self) -> None:
        sequence, sampled = self.unreported.popleft()
        self.take(self.batcher.on_tokens(sequence, sampled))
        self.batcher.on_acknowledged(sequence)

    def step(self) -> None:
        """Issues what the window takes, then hears of the oldest step."""
        self.issue_all()
        if self.unreported:
            self.report()

    def run(self, max_steps: int = 10_000) -> None:
        """Until nothing is left to do; every block is then accounted for."""
        for _ in range(max_steps):
            self.step()
            if not self.unreported and not self.batcher.open_request_ids:
                break
        else:
            raise AssertionError(f"still open after {max_steps} steps: {self.batcher.open_request_ids}")
        census = self.batcher.census()
        assert census.is_sound, census
        assert census.num_referenced == 0, census

    def indexes(self, name: str) -> list[RequestIndex]:
        """Places that a request was admitted at, in order."""
        return [new.request_index for plan in self.plans.values() for new in plan.admitted if new.request_id == name]
