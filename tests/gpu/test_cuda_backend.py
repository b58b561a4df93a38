"""The CUDA backend against the reference backend in float32 on the same device, on the same rounded numbers.

A bound is half an ulp of the format for the result, and what the format loses on the way: products of bf16 numbers are
summed in float32, so an error is a few ulps of the largest term.
"""

import pytest
import torch
from torch import Tensor

from kernels.backend import Activation, AttentionShape, Backend, Rotary, StepInputs
from kernels.reference.backend import ReferenceBackend
from kernels.rotary import rope_table
from kernels.weights import Matrix, PiecedMatrix, PlacedMatrix

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
DECODE = ((1, 1), (1, 17), (1, 301), (1, 4096))
MIXED = ((1, 1), (33, 100), (1, 301), (65, 321), (512, 512))
SHAPES = {
    "llama": AttentionShape(32, 8, 0, 128, 128**-0.5),
    "window": AttentionShape(8, 2, 0, 128, 128**-0.5, window=64),
    "soft cap": AttentionShape(8, 4, 0, 256, 256**-0.5, soft_cap=50.0),
    "part of the pool's heads": AttentionShape(12, 3, 1, 64, 0.125),
}


@pytest.fixture
def backend() -> Backend:
    """In bf16: each format is compiled anew, kind by kind."""
    from kernels.cuda.backend import CudaBackend

    return CudaBackend(torch.device("cuda"), torch.bfloat16)


@pytest.fixture
def oracle() -> Backend:
    return ReferenceBackend(torch.device("cuda"), torch.float32)


def normal(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(device="cuda", dtype=dtype)


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype, ulps: float) -> None:
    assert torch.isfinite(found).all()
    error = (found.float() - wanted.float()).abs().max().item()
    assert error <= ulps * ULP[dtype] * max(1.0, wanted.abs().max().item()), error


