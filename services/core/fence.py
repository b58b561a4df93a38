"""Refuses what comes from another generation or epoch; pure."""

from __future__ import annotations

from dataclasses import dataclass

from services.core.ids import Epoch, Generation


@dataclass(slots=True)
class EpochFence:
    """Admits messages of one (generation, epoch). Its owner alone moves it, on the log's COMMIT and RESET entries."""

    generation: Generation
    epoch: Epoch
    num_refused: int = 0

    def admit(self, generation: Generation, epoch: Epoch, source: str) -> str | None:
        """None if a message of `source` may pass, else why not, for the log and for the sender."""
        if (generation, epoch) == (self.generation, self.epoch):
            return None
        self.num_refused += 1
        if generation != self.generation:
            return (
                f"generation {self.generation} expected, got {generation} from {source}: dropped; "
                "the sender must join the group again"
            )
        return f"epoch {self.epoch} expected, got {epoch} from {source}: dropped; the sender must refetch the layout"

    def move(self, generation: Generation, epoch: Epoch) -> None:
        """Expects (generation, epoch) from here on; neither ever goes back."""
        assert (generation, epoch) >= (self.generation, self.epoch), (
            f"fence at generation {self.generation} epoch {self.epoch} cannot go back to {generation} epoch {epoch}"
        )
        self.generation, self.epoch = generation, epoch
