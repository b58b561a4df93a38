"""The quantised products against ggml's own reference and float64, on every instruction set the machine has."""

import ctypes
import mmap
import threading

import kernels._native as _native
import numpy as np
import pytest
import torch

from kernels.backend import Backend
from kernels.cpu.backend import CpuBackend
from kernels.cpu.linear import dequantize
from kernels.reference.backend import ReferenceBackend
from kernels.weights import Matrix
from services.models.ggml_types import GgmlType, GgmlTypeError, block_length, row_bytes
from tests.support.stored_weights import in_pieces, random_bytes, reference, view

gguf = pytest.importorskip("gguf")

KINDS = list(GgmlType)
QUANTISABLE = [GgmlType[name] for name in ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")]
LANES = [4, 8, 16]
BACKENDS: dict[str, Backend] = {
    **{f"{lanes} lanes": CpuBackend(lanes) for lanes in LANES},
    "reference": ReferenceBackend(torch.device("cpu"), torch.float32),
}


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def assert_close(out_TN: torch.Tensor, x_TK: torch.Tensor, weight_NK: torch.Tensor) -> None:
    """Within 1e-5 of the product of the norms of a float64 reference, and no output left poisoned."""
    expected_TN = x_TK.double() @ weight_NK.double().T
    norms_TN = x_TK.double().norm(dim=1)[:, None] * weight_NK.double().norm(dim=1)[None, :]
    assert torch.isfinite(out_TN).all()
    assert ((out_TN.double() - expected_TN).abs() <= 1e-5 * norms_TN + 1e-30).all()


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", KINDS)
def test_dequantize_is_bit_exact_on_random_blocks(kind: GgmlType, lanes: int) -> None:
    num_columns = 512 if block_length(kind) > 1 else 509
    data = random_bytes(kind, 37, num_columns, seed=kind)
    out = poisoned(37, num_columns)
    dequantize(view(data, kind, num_columns), out, max_lanes=lanes)
    assert torch.equal(out.view(torch.int32), reference(data, kind).view(torch.int32))


@pytest.mark.parametrize("lanes", LANES)
@pytest.mark.parametrize("kind", QUANTISABLE)
def test_dequantize_is_bit_exact_on_quantised_weights(kind: GgmlType, lanes: int) -> None:
    weights = np.random.default_rng(1).standard_normal((19, 576)).astype(np.float32)
    data = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(kind.value)).view(np.uint8)
    out = poisoned(19, 576)
    dequantize(view(data, kind, 576), out, max_lanes=lanes)
    assert torch.equal(out.view(torch.int32), reference(data, kind).view(torch.int32))
    error = (out - torch.from_numpy(weights)).norm() / np.linalg.norm(weights)
    assert error < 0.12  # it is the weights that come back, not merely what the reference says


@pytest.mark.parametrize("kind", [GgmlType.F16, GgmlType.BF16])
@pytest.mark.parametrize("lanes", LANES)
def test_every_finite_half_is_read_exactly(kind: GgmlType, lanes: int) -> None:
    dtype = torch.float16 if kind is GgmlType.F16 else torch.bfloat16
    halves = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype)
    halves = halves[~halves.isnan()][None]
    out = poisoned(*halves.shape)
    dequantize(view(halves.view(torch.uint8).numpy(), kind, halves.shape[1]), out, max_lanes=lanes)
    assert torch.equal(out.view(torch.int32), halves.float().view(torch.int32))


