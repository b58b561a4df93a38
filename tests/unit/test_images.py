"""Images of two layouts in memory and on disk, and an arena that is refilled from them."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from services.core.ids import LayoutKind
from services.worker.backing import MissingMemoryError
from services.worker.chunks import chunk_checksums
from services.worker.cold_image import ColdForm, ColdImage, OnPart
from services.worker.images import (
    ImageBrokenError,
    ImageBusyError,
    ImageNotFilledError,
    ImageState,
    PromotionUnfinishedError,
    WeightImage,
)
from services.worker.refill import ImageRefill, ImagesLostError, Refilled, Restored
from tests.unit.memory_stand import PIECE, Device, checksum, random_bytes

PP, TP = LayoutKind.PP, LayoutKind.TP
CHUNK = 32 << 10
SIZES = {PP: 5 * CHUNK + 300, TP: 4 * CHUNK}
BYTES = {kind: random_bytes(size, seed) for seed, (kind, size) in enumerate(SIZES.items())}
EXTENT = {PP: 3 * PIECE, TP: 2 * PIECE}
WAIT_S = 60.0


def writer_of(content: torch.Tensor) -> Callable[[torch.Tensor], None]:
    def write(flat: torch.Tensor) -> None:
        flat.copy_(content)

    return write


class Gate:
    """A checksum that can be held up, in whichever thread adds up."""

    def __init__(self) -> None:
        self.open, self.reached = threading.Event(), threading.Event()
        self.open.set()

    def __call__(self, view: memoryview) -> int:
        self.reached.set()
        assert self.open.wait(WAIT_S)
        return checksum(view)

    def shut(self) -> None:
        self.reached.clear()
        self.open.clear()


class Stand:
    def __init__(self, directory: Path, device: Device) -> None:
        self.device, self.gate = device, Gate()
        self.forms = {kind: ColdForm(bytes(32), size, CHUNK, self.gate) for kind, size in SIZES.items()}
        self.images = {
            kind: WeightImage(
                f"{kind.name} image",
                device.range(kind.name, size),
                size,
                self.gate,
                ColdImage(directory / f"{kind.value}.cold", self.forms[kind]),
                CHUNK,
            )
            for kind, size in SIZES.items()
        }
        arena = device.range("arena", max(SIZES.values()))
        arena.back(0, arena.num_bytes)
        self.arena = arena.flat
        self.refill = ImageRefill(self.arena, self.images, PP, self.gate)

    def fill(self) -> None:
        for kind, image in self.images.items():
            image.fill(writer_of(BYTES[kind]))
        self.arena[: SIZES[PP]].copy_(BYTES[PP])

    def holds(self, kind: LayoutKind) -> bool:
        return torch.equal(self.arena[: SIZES[kind]], BYTES[kind])


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path, Device(1 << 30))
    stand.fill()
    yield stand
    stand.gate.open.set()
    for image in stand.images.values():
        image.close()


def spilled(stand: Stand, kind: LayoutKind) -> WeightImage:
    image = stand.images[kind]
    image.spill()
    assert image.settle(WAIT_S)
    assert image.state is ImageState.COLD, image.kept_reason
    return image


def corrupt(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def test_a_refill_is_copied_verified_and_goes_both_ways(stand: Stand) -> None:
    address = stand.arena.data_ptr()
    for to in (TP, PP, TP):
        outcome = stand.refill.refill(to, 0, 0)
        assert isinstance(outcome, Refilled) and (outcome.layout, outcome.num_bytes) == (to, SIZES[to])
        assert stand.refill.active is to and stand.holds(to)
    assert stand.arena.data_ptr() == address
    with pytest.raises(ImageNotFilledError, match="holds TP already"):
        stand.refill.refill(TP, 0, 0)


def test_images_take_memory_when_they_are_filled_and_once(tmp_path: Path) -> None:
    stand = Stand(tmp_path, Device(1 << 30))
    before = stand.device.free()
    assert stand.refill.obstacle(TP) == "PP image is EMPTY: load the PP layout again"
    with pytest.raises(ImageNotFilledError, match="TP image is EMPTY"):
        stand.refill.refill(TP, 0, 0)

    def broken(flat: torch.Tensor) -> None:
        raise RuntimeError("the file is cut short")

    with pytest.raises(RuntimeError, match="cut short"):
        stand.images[PP].fill(broken)
    assert stand.device.free() == before and stand.images[PP].state is ImageState.EMPTY
    stand.fill()
    assert before - stand.device.free() == sum(EXTENT.values())
    assert stand.images[PP].checksums == tuple(checksum(c.numpy().data) for c in BYTES[PP].split(CHUNK))
    assert stand.refill.obstacle(TP) is None
    with pytest.raises(ImageNotFilledError, match="filled once"):
        stand.images[PP].fill(writer_of(BYTES[PP]))


def test_a_wrong_byte_in_the_wanted_image_leaves_the_active_layout(stand: Stand) -> None:
    """RESTORED: the arena was overwritten by then."""
    stand.images[TP].flat[2 * CHUNK + 5] ^= 1
    outcome = stand.refill.refill(TP, 0, 0)
    assert isinstance(outcome, Restored)
    assert (outcome.layout, outcome.wanted, outcome.chunk, outcome.is_image_bad) == (PP, TP, 2, True)
    assert "TP image: chunk 2 of 4" in outcome.reason and "load the layout again" in outcome.reason
    assert stand.refill.active is PP and stand.holds(PP)


def test_a_wrong_copy_of_a_right_image_leaves_the_active_layout(stand: Stand) -> None:
    """The device's own checksum differs although the image has not changed."""
    calls = 0

    def once_wrong(view: memoryview) -> int:
        nonlocal calls
        calls += 1
        return checksum(view) ^ (calls == 3)

    refill = ImageRefill(stand.arena, stand.images, PP, once_wrong)
    outcome = refill.refill(TP, 0, 0)
    assert isinstance(outcome, Restored) and (outcome.chunk, outcome.is_image_bad) == (2, False)
    assert refill.active is PP and stand.holds(PP)
    assert isinstance(refill.refill(TP, 0, 0), Refilled)


