"""What the runner knows of a model: one rank's part of it under one layout, whatever the architecture.

Never knows a carrier: where a sum over ranks is due, a stage calls its peers.
"""

import importlib
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from kernels.backend import Backend, StepInputs
from kernels.weights import Weight
from services.core.layout import RankShare, Span
from services.models.geometry import ModelGeometry
from services.worker.dataplane.peers import Peers
from services.worker.memory.rows.kv_cache import Pool


@dataclass(frozen=True, slots=True)
class StageSpec:
    """What a stage is built from."""

    geometry: ModelGeometry
    share: RankShare
    keeps_residual: bool
    """Whether this rank adds the residual to its partial sums; exactly one of those that are summed does."""
    peers: Peers | None
    """Over whom partial sums are summed; None: this rank's sums are the whole."""
    max_batch_tokens: int
    max_context_tokens: int
    """Positions that the rotary table covers."""
    backend: Backend
    """What it computes with, where its tensors are, and those of its inputs and pools."""
    cut_by_tokens: bool = False
    """Whether peers have the other rows of the KV cache, of all heads."""


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

    def embed(self, inputs: StepInputs) -> None:
        """Begins the residual stream from the ids."""

    def layers(self, inputs: StepInputs, pool: Pool) -> None:
        """Runs this share's layers over the residual stream; keys and values of the inputs go to the pool first."""

    def logits(self, inputs: StepInputs) -> Tensor:
        """[N, this share's vocabulary rows] float32, for the sampled rows alone; overwritten by the next call."""


def build_stage(spec: StageSpec, store: Weights) -> Stage:
    """The stage of the architecture's own module."""
    module = importlib.import_module(f"services.worker.model.{spec.geometry.architecture.value}")
    stage: Stage = module.build(spec, store)
    return stage
