"""The reference on a CUDA device against C on the host, kernel by kernel, in float32."""

from dataclasses import replace

import pytest
import torch

from kernels.backend import NO_SLOT, Activation, Backend, Rotary
from kernels.cpu.backend import CpuBackend
from kernels.reference.backend import ReferenceBackend
from kernels.rotary import rope_table
from kernels.weights import Matrix
from services.core.ids import Rank
from services.models.ggml_types import GgmlType
from services.placement.compatibility import Device
from services.worker.memory.device import rank_device
from tests.support.attention_batches import Batch, Case, build, one_sequence

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

MIXED = ((1, 1), (1, 17), (1, 301), (4, 4), (33, 100), (65, 321))
CASES = {
    "smollm2": Case(MIXED, 9, 3, 64),
    "gemma_2": Case(MIXED, 4, 2, 256, window=64, softcap=50.0, spread=8.0),
    "part of the pool's heads": Case(MIXED, 8, 2, 128, num_pool_heads=5, kv_head_begin=1),
}
HERE = CpuBackend()


@pytest.fixture
def there() -> Backend:
    return ReferenceBackend(rank_device(Device.CUDA, Rank(0)).place, torch.float32)


def moved(batch: Batch, there: Backend) -> Batch:
    tables = {name: getattr(batch, name).cuda() for name in ("q", "tables", "rows", "query_start", "context")}
    return replace(batch, backend=there, pools=(batch.pools[0].cuda(), batch.pools[1].cuda()), **tables)


@pytest.mark.parametrize("name", CASES)
def test_attention(there: Backend, generator: torch.Generator, name: str) -> None:
    batch = build(CASES[name], generator, HERE)
    lse, out = torch.empty(batch.q.shape[:2]), torch.empty_like(batch.q)
    batch.run_into(out, lse)
    lse_there, out_there = torch.empty_like(lse, device="cuda"), torch.empty_like(out, device="cuda")
    moved(batch, there).run_into(out_there, lse_there)
    assert batch.error(out_there.cpu()) < batch.bound()
    torch.testing.assert_close(lse_there.cpu(), lse, rtol=1e-5, atol=1e-5)


def test_merged_parts(there: Backend, generator: torch.Generator) -> None:
    parts, lse = torch.randn(3, 7, 4, 16, generator=generator), torch.randn(3, 7, 4, generator=generator)
    here, out = torch.empty(7, 4, 16), torch.empty(7, 4, 16, device="cuda")
    HERE.merge(parts, lse, here)
    there.merge(parts.cuda(), lse.cuda(), out)
    torch.testing.assert_close(out.cpu(), here, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("num_tokens", [1, 9, 300])
def test_products_and_look_up(there: Backend, generator: torch.Generator, num_tokens: int) -> None:
    x, weights = torch.randn(num_tokens, 576, generator=generator), torch.randn(1536, 576, generator=generator)
    on_device = weights.to(there.device)
    matrix = Matrix(on_device.data_ptr(), GgmlType.F32, 1536, 576, 576 * 4, on_device).rows(3, 1500)
    out = torch.full((num_tokens, 1600), 7.0, device=there.device)
    there.linear(x.to(there.device), matrix, out[:, 50:1547])
    wanted = x.double() @ weights[3:1500].double().T
    norms = x.double().norm(dim=1)[:, None] * weights[3:1500].double().norm(dim=1)
    assert ((out[:, 50:1547].cpu().double() - wanted).abs() <= 1e-5 * norms).all()
    there.linear(x.to(there.device), matrix, out[:, 50:1547], accumulate=True)
    assert ((out[:, 50:1547].cpu().double() - 2 * wanted).abs() <= 2e-5 * norms).all()
    assert out[:, :50].eq(7).all() and out[:, 1547:].eq(7).all()
    ids = torch.randint(1497, (num_tokens,), generator=generator)
    rows = torch.empty(num_tokens, 576, device=there.device)
    there.embed(matrix, ids.to(there.device), rows)
    assert torch.equal(rows.cpu(), weights[3:1500][ids])


def test_rows_between_the_products(there: Backend, generator: torch.Generator) -> None:
    x, weight, gate, up = (torch.randn(5, 64, generator=generator) for _ in range(4))
    here, out = torch.empty(5, 64), torch.empty(5, 64, device="cuda")
    HERE.norm(x, weight[0], 1e-5, here)
    there.norm(x.cuda(), weight[0].cuda(), 1e-5, out)
    torch.testing.assert_close(out.cpu(), here, rtol=2e-6, atol=1e-7)
    HERE.gate(gate, up, here, Activation.SILU)
    there.gate(gate.cuda(), up.cuda(), out, Activation.SILU)
    torch.testing.assert_close(out.cpu(), here, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_and_store(there: Backend, generator: torch.Generator, interleaved: bool) -> None:
    q, k, v = (torch.randn(7, heads, 64, generator=generator) for heads in (6, 2, 2))
    table = rope_table(64, 10000.0, 50)
    positions = torch.randint(50, (7,), generator=generator, dtype=torch.int32)
    slots = torch.randperm(5 * 16, generator=generator)[:7].to(torch.int32)
    slots[3] = NO_SLOT
    host = [q, k, v, *(torch.zeros(5, 4, 16, 64) for _ in range(2))]
    device = [tensor.cuda() for tensor in host]
    for backend, tensors in ((HERE, host), (there, device)):
        places = (positions.to(backend.device), slots.to(backend.device))
        plan = one_sequence(backend, *places, (6, 2, 64), begin=1)
        rotary = Rotary(table.to(backend.device), interleaved)
        backend.rope_and_store(plan, *tensors[:3], rotary, *tensors[3:])
    for one, other in zip(host, device, strict=True):
        torch.testing.assert_close(other.cpu(), one, rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="slot 80"):
        plan = one_sequence(there, positions.cuda(), (slots * 0 + 80).cuda(), (6, 2, 64), begin=1)
        there.rope_and_store(plan, *device[:3], Rotary(table.cuda(), interleaved), *device[3:])
