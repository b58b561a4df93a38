"""A rank's weights of one layout in host memory or on disk: always either whole and known, or refused.

An image holds exactly the bytes that the arena holds under that layout, with a checksum for each chunk beside them, so
a refill is one copy and its check needs no second copy. The image that is not needed next may lie on disk instead: it
is written once (weights do not change), its memory released, and read back later. What is lost is loaded again from the
model's files, and must have the checksums it had at start. Never decides which image is needed next (image_pair), and
never touches the arena.

Invariants: memory is released only after the file is whole, named and read back right; an image that could not be
written stays in memory and says why; what fails its checks is never partly right: it is loaded again, or `BROKEN`. Used
by one thread at a time.
"""

from collections.abc import Callable
from enum import Enum

from torch import Tensor

from services.worker.memory.images.background import CancelledError
from services.worker.memory.images.chunks import CHUNK_BYTES, Checksum, chunk_checksums, first_difference, host_bytes
from services.worker.memory.images.cold_image import ColdImage, ColdImageError, OnPart
from services.worker.memory.pages.backing import Backing, whole_pieces


class ImageState(Enum):
    """Where an image's bytes are."""

    EMPTY = "empty"
    """Nowhere yet."""
    READY = "ready"
    """In memory."""
    COLD = "cold"
    """On disk only."""
    BROKEN = "broken"
    """Nowhere: to be loaded again."""


class ImageError(RuntimeError):
    """Base: an image that cannot serve now; the message says why and what would help."""


class ImageStateError(ImageError):
    """What was asked leads nowhere from the image's state."""


class ImageBrokenError(ImageError):
    """Neither the file that had the image nor the model's files have what was loaded at start."""


def unheard(done_bytes: int) -> None:
    """Where nobody wants to know how far the work is."""


class WeightImage:
    """One layout's image of `num_bytes`; `cold`: where it may be spilled, None: nowhere."""

    def __init__(
        self,
        name: str,
        backing: Backing,
        num_bytes: int,
        load: Callable[[Tensor], None],
        checksum: Checksum,
        cold: ColdImage | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Holds no memory until it is loaded. `load` writes the layout's bytes from the model's files.

        `cold` must have the same size, chunks and checksum function.
        """
        assert num_bytes <= backing.num_bytes, "an image lies within its range"
        assert cold is None or (cold.form.num_bytes, cold.form.chunk_bytes) == (num_bytes, chunk_bytes), "one form"
        self.name, self.num_bytes, self.chunk_bytes = name, num_bytes, chunk_bytes
        self.checksums: tuple[int, ...] = ()
        """Of each chunk, from the first `load` on, wherever the bytes are."""
        self.kept_reason: str | None = None
        """Why the last spill left the image in memory; None: it did not."""
        self.lost_reason: str | None = None
        """Why the bytes had to be loaded from the model's files again; None: they never had."""
        self.state = ImageState.EMPTY
        self._backing, self._load, self._checksum, self._cold = backing, load, checksum, cold
        self._extent = whole_pieces(num_bytes, backing.piece_bytes)
        self._has_file = False
        """Whether the file has these very bytes."""

    @property
    def can_be_cold(self) -> bool:
        """Whether there is a place on disk for it."""
        return self._cold is not None

    @property
    def flat(self) -> Tensor:
        """[num_bytes] uint8 of host memory; only to be touched while `state` is READY."""
        return self._backing.flat[: self.num_bytes]

    def load(self) -> None:
        """Takes the bytes from the model's files: at first, or again where they are lost.

        Raises:
            ImageStateError: they are not lost.
            ImageBrokenError: the files have others than at first.
            MissingMemoryError: there is no memory for it.
        """
        if self.state not in (ImageState.EMPTY, ImageState.BROKEN):
            raise ImageStateError(f"{self.name} is {self.state.name} and loaded once: weights do not change")
        self._backing.back(0, self._extent)
        try:
            self._load(self.flat)
            found = chunk_checksums(self.flat, self._checksum, self.chunk_bytes)
            if self.checksums and found != self.checksums:
                raise ImageBrokenError(
                    f"{self.name}: the model's files have other bytes than at start: restore them, or start again"
                )
        except BaseException:
            self._backing.release(0, self._extent)
            raise
        self.checksums = found
        self.state = ImageState.READY

    def discard(self, reason: str) -> None:
        """What is in memory is not what was loaded: gives it up."""
        self.lost_reason = reason
        self._let_go(ImageState.BROKEN)

    def store(self, on_part: OnPart = unheard) -> bool:
        """Sees to it that the file has these bytes, the image staying in memory; whether it has, else `kept_reason`.

        Raises:
            ImageStateError: it is not in memory, or has no place on disk.
            CancelledError: `on_part` said so.
        """
        if self._cold is None or self.state is not ImageState.READY:
            where = "has no directory for cold images" if self._cold is None else f"is {self.state.name}, not READY"
            raise ImageStateError(f"{self.name} {where}: it cannot be spilled")
        self.kept_reason = None
        try:
            if not self._has_file and not self._is_on_disk(self._cold, on_part):
                self._cold.write(host_bytes(self.flat), self.checksums, on_part)
                if not self._is_on_disk(self._cold, on_part):
                    raise ImageError(f"{self._cold.path}: not read back as it was written: replace the disk")
            self._has_file = True
        except (ColdImageError, ImageError) as error:
            self.kept_reason = str(error)
        return self._has_file

    def spill(self, on_part: OnPart = unheard) -> None:
        """Moves the image to disk; if that fails it stays in memory, with `kept_reason`. Raises as `store`."""
        if self.store(on_part):
            self._let_go(ImageState.COLD)

    def promote(self, on_part: OnPart = unheard) -> None:
        """Sees to it that the image is in memory: from its file, or where that fails a check from the model's files.

        Raises:
            MissingMemoryError: there is no memory for it; it stays where it is.
            ImageBrokenError: it cannot be had.
            CancelledError: `on_part` said so; it stays where it is.
        """
        if self.state is ImageState.COLD:
            self._backing.back(0, self._extent)
            self._read(on_part)
        if self.state in (ImageState.EMPTY, ImageState.BROKEN):
            self.load()

    def is_right(self) -> bool:
        """Whether what is in memory is what was loaded."""
        return first_difference(self.flat, self.checksums, self._checksum, self.chunk_bytes) is None

    def close(self) -> None:
        """Returns the memory; a file stays for the next start."""
        self._backing.close()
        if self._cold is not None:
            self._cold.close()

    def _read(self, on_part: OnPart) -> None:
        assert self._cold is not None, "an image without a file is never cold"
        try:
            found = self._cold.read_into(host_bytes(self.flat), on_part)
            if found != self.checksums:
                raise ColdImageError(f"{self._cold.path}: whole, but not the image that was written")
        except ColdImageError as error:
            self._has_file = False
            self.discard(str(error))
        except CancelledError:
            self._let_go(ImageState.COLD)
            raise
        else:
            self.state = ImageState.READY

    def _is_on_disk(self, cold: ColdImage, on_part: OnPart) -> bool:
        """Whether the file has these very bytes, of this or of an earlier start: all of it is read."""
        try:
            return cold.read_head() == self.checksums == cold.verify(on_part)
        except ColdImageError:
            return False

    def _let_go(self, state: ImageState) -> None:
        """What has its bytes elsewhere, or nowhere, holds no memory."""
        self.state = state
        self._backing.release(0, self._extent)
