"""Routing and experts of every backend against plain torch in float64; outputs hold NaN before."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from kernels.backend import Activation, Backend
from kernels.weights import Weight
from services.models.ggml_types import GgmlType
from tests.support.stored_weights import in_pieces, random_bytes, reference, view

NUM_EXPERTS, HIDDEN, WIDTH = 12, 256, 512


def drawn(kind: GgmlType, num_rows: int, num_columns: int, seed: int) -> tuple[Weight, Tensor]:
    data = random_bytes(kind, num_rows, num_columns, seed)
    return view(data, kind, num_columns), reference(data, kind).double()


def activated(gate: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.SILU:
        return torch.nn.functional.silu(gate)
    return torch.nn.functional.gelu(gate, approximate="tanh")


def wanted(
    x: Tensor, ids: Tensor, weights: Tensor, matrices: Sequence[Sequence[Tensor]], first: int, activation: Activation
) -> tuple[Tensor, Tensor]:
    """Token by token in float64; and the size that the bound is relative to."""
    out, size = torch.zeros(x.shape, dtype=torch.float64), torch.zeros(len(x), 1, dtype=torch.float64)
    for t in range(len(x)):
        for expert, weight in zip(ids[t].tolist(), weights[t].double(), strict=True):
            if first <= expert < first + len(matrices[0]):
                gate, up, down = (each[expert - first] for each in matrices)
                hidden = activated(gate @ x[t].double(), activation) * (up @ x[t].double())
                out[t] += weight * (down @ hidden)
                spread = gate.norm(dim=1).max() * up.norm(dim=1).max() * x[t].double().norm() ** 2 * WIDTH**0.5
                size[t] += weight.abs() * down.norm(dim=1).max() * max(spread, hidden.norm())
    return out, size


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("num_used", [1, 2, 8, NUM_EXPERTS])
def test_routes_are_the_most_probable(
    backend: Backend, generator: torch.Generator, num_used: int, normalise: bool
) -> None:
    logits = torch.randn(9, NUM_EXPERTS + 3, generator=generator)[:, 1:-2] * 4
    logits[4] = logits[4].round()  # ties
    ids, weights = backend.route(logits, num_used, normalise=normalise)
    probable = logits.double().softmax(-1)
    order = torch.sort(probable, dim=-1, descending=True, stable=True)
    assert ids.dtype == torch.int32
    assert torch.equal(ids.long(), order.indices[:, :num_used])
    want = order.values[:, :num_used]
    if normalise:
        want = want / want.sum(-1, keepdim=True)
    torch.testing.assert_close(weights.double(), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("normalise", [False, True])
def test_a_route_of_logits_that_are_not_numbers_is_seen(backend: Backend, normalise: bool) -> None:
    logits = torch.zeros(3, 5)
    logits[1, 4] = math.nan
    ids, weights = backend.route(logits, 2, normalise=normalise)
    assert weights.isnan().all(1).tolist() == [False, True, False]
    assert ((ids >= 0) & (ids < 5)).all()
    with pytest.raises(ValueError, match="6"):
        backend.route(logits, 6, normalise=normalise)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.Q4_K, GgmlType.Q8_0])
@pytest.mark.parametrize("num_tokens", [1, 5, 150])
def test_ranks_experts_sum_to_the_whole(
    backend: Backend, generator: torch.Generator, num_tokens: int, kind: GgmlType, activation: Activation
) -> None:
    """Uneven shares of the experts, one of them empty; the sum begins with what out had on one rank."""
    seed = iter(range(10_000))
    scale = 0.3 if kind is GgmlType.F32 else 1.0
    drawn_ones = [
        [drawn(kind, rows, columns, next(seed)) for _ in range(NUM_EXPERTS)]
        for rows, columns in ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
    ]
    x = torch.randn(num_tokens, HIDDEN + 5, generator=generator)[:, 5:] * scale
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator) * 2
    logits[:, 3] += 3  # one expert has more tokens than are in work at once
    ids, weights = backend.route(logits, 3, normalise=True)
    residual = torch.randn(num_tokens, HIDDEN, generator=generator)
    total = torch.zeros(num_tokens, HIDDEN, dtype=torch.float64)
    for begin, end in ((0, 7), (7, 7), (7, 12)):
        local = [tuple(weight for weight, _ in each[begin:end]) for each in drawn_ones]
        wide = torch.full((num_tokens, HIDDEN + 4), 7.0)
        out = wide[:, 2:-2]
        out.copy_(residual if begin == 0 else torch.full_like(residual, math.nan))
        backend.experts(x, ids, weights, begin, *local, activation, out, accumulate=begin == 0)
        assert wide[:, [0, 1, -2, -1]].eq(7).all()
        total += out
    want, size = wanted(x, ids, weights, [[plain for _, plain in each] for each in drawn_ones], 0, activation)
    assert ((total - want - residual).abs() <= 1e-5 * size + 1e-6).all()


def test_experts_in_pieces_are_the_experts(backend: Backend, generator: torch.Generator) -> None:
    whole = [
        [drawn(GgmlType.Q8_0, rows, columns, 7 * expert + place)[0] for expert in range(3)]
        for place, (rows, columns) in enumerate(((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)))
    ]
    x, ids = torch.randn(4, HIDDEN, generator=generator), torch.tensor([[0, 2], [1, 0], [2, 2], [9, 1]])
    weights, ids = torch.rand(4, 2, generator=generator), ids.to(torch.int32)
    pieced = [[in_pieces(weight, [64, 160], [96]) for weight in each] for each in whole]  # type: ignore[arg-type]
    want, got = torch.full((4, HIDDEN), math.nan), torch.full((4, HIDDEN), math.nan)
    backend.experts(x, ids, weights, 0, *whole, Activation.SILU, want)
    backend.experts(x, ids, weights, 0, *pieced, Activation.SILU, got)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * float(want.abs().max()))


def test_experts_that_do_not_fit_are_refused_before_anything_is_written(backend: Backend) -> None:
    gate, up, down = ([drawn(GgmlType.F32, *shape, 1)[0]] * 2 for shape in ((8, 16), (8, 16), (16, 8)))
    x, out, weights = torch.zeros(2, 16), torch.full((2, 16), 7.0), torch.ones(2, 1)
    ids = torch.zeros(2, 1, dtype=torch.int32)
    for bad_ids, matrices in (
        (ids - 1, (gate, up, down)),
        (ids, (gate, up[:1], down)),
        (ids, (gate, up, gate)),
    ):
        with pytest.raises(ValueError, match=r"expert|expected|must be"):
            backend.experts(x, bad_ids, weights, 0, *matrices, Activation.SILU, out)
    assert out.eq(7).all()
