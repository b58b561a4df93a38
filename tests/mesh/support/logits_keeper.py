"""Keeps the logits that a rank samples from, so that a test may ask for them over the rank's pipe."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from services.worker.steps.execute import Runner


class LogitsKeeper:
    """Stands before the draws of a runner's sampler."""

    def __init__(self, runner: Runner) -> None:
        self._sample = runner.parts.sampler.sample
        self._last: Tensor | None = None
        runner.parts.sampler.sample = self.sample  # type: ignore[method-assign]

    def sample(self, logits: Tensor, *rest: Any) -> Any:
        self._last = logits.clone()
        return self._sample(logits, *rest)

    def collected(self) -> NDArray[np.float32] | None:
        """[rows, vocabulary] of the last step that sampled here."""
        return None if self._last is None else self._last.numpy()
