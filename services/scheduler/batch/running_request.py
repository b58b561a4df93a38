"""One request in the scheduler's hands: what it asked, what of it is known, what of it is in the log.

Positions count tokens of the whole sequence, prompt and output. `tokens` are known here; behind them come
`num_in_flight` sampled ones that ranks know and the scheduler does not yet. Never decides anything.

Invariants: num_computed <= num_issued <= num_known; a request has an index exactly while it is resident; `path` pins
the first blocks of the table in the prefix tree.
"""

from dataclasses import dataclass, field

from services.core.ids import BlockId, LogIndex, RequestId, RequestIndex, TokenId
from services.core.radix import PrefixNode
from services.core.request import Submission


@dataclass(slots=True, eq=False)
class Request:
    """From submission to its end, through preemptions."""

    submission: Submission
    order: tuple[int, int]
    """(priority, arrival): lower runs first and is preempted last."""
    arrived_ns: int
    max_tokens: int
    """Length of the sequence at which it ends, cut at the context."""
    tokens: list[TokenId]
    """Prompt and committed output."""
    num_admissions: int = 0
    """Tells results of an earlier residence from those of the present one."""
    index: RequestIndex | None = None
    blocks: list[BlockId] = field(default_factory=list)
    path: list[PrefixNode] = field(default_factory=list)
    prefill_target: int = 0
    """Positions that were known when it was admitted: computing them is prefill."""
    num_issued: int = 0
    """Positions whose keys and values the log has written, or will have when it is executed."""
    num_computed: int = 0
    """Positions that every rank has acknowledged."""
    num_in_flight: int = 0
    last_sampled_by: LogIndex | None = None
    """The newest step that samples for it; a step that decodes for it reads what that one sampled."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix tree at the first admission."""
    is_over: bool = False
    is_distrusted: bool = False
    """Its results were not finite: what it computed is not to be shared."""

    @property
    def request_id(self) -> RequestId:
        """The router's name for it."""
        return self.submission.request_id

    @property
    def num_output_tokens(self) -> int:
        """Emitted so far, before a resubmission too."""
        return len(self.tokens) - self.submission.num_prompt_tokens

    @property
    def num_known(self) -> int:
        """Length of the sequence as ranks know it once the log is executed."""
        return len(self.tokens) + self.num_in_flight

    @property
    def is_prefilling(self) -> bool:
        """Whether part of what was known at admission is not in the log yet."""
        return self.num_issued < self.prefill_target
