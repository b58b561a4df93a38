"""Norms, activations and rotary positions against float64 references, on both instruction paths."""

import math

import pytest
import torch
from torch import Tensor

from kernels.cpu import elementwise
from kernels.rotary import rope_table

pytestmark = pytest.mark.usefixtures("each_path")


def _relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).abs() / want.abs().clamp_min(1e-30)).max().item()


def _poisoned(*shape: int) -> Tensor:
    return torch.full(shape, math.nan)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 576), (3, 577), (2, 8), (5, 7), (4, 640), (1, 1)])
def test_rms_norm(generator: torch.Generator, num_rows: int, width: int) -> None:
    x, weight = torch.randn(num_rows, width + 3, generator=generator)[:, 3:], torch.randn(width, generator=generator)
    out = _poisoned(num_rows, width + 1)[:, :width]
    elementwise.rms_norm(x, weight, 1e-5, out)
    assert _relative(out, elementwise.rms_norm_reference(x, weight, 1e-5)) < 1e-6


def test_norm_keeps_a_nan_in_its_row(generator: torch.Generator) -> None:
    x, out = torch.randn(3, 40, generator=generator), _poisoned(3, 40)
    x[1, 17] = math.nan
    elementwise.rms_norm(x, torch.ones(40), 1e-5, out)
    assert out.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("fused", [False, True])
def test_head_norm_in_place(generator: torch.Generator, fused: bool) -> None:
    whole = torch.randn(5, 7, 24, generator=generator)
    x, kept, weight = (whole[:, 2:6] if fused else whole), whole.clone(), torch.randn(24, generator=generator)
    want = elementwise.rms_norm_reference(x, weight, 1e-6)
    elementwise.rms_norm(x, weight, 1e-6, x)
    assert _relative(x, want) < 1e-6
    if fused:
        assert torch.equal(whole[:, :2], kept[:, :2])
        assert torch.equal(whole[:, 6:], kept[:, 6:])


@pytest.mark.parametrize("width", [1536, 13, 8, 3])
@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gated_activations_of_a_fused_product(generator: torch.Generator, name: str, width: int) -> None:
    both = torch.randn(4, 2 * width, generator=generator) * 4
    gate, up = both.chunk(2, dim=1)
    out = _poisoned(4, width)
    getattr(elementwise, name)(gate, up, out)
    want = getattr(elementwise, f"{name}_reference")(gate, up)
    size = want if name == "silu_mul" else gate.double() * up.double()
    bound = 1e-6 if name == "silu_mul" else 5e-7
    assert ((out.double() - want).abs() <= bound * size.abs()).all()


@pytest.mark.parametrize("name", ["silu_mul", "gelu_tanh_mul"])
def test_gates_at_the_ends_of_the_range(name: str) -> None:
    gate = torch.tensor([[-1e30, -1000.0, -100.0, -88.5, -87.0, -0.0, 0.0, 1e-30, 87.0, 100.0, 1e30, math.nan]])
    out = _poisoned(*gate.shape)
    getattr(elementwise, name)(gate, torch.ones_like(gate), out)
    assert out[0, -1].isnan()
    want = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 5e-31, 87, 100, 1e30]], dtype=torch.float64)
    assert torch.allclose(out[:, :-1].double(), want, rtol=1e-6, atol=1e-35)


def test_add_in_place(generator: torch.Generator) -> None:
    x, y = torch.randn(3, 2 * 45, generator=generator)[:, 45:], torch.randn(3, 45, generator=generator)
    want = x + y
    elementwise.add(x, y)
    assert torch.equal(x, want)


def test_rows_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="expected, got"):
        elementwise.add(torch.zeros(3, 8), torch.zeros(3, 9))
    with pytest.raises(ValueError, match=r"\[9\] weights"):
        elementwise.rms_norm(torch.zeros(3, 8), torch.zeros(9), 1e-5, torch.zeros(3, 8))


