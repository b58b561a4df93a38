"""Images of two layouts in memory and on disk: each whole and known, wherever it is, or had back from the files."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from services.core.ids import LayoutKind
from services.worker.memory.images.chunks import chunk_checksums, host_checksum
from services.worker.memory.images.cold_image import ColdForm, ColdImage, OnPart
from services.worker.memory.images.image_pair import ImagePair
from services.worker.memory.images.images import ImageBrokenError, ImageError, ImageState, ImageStateError, WeightImage
from services.worker.memory.pages.backing import MissingMemoryError
from tests.support.memory_stand import PIECE, Device, checksum, random_bytes

PP, TP = LayoutKind.PP, LayoutKind.TP
CHUNK = 32 << 10
SIZES = {PP: 5 * CHUNK + 300, TP: 4 * CHUNK}
EXTENT = {PP: 3 * PIECE, TP: 2 * PIECE}
WAIT_S = 60.0


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
    """Two images, the files that they are loaded from, and the arena's copy."""

    def __init__(self, directory: Path | None, device: Device) -> None:
        self.device, self.gate = device, Gate()
        self.files = {kind: random_bytes(size, seed) for seed, (kind, size) in enumerate(SIZES.items())}
        self.num_loads = dict.fromkeys(SIZES, 0)
        self.forms = {kind: ColdForm(bytes(32), size, CHUNK, self.gate) for kind, size in SIZES.items()}
        self.images = {kind: self._image(kind, directory) for kind in SIZES}
        self.pair = ImagePair(self.images)
        self.taken: torch.Tensor | None = None

    def _image(self, kind: LayoutKind, directory: Path | None) -> WeightImage:
        cold = None if directory is None else ColdImage(directory / f"{kind.value}.cold", self.forms[kind])
        backing = self.device.range(kind.name, SIZES[kind])

        def load(flat: torch.Tensor) -> None:
            self.num_loads[kind] += 1
            flat.copy_(self.files[kind])

        return WeightImage(f"{kind.name} image", backing, SIZES[kind], load, self.gate, cold, CHUNK)

    def take(self, image: WeightImage) -> None:
        self.taken = image.flat.clone()

    def holds(self, kind: LayoutKind) -> bool:
        return torch.equal(self.images[kind].flat, self.files[kind])

    def close(self) -> None:
        self.gate.open.set()
        self.pair.close()


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Stand]:
    stand = Stand(tmp_path, Device(1 << 30))
    yield stand
    stand.close()


def spilled(stand: Stand, kind: LayoutKind) -> WeightImage:
    image = stand.images[kind]
    image.load()
    image.spill()
    assert image.state is ImageState.COLD, image.kept_reason
    return image


def corrupt(path: Path, place: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1]))


def path_of(stand: Stand, kind: LayoutKind) -> Path:
    cold = stand.images[kind]._cold
    assert cold is not None
    return cold.path


def test_the_checksum_is_that_of_what_moves() -> None:
    content = random_bytes(CHUNK + 5, 9)
    assert host_checksum(content.numpy().data) != host_checksum(content[1:].numpy().data)
    assert host_checksum(memoryview(b"")) == 0


def test_an_image_takes_memory_when_it_is_loaded_and_once(stand: Stand) -> None:
    before, image = stand.device.free(), stand.images[PP]
    stand.files[PP] = stand.files[PP][1:]
    with pytest.raises(RuntimeError, match="size of tensor"):
        image.load()
    assert stand.device.free() == before and image.state is ImageState.EMPTY
    stand.files[PP] = random_bytes(SIZES[PP], 0)
    image.load()
    assert before - stand.device.free() == EXTENT[PP] and stand.holds(PP)
    assert image.checksums == tuple(checksum(c.numpy().data) for c in stand.files[PP].split(CHUNK))
    with pytest.raises(ImageStateError, match="loaded once"):
        image.load()


def test_a_spilled_image_is_on_disk_and_not_in_memory(stand: Stand) -> None:
    before = stand.device.free()
    image = spilled(stand, TP)
    assert stand.device.free() == before
    image.promote()
    image.promote()
    assert before - stand.device.free() == EXTENT[TP] and stand.holds(TP) and image.is_right()
    assert stand.num_loads[TP] == 1 and image.lost_reason is None


