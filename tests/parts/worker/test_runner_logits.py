"""The logits of a tiny random model are those of plain torch in float64, in both layouts and all cuts."""

from pathlib import Path

import gguf
import pytest
import torch

from services.core.ids import LayoutKind
from services.models.model_files import ModelFiles, open_model
from tests.support.rank_threads import Group, group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf, write_safetensors

BOUND = 2e-5
"""Relative error of a row of logits: float32 sums over a few hundred terms and a few layers."""
PROMPT = [(7 * i * i + 3 * i) % 131 for i in range(50)]
OTHER = [(5 * i * i + i + 11) % 131 for i in range(21)]


def check(group: Group, model: TinyLlama, *sequences: list[int]) -> None:
    """The rows sampled last are those after each sequence."""
    actual = group.tap.logits[-1].double()
    expected = torch.stack([model.logits(ids)[-1] for ids in sequences])
    assert actual.shape == expected.shape
    error = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    assert error < BOUND


CUTS = {
    "one rank": (1, None, None),
    "two": (2, None, None),
    "two, uneven": (2, [3, 1], [5.0, 1.0]),
    "three": (3, None, None),
    "three, uneven": (3, [1, 2, 1], [1.0, 4.0, 1.5]),
    "four, more than KV heads": (4, None, None),
    "two, a rank without heads": (2, None, [9.0, 1.0]),
}


@pytest.mark.parametrize("layout", LayoutKind, ids=lambda kind: kind.value)
@pytest.mark.parametrize("cut", CUTS.values(), ids=CUTS)
def test_whole_prompts_chunks_and_decoding(
    tmp_path: Path, layout: LayoutKind, cut: tuple[int, list[int] | None, list[float] | None]
) -> None:
    model = write_gguf(tmp_path / "tiny.gguf", TinyShape(num_layers=4), gguf.GGMLQuantizationType.Q4_1)
    num_ranks, pp_layers, tp_weights = cut
    with group_of(open_model(tmp_path / "tiny.gguf"), num_ranks, pp_layers=pp_layers, tp_weights=tp_weights) as group:
        log = group.log
        log.reset(layout, 64, 8, 256)
        log.step([(2, 0, 50)], admitted=[log.admit(2, PROMPT)], sampled=[0])
        log.settle()
        check(group, model, PROMPT)
        # A prompt in chunks beside a request that decodes: ragged rows, only the last ones sample.
        other = log.admit(5, OTHER)
        log.step([(5, 0, 7), (2, 50, 1)], admitted=[other], sampled=[1], tokens_through=log.sequence)
        log.settle()
        check(group, model, log.requests[2][:-1])
        log.step([(5, 7, 14)], sampled=[0])
        log.settle()
        check(group, model, OTHER)
        log.decode([5, 2], 20)
        check(group, model, log.requests[5][:-1], log.requests[2][:-1])


def variants(folder: Path) -> dict[str, tuple[ModelFiles, TinyLlama]]:
    shape, misaligned, tied = TinyShape(), TinyShape(num_kv_heads=6), TinyShape(tied=True)
    kinds = gguf.GGMLQuantizationType
    models = {
        "q8_0.gguf": write_gguf(folder / "q8_0.gguf", shape, kinds.Q8_0),
        "cut-within-blocks.gguf": write_gguf(folder / "cut-within-blocks.gguf", misaligned, kinds.Q4_0),
        "tied.gguf": write_gguf(folder / "tied.gguf", tied, kinds.Q5_1),
        "bf16": write_safetensors(folder / "bf16", shape, torch.bfloat16),
        "tied-f32": write_safetensors(folder / "tied-f32", tied, torch.float32),
    }
    return {name: (open_model(folder / name), model) for name, model in models.items()}


@pytest.mark.parametrize("layout", LayoutKind, ids=lambda kind: kind.value)
def test_formats_types_and_tied_heads(tmp_path: Path, layout: LayoutKind) -> None:
    for files, model in variants(tmp_path).values():
        with group_of(files, 2) as group:
            group.log.reset(layout, 64, 8, 256)
            group.log.prefill({0: PROMPT}, 50)
            check(group, model, PROMPT)
