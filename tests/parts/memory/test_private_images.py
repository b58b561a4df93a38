"""Mode `image` in a real group: what is wrong in an image, in the arena or on disk is found, and has a way back."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from services.core.ids import FlipId, LayoutKind
from services.core.step import AbandonEntry, FlipEntry
from services.models.model_files import ModelFiles, open_model
from services.worker.memory.images.cold_image import ColdImage, OnPart
from services.worker.memory.images.images import ImageState, WeightImage
from services.worker.memory.rank_memory import NotWholeError
from services.worker.memory.weights.image_weights import ImageWeights
from services.worker.participation import Worked, WorkLost
from tests.parts.memory.test_private_flips import check_weights, owned
from tests.parts.worker.test_runner import PROMPT, check_greedy
from tests.support.memory_stand import small_disk
from tests.support.private_group import flip, runs
from tests.support.rank_threads import DEADLINE_S, Group, group_of
from tests.support.tiny_llama import TinyLlama, TinyShape, write_gguf

PP, TP = LayoutKind.PP, LayoutKind.TP
NUM_BLOCKS = 24
Tiny = tuple[ModelFiles, TinyLlama]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    model = write_gguf(path, TinyShape(num_layers=4), gguf.GGMLQuantizationType.Q8_0)
    return open_model(path), model


def weights_of(group: Group, rank: int) -> ImageWeights:
    weights = group.ranks[rank].runner.parts.memory._weights
    assert isinstance(weights, ImageWeights)
    return weights


def image_of(group: Group, rank: int, kind: LayoutKind) -> WeightImage:
    return weights_of(group, rank).images[kind]


def started(group: Group) -> None:
    group.log.reset(PP, NUM_BLOCKS, 8, 256)
    group.log.prefill({0: PROMPT}, 16)


def restored_then_committed(group: Group, tiny: Tiny, reason: str) -> None:
    """Every rank is back in PP after the one attempt, and the next one leads to TP."""
    answers = flip(group, TP, owned(group)).answers
    assert all(isinstance(answer, WorkLost) and answer.restored for answer in answers), answers
    assert any(isinstance(answer, WorkLost) and reason in answer.reason for answer in answers), answers
    check_weights(group, PP, tiny)
    group.log.decode([0], 5)
    assert all(isinstance(answer, Worked) for answer in flip(group, TP, owned(group)).answers)
    check_weights(group, TP, tiny)
    group.log.decode([0], 5)
    check_greedy(tiny[1], group.log.requests[0], 40, 11)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_one_changed_byte_of_an_image_takes_all_back(tiny: Tiny, num_ranks: int) -> None:
    """The image is loaded from the model's files again, so that the next flip finds it right."""
    with group_of(tiny[0], num_ranks, mode="image") as group:
        started(group)
        image = image_of(group, 1, TP)
        image.flat[image.num_bytes // 2] ^= 1
        restored_then_committed(group, tiny, "image of tp, rank 1: chunk 0 of 1 in the arena is not what was loaded")
        assert image.lost_reason is not None and "the image itself has changed" in image.lost_reason


def test_one_changed_byte_of_the_arena_takes_all_back(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed between the copy and its check: where the bytes lie now is what is looked at."""
    with group_of(tiny[0], 2, mode="image") as group:
        started(group)
        weights = weights_of(group, 0)
        honest = weights._wrong_chunk

        def changed(into: torch.Tensor, image: WeightImage) -> str | None:
            monkeypatch.setattr(weights, "_wrong_chunk", honest)
            into[77] ^= 1
            return honest(into, image)

        monkeypatch.setattr(weights, "_wrong_chunk", changed)
        restored_then_committed(group, tiny, "chunk 0 of 1 in the arena")
        assert image_of(group, 0, TP).lost_reason is None, "the image was right"


def test_the_image_of_the_layout_in_force_may_be_cold_and_still_restores(tiny: Tiny, tmp_path: Path) -> None:
    with group_of(tiny[0], 2, mode="image", keeps={"cold_directory": tmp_path}) as group:
        started(group)
        assert [image_of(group, rank, PP).state for rank in (0, 1)] == [ImageState.COLD] * 2
        image_of(group, 0, TP).flat[9] ^= 1
        restored_then_committed(group, tiny, "image of tp, rank 0")


def test_both_images_wrong_and_the_files_right(tiny: Tiny) -> None:
    with group_of(tiny[0], 2, mode="image") as group:
        started(group)
        for kind in LayoutKind:
            image_of(group, 0, kind).flat[9] ^= 1
        restored_then_committed(group, tiny, "image of tp, rank 0")


def test_files_that_changed_are_no_way_back(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    with group_of(tiny[0], 2, mode="image") as group:
        started(group)
        weights = weights_of(group, 0)
        image = image_of(group, 0, PP)
        image.flat[9] ^= 1
        load = image._load

        def other(flat: torch.Tensor) -> None:
            load(flat)
            flat[11] ^= 1

        monkeypatch.setattr(image, "_load", other)
        weights.active = None
        with pytest.raises(NotWholeError, match=r"weights of pp cannot be had back: .*other bytes than at start"):
            group.ranks[0].runner.parts.memory.settle(PP)
        assert weights.active is None


def test_abandoned_after_the_arena_was_filled(tiny: Tiny, tmp_path: Path) -> None:
    """The mover may give up what every rank has verified: the layout before is had back without a peer."""
    with group_of(tiny[0], 2, mode="image", keeps={"cold_directory": tmp_path}) as group:
        started(group)
        group.log.write(FlipEntry(FlipId(9), TP, owned(group)))
        group.log.answers()
        at_work = [rank.thread.submit(rank.runner.work, FlipId(9)) for rank in group.ranks]
        assert all(isinstance(future.result(timeout=DEADLINE_S), Worked) for future in at_work)
        check_weights(group, TP, tiny)
        group.log.write(AbandonEntry(FlipId(9), "a test"))
        group.log.answers()
        check_weights(group, PP, tiny)
        group.log.decode([0], 5)
        assert all(isinstance(answer, Worked) for answer in flip(group, TP, owned(group)).answers)
        group.log.decode([0], 3)
        check_greedy(tiny[1], group.log.requests[0], 40, 9)


def to_and_fro(group: Group, tiny: Tiny, harm: Callable[[], None] = lambda: None) -> None:
    """`harm` is done while TP is in force and PP's image on its way or there."""
    started(group)
    for kind in (TP, PP, TP):
        flipped = flip(group, kind, owned(group))
        assert all(parked.fits for parked in flipped.parked), flipped.parked
        assert all(isinstance(answer, Worked) for answer in flipped.answers), flipped.answers
        check_weights(group, kind, tiny)
        group.log.decode([0], 4)
    check_greedy(tiny[1], group.log.requests[0], 40, 13)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_answers_with_one_image_in_memory_at_a_time(tiny: Tiny, num_ranks: int, tmp_path: Path) -> None:
    with group_of(tiny[0], num_ranks, mode="image", keeps={"cold_directory": tmp_path}) as group:
        to_and_fro(group, tiny)
        assert image_of(group, 0, PP).lost_reason is None
    for rank in range(num_ranks):
        assert all((tmp_path / f"worker-{rank}-{kind.value}.image").exists() for kind in LayoutKind)


def test_a_torn_file_costs_only_time(tiny: Tiny, tmp_path: Path) -> None:
    with group_of(tiny[0], 2, mode="image", keeps={"cold_directory": tmp_path}) as group:
        path = tmp_path / "worker-1-pp.image"
        path.write_bytes(path.read_bytes()[:5000])
        to_and_fro(group, tiny)
        reason = image_of(group, 1, PP).lost_reason
        assert reason is not None and "worker-1-pp.image: 5000 bytes" in reason
        assert image_of(group, 0, PP).lost_reason is None


def test_a_promotion_that_is_unfinished_refuses_the_flip_and_goes_on(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waited for within a bound; the verdict has the numbers, nobody enters, and the next attempt finds the image."""
    gate, read = threading.Event(), ColdImage.read_into

    def slow(cold: ColdImage, image: memoryview, on_part: OnPart) -> tuple[int, ...]:
        assert "worker-1" not in cold.path.name or gate.wait(DEADLINE_S)
        return read(cold, image, on_part)

    monkeypatch.setattr(ColdImage, "read_into", slow)
    with group_of(tiny[0], 2, mode="image", keeps={"cold_directory": tmp_path}) as group:
        started(group)
        try:
            flip(group, TP, owned(group))
            refused = flip(group, PP, owned(group))
            assert [parked.fits for parked in refused.parked].count(False) == 1
            [refusal] = [parked.refusal for parked in refused.parked if not parked.fits]
            assert "image of pp, rank 1 is not in memory after" in refusal and "tried again" in refusal
            assert all(isinstance(answer, WorkLost) and answer.restored for answer in refused.answers)
            check_weights(group, TP, tiny)
            group.log.decode([0], 4)
        finally:
            gate.set()
        assert all(isinstance(answer, Worked) for answer in flip(group, PP, owned(group)).answers)
        group.log.decode([0], 4)
        check_greedy(tiny[1], group.log.requests[0], 40, 9)


def test_a_full_disk_leaves_images_in_memory_and_flips_go_on(tiny: Tiny, tmp_path: Path) -> None:
    with small_disk(tmp_path):
        (tmp_path / "filler").write_bytes(bytes(960 << 10))
        with group_of(tiny[0], 2, mode="image", keeps={"cold_directory": tmp_path}) as group:
            to_and_fro(group, tiny)
            image = image_of(group, 0, PP)
            assert image.state is ImageState.READY and image.kept_reason is not None
            assert "free space or name another directory" in image.kept_reason
        assert not list(tmp_path.glob("*.image"))


def test_a_second_start_reads_what_the_first_one_wrote(tiny: Tiny, tmp_path: Path) -> None:
    times: list[list[Any]] = []
    for _ in range(2):
        with group_of(tiny[0], 2, mode="image", keeps={"cold_directory": tmp_path}) as group:
            started(group)
            assert all(isinstance(answer, Worked) for answer in flip(group, TP, runs()).answers)
        times.append(sorted((path.name, path.stat().st_mtime_ns) for path in tmp_path.glob("*.image")))
    assert len(times[0]) == 4 and times[0] == times[1]
