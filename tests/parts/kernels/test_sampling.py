"""Sampling against sorted float64 references and exact distributions, on both instruction paths."""

import math

import kernels._native as _native
import pytest
import torch
from torch import Tensor

from kernels.cpu import sampling

FILTERS = [(0, 1.0, 0.0), (7, 1.0, 0.0), (0, 0.9, 0.0), (0, 1.0, 0.2), (20, 0.8, 0.02), (1, 0.5, 0.5), (900, 0.99, 0.0)]


def _draw(
    logits: Tensor,
    temperature: float,
    filters: tuple[int, float, float] = (0, 1.0, 0.0),
    *,
    seeds: Tensor | None = None,
    positions: Tensor | None = None,
    num_valid: int | None = None,
) -> tuple[Tensor, Tensor]:
    rows = len(logits)
    ids, finite = torch.full((rows,), 777_777, dtype=torch.int32), torch.zeros(rows, dtype=torch.bool)
    sampling.sample(
        logits,
        torch.full((rows,), temperature),
        torch.full((rows,), filters[0], dtype=torch.int32),
        torch.full((rows,), filters[1]),
        torch.full((rows,), filters[2]),
        torch.arange(rows) if seeds is None else seeds,
        torch.zeros(rows, dtype=torch.int64) if positions is None else positions,
        ids,
        finite,
        num_valid=num_valid,
    )
    return ids, finite


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_its_published_answers(counter: tuple[int, ...], key: tuple[int, ...], words: object) -> None:
    assert _native.philox_block(*counter, *key) == words


def test_reference_uniform_is_the_first_two_words() -> None:
    assert sampling.uniform_reference(0, 0) == ((0x6627E8D5 << 32 | 0xE169C58D) >> 11) * 2.0**-53


@pytest.mark.usefixtures("each_native_path")
@pytest.mark.parametrize("num_ids", [1, 7, 8, 33, 1000, 5003])
def test_greedy_takes_the_lowest_of_equal_logits(generator: torch.Generator, num_ids: int) -> None:
    logits = torch.randint(-3, 3, (20, num_ids), generator=generator).float() / 7
    ids, finite = _draw(logits, 0.0)
    assert finite.all()
    assert ids.tolist() == [row.tolist().index(max(row.tolist())) for row in logits]


@pytest.mark.usefixtures("each_native_path")
@pytest.mark.parametrize("filters", FILTERS)
def test_distribution_is_exact(filters: tuple[int, float, float]) -> None:
    """Chi-square over 40,000 positions of one seed, against probabilities by sorting: beyond 5 deviations fails."""
    logits = torch.randn(37, generator=torch.Generator().manual_seed(3)) * 2
    num = 40_000
    seeds = torch.full((num,), 1234567890123456789)
    ids, _ = _draw(logits.expand(num, -1), 0.8, filters, seeds=seeds, positions=torch.arange(num))
    counts = torch.bincount(ids, minlength=37).double()
    expected = sampling.kept_reference(logits, 0.8, *filters) * num
    assert counts[expected == 0].sum() == 0
    likely = expected >= 5
    statistic = ((counts - expected).square() / expected)[likely].sum().item()
    freedom = int(likely.sum()) - 1
    assert statistic <= freedom + 5 * math.sqrt(2 * max(freedom, 1))


@pytest.mark.usefixtures("each_native_path")
@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize("ties", [False, True])
def test_draws_match_the_sorting_reference(
    generator: torch.Generator, filters: tuple[int, float, float], ties: bool
) -> None:
    logits = torch.randn(24, 2051, generator=generator) * 3
    if ties:
        logits = logits.round()
    seeds = torch.randint(-(2**63), 2**63 - 1, (24,), generator=generator)
    positions = torch.randint(2**40, (24,), generator=generator)
    ids, finite = _draw(logits, 1.3, filters, seeds=seeds, positions=positions)
    assert finite.all()
    for row in range(24):
        seed, position = int(seeds[row]) % 2**64, int(positions[row])
        want = sampling.sample_reference(logits[row], 1.3, *filters, seed, position)
        got = int(ids[row])
        if got != want:  # only where u lies within rounding of the border of two ids, or a prefix ends within it
            running = sampling.kept_reference(logits[row], 1.3, *filters).cumsum(0)
            gap = abs(running[min(want or 0, got)].item() - sampling.uniform_reference(seed, position))
            assert gap < 3e-6, f"row {row}: id {got}, reference {want}"


