"""Mode `image`: the arena takes the other layout's bytes from that layout's host image, or gets its own back.

Copy first, then verify in place, chunk by chunk; on a mismatch the layout that was active is copied back from its image
and verified as well. Nothing is touched before the wanted image is whole in memory, so until then a flip can be
abandoned. Never decides a flip: the caller reports the outcome.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from services.core.ids import LayoutKind
from services.worker.chunks import Checksum, first_difference
from services.worker.images import ImageBrokenError, ImageError, ImageNotFilledError, ImageState, WeightImage


class ImagesLostError(ImageError):
    """Neither layout's image makes a verified arena: the generation ends, its requests are recomputed."""


@dataclass(frozen=True, slots=True)
class Refilled:
    """The arena holds the wanted layout, verified."""

    layout: LayoutKind
    num_bytes: int
    copy_ns: int
    verify_ns: int


@dataclass(frozen=True, slots=True)
class Restored:
    """The arena holds the layout that was active, verified; the wanted one failed at `chunk`."""

    layout: LayoutKind
    wanted: LayoutKind
    chunk: int
    is_image_bad: bool
    """Whether the wanted image itself has changed in memory, and not only the copy of it: load that layout again."""
    reason: str


class ImageRefill:
    """The arena's bytes, both layouts' images, and which of them the arena holds."""

    def __init__(
        self, arena: Tensor, images: Mapping[LayoutKind, WeightImage], active: LayoutKind, checksum: Checksum
    ) -> None:
        """`arena`: [num_bytes] uint8, at least as long as each image. `checksum`: of the device that holds it."""
        for image in images.values():
            assert image.num_bytes <= arena.numel(), "the arena is as large as the larger layout"
        self.active = active
        self._arena, self._images, self._checksum = arena, dict(images), checksum

    def obstacle(self, to: LayoutKind) -> str | None:
        """Why a refill would not be certain now, or None: a rank's verdict on a flip, before anything is touched."""
        for kind, image in self._images.items():
            state = image.state
            if state in (ImageState.EMPTY, ImageState.BROKEN):
                return f"{image.name} is {state.name}: load the {kind.name} layout again"
            if kind is to and state in (ImageState.COLD, ImageState.PROMOTING):
                return f"{image.name} is {state.name}: promote it and wait before a flip to {kind.name}"
        return None

    def refill(self, to: LayoutKind, deadline_s: float, restore_deadline_s: float) -> Refilled | Restored:
        """Makes `to` the arena's layout, or leaves the active one there.

        `deadline_s`: for the wanted image to come back from disk. `restore_deadline_s`: the same for the active one,
        should it be needed: sized for reading all of it.

        Raises:
            ImageError, MissingMemoryError: the wanted image is not to be had; the arena is untouched.
            ImagesLostError: its content is worthless.
        """
        if to is self.active:
            raise ImageNotFilledError(f"the arena holds {to.name} already: refetch the layout")
        wanted = self._images[to]
        wanted.ready(deadline_s)
        began_ns = time.perf_counter_ns()
        self._copy(wanted)
        copied_ns = time.perf_counter_ns()
        chunk = self._first_bad_chunk(wanted)
        if chunk is None:
            self.active = to
            return Refilled(to, wanted.num_bytes, copied_ns - began_ns, time.perf_counter_ns() - copied_ns)
        return self._restore(to, chunk, restore_deadline_s)

    def _restore(self, wanted: LayoutKind, chunk: int, deadline_s: float) -> Restored:
        bad, active = self._images[wanted], self._images[self.active]
        is_image_bad = bad.first_bad_chunk() is not None
        whose = "its image has changed in memory, load the layout again" if is_image_bad else "the copy went wrong"
        reason = f"{bad.name}: chunk {chunk} of {len(bad.checksums)} is not what was loaded ({whose})"
        try:
            active.ready(deadline_s)
            self._copy(active)
            second = self._first_bad_chunk(active)
            if second is not None:
                raise ImageBrokenError(f"{active.name}: chunk {second} is not what was loaded either")
        except Exception as error:
            raise ImagesLostError(f"{reason}, and {self.active.name} cannot be had back: {error}") from error
        return Restored(self.active, wanted, chunk, is_image_bad, reason)

    def _copy(self, image: WeightImage) -> None:
        self._arena[: image.num_bytes].copy_(image.flat)

    def _first_bad_chunk(self, image: WeightImage) -> int | None:
        return first_difference(self._arena[: image.num_bytes], image.checksums, self._checksum, image.chunk_bytes)
