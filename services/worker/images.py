"""A rank's weights of one layout in host memory or on disk: filled once, always either whole and known or refused.

An image holds exactly the bytes that the arena holds under that layout, with a checksum for each chunk beside them, so
a refill is one copy and its check needs no second copy. The image that is not needed next may lie on disk instead: it
is written once (weights do not change), its memory released, and read back in the background. Never decides which image
is needed next, and never touches the arena: see refill.

Invariants: memory is released only after the file is whole, named and read back right; an image that could not be
written stays in memory and says why; a file that fails its checks makes the image `BROKEN`, never a partly right one.
`fill`, `spill`, `promote` and `ready` are called by one thread; the work in between goes on in at most one other.
"""

import threading
import time
from collections.abc import Callable
from enum import Enum

from torch import Tensor

from services.worker.background import CANCEL_WAIT_S, Background, CancelledError
from services.worker.backing import Backing, whole_pieces
from services.worker.chunks import CHUNK_BYTES, Checksum, chunk_checksums, first_difference, host_bytes
from services.worker.cold_image import ColdImage, ColdImageError


class ImageState(Enum):
    """Where an image's bytes are."""

    EMPTY = "empty"
    """Nowhere yet."""
    READY = "ready"
    """In memory."""
    SPILLING = "spilling"
    """In memory, on their way to disk as well."""
    COLD = "cold"
    """On disk only."""
    PROMOTING = "promoting"
    """On disk, on their way to memory."""
    BROKEN = "broken"
    """Nowhere: the file failed its checks. To be filled anew."""


class ImageError(RuntimeError):
    """Base: an image that cannot serve now; the message says why and what would help."""


class ImageNotFilledError(ImageError):
    """The image is in a state from which what was asked leads nowhere."""


class PromotionUnfinishedError(ImageError):
    """The image is not back from disk by the deadline; the flip is to be abandoned and may be tried again."""

    def __init__(self, name: str, done_bytes: int, num_bytes: int, deadline_s: float) -> None:
        super().__init__(
            f"{name}: {done_bytes} of {num_bytes} bytes are back from disk after {deadline_s:g} s: abandon this flip "
            "and try again, promote earlier, or raise the deadline"
        )
        self.done_bytes, self.num_bytes = done_bytes, num_bytes


class ImageBusyError(ImageError):
    """A spill that is to stop is still within one write: the flip is to be abandoned and may be tried again."""


class ImageBrokenError(ImageError):
    """The file that had the image failed a check: the layout must be loaded again before a flip to it."""