@pytest.mark.usefixtures("each_native_path")
@pytest.mark.parametrize("filters", [(5, 1.0, 0.0), (0, 0.5, 0.0), (0, 1.0, 1.0), (3072, 2.0**-10, 0.0)])
def test_ties_at_the_border_keep_the_lowest_ids(filters: tuple[int, float, float]) -> None:
    logits = torch.zeros(400, 4096)
    ids, _ = _draw(logits, 1.0, filters)
    kept = {5: 5, 3072: 3}.get(filters[0], 2048 if filters[1] == 0.5 else 4096)
    assert ids.max() < kept
    assert len(set(ids.tolist())) > min(kept, 400) // 2


@pytest.mark.usefixtures("each_native_path")
def test_draws_depend_on_seed_and_position_only(generator: torch.Generator) -> None:
    logits = torch.randn(1, 500, generator=generator).expand(64, -1)
    seeds, positions = torch.arange(64) // 8, torch.arange(64) % 8
    ids, _ = _draw(logits, 1.0, seeds=seeds, positions=positions)
    order = torch.randperm(64, generator=generator)
    again, _ = _draw(logits[order], 1.0, seeds=seeds[order], positions=positions[order])
    assert torch.equal(again, ids[order])
    alone = [
        _draw(logits[:1], 1.0, seeds=seeds[i : i + 1], positions=positions[i : i + 1])[0].item() for i in range(64)
    ]
    assert alone == ids.tolist()
    assert len(set(ids.tolist())) > 20


@pytest.mark.parametrize("filters", FILTERS)
def test_paths_draw_the_same_ids_to_the_bit(generator: torch.Generator, filters: tuple[int, float, float]) -> None:
    if not _native.has_avx2():
        pytest.skip("one path only on this machine")
    logits = torch.randn(300, 1801, generator=generator) * 2
    drawn = []
    for portable in (False, True):
        _native.force_portable(portable)
        try:
            tops, logprobs = torch.empty(300, 5, dtype=torch.int32), torch.empty(300, 5)
            sampling.top_logprobs(logits, 5, tops, logprobs)
            drawn.append((_draw(logits, 0.9, filters)[0], tops, logprobs))
        finally:
            _native.force_portable(False)
    assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))


@pytest.mark.usefixtures("each_native_path")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", FILTERS)
def test_p4_15_a_row_that_is_not_finite_is_flagged_alone(
    generator: torch.Generator, temperature: float, filters: tuple[int, float, float]
) -> None:
    clean = torch.randn(6, 101, generator=generator)
    logits = clean.clone()
    logits[1, 100] = math.nan
    logits[2, 0] = math.inf
    logits[3] = -math.inf
    logits[4, 5:] = -math.inf  # masked, not broken
    ids, finite = _draw(logits, temperature, filters)
    assert finite.tolist() == [True, False, False, False, True, True]
    assert ids[1:4].tolist() == [0, 0, 0]
    assert ids[4] < 5
    want, _ = _draw(clean, temperature, filters)
    assert (ids[0], ids[5]) == (want[0], want[5])


@pytest.mark.usefixtures("each_native_path")
@pytest.mark.parametrize("poison", [1e9, math.nan, math.inf])
def test_p6_9_padded_columns_do_not_exist(generator: torch.Generator, poison: float) -> None:
    padded = torch.randn(50, 128, generator=generator)
    padded[:, 101:] = poison
    cut = padded[:, :101].clone()
    for filters in FILTERS:
        ids, finite = _draw(padded, 1.0, filters, num_valid=101)
        assert finite.all()
        assert torch.equal(ids, _draw(cut, 1.0, filters)[0])
    tops, logprobs = torch.zeros(50, 3, dtype=torch.int32), torch.zeros(50, 3)
    sampling.top_logprobs(padded, 3, tops, logprobs, num_valid=101)
    assert torch.allclose(logprobs, cut.log_softmax(1).topk(3).values, atol=2e-6)
    with pytest.raises(ValueError, match="id 101 outside"):
        sampling.log_softmax_at(padded, torch.full((50, 1), 101, dtype=torch.int32), torch.empty(50, 1), num_valid=101)


@pytest.mark.usefixtures("each_native_path")
@pytest.mark.parametrize("temperature", [1e-5, 1e-3, 1e4, 3e38])
def test_extreme_temperatures_and_logits(temperature: float) -> None:
    logits = torch.tensor([[-3e38, 0.0, 3e38, -math.inf, 1.0]]).expand(200, -1)
    for filters in FILTERS:
        ids, finite = _draw(logits, temperature, filters)
        assert finite.all()
        assert 3 not in ids
        if temperature < 1e30:
            assert (ids == 2).all()


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", -1.0), ("temperature", math.nan), ("top_p", 0.0), ("top_p", 1.5), ("min_p", -0.1)],
)
def test_parameters_out_of_range_are_refused(name: str, value: float) -> None:
    given = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, name: value}
    with pytest.raises(ValueError, match="row 0"):
        _draw(torch.zeros(1, 4), given["temperature"], (0, given["top_p"], given["min_p"]))