@pytest.mark.parametrize("wide", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_products_match_float64_for_1_to_33_rows(kind: GgmlType, wide: Backend) -> None:
    num_columns = 768 if block_length(kind) > 1 else 771
    for num_rows in (1, 2, 7, 12):
        data = random_bytes(kind, num_rows, num_columns, seed=num_rows)
        matrix, weights = view(data, kind, num_columns), reference(data, kind)
        for num_tokens in (*range(1, 14), 32, 33, 70):
            x = torch.randn(num_tokens, num_columns, generator=torch.Generator().manual_seed(num_tokens))
            out = poisoned(num_tokens, num_rows)
            wide.linear(x, matrix, out)
            assert_close(out, x, weights)


@pytest.mark.parametrize("num_tokens", [1, 3, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_columns_beyond_one_pass_are_summed(backend: Backend, kind: GgmlType, num_tokens: int) -> None:
    """More columns than the panel (1536) and the sums of x (4096) hold at once."""
    data = random_bytes(kind, 5, 8448, seed=3)
    x = torch.randn(num_tokens, 8448, generator=torch.Generator().manual_seed(1))
    out = poisoned(num_tokens, 5)
    backend.linear(x, view(data, kind, 8448), out)
    assert_close(out, x, reference(data, kind))
    before = torch.randn(num_tokens, 5)
    after = before.clone()
    backend.linear(x, view(data, kind, 8448), after, accumulate=True)
    torch.testing.assert_close(after, before + out, rtol=1e-5, atol=1e-5 * float(out.abs().max()))


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_strided_x_and_out_and_nothing_written_beside_out(backend: Backend, kind: GgmlType, num_tokens: int) -> None:
    data = random_bytes(kind, 11, 512, seed=4)
    wide_x = torch.randn(num_tokens, 700, generator=torch.Generator().manual_seed(2))
    wide_out = torch.full((num_tokens, 40), 7.0)
    x, out = wide_x[:, 100:612], wide_out[:, 20:31]
    out.fill_(float("nan"))
    backend.linear(x, view(data, kind, 512), out)
    assert_close(out, x, reference(data, kind))
    assert (wide_out[:, :20] == 7).all()
    assert (wide_out[:, 31:] == 7).all()


@pytest.mark.parametrize("num_tokens", [1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_shards_by_rows_join_and_shards_by_columns_sum_to_the_whole(
    backend: Backend, kind: GgmlType, num_tokens: int
) -> None:
    """P6.4: an uneven cut on block borders is as good as the whole."""
    data = random_bytes(kind, 21, 1280, seed=5)
    matrix, weights = view(data, kind, 1280), reference(data, kind)
    x = torch.randn(num_tokens, 1280, generator=torch.Generator().manual_seed(3))
    by_rows = poisoned(num_tokens, 21)
    for begin, end in ((0, 9), (9, 9), (9, 20), (20, 21)):
        backend.linear(x, matrix.rows(begin, end), by_rows[:, begin:end])
    assert_close(by_rows, x, weights)
    by_columns = torch.zeros(num_tokens, 21)
    for begin, end in ((0, 768), (768, 768), (768, 1280)):
        part = poisoned(num_tokens, 21)
        backend.linear(x[:, begin:end], matrix.columns(begin, end), part)
        assert_close(part, x[:, begin:end], weights[:, begin:end])
        by_columns += part
    assert_close(by_columns, x, weights)
    both = matrix.rows(3, 8).columns(256, 512)
    out = poisoned(5, 256)
    dequantize(both, out)
    assert torch.equal(out, weights[3:8, 256:512])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_take_rows_is_dequantise_then_look_up(backend: Backend, kind: GgmlType, dtype: torch.dtype) -> None:
    """P4.3."""
    data = random_bytes(kind, 50, 256, seed=6)
    ids = torch.tensor([[49, 1], [0, 2], [7, 3], [7, 4]], dtype=dtype)[:, 0]
    out = poisoned(4, 256)
    backend.embed(view(data, kind, 256), ids, out)
    assert torch.equal(out, reference(data, kind)[ids.long()])


@pytest.mark.parametrize("bad", [-1, 50, 2**31 - 1, -(2**31)])
def test_take_rows_refuses_ids_outside_before_it_writes(backend: Backend, bad: int) -> None:
    matrix = view(random_bytes(GgmlType.Q8_0, 50, 64, seed=6), GgmlType.Q8_0, 64)
    out = torch.full((3, 64), 7.0)
    with pytest.raises(IndexError, match=rf"id {bad} at position 2 .* \[0, 50\)"):
        backend.embed(matrix, torch.tensor([1, 2, bad]), out)
    assert (out == 7).all()
    with pytest.raises(IndexError, match=r"\[0, 10\)"):
        backend.embed(matrix.rows(0, 10), torch.tensor([0, 1, 10]), out)


def test_columns_within_a_block_and_ranges_outside_are_refused() -> None:
    matrix = view(random_bytes(GgmlType.Q4_K, 4, 768, seed=7), GgmlType.Q4_K, 768)
    with pytest.raises(ValueError, match=r"\[0, 384\) cut a Q4_K block.*256"):
        matrix.columns(0, 384)
    with pytest.raises(ValueError, match=r"columns \[256, 1024\) are not within.*\[0, 768\)"):
        matrix.columns(256, 1024)
    with pytest.raises(ValueError, match=r"rows \[3, 2\)"):
        matrix.rows(3, 2)
    with pytest.raises(ValueError, match=r"rows \[-1, 2\)"):
        matrix.rows(-1, 2)
    with pytest.raises(GgmlTypeError, match="100 elements"):
        Matrix.from_buffer(memoryview(bytes(1000)), 0, GgmlType.Q4_0, 1, 100)
    with pytest.raises(ValueError, match=r"bytes \[500, 1140\), but the buffer has 1000"):
        Matrix.from_buffer(memoryview(bytes(1000)), 500, GgmlType.Q4_1, 32, 32)
    with pytest.raises(ValueError, match="cannot lie 10 bytes apart"):
        Matrix(4096, GgmlType.Q4_0, 2, 32, 10, None)


def test_misfits_are_refused_with_both_sides(backend: Backend) -> None:
    matrix = Matrix.from_tensor(torch.zeros(8, 16))
    for x, out, said in (
        (torch.zeros(2, 15), torch.zeros(2, 8), r"x must be \[T, 16\].*15\]"),
        (torch.zeros(2, 16), torch.zeros(2, 9), r"out \[\w, 8\].*9\]"),
        (torch.zeros(2, 16), torch.zeros(3, 8), r"out.*3"),
    ):
        with pytest.raises(ValueError, match=said):
            backend.linear(x, matrix, out)
    with pytest.raises(ValueError, match=r"out must be \[2, 16\]"):
        backend.embed(matrix, torch.zeros(2, dtype=torch.int64), torch.zeros(3, 16))


def test_what_c_cannot_read_is_refused_by_name() -> None:
    matrix, backend = Matrix.from_tensor(torch.zeros(8, 16)), CpuBackend()
    for x, said in (
        (torch.zeros(16, 2).T, "x must have inner stride 1"),
        (torch.zeros(16), "x must have 2 dimensions"),
        (torch.zeros(2, 16, dtype=torch.float16), "float16"),
        (torch.zeros(2, 16, device="meta"), "meta"),
    ):
        with pytest.raises(ValueError, match=said):
            backend.linear(x, matrix, torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"out must be \[8, 16\]"):
        dequantize(matrix, torch.zeros(16, 8))
    with pytest.raises(ValueError, match="int16"):
        backend.embed(matrix, torch.zeros(2, dtype=torch.int16), torch.zeros(2, 16))
    for bad in (torch.zeros(4, 4).T[:, :3], torch.zeros(4, 4, dtype=torch.int16), torch.zeros(4)):
        with pytest.raises(ValueError, match="inner stride 1"):
            Matrix.from_tensor(bad)


def test_empty_rows_columns_and_tokens(backend: Backend) -> None:
    matrix = view(random_bytes(GgmlType.Q4_1, 6, 64, seed=8), GgmlType.Q4_1, 64)
    out = poisoned(3, 6)
    backend.linear(torch.zeros(3, 0), matrix.columns(64, 64), out)
    assert (out == 0).all()
    backend.linear(torch.zeros(3, 0), matrix.columns(64, 64), out.fill_(2.0), accumulate=True)
    assert (out == 2).all()
    backend.linear(torch.zeros(3, 64), matrix.rows(6, 6), torch.zeros(3, 0))
    backend.linear(torch.zeros(0, 64), matrix, torch.zeros(0, 6))
    backend.embed(matrix, torch.zeros(0, dtype=torch.int64), torch.zeros(0, 64))


@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("wide", BACKENDS.values(), ids=BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_read_past_the_end_of_the_mapping(kind: GgmlType, wide: Backend, num_tokens: int) -> None:
    """The matrix ends on the last byte of a page and the page after it may not be read: one byte too far is a crash."""
    page = mmap.PAGESIZE
    num_columns = 256 if block_length(kind) > 1 else 250
    size = 3 * row_bytes(kind, num_columns)
    num_bytes = -(-size // page) * page
    mapping = mmap.mmap(-1, num_bytes + page)
    begin, _ = _native.buffer_address(mapping)
    libc = ctypes.CDLL(None, use_errno=True)
    data = random_bytes(kind, 3, num_columns, seed=9)
    mapping[num_bytes - size : num_bytes] = data.tobytes()
    no_access = 0
    assert libc.mprotect(ctypes.c_void_p(begin + num_bytes), ctypes.c_size_t(page), no_access) == 0
    matrix = Matrix.from_buffer(memoryview(mapping), num_bytes - size, kind, 3, num_columns)
    x, out = torch.randn(num_tokens, num_columns), poisoned(num_tokens, 3)
    wide.linear(x, matrix, out)
    assert_close(out, x, reference(data, kind))


def test_a_read_only_mapping_stays_open_while_a_view_lives() -> None:
    data = random_bytes(GgmlType.Q8_0, 4, 64, seed=10)
    mapping = mmap.mmap(-1, 4096)
    mapping[: data.nbytes] = data.tobytes()
    matrix = Matrix.from_buffer(memoryview(mapping).toreadonly(), 0, GgmlType.Q8_0, 4, 64).rows(1, 3)
    with pytest.raises(BufferError):
        mapping.close()
    out = poisoned(2, 64)
    dequantize(matrix, out)
    assert torch.equal(out, reference(data, GgmlType.Q8_0)[1:3])
    del matrix
    mapping.close()


def test_the_interpreter_lock_is_let_go_during_a_product(backend: Backend) -> None:
    """A second Python thread counts on while products run; held, the lock would keep it from counting at all."""
    matrix = Matrix.from_tensor(torch.zeros(4096, 2048))
    x, out = torch.zeros(64, 2048), torch.zeros(64, 4096)
    counts: list[int] = []
    started, ended = threading.Event(), threading.Event()

    def count() -> None:
        number = 0
        started.set()
        while not ended.is_set():
            number += 1
        counts.append(number)

    counter = threading.Thread(target=count)
    counter.start()
    started.wait()
    backend.linear(x, matrix, out)
    ended.set()
    counter.join()
    assert counts[0] > 1000


def test_the_answer_for_a_row_does_not_depend_on_what_the_other_rows_hold(backend: Backend) -> None:
    matrix = view(random_bytes(GgmlType.Q4_1, 9, 576, seed=11), GgmlType.Q4_1, 576)
    for num_tokens in (2, 3, 5, 8):
        x = torch.randn(num_tokens, 576)
        first, second = poisoned(num_tokens, 9), poisoned(num_tokens, 9)
        backend.linear(x, matrix, first)
        x[1:] = torch.randn(num_tokens - 1, 576)
        backend.linear(x, matrix, second)
        assert torch.equal(first[0], second[0])


@pytest.mark.parametrize("kind", [GgmlType.F32, GgmlType.Q8_0, GgmlType.Q4_K])
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_biases_and_pieces(backend: Backend, generator: torch.Generator, num_tokens: int, kind: GgmlType) -> None:
    """A weight in pieces, with a bias once for all of them, and what out had where products accumulate."""
    data = random_bytes(kind, 21, 768, seed=11)
    matrix, weights = view(data, kind, 768), reference(data, kind)
    x, bias = torch.randn(num_tokens, 768, generator=generator), torch.randn(21, generator=generator) * 50
    for weight in (matrix, in_pieces(matrix, [5, 6], [256, 512])):
        out = poisoned(num_tokens, 21)
        backend.linear(x, weight, out)
        assert_close(out, x, weights)
        added = poisoned(num_tokens, 21)
        backend.linear(x, weight, added, bias_N=bias)
        torch.testing.assert_close(added, out + bias, rtol=1e-6, atol=1e-5)
        backend.linear(x, weight, added, bias_N=bias, accumulate=True)
        torch.testing.assert_close(added, 2 * (out + bias), rtol=1e-5, atol=1e-5 * float(out.abs().max()) + 1e-5)
    for bad in (bias[:20], bias.double(), bias[:, None]):
        with pytest.raises(ValueError, match="bias of 21"):
            backend.linear(x, matrix, out, bias_N=bad)


@pytest.mark.parametrize("kind", KINDS)
def test_scaled_look_ups(backend: Backend, kind: GgmlType) -> None:
    data = random_bytes(kind, 9, 256, seed=12)
    ids, out = torch.tensor([8, 0, 3, 3], dtype=torch.int32), poisoned(4, 256)
    backend.embed(view(data, kind, 256), ids, out, 25.5)
    assert torch.equal(out, reference(data, kind)[ids.long()] * 25.5)


def test_products_that_a_device_would_round_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with pytest.raises(ValueError, match="TF32"):
        BACKENDS["reference"].linear(torch.zeros(2, 6), Matrix.from_tensor(torch.zeros(7, 6)), torch.zeros(2, 7))
