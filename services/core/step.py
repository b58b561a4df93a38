"""The step log: what the scheduler writes and every rank executes in order. Values only.

Rows are parallel lists, so that a rank turns them into arrays without a loop over rows. The log is the only order: an
entry never depends on anything a rank decides.

Every position, count and block in a plan is **absolute** today: the scheduler has counted on each earlier step's one
token. When proposals are verified, how many are accepted is known on the device before it is known in the log, so what
counts from a request's last accepted token becomes relative: `row_start` (then an offset from it), and with it the
place of the sampled tokens. What will stay absolute: indexes of requests and rows, block tables (blocks are given ahead
for the most that may be accepted), `tokens_through`, `dead_from`. A request may then have several rows in one step, so
nothing may take a row for a request.
"""

from dataclasses import dataclass, field

from services.core.ids import BlockId, Epoch, FlipId, Generation, LayoutKind, LogIndex, RequestId, RequestIndex, TokenId
from services.core.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class AdmittedRequest:
    """A request's first appearance in the log, or its return after preemption: in full."""

    request_id: RequestId
    request_index: RequestIndex
    token_ids: tuple[TokenId, ...]
    """Prompt, then whatever was emitted before."""
    num_prompt_tokens: int
    block_ids: tuple[BlockId, ...]
    """Its block table so far, shared prefix blocks included."""
    sampling: SamplingParams
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One model step: deltas of the request table, then the rows. Lists of one group are parallel."""

    microbatch: int = 0
    released: list[RequestIndex] = field(default_factory=list)
    """Applied before `admitted`."""
    admitted: list[AdmittedRequest] = field(default_factory=list)
    block_request_index: list[RequestIndex] = field(default_factory=list)
    """Blocks appended to block tables before the step: whose, at which place of the table, which. Absolute."""
    block_position: list[int] = field(default_factory=list)
    block_id: list[BlockId] = field(default_factory=list)
    row_request_index: list[RequestIndex] = field(default_factory=list)
    """A row computes tokens [start, start + num_tokens) of one request; no request has two rows yet."""
    row_start: list[int] = field(default_factory=list)
    """Position in the request's prompt and output together; absolute."""
    row_num_tokens: list[int] = field(default_factory=list)
    sampled_row: list[int] = field(default_factory=list)
    """Indexes of the rows that sample the token after their last one, rising. Of rows, never of requests."""
    tokens_through: LogIndex | None = None
    """The newest step whose sampled ids this one reads; all up to it are applied first."""
    dead_from: BlockId | None = None
    """Memory is short: no block from this one on has an owner, nor any row in a step that some rank may still be at."""

    @property
    def num_tokens(self) -> int:
        """Tokens computed by the step."""
        return sum(self.row_num_tokens)


@dataclass(frozen=True, slots=True)
class ResetEntry:
    """Forget everything and begin under this layout; the first entry of a log opens its generation."""

    layout: LayoutKind
    num_blocks: int
    max_resident_requests: int
    max_context_tokens: int


@dataclass(frozen=True, slots=True)
class FlipEntry:
    """Park here. Everything in the live runs [begin, begin + length) of blocks must survive."""

    flip_id: FlipId
    target: LayoutKind
    live_runs: tuple[tuple[BlockId, int], ...]


@dataclass(frozen=True, slots=True)
class CommitEntry:
    """The flip happened: switch; later entries carry the next epoch."""

    flip_id: FlipId
    layout: LayoutKind


@dataclass(frozen=True, slots=True)
class AbandonEntry:
    """The flip did not happen: go on as before."""

    flip_id: FlipId
    reason: str


Entry = ResetEntry | StepPlan | FlipEntry | CommitEntry | AbandonEntry


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry with its place; sequences rise by one, whatever the entry."""

    generation: Generation
    epoch: Epoch
    sequence: LogIndex
    entry: Entry


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """What one step sampled, in the order of the plan's `sampled_row`."""

    token_ids: tuple[TokenId, ...]
    non_finite: frozenset[int] = frozenset()
    """Indexes into `sampled_row` whose logits were not finite."""
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    """(index into `sampled_row`, log-probabilities) where asked for."""


@dataclass(frozen=True, slots=True)
class StepReport:
    """One rank's acknowledgement of one step; `tokens` from the sampling rank alone."""

    sequence: LogIndex
    digest: int
    compute_ns: int
    wait_ns: int
    tokens: SampledTokens | None = None