@pytest.mark.usefixtures("each_native_path")
@pytest.mark.parametrize("num_ids", [5, 64, 4999])
def test_logprobs(generator: torch.Generator, num_ids: int) -> None:
    logits = torch.randn(9, num_ids + 1, generator=generator)[:, 1:] * 5
    logits[0, 1:] = -math.inf
    want = logits.double().log_softmax(1)
    ids = torch.randint(num_ids, (9, 4), generator=generator, dtype=torch.int32)
    out = torch.full((9, 4), math.nan)
    sampling.log_softmax_at(logits, ids, out)
    assert torch.allclose(out.double(), want.gather(1, ids.long()), rtol=1e-6, atol=2e-6)
    num_top = min(20, num_ids)
    tops, logprobs = torch.full((9, num_top), 9, dtype=torch.int32), torch.full((9, num_top), math.nan)
    sampling.top_logprobs(logits, num_top, tops, logprobs)
    assert torch.allclose(logprobs.double(), want.topk(num_top).values, rtol=1e-6, atol=2e-6)
    assert tops[1:].tolist() == logits[1:].topk(num_top).indices.tolist()
    assert tops[0].tolist() == [0] * num_top


def test_logprobs_of_a_broken_row_are_nan() -> None:
    logits = torch.zeros(2, 10)
    logits[1, 3] = math.nan
    out, tops, logprobs = torch.zeros(2, 1), torch.ones(2, 2, dtype=torch.int32), torch.zeros(2, 2)
    sampling.log_softmax_at(logits, torch.zeros(2, 1, dtype=torch.int32), out)
    sampling.top_logprobs(logits, 2, tops, logprobs)
    assert out.isnan().tolist() == [[False], [True]]
    assert logprobs.isnan().tolist() == [[False, False], [True, True]]
    assert tops.tolist() == [[0, 1], [0, 0]]


@pytest.mark.parametrize("num_top", [-1, 11, 300])
def test_too_many_top_logprobs_are_refused(num_top: int) -> None:
    width = max(num_top, 0)
    with pytest.raises(ValueError, match=r"num_top|outputs"):
        sampling.top_logprobs(
            torch.zeros(1, 10), num_top, torch.zeros(1, width, dtype=torch.int32), torch.zeros(1, width)
        )


def test_penalties(generator: torch.Generator) -> None:
    logits = torch.randn(3, 300, generator=generator)
    kept = logits.clone()
    history = torch.randint(300, (500,), generator=generator, dtype=torch.int32)
    want = sampling.penalize_reference(logits[1], history.tolist(), presence=0.4, frequency=0.3, repetition=1.2)
    sampling.penalize(logits, 1, history, presence=0.4, frequency=0.3, repetition=1.2)
    assert torch.allclose(logits[1].double(), want, atol=1e-5)
    assert torch.equal(logits[[0, 2]], kept[[0, 2]])
    sampling.penalize(logits, 0, history)
    sampling.penalize(logits, 2, history[:0], presence=2.0)
    assert torch.equal(logits[[0, 2]], kept[[0, 2]])


def test_bias_adds_where_told_and_refuses_whole(generator: torch.Generator) -> None:
    logits = torch.randn(3, 40, generator=generator)
    want = logits.clone()
    rows, ids = torch.tensor([0, 2, 2], dtype=torch.int32), torch.tensor([5, 39, 39], dtype=torch.int32)
    sampling.add_sparse(logits, rows, ids, torch.tensor([1.0, -math.inf, 2.0]))
    want[0, 5] += 1
    want[2, 39] = -math.inf
    assert torch.equal(logits, want)
    for bad_rows, bad_ids, said in ((rows, ids + 1, "id 40"), (rows + 1, ids, "row 3"), (rows, ids - 6, "id -1")):
        with pytest.raises(ValueError, match=said):
            sampling.add_sparse(logits, bad_rows, bad_ids, torch.ones(3))
    with pytest.raises(ValueError, match="id 40"):
        sampling.penalize(logits, 0, torch.tensor([1, 40], dtype=torch.int32), presence=1.0)
    assert torch.equal(logits, want)
