"""The byte oracle of rows on a geometry with enough units for uneven shares: 48 query heads in 24 groups."""

from pathlib import Path

import gguf
import pytest

from services.core.ids import LayoutKind
from services.models.model_files import ModelFiles, open_model
from services.placement.rows.transfers import BlockRuns
from services.worker.memory.owned_memory import OwnedMode
from tests.parts.memory.test_private_flips import check_weights
from tests.support.private_group import runs, there_and_back, whole_cache
from tests.support.rank_threads import group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf

SHAPE = TinyShape(num_layers=8, num_heads=48, num_kv_heads=24, head_dim=8, hidden_size=96, ffn_size=960)
NUM_BLOCKS = 20
SHARES: dict[str, tuple[tuple[int, ...], tuple[float, ...]]] = {
    "2,1": ((3, 5), (2.0, 1.0)),
    "30,17,17": ((2, 3, 3), (30.0, 17.0, 17.0)),
    "1,1,1,5": ((1, 1, 1, 5), (1.0, 1.0, 1.0, 5.0)),
    "5,1,1,1 against its stages": ((1, 1, 1, 5), (5.0, 1.0, 1.0, 1.0)),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, TinyLlama]:
    path: Path = tmp_path_factory.mktemp("model") / "wide.gguf"
    model = write_gguf(path, SHAPE, gguf.GGMLQuantizationType.F16)
    return open_model(path), model


@pytest.mark.parametrize("mode", ["dual", "exchange", "image"])
@pytest.mark.parametrize("live", [runs((0, NUM_BLOCKS)), runs((1, 1), (4, 3), (19, 1))], ids=["all", "scattered"])
@pytest.mark.parametrize("shares", SHARES.values(), ids=SHARES)
def test_uneven_shares_keep_every_bit(
    wide: tuple[ModelFiles, TinyLlama],
    shares: tuple[tuple[int, ...], tuple[float, ...]],
    live: BlockRuns,
    mode: OwnedMode,
) -> None:
    pp_layers, tp_weights = shares
    cache = whole_cache(SHAPE.num_layers, NUM_BLOCKS, SHAPE.num_kv_heads, SHAPE.head_dim)
    with group_of(wide[0], len(pp_layers), pp_layers=pp_layers, tp_weights=tp_weights, mode=mode) as group:
        there_and_back(group, cache, live)
        check_weights(group, LayoutKind.TP, wide)


BY_TOKENS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = {
    "2,1": ((3, 5), (2, 1), (1.0, 2.0)),
    "30,17,17": ((2, 3, 3), (30, 17, 17), (17.0, 30.0, 17.0)),
    "1,1,1,5": ((1, 1, 1, 5), (1, 1, 1, 5), (5.0, 1.0, 1.0, 1.0)),
}
"""Layers, rows and weights of each rank: no two of them alike."""
MANY_BLOCKS = 150
"""More than twice the longest period."""
ROWS = {
    "nothing": runs(),
    "one": runs((133, 1)),
    "scattered": runs((1, 1), (4, 3), (29, 70), (149, 1)),
    "all": runs((0, MANY_BLOCKS)),
}
FEW = ("nothing", "one")
"""What the tiny model's tests have as well."""


@pytest.mark.parametrize("mode", ["dual", pytest.param("exchange", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "live", [pytest.param(live, id=name, marks=[pytest.mark.slow] * (name in FEW)) for name, live in ROWS.items()]
)
@pytest.mark.parametrize("shares", BY_TOKENS.values(), ids=BY_TOKENS)
def test_rows_cut_by_tokens_keep_every_bit(
    wide: tuple[ModelFiles, TinyLlama],
    shares: tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]],
    live: BlockRuns,
    mode: OwnedMode,
) -> None:
    pp_layers, kv_tokens, tp_weights = shares
    cut = {"pp_layers": pp_layers, "tp_weights": tp_weights, "kv_tokens": kv_tokens}
    cache = whole_cache(SHAPE.num_layers, MANY_BLOCKS, SHAPE.num_kv_heads, SHAPE.head_dim)
    with group_of(wide[0], len(pp_layers), **cut, mode=mode) as group:
        there_and_back(group, cache, live)
