"""RESET: the table, pools, buffers and layouts that a generation begins with, or why this rank refuses it."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.core.ids import LayoutKind
from services.core.log import ProtocolError
from services.core.step import ResetEntry
from services.models.geometry import ModelGeometry
from services.worker.memory.rows.kv_cache import Pool
from services.worker.steps.active_layout import ActiveLayout, LayoutView
from services.worker.steps.id_space import check_id_space
from services.worker.steps.inputs import StepBuffers
from services.worker.steps.pipeline import StepParts, StepPipeline
from services.worker.steps.stages import BuiltStage, RunnerLimits
from services.worker.steps.table import RequestTable, TableLimits


@dataclass(frozen=True, slots=True)
class Opened:
    """RESET is done: pools are there, the data plane is joined."""

    num_blocks: int


def table_limits(reset: ResetEntry, limits: RunnerLimits, geometry: ModelGeometry) -> TableLimits:
    """What the table is made for.

    Raises:
        ProtocolError: more than this process was started for.
    """
    if reset.max_resident_requests > limits.max_resident_requests:
        raise ProtocolError(
            f"RESET asks for {reset.max_resident_requests} running requests, this rank was started for "
            f"{limits.max_resident_requests}: give scheduler and workers the same configuration"
        )
    if reset.max_context_tokens > geometry.max_context_tokens or reset.num_blocks < 1:
        raise ProtocolError(
            f"RESET asks for a context of {reset.max_context_tokens} tokens and {reset.num_blocks} blocks; at most "
            f"{geometry.max_context_tokens} tokens and at least one block expected"
        )
    return TableLimits(
        max_resident_requests=reset.max_resident_requests,
        max_context_tokens=reset.max_context_tokens,
        num_blocks=reset.num_blocks,
        vocab_size=geometry.vocab_size,
        max_batch_tokens=limits.max_batch_tokens,
    )


def open_steps(
    reset: ResetEntry, limits: TableLimits, parts: StepParts, stages: Mapping[LayoutKind, BuiltStage]
) -> tuple[StepPipeline, Mapping[LayoutKind, Pool]]:
    """A generation's steps, and the pools that they use.

    Raises:
        ProtocolError: a table of these limits is nonsense.
        ConfigurationError: ids have no place in a pool, or peers share rows in another way.
    """
    table = RequestTable(limits, parts.device.place)
    pools = parts.memory.open_pools(reset.num_blocks, reset.layout)
    layouts = {kind: built.layout for kind, built in stages.items()}
    check_id_space(reset.num_blocks, layouts, pools, parts.carrier)
    views = {
        kind: LayoutView(built.layout, built.spec, built.stage, pools[kind], StepBuffers(kind, table))
        for kind, built in stages.items()
    }
    return StepPipeline(parts, table, ActiveLayout(views, reset.layout)), pools
