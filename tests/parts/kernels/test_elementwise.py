"""What runs between the products of a layer: every backend against float64, outputs poisoned before."""

import math

import pytest
import torch
from torch import Tensor

from kernels.backend import NO_SLOT, Activation, Backend, Rotary
from kernels.rotary import rope_table
from tests.support import kernel_oracles
from tests.support.attention_batches import one_sequence

SILU, GELU = Activation.SILU, Activation.GELU_TANH


def _relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).abs() / want.abs().clamp_min(1e-30)).max().item()


def _poisoned(*shape: int) -> Tensor:
    return torch.full(shape, math.nan)


@pytest.mark.parametrize(("num_rows", "width"), [(1, 576), (3, 577), (2, 8), (5, 7), (4, 640), (1, 1)])
def test_norm(backend: Backend, generator: torch.Generator, num_rows: int, width: int) -> None:
    x, weight = torch.randn(num_rows, width + 3, generator=generator)[:, 3:], torch.randn(width, generator=generator)
    out = _poisoned(num_rows, width + 1)[:, :width]
    backend.norm(x, weight, 1e-5, out)
    assert _relative(out, kernel_oracles.normed(x, weight, 1e-5)) < 1e-6


def test_norm_keeps_a_nan_in_its_row(backend: Backend, generator: torch.Generator) -> None:
    x, out = torch.randn(3, 40, generator=generator), _poisoned(3, 40)
    x[1, 17] = math.nan
    backend.norm(x, torch.ones(40), 1e-5, out)
    assert out.isnan().any(1).tolist() == [False, True, False]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_norm_of_heads(backend: Backend, generator: torch.Generator, fused: bool, in_place: bool) -> None:
    whole = torch.randn(5, 7, 24, generator=generator)
    x, kept, weight = (whole[:, 2:6] if fused else whole), whole.clone(), torch.randn(24, generator=generator)
    want = kernel_oracles.normed(x, weight, 1e-6)
    out = x if in_place else _poisoned(5, 9, 24)[:, : x.shape[1]]
    backend.norm(x, weight, 1e-6, out)
    assert _relative(out, want) < 1e-6
    untouched = slice(0, 2) if in_place and fused else slice(0, 7) if not in_place else slice(0, 0)
    assert torch.equal(whole[:, untouched], kept[:, untouched])


@pytest.mark.parametrize("width", [1536, 13, 8, 3])
@pytest.mark.parametrize("activation", list(Activation))
def test_gates_of_a_fused_product(
    backend: Backend, generator: torch.Generator, activation: Activation, width: int
) -> None:
    both = torch.randn(4, 2 * width, generator=generator) * 4
    gate, up = both.chunk(2, dim=1)
    out = _poisoned(4, width)
    backend.gate(gate, up, out, activation)
    want = kernel_oracles.gated(gate, up, activation)
    size = want if activation is SILU else gate.double() * up.double()
    bound = 1e-6 if activation is SILU else 5e-7
    assert ((out.double() - want).abs() <= bound * size.abs()).all()


@pytest.mark.parametrize("activation", list(Activation))
def test_gates_at_the_ends_of_the_range(backend: Backend, activation: Activation) -> None:
    gate = torch.tensor([[-1e30, -1000.0, -100.0, -88.5, -87.0, -0.0, 0.0, 1e-30, 87.0, 100.0, 1e30, math.nan]])
    out = _poisoned(*gate.shape)
    backend.gate(gate, torch.ones_like(gate), out, activation)
    assert out[0, -1].isnan()
    want = torch.tensor([[0, 0, 0, 0, 0, 0, 0, 5e-31, 87, 100, 1e30]], dtype=torch.float64)
    assert torch.allclose(out[:, :-1].double(), want, rtol=1e-6, atol=1e-35)


def test_add_in_place(backend: Backend, generator: torch.Generator) -> None:
    x, y = torch.randn(3, 2 * 45, generator=generator)[:, 45:], torch.randn(3, 45, generator=generator)
    want = x + y
    backend.add(x, y)
    assert torch.equal(x, want)


@pytest.mark.parametrize("cap", [1.0, 30.0])
def test_soft_caps(backend: Backend, generator: torch.Generator, cap: float) -> None:
    wide = torch.randn(3, 50, generator=generator) * 60
    wide[0, 3:7] = torch.tensor([1e-20, -1e-4, 3e38, -math.inf])
    x, out = wide[:, 2:-1], _poisoned(3, 47)
    want = cap * torch.tanh(x.double() / cap)
    backend.soft_cap(x, cap, out)
    assert _relative(out, want) < 1e-6
    backend.soft_cap(x, cap, x)
    assert torch.equal(x, out)
    wide[1, 5] = math.nan
    backend.soft_cap(x, cap, out)
    assert out.isnan().sum() == 1
    with pytest.raises(ValueError, match="soft cap"):
        backend.soft_cap(x, 0.0, out)


def test_what_does_not_fit_is_refused(backend: Backend) -> None:
    with pytest.raises(ValueError, match="expected, got"):
        backend.add(torch.zeros(3, 8), torch.zeros(3, 9))
    with pytest.raises(ValueError, match=r"\[9\] weights"):
        backend.norm(torch.zeros(3, 8), torch.zeros(9), 1e-5, torch.zeros(3, 8))
    with pytest.raises(ValueError, match="expected, got"):
        backend.gate(torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(2, 8), SILU)


