"""Pools that take turns with one memory, in real groups: rows keep their bits, and every fault has its way back."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from kernels.cpu.reshard import Planes, Runs
from services.core.ids import FlipId, LayoutKind
from services.core.layout import Span
from services.core.step import AbandonEntry, FlipEntry
from services.models.model_files import ModelFiles, open_model
from services.placement.demand import Deployment, Model, plan_memory
from services.placement.exchange_plan import PAGE_BYTES
from services.placement.ledger import MemoryMode, PoolBacking
from services.placement.staging import chunk_bytes
from services.worker.memory.owned_memory import OwnedMode
from services.worker.memory.pages.backing import Backing
from services.worker.memory.rank_memory import NotWholeError
from services.worker.memory.rows import batch_mover
from services.worker.memory.rows.exclusive_pools import ExclusivePools
from services.worker.memory.rows.exclusive_rows import ExclusiveRows
from services.worker.memory.wire import MoveBounds
from services.worker.participation import Worked, WorkLost
from tests.parts.memory.test_private_flips import CUTS, LIVE, NUM_BLOCKS, SHAPE, FaultyWire, check_weights, owned
from tests.parts.worker.test_runner import PROMPT, check_greedy
from tests.support.memory_stand import shared_memory_bytes
from tests.support.private_group import check_live, fill, flip, pools_of, rows_of, runs, whole_cache
from tests.support.rank_threads import DEADLINE_S, Group, group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP
Tiny = tuple[ModelFiles, TinyLlama]
BLOCK_BYTES = SHAPE.num_layers * SHAPE.num_kv_heads * 2 * 16 * SHAPE.head_dim * 4
BATCH_BYTES = 10 * BLOCK_BYTES
"""Of a rank with all heads or all layers: five live blocks a batch; of one with half of them, ten."""
EXCLUSIVE = {"backing": PoolBacking.EXCLUSIVE, "batch_bytes": BATCH_BYTES}
MODES: tuple[OwnedMode, ...] = ("dual", "exchange", "image")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model = write_gguf(path, SHAPE, gguf.GGMLQuantizationType.Q8_0)
    return open_model(path), model


def exclusive_rows(group: Group, rank: int) -> ExclusiveRows:
    rows = rows_of(group, rank)
    assert isinstance(rows, ExclusiveRows)
    return rows


def memory_of(group: Group, rank: int) -> ExclusivePools:
    memory = exclusive_rows(group, rank)._memory
    assert memory is not None
    return memory


def check_memory(group: Group, kind: LayoutKind) -> None:
    """One layout's pools have pages, and no more than they need, by the system's account."""
    for rank in range(len(group.ranks)):
        memory, pool = memory_of(group, rank), rows_of(group, rank).pools[kind]
        assert len(memory.held[kind]) == NUM_BLOCKS and not len(memory.held[kind.other])
        assert 0 <= memory.held_bytes() - pool.num_bytes < memory.piece_bytes


def addresses(group: Group) -> list[int]:
    ranks = range(len(group.ranks))
    return [
        plane.data_ptr()
        for rank in ranks
        for pool in rows_of(group, rank).pools.values()
        for plane in pool.keys.values()
    ]


CASES = [("dual", cut, live) for cut in CUTS for live in LIVE] + [
    (mode, cut, live) for mode in MODES[1:] for cut in ("two uneven", "three uneven") for live in ("scattered", "all")
]


@pytest.mark.parametrize(("mode", "cut", "live"), CASES)
def test_to_tp_and_back_every_live_row_keeps_its_bits(tiny: Tiny, mode: OwnedMode, cut: str, live: str) -> None:
    num_ranks, pp_layers, tp_weights = CUTS[cut]
    cache = whole_cache(SHAPE.num_layers, NUM_BLOCKS, SHAPE.num_kv_heads, SHAPE.head_dim)
    shares: dict[str, Any] = {"pp_layers": pp_layers, "tp_weights": tp_weights}
    with group_of(tiny[0], num_ranks, **shares, mode=mode, keeps=EXCLUSIVE) as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        before = addresses(group)
        check_memory(group, PP)
        for pool in pools_of(group, PP):
            assert not any(plane.any() for plane in pool.keys.values()), "freshly backed"
            fill(pool, cache)
        for target in (TP, PP):
            flipped = flip(group, target, LIVE[live])
            assert all(isinstance(answer, Worked) for answer in flipped.answers), flipped.answers
            assert len({parked.plan_hash for parked in flipped.parked}) == 1
            check_memory(group, target)
            for pool in pools_of(group, target):
                check_live(pool, cache, LIVE[live])
            check_weights(group, target, tiny)
        assert addresses(group) == before


@pytest.mark.parametrize("live", LIVE)
@pytest.mark.parametrize("kv_tokens", [(1, 3), (2, 3, 1), (1, 1, 1, 5)])
def test_rows_by_tokens_keep_their_bits_as_well(tiny: Tiny, kv_tokens: tuple[int, ...], live: str) -> None:
    cache = whole_cache(SHAPE.num_layers, NUM_BLOCKS, SHAPE.num_kv_heads, SHAPE.head_dim)
    with group_of(tiny[0], len(kv_tokens), kv_tokens=kv_tokens, mode="dual", keeps=EXCLUSIVE) as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        for pool in pools_of(group, PP):
            fill(pool, cache)
        for target in (TP, PP):
            answers = flip(group, target, LIVE[live]).answers
            assert all(isinstance(answer, Worked) for answer in answers), answers
            check_memory(group, target)
            for pool in pools_of(group, target):
                check_live(pool, cache, LIVE[live])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", ["one rank", "two uneven", "four, more than heads"])
def test_answers_across_flips_are_the_references(tiny: Tiny, cut: str, mode: OwnedMode) -> None:
    num_ranks, pp_layers, tp_weights = CUTS[cut]
    shares: dict[str, Any] = {"pp_layers": pp_layers, "tp_weights": tp_weights}
    with group_of(tiny[0], num_ranks, **shares, mode=mode, keeps=EXCLUSIVE) as group:
        started(group)
        for target in (TP, PP, TP):
            committed(group, target)
            group.log.decode([0], 6)
        check_greedy(tiny[1], group.log.requests[0], 160, 19)


def started(group: Group, kind: LayoutKind = PP) -> None:
    group.log.reset(kind, NUM_BLOCKS, 8, 256)
    group.log.prefill({0: PROMPT * 4}, 64)


def committed(group: Group, target: LayoutKind) -> None:
    answers = flip(group, target, owned(group)).answers
    assert all(isinstance(answer, Worked) for answer in answers), answers


def restored(answers: Sequence[Worked | WorkLost]) -> list[str]:
    """Reasons of a group of which every rank has the layout before."""
    assert all(isinstance(answer, WorkLost) and answer.restored for answer in answers), answers
    return [answer.reason for answer in answers if isinstance(answer, WorkLost)]


def serves_on(group: Group, tiny: Tiny, before: LayoutKind) -> None:
    """After a flip that was restored: the rows are there, one layout has memory, and the next flip leads on."""
    check_memory(group, before)
    check_weights(group, before, tiny)
    group.log.decode([0], 6)
    committed(group, before.other)
    group.log.decode([0], 6)
    check_greedy(tiny[1], group.log.requests[0], 160, 13)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("at_message", [1, 5])
@pytest.mark.parametrize("victim", [0, 1])
def test_one_changed_byte_on_its_way_takes_all_batches_back(
    tiny: Tiny, victim: int, at_message: int, mode: OwnedMode
) -> None:
    """In the first batch or in a later one, when those before it have gone."""
    keeps = EXCLUSIVE | {"batch_bytes": 2 * BLOCK_BYTES}
    with group_of(tiny[0], 2, mode=mode, keeps=keeps) as group:
        started(group, TP)
        FaultyWire(exclusive_rows(group, victim)._wire._carrier, at_message)
        reasons = restored(flip(group, PP, owned(group)).answers)
        assert all(f"to rank {victim} are not what was sent" in reason for reason in reasons)
        serves_on(group, tiny, TP)


class FaultyScatter:
    """Writes one wrong byte to a pool, at one of all ranks' calls."""

    def __init__(self, at_call: int) -> None:
        self._scatter, self._left = batch_mover.scatter, at_call

    def __call__(self, planes: Planes, heads: Span, parts: Runs, staging: Tensor) -> None:
        self._scatter(planes, heads, parts, staging)
        self._left -= 1
        if self._left == 0:
            block = int(parts.begin_length[0, 0])
            planes.tensors[0][block, heads.begin].view(torch.int32)[3, 3] ^= 1


