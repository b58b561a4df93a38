"""What the batcher has done since its generation began: counts only, read by status and metrics."""

from dataclasses import dataclass, field

from services.core.request import FinishReason
from services.scheduler.batch.running_request import Request


@dataclass(slots=True)
class Tally:
    """Rising counts; whoever publishes them adds up generations."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    """Of acknowledged steps, recomputed and dead ones included."""
    num_emitted_tokens: int = 0
    num_dropped_tokens: int = 0
    """Sampled for requests that were over, or back in the queue, by then."""
    num_prompt_tokens: int = 0
    """Of first admissions: what prefix hits are a share of."""
    num_cached_tokens: int = 0
    """Of these, found in the prefix tree."""
    num_resumed_tokens: int = 0
    """Known tokens of requests that came back after preemption."""
    num_resumed_cached_tokens: int = 0
    """Of these, still in the prefix tree: no prefix hits, as the request had computed them itself."""
    num_preemptions: int = 0
    num_rejected: int = 0
    num_finished: dict[FinishReason, int] = field(default_factory=lambda: dict.fromkeys(FinishReason, 0))

    def count_admission(self, request: Request, is_first: bool) -> None:
        """Counts what was found in the prefix tree, apart for first admissions and returns."""
        if is_first:
            self.num_prompt_tokens += request.submission.num_prompt_tokens
            self.num_cached_tokens += request.num_cached_tokens
        else:
            self.num_resumed_tokens += len(request.tokens)
            self.num_resumed_cached_tokens += request.num_issued
