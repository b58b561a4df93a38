"""What bounds the batch: sizes of the pool, of the resident table, of the queue and of one step. Values only."""

from dataclasses import dataclass

from services.core.ids import BLOCK_SLOTS


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """Bounds of one generation; contradictions are refused when it is made, never met while serving."""

    num_blocks: int
    """Blocks the allocator issues: what every layout can hold."""
    max_resident_requests: int
    """Requests in the batch at once: rows of every rank's resident table."""
    max_queued_requests: int
    """Requests that wait, beyond those that free indexes could let in, before new ones are refused as overload."""
    max_context_tokens: int
    """Longest sequence (prompt and output) by the model and the configuration; the pool may cut it further."""
    chunk_tokens: int
    """Longest part of a prompt that one step computes."""
    max_batch_tokens: int
    """Tokens of one step, decode rows included: what a rank's workspaces hold."""
    steps_ahead: int = 2
    """Unacknowledged steps in TP, hence also the sampled tokens of one request that are not known yet."""
    num_vocab: int | None = None
    """Ids of a prompt are below this; None: the router vouches for them."""
    attention_parity_tokens: int | None = None
    """Context length at which a token's attention costs as much as the rest of it: chunks shrink with their position
    so that they cost the same. None: chunks of equal length."""

    def __post_init__(self) -> None:
        for name in ("num_blocks", "max_resident_requests", "max_queued_requests", "chunk_tokens", "steps_ahead"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.max_context_tokens < 2:
            raise ValueError(f"max_context_tokens must hold a prompt and an output, got {self.max_context_tokens}")
        for name in ("chunk_tokens", "max_resident_requests"):
            if getattr(self, name) > self.max_batch_tokens:
                raise ValueError(
                    f"{name} = {getattr(self, name)} is above max_batch_tokens = {self.max_batch_tokens}, so a step "
                    f"could not hold it: lower {name}, or raise max_batch_tokens"
                )

    @property
    def pool_tokens(self) -> int:
        """Slots of the whole pool."""
        return self.num_blocks * BLOCK_SLOTS

    @property
    def context_tokens(self) -> int:
        """Longest sequence of one request: bounded by the window and by the pool it would fill alone."""
        return min(self.max_context_tokens, self.pool_tokens)
