"""A rank's stage of each layout, built once at start, and what each was built from."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.core.ids import LayoutKind, Rank
from services.core.layout import KvSharding, Layout
from services.models.geometry import ModelGeometry
from services.worker.dataplane.carrier import Carrier
from services.worker.dataplane.peers import Peers
from services.worker.memory.device import RankDevice
from services.worker.memory.rank_memory import RankMemory
from services.worker.model.stage import Stage, StageSpec, build_stage


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """What this process was sized for; RESET may ask for less, never for more."""

    max_resident_requests: int
    max_batch_tokens: int
    num_valid_ids: int
    """Ids that may be sampled: a vocabulary may be padded beyond them."""


@dataclass(frozen=True, slots=True)
class BuiltStage:
    """One layout's."""

    layout: Layout
    spec: StageSpec
    stage: Stage


def is_summed(layout: Layout) -> bool:
    """Whether ranks have parts of every layer, whose products are summed over them."""
    return layout.kind is LayoutKind.TP and layout.num_ranks > 1


def build_stages(
    rank: Rank,
    geometry: ModelGeometry,
    memory: RankMemory,
    layouts: Mapping[LayoutKind, Layout],
    carrier: Carrier,
    limits: RunnerLimits,
    device: RankDevice,
) -> Mapping[LayoutKind, BuiltStage]:
    """Both layouts' stages over the memory's weights."""

    def built(layout: Layout) -> BuiltStage:
        summed = is_summed(layout)
        spec = StageSpec(
            geometry=geometry,
            share=layout.shares[rank],
            keeps_residual=not summed or rank == 0,
            peers=Peers(carrier, layout.shares) if summed else None,
            max_batch_tokens=limits.max_batch_tokens,
            max_context_tokens=geometry.max_context_tokens,
            backend=device.backend,
            cut_by_tokens=summed and layout.kv_sharding is KvSharding.TOKENS,
        )
        return BuiltStage(layout, spec, build_stage(spec, memory.weights(layout.kind)))

    return {kind: built(layout) for kind, layout in layouts.items()}