def test_at_start_one_image_is_in_memory_at_a_time(stand: Stand) -> None:
    before = stand.device.free()
    stand.device.peak_bytes = 0
    stand.pair.load(PP, stand.take)
    assert stand.taken is not None and torch.equal(stand.taken, stand.files[PP])
    assert (stand.images[PP].state, stand.images[TP].state) == (ImageState.COLD, ImageState.READY)
    assert before - stand.device.free() == EXTENT[TP] and stand.device.peak_bytes <= max(EXTENT.values())


def test_after_a_flip_the_images_change_places(stand: Stand) -> None:
    stand.pair.load(PP, stand.take)
    stand.device.peak_bytes = 0
    for kind in (TP, PP, TP):
        assert stand.pair.obstacle(kind, WAIT_S) is None and stand.holds(kind)
        stand.pair.need_next(kind.other)
        assert stand.pair.obstacle(kind.other, WAIT_S) is None
        assert stand.images[kind].state is ImageState.COLD
    assert stand.device.peak_bytes <= max(EXTENT.values()), "one goes before the other comes"
    assert stand.num_loads == {PP: 1, TP: 1}


def test_without_a_directory_both_stay_in_memory() -> None:
    stand = Stand(None, Device(1 << 30))
    stand.pair.load(PP, stand.take)
    for kind in (TP, PP):
        stand.pair.need_next(kind)
        assert stand.pair.obstacle(kind, 0) is None and stand.holds(kind)
    with pytest.raises(ImageStateError, match="no directory for cold images"):
        stand.images[PP].spill()
    stand.close()


def test_a_promotion_that_is_not_finished_is_named_with_numbers_and_goes_on(stand: Stand) -> None:
    stand.pair.load(PP, stand.take)
    stand.gate.shut()
    stand.pair.need_next(PP)
    assert stand.gate.reached.wait(WAIT_S)
    refusal = stand.pair.obstacle(PP, 0.01)
    assert refusal is not None and f"of {SIZES[PP]} bytes" in refusal and "can be tried again" in refusal
    stand.pair.need_next(PP)
    stand.gate.open.set()
    assert stand.pair.obstacle(PP, WAIT_S) is None and stand.holds(PP)


@pytest.mark.parametrize("harm", ["torn", "corrupt", "absent", "another"])
def test_a_file_that_went_bad_costs_only_time(stand: Stand, harm: str) -> None:
    """The layout is loaded from the model's files again, and the file is written anew when it is next needed."""
    stand.pair.load(PP, stand.take)
    path = path_of(stand, PP)
    if harm == "torn":
        path.write_bytes(path.read_bytes()[: stand.forms[PP].image_offset + 5])
    elif harm == "corrupt":
        corrupt(path, stand.forms[PP].image_offset + CHUNK)
    elif harm == "absent":
        path.unlink()
    else:
        other = stand.files[PP].flip(0).clone()
        stand.images[PP]._cold.write(other.numpy().data, chunk_checksums(other, checksum, CHUNK))  # type: ignore[union-attr]
    stand.pair.need_next(PP)
    assert stand.pair.obstacle(PP, WAIT_S) is None and stand.holds(PP)
    assert stand.num_loads[PP] == 2 and stand.images[PP].lost_reason is not None
    stand.pair.need_next(TP)
    assert stand.pair.obstacle(TP, WAIT_S) is None
    stand.pair.need_next(PP)
    assert stand.pair.obstacle(PP, WAIT_S) is None and stand.holds(PP)
    assert stand.num_loads[PP] == 2, "the second time the file was right"


def test_files_of_the_model_that_changed_are_not_taken(stand: Stand) -> None:
    stand.pair.load(PP, stand.take)
    path_of(stand, PP).unlink()
    stand.files[PP] = stand.files[PP].flip(0).clone()
    stand.pair.need_next(PP)
    refusal = stand.pair.obstacle(PP, WAIT_S)
    assert refusal is not None and "PP image is BROKEN" in refusal and "other bytes than at start" in refusal
    with pytest.raises(ImageBrokenError, match="other bytes than at start"):
        stand.pair.had(PP)
    stand.files[PP] = random_bytes(SIZES[PP], 0)
    assert stand.pair.had(PP).is_right(), "put back, they are"