def test_where_both_images_are_bad_the_generation_ends(stand: Stand) -> None:
    stand.images[TP].flat[0] ^= 1
    stand.images[PP].flat[SIZES[PP] - 1] ^= 1
    with pytest.raises(ImagesLostError, match="PP image: chunk 5 is not what was loaded either"):
        stand.refill.refill(TP, 0, 0)


def test_a_spilled_image_is_on_disk_and_not_in_memory(stand: Stand) -> None:
    before = stand.device.free()
    image = spilled(stand, TP)
    assert stand.device.free() - before == EXTENT[TP]
    assert stand.refill.obstacle(TP) == "TP image is COLD: promote it and wait before a flip to TP"
    assert stand.refill.obstacle(PP) is None
    image.promote()
    image.promote()
    assert image.settle(WAIT_S) and image.state is ImageState.READY
    assert stand.device.free() == before and torch.equal(image.flat, BYTES[TP])
    assert isinstance(stand.refill.refill(TP, 0, 0), Refilled) and stand.holds(TP)


def test_a_cold_image_is_waited_for(stand: Stand) -> None:
    spilled(stand, TP)
    assert isinstance(stand.refill.refill(TP, WAIT_S, 0), Refilled)
    assert stand.holds(TP)


def test_a_promotion_that_is_not_finished_is_named_and_goes_on(stand: Stand) -> None:
    image = spilled(stand, TP)
    stand.gate.shut()
    image.promote()
    assert stand.gate.reached.wait(WAIT_S)
    assert stand.refill.obstacle(TP) == "TP image is PROMOTING: promote it and wait before a flip to TP"
    with pytest.raises(
        PromotionUnfinishedError, match=f"TP image: .* of {SIZES[TP]} bytes .* abandon this flip"
    ) as error:
        stand.refill.refill(TP, 0.01, 0)
    assert error.value.done_bytes < error.value.num_bytes == SIZES[TP]
    assert stand.holds(PP) and stand.refill.active is PP
    stand.gate.open.set()
    assert isinstance(stand.refill.refill(TP, WAIT_S, 0), Refilled)


def test_a_spill_stops_where_its_image_is_needed_after_all(stand: Stand) -> None:
    """The spill is held in its read-back; the flip back comes."""
    image = stand.images[TP]
    stand.gate.shut()
    image.spill()
    assert stand.gate.reached.wait(WAIT_S)
    assert image.state is ImageState.SPILLING
    assert stand.refill.obstacle(TP) is None, "its bytes are in memory"
    with pytest.raises(ImageBusyError, match=r"has not stopped within 0.01 s"):
        stand.refill.refill(TP, 0.01, 0)
    assert stand.holds(PP)
    stand.gate.open.set()
    assert isinstance(stand.refill.refill(TP, WAIT_S, 0), Refilled)
    assert image.state is ImageState.READY and image.kept_reason == "needed again before it was written"


def test_the_active_image_may_be_cold_and_still_restores(stand: Stand) -> None:
    spilled(stand, PP)
    stand.images[TP].flat[9] ^= 1
    outcome = stand.refill.refill(TP, 0, WAIT_S)
    assert isinstance(outcome, Restored) and stand.holds(PP)


def test_a_restore_that_would_take_too_long_ends_the_generation(stand: Stand) -> None:
    image = spilled(stand, PP)
    corrupt(image._cold.path, stand.forms[PP].image_offset)
    stand.images[TP].flat[9] ^= 1
    with pytest.raises(ImagesLostError, match=r"PP cannot be had back: .*chunk 0 of 6"):
        stand.refill.refill(TP, 0, WAIT_S)


