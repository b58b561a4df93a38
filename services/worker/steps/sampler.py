"""From logits to ids and log-probabilities, on the sampling rank alone.

Gathers each row's parameters from the request table and calls the kernels on whole batches; the only loop is over rows
with penalties. Keeps nothing between steps: a draw depends on a row's logits, parameters, tokens, seed and output
position, so that a flip, a preemption or another batch changes nothing. Log-probabilities are of the model's own
distribution, taken before anything is added.

Shapes: N sampled rows, V vocabulary.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.sampling import add_sparse, log_softmax_at, penalize, sample, top_logprobs
from services.core.ids import TokenId
from services.core.request import TokenLogprobs
from services.core.step import SampledTokens
from services.worker.steps.sampling_words import NUM_FLOATS, Param
from services.worker.steps.table import RequestTable
from services.worker.steps.words import Int32s, Int64s


@dataclass(frozen=True, slots=True)
class Sampled:
    """What one step sampled, in the order of its sampled rows."""

    ids: Int32s
    """[N]; of a row that was not finite it means nothing."""
    finite: NDArray[np.bool_]
    """[N]"""
    logprobs: tuple[tuple[int, TokenLogprobs], ...]
    """(row, log-probabilities) of the rows that asked, finite ones alone."""

    def tokens(self) -> SampledTokens:
        """As it is reported."""
        return SampledTokens(
            token_ids=tuple(map(TokenId, self.ids.tolist())),
            non_finite=frozenset(np.flatnonzero(~self.finite).tolist()),
            logprobs=self.logprobs,
        )


class _Params:
    """Parameters of the sampled rows, [N] each by `Param`, on the host, where these kernels are."""

    def __init__(self, table: RequestTable, request: Int64s) -> None:
        words_PR = table.params_PR
        words = torch.index_select(words_PR, 1, torch.from_numpy(request).to(words_PR.device)).cpu().numpy()
        self.floats = words[:NUM_FLOATS].view(np.float32)
        self.top_k = words[Param.TOP_K]
        self.seeds = words[Param.SEED_LOW :].T.ravel().view(np.int64)


class Sampler:
    """Samples for one model. `num_valid_ids`: ids from here on are padding of the vocabulary and are never drawn."""

    def __init__(self, num_valid_ids: int) -> None:
        self._num_valid = num_valid_ids

    def sample(self, logits: Tensor, table: RequestTable, request: Int64s, position: Int64s) -> Sampled:
        """Draws for [N] rows of [N, V] logits, which are changed; `position` is the new token's place."""
        wanted = np.flatnonzero(table.wants_logprobs[request])
        # The model's own distribution: what is added below must not show in it.
        own = logits[torch.from_numpy(wanted)] if len(wanted) else logits[:0]
        params = _Params(table, request)
        self._penalize(logits, table, params, request, position)
        self._add_bias(logits, table, request)
        ids, finite = self._draw(logits, params, position - table.num_prompt_tokens[request])
        return Sampled(ids, finite, self._logprobs(own, table, request, wanted, ids, finite))

    def _draw(self, logits: Tensor, params: "_Params", output_position: Int64s) -> tuple[Int32s, NDArray[np.bool_]]:
        ids, finite = np.zeros(len(output_position), np.int32), np.zeros(len(output_position), np.bool_)
        sample(
            logits,
            torch.from_numpy(params.floats[Param.TEMPERATURE]),
            torch.from_numpy(params.top_k),
            torch.from_numpy(params.floats[Param.TOP_P]),
            torch.from_numpy(params.floats[Param.MIN_P]),
            torch.from_numpy(params.seeds),
            torch.from_numpy(output_position),
            torch.from_numpy(ids),
            torch.from_numpy(finite),
            num_valid=self._num_valid,
        )
        return ids, finite

    def _penalize(
        self, logits: Tensor, table: RequestTable, params: "_Params", request: Int64s, position: Int64s
    ) -> None:
        """Repetition covers prompt and output, presence and frequency the output alone."""
        for row in np.flatnonzero(table.penalised[request]).tolist():
            index = int(request[row])
            history = table.tokens_RC[index, : int(position[row])].cpu()
            repetition, presence, frequency = (
                float(params.floats[param, row]) for param in (Param.REPETITION, Param.PRESENCE, Param.FREQUENCY)
            )
            penalize(logits, row, history, repetition=repetition, num_valid=self._num_valid)
            output = history[int(table.num_prompt_tokens[index]) :]
            penalize(logits, row, output, presence=presence, frequency=frequency, num_valid=self._num_valid)

    def _add_bias(self, logits: Tensor, table: RequestTable, request: Int64s) -> None:
        counts = table.num_bias[request]
        rows = np.flatnonzero(counts)
        if len(rows):
            biases = [table.bias[index] for index in request[rows].tolist()]
            add_sparse(
                logits,
                torch.from_numpy(np.repeat(rows, counts[rows]).astype(np.int32)),
                torch.from_numpy(np.concatenate([ids for ids, _ in biases])),
                torch.from_numpy(np.concatenate([values for _, values in biases])),
                num_valid=self._num_valid,
            )

    def _logprobs(
        self,
        own: Tensor,
        table: RequestTable,
        request: Int64s,
        wanted: Int64s,
        ids: Int32s,
        finite: NDArray[np.bool_],
    ) -> tuple[tuple[int, TokenLogprobs], ...]:
        if not len(wanted):
            return ()
        counts = table.num_logprobs[request[wanted]]
        sampled = torch.empty((len(wanted), 1))
        log_softmax_at(own, torch.from_numpy(ids[wanted][:, None]), sampled, num_valid=self._num_valid)
        num_top = int(counts.max())
        shape = (len(wanted), num_top)
        top_ids, top_values = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape)
        if num_top:
            top_logprobs(own, num_top, top_ids, top_values, num_valid=self._num_valid)
        columns = (wanted.tolist(), counts.tolist(), sampled[:, 0].tolist(), top_ids.tolist(), top_values.tolist())
        return tuple(
            (row, TokenLogprobs(value, tuple(zip(map(TokenId, best[:count]), values[:count], strict=True))))
            for row, count, value, best, values in zip(*columns, strict=True)
            if finite[row]
        )