def test_what_changed_in_memory_is_loaded_again(stand: Stand) -> None:
    image = stand.images[TP]
    image.load()
    image.flat[5] ^= 1
    assert not image.is_right()
    image.discard("a test")
    assert image.state is ImageState.BROKEN and stand.device.free() == 1 << 30
    image.promote()
    assert image.is_right() and image.lost_reason == "a test"


def test_a_full_disk_keeps_the_image_in_memory_and_says_so(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.worker.memory.images.cold_image._free_bytes", lambda directory: 1000)
    stand.pair.load(PP, stand.take)
    image = stand.images[PP]
    assert image.state is ImageState.READY
    assert image.kept_reason is not None and "1000 are free on its disk: the image stays in memory" in image.kept_reason
    for kind in (TP, PP):
        stand.pair.need_next(kind)
        assert stand.pair.obstacle(kind, WAIT_S) is None and stand.holds(kind)
    monkeypatch.undo()
    stand.pair.need_next(TP)
    assert stand.pair.obstacle(TP, WAIT_S) is None
    assert image.state is ImageState.COLD and image.kept_reason is None, "with room again it goes"


def test_a_disk_that_lies_keeps_the_image_in_memory(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was written is read back before the memory goes."""
    image, write = stand.images[TP], ColdImage.write

    def written_wrongly(cold: ColdImage, content: memoryview, sums: tuple[int, ...], on_part: OnPart) -> None:
        write(cold, content, sums, on_part)
        corrupt(cold.path, cold.form.image_offset + 3)

    monkeypatch.setattr(ColdImage, "write", written_wrongly)
    image.load()
    image.spill()
    assert image.state is ImageState.READY and stand.holds(TP)
    assert image.kept_reason is not None and "not read back as it was written" in image.kept_reason


def test_without_memory_a_cold_image_stays_cold(stand: Stand) -> None:
    stand.pair.load(PP, stand.take)
    stand.device.others_bytes = stand.device.free() + EXTENT[TP] - EXTENT[PP] + 1
    stand.pair.need_next(PP)
    refusal = stand.pair.obstacle(PP, WAIT_S)
    assert refusal is not None and f"PP: {EXTENT[PP]} bytes are to be backed" in refusal
    with pytest.raises(MissingMemoryError):
        stand.pair.had(PP)
    stand.device.others_bytes = 0
    assert stand.pair.had(PP).is_right()


def test_weights_are_written_once(tmp_path: Path) -> None:
    """Neither a second spill nor another start writes a file that has the bytes; it is read before it is believed."""
    first = Stand(tmp_path, Device(1 << 30))
    image = spilled(first, TP)
    written_ns = path_of(first, TP).stat().st_mtime_ns
    image.promote()
    image.spill()
    first.close()
    second = Stand(tmp_path, Device(1 << 30))
    spilled(second, TP)
    assert path_of(second, TP).stat().st_mtime_ns == written_ns
    corrupt(path_of(second, TP), second.forms[TP].image_offset)
    harmed_ns = path_of(second, TP).stat().st_mtime_ns
    second.close()
    third = Stand(tmp_path, Device(1 << 30))
    spilled(third, TP)
    assert path_of(third, TP).stat().st_mtime_ns > harmed_ns, "one that has not is written again"
    third.close()


def test_closing_stops_what_is_on_its_way(tmp_path: Path) -> None:
    stand = Stand(tmp_path, Device(1 << 30))
    stand.pair.load(PP, stand.take)
    stand.gate.shut()
    stand.pair.need_next(PP)
    assert stand.gate.reached.wait(WAIT_S)
    with pytest.raises(ImageError, match="has not ended"), pytest.MonkeyPatch.context() as patched:
        patched.setattr("services.worker.memory.images.image_pair.READ_FIXED_S", 0.01)
        stand.pair.had(PP)
    stand.close()
    assert not any(backing.backed_bytes for backing in stand.device.backings)
    ColdImage(tmp_path / "pp.cold", stand.forms[PP]).close()