def test_rope_table_divides_by_the_factors() -> None:
    factors = torch.tensor([1.0, 4.0])
    table = rope_table(4, 100.0, 3, factors)
    angles = [[p * f for f in (1.0, 0.1 / 4)] for p in range(3)]
    want = [[math.cos(a) for a in row] + [math.sin(a) for a in row] for row in angles]
    assert torch.allclose(table, torch.tensor(want), atol=1e-7)
    with pytest.raises(ValueError, match="2 frequency factors"):
        rope_table(4, 100.0, 3, torch.ones(3))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (40, 40), (128, 32), (16, 6), (8, 8)])
def test_rope_and_store(generator: torch.Generator, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    num_tokens, num_q_heads, num_kv_heads = 7, 6, 2
    fused = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim, generator=generator)
    q, k, v = fused[:, :num_q_heads], fused[:, num_q_heads:-num_kv_heads], fused[:, -num_kv_heads:]
    table = rope_table(rotary_dim, 10000.0, 50)
    positions = torch.randint(50, (num_tokens,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(5 * 16, generator=generator)[:num_tokens].to(torch.int32)
    pools = [_poisoned(5, 4, 16, head_dim) for _ in range(2)]
    wanted = [pool.clone() for pool in pools]
    want_q, want_k = (elementwise.rope_reference(x, positions, table, interleaved=interleaved) for x in (q, k))
    elementwise.rope_and_store(q, k, v, positions, slots, table, *pools, kv_head_begin=1, interleaved=interleaved)
    for got, want in ((q, want_q), (k, want_k)):
        assert (got.double() - want).abs().max() < 1e-6 * want.abs().max()
    for rows, pool, want in zip((k, v), pools, wanted, strict=True):
        elementwise.store_reference(rows, slots, want, 1)
        assert torch.equal(pool, want) or torch.equal(pool.nan_to_num(7e9), want.nan_to_num(7e9))
        assert pool.isnan().sum() == pool.numel() - num_tokens * num_kv_heads * head_dim


def test_rope_turns_and_does_not_store_rows_of_other_ranks(generator: torch.Generator) -> None:
    q, k, v = (torch.randn(4, heads, 8, generator=generator) for heads in (2, 1, 1))
    table, positions = rope_table(8, 10000.0, 50), torch.tensor([3, 9, 4, 1], dtype=torch.int32)
    slots = torch.tensor([5, elementwise.NO_SLOT, 70, elementwise.NO_SLOT], dtype=torch.int32)
    pools = [_poisoned(5, 1, 16, 8) for _ in range(2)]
    wanted = [elementwise.rope_reference(x, positions, table, interleaved=False) for x in (q, k)]
    elementwise.rope_and_store(q, k, v, positions, slots, table, *pools, kv_head_begin=0, interleaved=False)
    for got, want in zip((q, k), wanted, strict=True):
        assert (got.double() - want).abs().max() < 1e-6 * want.abs().max()
    for rows, pool in zip((k, v), pools, strict=True):
        assert torch.equal(pool[0, :, 5], rows[0]) and torch.equal(pool[4, :, 6], rows[2])
        assert pool.isnan().sum() == pool.numel() - 2 * 8


@pytest.mark.parametrize(
    ("position", "slot", "said"),
    [(50, 0, "position 50"), (-1, 0, "position -1"), (0, 80, "slot 80"), (0, -2, "slot -2")],
)
def test_rope_refuses_what_lies_outside_before_writing(position: int, slot: int, said: str) -> None:
    q, k, v = (torch.ones(2, heads, 8) for heads in (2, 1, 1))
    pools = [_poisoned(5, 1, 16, 8) for _ in range(2)]
    positions, slots = torch.tensor([3, position], dtype=torch.int32), torch.tensor([1, slot], dtype=torch.int32)
    table = rope_table(8, 10000.0, 50)
    with pytest.raises(ValueError, match=said):
        elementwise.rope_and_store(q, k, v, positions, slots, table, *pools, kv_head_begin=0, interleaved=False)
    assert pools[0].isnan().all()
    assert torch.equal(q, torch.ones_like(q))
