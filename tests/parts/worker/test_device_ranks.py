"""Ranks as a device has them, float32 weights and torch kernels, here over host memory: rows, weights and answers."""

from collections.abc import Sequence
from typing import Any

import gguf
import pytest
import torch

from kernels.reference.backend import ReferenceBackend
from services.core.errors import ConfigurationError
from services.core.ids import LayoutKind, Rank
from services.models.model_files import ModelFiles, open_model
from services.placement.compatibility import Device
from services.worker.memory.device import RankDevice, rank_device
from services.worker.memory.owned_memory import OwnedMode
from services.worker.participation import Worked
from tests.parts.conftest import take_torch
from tests.parts.memory.test_private_flips import check_weights, owned
from tests.parts.worker.test_runner import PROMPT, check_greedy
from tests.parts.worker.test_runner_logits import check
from tests.support.private_group import check_rows, fill, flip, poison, pools_of, runs, whole_cache
from tests.support.rank_threads import group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP
SHAPE = TinyShape(num_layers=4)
NUM_BLOCKS = 24
AS_A_DEVICE = RankDevice(Device.CUDA, torch.device("cpu"), ReferenceBackend(torch.device("cpu"), torch.float32))
Group = tuple[int, Sequence[int] | None, Sequence[float] | None, Sequence[int] | None]
CUTS: dict[str, Group] = {
    "two uneven": (2, (1, 3), (2.0, 1.0), None),
    "two, by tokens": (2, None, None, (1, 2)),
    "three uneven": (3, (1, 1, 2), (1.0, 4.0, 1.0), None),
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelFiles, TinyLlama]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model = write_gguf(path, SHAPE, gguf.GGMLQuantizationType.Q4_1)
    return open_model(path), model


@pytest.mark.parametrize("mode", ["dual", "exchange", "image"])
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_rows_weights_logits_and_answers_across_flips(
    tiny: tuple[ModelFiles, TinyLlama],
    cut: Group,
    mode: OwnedMode,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    files, model = tiny
    num_ranks, pp_layers, tp_weights, kv_tokens = cut
    shares: dict[str, Any] = {"pp_layers": pp_layers, "tp_weights": tp_weights, "kv_tokens": kv_tokens}
    take_torch(monkeypatch)
    with group_of(files, num_ranks, **shares, mode=mode, device=AS_A_DEVICE) as group:
        log = group.log
        log.reset(PP, NUM_BLOCKS, 8, 256)
        log.prefill({0: PROMPT, 1: PROMPT[5:]}, 16)
        for target in (TP, PP):
            for pool in pools_of(group, target):
                poison(pool)
            assert all(isinstance(answer, Worked) for answer in flip(group, target, owned(group)).answers)
            check_weights(group, target, tiny)
            log.decode([0, 1], 4)
            check(group, model, log.requests[0][:-1], log.requests[1][:-1])
        check_greedy(model, log.requests[0], 40, 9)
        cache = whole_cache(SHAPE.num_layers, NUM_BLOCKS, SHAPE.num_kv_heads, SHAPE.head_dim)
        for pool in pools_of(group, PP):
            fill(pool, cache)
        live = runs((0, 1), (3, 5), (11, 2), (23, 1))
        for target in (TP, PP):
            for pool in pools_of(group, target):
                poison(pool)
            assert all(isinstance(answer, Worked) for answer in flip(group, target, live).answers)
            for pool in pools_of(group, target):
                check_rows(pool, cache, live)


def test_no_device_is_a_refusal_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        ConfigurationError, match=r'device = "cuda": torch .* finds no CUDA device here: set device = "cpu"'
    ):
        rank_device(Device.CUDA, Rank(0))
