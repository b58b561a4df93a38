"""provisional"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from services.core.ids import TokenId
from services.core.step import SampledTokens
from services.worker.resident import Int32s, Int64s, ResidentTable


@dataclass(frozen=True, slots=True)
class Sampled:
    ids: Int32s

    def tokens(self) -> SampledTokens:
        return SampledTokens(token_ids=tuple(map(TokenId, self.ids.tolist())))


class Sampler:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def sample(self, logits: Tensor, resident: ResidentTable, request: Int64s, position: Int64s) -> Sampled:
        return Sampled(logits.argmax(-1).numpy().astype(np.int32))