def test_a_file_that_went_bad_is_refused_and_the_layout_can_be_loaded_again(stand: Stand) -> None:
    before = stand.device.free()
    image = spilled(stand, TP)
    corrupt(image._cold.path, stand.forms[TP].image_offset + CHUNK)
    with pytest.raises(ImageBrokenError, match=r"TP image cannot be read back: .*chunk 1 of 4"):
        stand.refill.refill(TP, WAIT_S, 0)
    assert stand.holds(PP) and stand.device.free() - before == EXTENT[TP]
    assert stand.refill.obstacle(TP) == "TP image is BROKEN: load the TP layout again"
    with pytest.raises(ImageNotFilledError, match="is BROKEN"):
        image.spill()
    with pytest.raises(ImageNotFilledError, match="is BROKEN"):
        image.promote()
    image.fill(writer_of(BYTES[TP]))
    spilled(stand, TP)
    assert isinstance(stand.refill.refill(TP, WAIT_S, 0), Refilled), "the bad file was not taken for the good one"


def test_a_full_disk_keeps_the_image_in_memory_and_says_so(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.cold_image._free_bytes", lambda directory: 1000)
    image = stand.images[TP]
    image.spill()
    assert image.settle(WAIT_S) and image.state is ImageState.READY
    assert image.kept_reason is not None and "1000 are free on its disk: the image stays in memory" in image.kept_reason
    assert isinstance(stand.refill.refill(TP, 0, 0), Refilled)


def test_a_disk_that_lies_keeps_the_image_in_memory(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is read back before the memory goes."""
    image, write = stand.images[TP], ColdImage.write

    def written_wrongly(cold: ColdImage, content: memoryview, sums: tuple[int, ...], on_part: OnPart) -> None:
        write(cold, content, sums, on_part)
        corrupt(cold.path, cold.form.image_offset + 3)

    monkeypatch.setattr(ColdImage, "write", written_wrongly)
    image.spill()
    assert image.settle(WAIT_S) and image.state is ImageState.READY
    assert image.kept_reason is not None and "not read back as it was written" in image.kept_reason
    assert isinstance(stand.refill.refill(TP, 0, 0), Refilled)


def test_a_whole_file_with_other_bytes_is_not_taken(stand: Stand) -> None:
    image = spilled(stand, TP)
    other = BYTES[TP].flip(0).clone()
    image._cold.write(other.numpy().data, chunk_checksums(other, checksum, CHUNK))
    with pytest.raises(ImageBrokenError, match="whole but not the one that was written"):
        stand.refill.refill(TP, WAIT_S, 0)
    assert stand.holds(PP)


def test_without_memory_a_cold_image_stays_cold(stand: Stand) -> None:
    image = spilled(stand, TP)
    stand.device.others_bytes = stand.device.free()
    with pytest.raises(MissingMemoryError, match=f"TP: {EXTENT[TP]} bytes"):
        stand.refill.refill(TP, 0, 0)
    assert image.state is ImageState.COLD and stand.holds(PP)
    stand.device.others_bytes = 0
    assert isinstance(stand.refill.refill(TP, WAIT_S, 0), Refilled)


def test_weights_are_written_once(tmp_path: Path) -> None:
    """Neither a second spill nor another start writes a file that has the bytes; it is read before it is believed."""
    first = Stand(tmp_path, Device(1 << 30))
    first.fill()
    path = spilled(first, TP)._cold.path
    written_ns = path.stat().st_mtime_ns
    first.images[TP].ready(WAIT_S)
    spilled(first, TP)
    for image in first.images.values():
        image.close()
    second = Stand(tmp_path, Device(1 << 30))
    second.fill()
    spilled(second, TP)
    assert path.stat().st_mtime_ns == written_ns
    second.images[TP].ready(WAIT_S)
    corrupt(path, second.forms[TP].image_offset)
    third_ns = path.stat().st_mtime_ns
    for image in second.images.values():
        image.close()
    third = Stand(tmp_path, Device(1 << 30))
    third.fill()
    spilled(third, TP)
    assert path.stat().st_mtime_ns > third_ns, "one that has not is written again"
    for image in third.images.values():
        image.close()


def test_an_image_that_is_closed_gives_its_memory_back(tmp_path: Path) -> None:
    stand = Stand(tmp_path, Device(1 << 30))
    stand.fill()
    backing = stand.images[TP]._backing
    stand.gate.shut()
    stand.images[TP].spill()
    assert stand.gate.reached.wait(WAIT_S)
    stand.gate.open.set()
    stand.images[TP].close()
    assert backing.backed_bytes == 0
    ColdImage(tmp_path / "tp.cold", stand.forms[TP]).close()


def test_an_image_without_a_directory_is_never_spilled() -> None:
    image = WeightImage("PP image", Device(1 << 30).range("PP", CHUNK), CHUNK, checksum)
    image.fill(writer_of(BYTES[PP][:CHUNK]))
    with pytest.raises(ImageNotFilledError, match="no directory for cold images"):
        image.spill()