@pytest.mark.parametrize("at_call", [1, 12])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_wrong_byte_in_a_pool_is_found_where_it_lies(
    tiny: Tiny, num_ranks: int, at_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with group_of(tiny[0], num_ranks, mode="dual", keeps=EXCLUSIVE | {"batch_bytes": 2 * BLOCK_BYTES}) as group:
        started(group)
        with monkeypatch.context() as patched:
            patched.setattr(batch_mover, "scatter", FaultyScatter(at_call))
            reasons = restored(flip(group, TP, owned(group)).answers)
        assert any("rows in the tp pool of rank" in reason for reason in reasons), reasons
        serves_on(group, tiny, PP)


@pytest.mark.parametrize("is_first", [True, False])
def test_memory_that_is_gone_at_the_seam_leads_back(
    tiny: Tiny, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    """Others have taken what was free when the group entered: pages cannot be had on one rank."""
    with group_of(tiny[0], 2, mode="exchange", keeps=EXCLUSIVE | {"batch_bytes": 2 * BLOCK_BYTES}) as group:
        started(group)
        memory = memory_of(group, 0)
        lack = Lack(monkeypatch, memory._backings[TP], lambda: is_first or len(memory.held[TP]) > 0)
        reasons = restored(flip(group, TP, owned(group)).answers)
        assert lack.is_over and any("are to be backed" in reason for reason in reasons)
        serves_on(group, tiny, PP)


class Lack:
    """The system has no memory for one call, as soon as it is time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, backing: Backing, is_time: Callable[[], bool]) -> None:
        self._provide, self._is_time, self.is_over = backing._pages.provide, is_time, False
        monkeypatch.setattr(backing._pages, "provide", self)

    def __call__(self, begin: int, end: int) -> None:
        if not self.is_over and self._is_time():
            self.is_over = True
            raise OSError(12, "no memory")
        self._provide(begin, end)


def test_where_neither_pool_is_to_be_had_the_generation_ends(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(tiny[0], 2, mode="dual", keeps=EXCLUSIVE) as group:
        started(group)
        for backing in memory_of(group, 1)._backings.values():
            Lack(monkeypatch, backing, lambda: True)
        answers = flip_without_outcome(group)
        assert all(isinstance(answer, WorkLost) and not answer.restored for answer in answers), answers
        reasons = [answer.reason for answer in answers if isinstance(answer, WorkLost)]
        assert "on the way back: rank 1: rows that were kept cannot be written back" in reasons[1]
        assert "on the way back: ranks [1] have failed" in reasons[0]


def flip_without_outcome(group: Group) -> list[Worked | WorkLost]:
    group.log.write(FlipEntry(FlipId(9), TP, owned(group)))
    group.log.answers()
    at_work = [rank.thread.submit(rank.runner.work, FlipId(9)) for rank in group.ranks]
    return [future.result(timeout=DEADLINE_S) for future in at_work]


class Free:
    """Free memory as a test says; hears how much this process has in at each look."""

    def __init__(self) -> None:
        self.num_bytes, self.peak_bytes = 1 << 40, 0

    def __call__(self) -> int:
        self.peak_bytes = max(self.peak_bytes, shared_memory_bytes())
        return self.num_bytes


def test_without_room_at_the_seam_nobody_enters(tiny: Tiny) -> None:
    free = Free()
    bounds = {"free_bytes": free, "margin_bytes": 1 << 20}
    with group_of(tiny[0], 2, mode="dual", keeps=EXCLUSIVE | bounds) as group:
        started(group)
        free.num_bytes = 1 << 20
        flipped = flip(group, TP, owned(group))
        assert all(
            not parked.fits and "1048576 to stay free, 1048576 are free" in parked.refusal for parked in flipped.parked
        )
        restored(flipped.answers)
        free.num_bytes = 1 << 40
        serves_on(group, tiny, PP)


@pytest.mark.parametrize("mode", MODES)
def test_abandoned_after_every_row_has_gone(tiny: Tiny, mode: OwnedMode) -> None:
    """No attempt that ends well leaves that, so nobody goes to meet the others for it: the generation ends."""
    with group_of(tiny[0], 3, mode=mode, keeps=EXCLUSIVE) as group:
        started(group)
        assert all(isinstance(answer, Worked) for answer in flip_without_outcome(group))
        check_memory(group, TP)
        group.log.write(AbandonEntry(FlipId(9), "a test"))
        for rank in group.ranks:
            with pytest.raises(NotWholeError, match=r"pp is in force, and of 24 blocks .*'tp': \(0, 24\)"):
                rank.answer()


@pytest.mark.parametrize("mode", ["exchange", "image"])
def test_rows_come_back_where_weights_are_wrong(tiny: Tiny, mode: OwnedMode, monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(tiny[0], 2, mode=mode, keeps=EXCLUSIVE) as group:
        started(group)
        memory: Any = group.ranks[1].runner.parts.memory
        if mode == "image":
            memory._weights.images[TP].flat[99] ^= 1
        else:
            pieces, honest = [next(iter(memory._weights._maps[TP]))], memory._weights.wrong
            monkeypatch.setattr(memory._weights, "wrong", lambda kind: pieces if kind is TP else honest(kind))
        restored(flip(group, TP, owned(group)).answers)
        monkeypatch.undo()
        serves_on(group, tiny, PP)


def test_a_peer_that_never_comes_ends_the_generation_by_name(tiny: Tiny) -> None:
    with group_of(tiny[0], 2, deadline_s=0.5, mode="dual", keeps=EXCLUSIVE) as group:
        started(group)
        [answer] = flip(group, TP, owned(group), working=[0]).answers
        assert isinstance(answer, WorkLost) and not answer.restored and "rank 1" in answer.reason


@pytest.mark.parametrize("call", ["send", "all_gather_columns"])
def test_an_error_within_a_batch_releases_the_partner(tiny: Tiny, call: str) -> None:
    with group_of(tiny[0], 2, mode="dual", keeps=EXCLUSIVE) as group:
        started(group)
        carrier: Any = exclusive_rows(group, 1)._wire._carrier
        honest, calls = getattr(carrier, call), iter(range(1, 1000))

        def fail(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == 4:
                raise MemoryError("no memory for the message")
            return honest(*args, **kwargs)

        setattr(carrier, call, fail)
        answers = flip_without_outcome(group)
        assert all(isinstance(answer, WorkLost) and not answer.restored for answer in answers), answers


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("backing", list(PoolBacking))
def test_staging_is_what_the_ledger_prices(tiny: Tiny, mode: OwnedMode, backing: PoolBacking) -> None:
    files = tiny[0]
    asked = Deployment(2, 512, 64, mode=MemoryMode(mode), backing=backing)
    priced = plan_memory(asked, Model(files.geometry, files.tensors, 0))
    message_bytes = asked.max_batch_rows * files.geometry.hidden_size * 4
    keeps = {"backing": backing, "bounds": MoveBounds(chunk_bytes(message_bytes)), "page_bytes": PAGE_BYTES}
    with group_of(files, 2, mode=mode, keeps=keeps) as group:
        group.log.reset(PP, NUM_BLOCKS, 8, 256)
        for rank in (0, 1):
            rows, mover = rows_of(group, rank), rows_of(group, rank)._mover
            if isinstance(rows, ExclusiveRows):
                taken = rows._mover._staging.rows.numel() + rows._mover._staging.message.numel()  # type: ignore[union-attr]
            else:
                taken = mover._outgoing.numel() + mover._incoming.numel()  # type: ignore[union-attr]
            memory: Any = group.ranks[rank].runner.parts.memory
            if mode == "exchange":
                taken += memory._weights._arena._staging.num_bytes
            [term] = [term.num_bytes for term in priced.ranks[rank].terms if term.name == "flip staging"]
            assert taken == term


@pytest.fixture
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelFiles]:
    """Weights and pools large enough to be told apart from what else a process has."""
    path = tmp_path_factory.mktemp("model") / "wide.gguf"
    shape = TinyShape(num_layers=4, num_heads=16, num_kv_heads=8, hidden_size=256, head_dim=32, ffn_size=1024)
    write_gguf(path, shape, gguf.GGMLQuantizationType.F16)
    yield open_model(path)


@pytest.mark.parametrize("mode", ["exchange", "image"])
def test_the_boot_peak_is_the_larger_layout_and_not_the_sum(wide: ModelFiles, mode: OwnedMode, tmp_path: Any) -> None:
    """By the system's account of this process's shared memory, which weights, images and pools are made of."""
    free, begin = Free(), shared_memory_bytes()
    num_blocks = 512
    keeps = {
        "backing": PoolBacking.EXCLUSIVE,
        "free_bytes": free,
        "cold_directory": tmp_path if mode == "image" else None,
    }
    with group_of(wide, 2, pp_layers=(1, 3), mode=mode, keeps=keeps) as group:
        loaded = shared_memory_bytes()
        group.log.reset(PP, num_blocks, 8, 256)
        touched = 0
        for rank in (0, 1):
            pool = rows_of(group, rank).pools[PP]
            touched += pool.num_bytes
            for plane in (*pool.keys.values(), *pool.values.values()):
                plane.fill_(1)
        free()
        weights = sum(rank.runner.parts.memory.weights_bytes for rank in group.ranks)
        larger = [max(pool.num_bytes for pool in rows_of(group, rank).pools.values()) for rank in (0, 1)]
        both = sum(pool.num_bytes for rank in (0, 1) for pool in rows_of(group, rank).pools.values())
        assert sum(larger) < 0.8 * both
        assert free.peak_bytes - begin < weights * (2 if mode == "image" else 1) + sum(larger) + (20 << 20)
        assert loaded - begin > 0.5 * weights
        before = shared_memory_bytes()
        flip(group, TP, runs())
        assert before - shared_memory_bytes() > 0.8 * touched, "what the pool before held is returned"