class WeightImage:
    """One layout's image of `num_bytes`; `cold`: where it may be spilled, None: nowhere."""

    def __init__(
        self,
        name: str,
        backing: Backing,
        num_bytes: int,
        checksum: Checksum,
        cold: ColdImage | None = None,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        """Holds no memory until it is filled. `cold` must have the same size, chunks and checksum function."""
        assert num_bytes <= backing.num_bytes, "an image lies within its range"
        assert cold is None or (cold.form.num_bytes, cold.form.chunk_bytes) == (num_bytes, chunk_bytes), "one form"
        self.name, self.num_bytes, self.chunk_bytes = name, num_bytes, chunk_bytes
        self.checksums: tuple[int, ...] = ()
        """Of each chunk, from `fill` on, wherever the bytes are."""
        self.kept_reason: str | None = None
        """Why the last spill left the image in memory; None: it did not."""
        self._backing, self._checksum, self._cold = backing, checksum, cold
        self._extent = whole_pieces(num_bytes, backing.piece_bytes)
        self._state = ImageState.EMPTY
        self._lock = threading.Lock()
        """Of `_state` and of the release that goes with it."""
        self._work: Background | None = None
        self._has_file = False
        """Whether the file has these very bytes."""

    @property
    def state(self) -> ImageState:
        """Where the bytes are, now."""
        with self._lock:
            return self._state

    @property
    def cold_path(self) -> str:
        """Where it may be spilled, for messages."""
        return "no file" if self._cold is None else str(self._cold.path)

    @property
    def flat(self) -> Tensor:
        """[num_bytes] uint8; only to be touched while `state` is READY or SPILLING."""
        return self._backing.flat[: self.num_bytes]

    def fill(self, write: Callable[[Tensor], None]) -> None:
        """Lets `write` put the layout's bytes in place and adds them up; once, or again after BROKEN.

        Raises:
            ImageNotFilledError: it is filled already.
            MissingMemoryError: there is no memory for it.
        """
        if self.state not in (ImageState.EMPTY, ImageState.BROKEN):
            raise ImageNotFilledError(f"{self.name} is {self.state.name} and filled once: weights do not change")
        self._backing.back(0, self._extent)
        try:
            write(self.flat)
            self.checksums = chunk_checksums(self.flat, self._checksum, self.chunk_bytes)
        except BaseException:
            self._backing.release(0, self._extent)
            raise
        self._has_file = False
        self._enter(ImageState.READY)

    def spill(self) -> None:
        """Begins to move the image to disk; until that is done it is in memory, and if it fails it stays there.

        Raises:
            ImageNotFilledError: it is not in memory, or has no place on disk.
        """
        if self._cold is None or self.state is not ImageState.READY:
            where = "has no directory for cold images" if self._cold is None else f"is {self.state.name}, not READY"
            raise ImageNotFilledError(f"{self.name} {where}: it cannot be spilled")
        self.kept_reason = None
        self._enter(ImageState.SPILLING)
        self._work = Background(f"spill {self.name}", self._spill)

    def promote(self) -> None:
        """Begins to read the image back; does nothing where it is in memory or on its way.

        Raises:
            MissingMemoryError: there is no memory for it; it stays on disk.
            ImageNotFilledError: there are no bytes to read.
        """
        self._settle_cancelled(CANCEL_WAIT_S)
        state = self.state
        if state in (ImageState.READY, ImageState.PROMOTING):
            return
        if state is not ImageState.COLD:
            raise ImageNotFilledError(f"{self.name} is {state.name}: fill it before it is promoted")
        self._backing.back(0, self._extent)
        self._enter(ImageState.PROMOTING)
        self._work = Background(f"promote {self.name}", self._promote)

    def ready(self, deadline_s: float) -> None:
        """Returns with the image in memory: at once, or after the rest of its way from disk.

        Raises:
            PromotionUnfinishedError: not within the deadline; the reading goes on.
            ImageBrokenError: the file failed a check.
            MissingMemoryError, ImageNotFilledError: as `promote`.
        """
        end_s = time.monotonic() + deadline_s
        self._settle_cancelled(deadline_s)
        if self.state is ImageState.COLD:
            self.promote()
        work = self._work
        if self.state is ImageState.PROMOTING and work is not None and not work.wait(end_s - time.monotonic()):
            raise PromotionUnfinishedError(self.name, work.done_bytes, self.num_bytes, deadline_s)
        if self.state is ImageState.BROKEN:
            raise ImageBrokenError(f"{self.name} cannot be read back: {work.error if work else 'no file'}")
        if self.state is not ImageState.READY:
            raise ImageNotFilledError(f"{self.name} is {self.state.name}: fill it before a flip needs it")

    def first_bad_chunk(self) -> int | None:
        """The first chunk in memory that is not what was filled in, or None."""
        return first_difference(self.flat, self.checksums, self._checksum, self.chunk_bytes)

    def settle(self, deadline_s: float) -> bool:
        """Waits until nothing is on its way; whether that came in time."""
        return self._work is None or self._work.wait(deadline_s)

    def close(self) -> None:
        """Ends what is on its way and returns the memory; a file stays for the next start."""
        if self._work is not None:
            self._work.cancel()
            if not self._work.wait(CANCEL_WAIT_S):
                raise ImageError(f"{self.name}: a read or write of its disk has not ended in {CANCEL_WAIT_S} s")
        self._backing.close()
        if self._cold is not None:
            self._cold.close()

    def _settle_cancelled(self, deadline_s: float) -> None:
        """Stops a spill that is under way: its image is needed after all."""
        if self.state is ImageState.SPILLING and self._work is not None:
            self._work.cancel()
            if not self._work.wait(deadline_s):
                raise ImageBusyError(
                    f"{self.name}: its spill to {self.cold_path} has not stopped within {deadline_s:g} s, one write "
                    "takes longer: abandon this flip and try again, or use a faster disk"
                )

    def _spill(self, check: Callable[[int], None]) -> None:
        assert self._cold is not None, "checked by spill"
        try:
            if not self._has_file and not self._is_on_disk(check):
                self._cold.write(host_bytes(self.flat), self.checksums, check)
                if not self._is_on_disk(check):
                    raise ImageError(f"{self.cold_path}: not read back as it was written: replace the disk")
            self._has_file = True
            check(self.num_bytes)
        except (ColdImageError, ImageError, CancelledError) as error:
            self.kept_reason = str(error) or "needed again before it was written"
            self._enter(ImageState.READY)
        except BaseException as error:
            self.kept_reason = repr(error)
            self._enter(ImageState.READY)
            raise
        else:
            self._enter(ImageState.COLD)

    def _is_on_disk(self, check: Callable[[int], None]) -> bool:
        """Whether the file has these very bytes, of this or of an earlier start: all of it is read."""
        assert self._cold is not None, "checked by spill"
        try:
            return self._cold.read_head() == self.checksums == self._cold.verify(check)
        except ColdImageError:
            return False

    def _promote(self, check: Callable[[int], None]) -> None:
        assert self._cold is not None, "an image without a file is never cold"
        try:
            found = self._cold.read_into(host_bytes(self.flat), check)
            if found != self.checksums:
                raise ImageBrokenError(f"{self.name}: its file is whole but not the one that was written")
        except CancelledError:
            self._enter(ImageState.COLD)
        except BaseException:
            self._enter(ImageState.BROKEN)
            raise
        else:
            self._enter(ImageState.READY)

    def _enter(self, state: ImageState) -> None:
        """Changes the state; what has its bytes elsewhere, or nowhere, holds no memory."""
        with self._lock:
            if state in (ImageState.COLD, ImageState.BROKEN):
                self._backing.release(0, self._extent)
            self._state = state
