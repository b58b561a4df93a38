"""What the runner knows of a model: one rank's part of it under one layout, whatever the architecture.

Never knows ranks or carriers: where a sum over ranks is due, a stage calls the seam it was given.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.cpu.collective_status import Purpose
from services.core.layout import RankShare, Span
from services.models.geometry import ModelGeometry
from services.worker.memory.rows.kv_cache import Pool
from services.worker.model.products import Weight
from services.worker.model.token_attention import TokenPeers
from services.worker.steps.inputs import Batch

Reduce = Callable[[Tensor, Purpose], None]
"""Sums a contiguous float32 tensor over the ranks, in place; does nothing where this rank's sum is the whole."""


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What a stage is built from."""

    geometry: ModelGeometry
    share: RankShare
    keeps_residual: bool
    """Whether this rank adds the residual to its partial sums; exactly one of those that are summed does."""
    reduce: Reduce
    max_batch_tokens: int
    max_context_tokens: int
    """Positions that the rotary table covers."""
    place: torch.device
    """Where the stage's tensors are, and those of its batches and pools."""
    token_peers: TokenPeers | None = None
    """Where the KV cache is cut by tokens: who has the other rows."""


class Weights(Protocol):
    """Where a stage finds its share's matrices and vectors, by canonical name (tensor_places)."""

    def matrix(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> Weight:
        """The part of a matrix that a share holds; the whole by default. The embedding is in one piece."""

    def vector(self, name: str) -> Tensor:
        """[columns] float32."""


class Stage(Protocol):
    """A rank's part of the model, with activations preallocated for the largest step."""

    def hidden(self, num_tokens: int) -> Tensor:
        """[T, hidden_size] float32: the residual stream at constant addresses; received into, or sent from."""

    def embed(self, batch: Batch) -> None:
        """Begins the residual stream from the ids."""

    def layers(self, batch: Batch, pool: Pool) -> None:
        """Runs this share's layers over the residual stream; keys and values of the batch go to the pool first."""

    def logits(self, batch: Batch) -> Tensor:
        """[N, this share's vocabulary rows] float32, for the sampled rows alone; overwritten by the next call."""


def build_stage(spec: StageSpec, store: Weights) -> Stage:
    """The stage of the architecture's own module."""
    module = importlib.import_module(f"services.worker.model.{spec.geometry.architecture.value}")
    stage: Stage = module.build(spec, store)
    return stage