def step(sequences: tuple[tuple[int, int], ...], generator: torch.Generator) -> tuple[StepInputs, int]:
    """(queries, context) of each sequence, its blocks scattered over a pool; how many blocks that has."""
    counts = [-(-context // 16) for _, context in sequences]
    num_blocks = sum(counts) + 5
    ids = torch.randperm(num_blocks, generator=generator, dtype=torch.int32)
    tables = torch.zeros(len(sequences) + 2, max(counts), dtype=torch.int32)
    rows = torch.randperm(len(sequences) + 2, generator=generator)[: len(sequences)].to(torch.int32)
    for row, count, own in zip(rows.tolist(), counts, torch.split(ids[: sum(counts)], counts), strict=True):
        tables[row, :count] = own
    positions = torch.cat([torch.arange(context - queries, context) for queries, context in sequences]).to(torch.int32)
    row_of_token = torch.repeat_interleave(rows, torch.tensor([queries for queries, _ in sequences]))
    slots = tables[row_of_token.long(), positions.long() // 16] * 16 + positions % 16
    query_start = torch.tensor([0, *(queries for queries, _ in sequences)], dtype=torch.int32).cumsum(0).to(torch.int32)
    context = torch.tensor([context for _, context in sequences], dtype=torch.int32)
    tensors = (torch.zeros_like(positions), positions, slots, tables, rows, query_start, context)
    on_device = [tensor.cuda() for tensor in tensors]
    return StepInputs(len(positions), *on_device, torch.zeros(0, dtype=torch.int64)), num_blocks


@pytest.mark.parametrize("sequences", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("name", SHAPES)
def test_rows_are_stored_and_attended(
    backend: Backend, oracle: Backend, generator: torch.Generator, name: str, sequences: tuple[tuple[int, int], ...]
) -> None:
    shape, dtype = SHAPES[name], backend.compute_dtype
    inputs, num_blocks = step(sequences, generator)
    num_pool_heads = shape.num_kv_heads + shape.kv_head_begin + 1
    pools = [normal(generator, dtype, num_blocks, num_pool_heads, 16, shape.head_dim) for _ in range(2)]
    q = normal(generator, dtype, inputs.num_tokens, shape.num_heads, shape.head_dim)
    k, v = (normal(generator, dtype, inputs.num_tokens, shape.num_kv_heads, shape.head_dim) for _ in range(2))
    rotary = Rotary(rope_table(shape.head_dim, 1e4, 8192).cuda(), False)
    found, wanted = [], []
    for kernels, into in ((backend, found), (oracle, wanted)):
        own = [tensor.to(kernels.compute_dtype).clone() for tensor in (q, k, v, *pools)]
        planned = kernels.plan(inputs, shape)
        kernels.rope_and_store(planned, *own[:3], rotary, *own[3:])
        if kernels is oracle:
            # What is attended is what the format keeps of the rows.
            own = [tensor.to(dtype).float() for tensor in own]
        out = torch.full_like(own[0], torch.nan)
        lse = torch.full(own[0].shape[:2], torch.nan, device="cuda")
        kernels.attend(planned, own[0], own[3], own[4], out, lse)
        into += [own[3], own[4], out, lse]
    for one, other in zip(found[:2], wanted[:2], strict=True):
        assert_close(one, other, dtype, 2)
    assert_close(found[2], wanted[2], dtype, 8)
    torch.testing.assert_close(found[3].float(), wanted[3].float(), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("num_tokens", [1, 9, 300])
def test_products(backend: Backend, oracle: Backend, generator: torch.Generator, num_tokens: int) -> None:
    dtype = backend.compute_dtype
    x, weight = normal(generator, dtype, num_tokens, 512), normal(generator, dtype, 384, 512) / 512**0.5
    bias, before = normal(generator, dtype, 384), normal(generator, dtype, num_tokens, 384)
    whole = Matrix.from_tensor(weight)
    cut = tuple(
        PlacedMatrix(row, column, Matrix.from_tensor(weight[row : row + 128, column : column + 256]))
        for row in range(0, 384, 128)
        for column in (0, 256)
    )
    for matrix in (whole, PiecedMatrix(384, 512, cut)):
        for accumulate in (False, True):
            out, exact = before.clone(), before.float()
            backend.linear(x, matrix, out, bias_N=bias, accumulate=accumulate)
            oracle.linear(x.float(), Matrix.from_tensor(weight.float()), exact, bias_N=bias, accumulate=accumulate)
            assert_close(out, exact, dtype, 4)


def test_rows_of_tokens(backend: Backend, oracle: Backend, generator: torch.Generator) -> None:
    dtype = backend.compute_dtype
    table, ids = normal(generator, dtype, 1000, 256), torch.randint(0, 1000, (37,), generator=generator).cuda().int()
    x, y, weight = (normal(generator, dtype, *shape) for shape in ((37, 256), (37, 256), (256,)))
    joined = torch.cat((x, y), 1)
    for act in (
        lambda kernels, out: kernels.embed(Matrix.from_tensor(table.to(kernels.compute_dtype)), ids, out, 2.0),
        lambda kernels, out: kernels.norm(x.to(kernels.compute_dtype), weight.float(), 1e-5, out),
        lambda kernels, out: kernels.gate(*(t.to(kernels.compute_dtype) for t in (x, y)), out, Activation.SILU),
        lambda kernels, out: kernels.gate(*(t.to(kernels.compute_dtype) for t in (x, y)), out, Activation.GELU_TANH),
        lambda kernels, out: kernels.gate(*joined.to(kernels.compute_dtype).chunk(2, 1), out, Activation.SILU),
        lambda kernels, out: kernels.soft_cap(x.to(kernels.compute_dtype), 3.0, out),
    ):
        out, exact = torch.full_like(x, torch.nan), torch.full_like(x, torch.nan, dtype=torch.float32)
        act(backend, out)
        act(oracle, exact)
        assert_close(out, exact, dtype, 3)


def test_norm_of_heads(backend: Backend, oracle: Backend, generator: torch.Generator) -> None:
    """q and k are views of one buffer; heads are normed each by itself."""
    dtype = backend.compute_dtype
    qkv, weight = normal(generator, dtype, 21, 6 * 128), normal(generator, dtype, 128)
    q, exact = qkv[:, : 4 * 128].view(21, 4, 128), qkv[:, : 4 * 128].float().view(21, 4, 128).clone()
    oracle.norm(exact.clone(), weight, 1e-6, exact)
    rest = qkv[:, 4 * 128 :].clone()
    backend.norm(q, weight, 1e-6, q)
    assert_close(q, exact, dtype, 3)
    assert torch.equal(qkv[:, 4 * 128 :], rest), "nothing beside the view is written"
