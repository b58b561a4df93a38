"""What a rank computes with under each layout, which of them is active, and the evidence that all of it is.

Everything that is of one layout is in one value for each, and COMMIT changes which of the two is used. The evidence is
what each part was made for, not where it was found; `LayoutPart` is the list of what must be asked.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from enum import StrEnum

from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout
from services.core.log import LogFollower
from services.worker.memory.rank_memory import RankMemory
from services.worker.memory.rows.kv_cache import Pool
from services.worker.model.stage import Stage, StageSpec
from services.worker.steps.inputs import StepBuffers
from services.worker.steps.layout_evidence import Evidence
from services.worker.steps.stages import is_summed


class LayoutPart(StrEnum):
    """Everything on a rank that is of one layout. The sampler is not: it draws on the same rank in both."""

    LOG = "the log follower"
    STAGE = "the stage"
    PEERS = "the stage's peers"
    POOL = "the KV pool"
    BUFFERS = "the step buffers"
    MEMORY = "the memory of weights and rows"


@dataclass(frozen=True, slots=True)
class LayoutView:
    """One rank's part of one layout."""

    layout: Layout
    spec: StageSpec
    """What the stage was built from."""
    stage: Stage
    pool: Pool
    buffers: StepBuffers


@dataclass(slots=True)
class ActiveLayout:
    """The layout that steps run under."""

    views: Mapping[LayoutKind, LayoutView]
    kind: LayoutKind

    @property
    def view(self) -> LayoutView:
        """What steps use."""
        return self.views[self.kind]

    def switch(self, kind: LayoutKind) -> None:
        """The other set of views; no byte moves."""
        self.kind = kind

    def evidence(
        self, rank: Rank, follower: LogFollower, memory: RankMemory, pools: Mapping[LayoutKind, Pool]
    ) -> Evidence:
        """What each part of the view in use was made for, by what is in it and not by where it was found."""
        view, layouts = self.view, {kind: own.layout for kind, own in self.views.items()}
        spec, peers = view.spec, view.spec.peers
        return {
            LayoutPart.LOG: frozenset(kind for kind in layouts if kind is follower.layout),
            LayoutPart.STAGE: _which(layouts, lambda layout: layout.shares[rank] == spec.share),
            LayoutPart.PEERS: _which(
                layouts,
                lambda layout: layout.shares == peers.shares if peers is not None else not is_summed(layout),
            ),
            LayoutPart.POOL: frozenset(kind for kind, pool in pools.items() if pool is view.pool),
            LayoutPart.BUFFERS: frozenset((view.buffers.layout,)),
            LayoutPart.MEMORY: memory.usable,
        }


def _which(layouts: Mapping[LayoutKind, Layout], fits: Callable[[Layout], bool]) -> Set[LayoutKind]:
    return frozenset(kind for kind, layout in layouts.items() if fits(layout))