def test_what_was_known_of_a_tensor_ends_with_it(backend: Backend, generator: torch.Generator) -> None:
    """Many tensors one after the other, at addresses and with ids that were others' before."""
    for step in range(300):
        width = 8 + step % 5
        x, y = torch.randn(2, width, generator=generator), torch.randn(2, width, generator=generator)
        want = x + y
        backend.add(x, y)
        assert torch.equal(x, want)


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
@pytest.mark.parametrize("copied", [False, True])
def test_rope_and_store(
    backend: Backend, generator: torch.Generator, head_dim: int, rotary_dim: int, interleaved: bool, copied: bool
) -> None:
    """Parts of a fused product; with `copied`, more KV heads are stored than the attention reads."""
    num_tokens, num_q_heads, num_kv_heads = 7, 6, 2
    fused = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim, generator=generator)
    q, k, v = fused[:, :num_q_heads], fused[:, num_q_heads:-num_kv_heads], fused[:, -num_kv_heads:]
    table = rope_table(rotary_dim, 10000.0, 50)
    positions = torch.randint(50, (num_tokens,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(5 * 16, generator=generator)[:num_tokens].to(torch.int32)
    pools = [_poisoned(5, 4, 16, head_dim) for _ in range(2)]
    wanted = [pool.clone() for pool in pools]
    want_q, want_k = (kernel_oracles.turned(x, positions, table, interleaved=interleaved) for x in (q, k))
    plan = one_sequence(backend, positions, slots, (num_q_heads, 1 if copied else num_kv_heads, head_dim), begin=1)
    backend.rope_and_store(plan, q, k, v, Rotary(table, interleaved), pools[0], pools[1])
    for got, want in ((q, want_q), (k, want_k)):
        assert (got.double() - want).abs().max() < 1e-6 * want.abs().max()
    for rows, pool, want in zip((k, v), pools, wanted, strict=True):
        kernel_oracles.store(rows, slots, want, 1)
        assert torch.equal(pool.nan_to_num(7e9), want.nan_to_num(7e9))
        assert pool.isnan().sum() == pool.numel() - num_tokens * num_kv_heads * head_dim


def test_rope_turns_and_does_not_store_rows_of_other_ranks(backend: Backend, generator: torch.Generator) -> None:
    q, k, v = (torch.randn(4, heads, 8, generator=generator) for heads in (2, 1, 1))
    table, positions = rope_table(8, 10000.0, 50), torch.tensor([3, 9, 4, 1], dtype=torch.int32)
    slots = torch.tensor([5, NO_SLOT, 70, NO_SLOT], dtype=torch.int32)
    pools = [_poisoned(5, 1, 16, 8) for _ in range(2)]
    wanted = [kernel_oracles.turned(x, positions, table, interleaved=False) for x in (q, k)]
    plan = one_sequence(backend, positions, slots, (2, 1, 8))
    backend.rope_and_store(plan, q, k, v, Rotary(table, False), pools[0], pools[1])
    for got, want in zip((q, k), wanted, strict=True):
        assert (got.double() - want).abs().max() < 1e-6 * want.abs().max()
    for rows, pool in zip((k, v), pools, strict=True):
        assert torch.equal(pool[0, :, 5], rows[0]) and torch.equal(pool[4, :, 6], rows[2])
        assert pool.isnan().sum() == pool.numel() - 2 * 8


@pytest.mark.parametrize(
    ("position", "slot", "said"),
    [(50, 0, "position 50"), (-1, 0, "position -1"), (0, 80, "slot 80"), (0, -2, "slot -2")],
)
def test_rope_refuses_what_lies_outside_before_writing(backend: Backend, position: int, slot: int, said: str) -> None:
    q, k, v = (torch.ones(2, heads, 8) for heads in (2, 1, 1))
    pools = [_poisoned(5, 1, 16, 8) for _ in range(2)]
    positions, slots = torch.tensor([3, position], dtype=torch.int32), torch.tensor([1, slot], dtype=torch.int32)
    rotary = Rotary(rope_table(8, 10000.0, 50), False)
    with pytest.raises(ValueError, match=said):
        backend.rope_and_store(one_sequence(backend, positions, slots, (2, 1, 8)), q, k, v, rotary, pools[0], pools[1])
    assert pools[0].isnan().all()
    assert torch.equal(q, torch.ones_like(q))


@pytest.mark.parametrize(
    ("q_heads", "k_heads", "dim", "num_tokens"), [(3, 1, 8, 2), (2, 2, 8, 2), (2, 1, 16, 2), (2, 1, 8, 1)]
)
def test_rope_refuses_tensors_of_another_step(
    backend: Backend, q_heads: int, k_heads: int, dim: int, num_tokens: int
) -> None:
    places = torch.tensor([0, 1], dtype=torch.int32)
    plan, rotary = one_sequence(backend, places, places, (2, 1, 8)), Rotary(rope_table(8, 10000.0, 50), False)
    q, k = torch.ones(num_tokens, q_heads, dim), torch.ones(num_tokens, k_heads, dim)
    pools = [_poisoned(5, 1, 16, 8) for _ in range(2)]
    with pytest.raises(ValueError, match=r"rope cannot take|outside the pool's 1"):
        backend.rope_and_store(plan, q, k, k.clone(), rotary, pools[0], pools[1])
    assert pools[0].isnan().all()
