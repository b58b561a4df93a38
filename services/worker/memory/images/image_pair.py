"""Both layouts' images of one rank: the one that is needed next comes to memory, the other one may lie on disk.

The arena has the layout in force, so the image that a flip needs is the other layout's. Where cold images are wanted,
the image of the layout in force goes to disk first and the other one is read back then: beside the arena one image
takes memory at a time. That goes on in the background, after a flip; what asks for an image waits for it within a
bound. Never touches the arena.
"""

from collections.abc import Callable, Mapping

from services.core.ids import LayoutKind
from services.worker.memory.images.background import CANCEL_WAIT_S, Background
from services.worker.memory.images.images import ImageError, ImageState, WeightImage

READ_FIXED_S, READ_S_PER_MIB = 5.0, 0.004
"""How long reading an image may take: four times what a slow disk was seen to need for a MiB."""


class ImagePair:
    """Use from one thread; the work in between goes on in at most one other."""

    def __init__(self, images: Mapping[LayoutKind, WeightImage]) -> None:
        self._images = dict(images)
        self._work: Background | None = None

    def __getitem__(self, kind: LayoutKind) -> WeightImage:
        """Not to be touched while something is on its way: see `obstacle` and `had`."""
        return self._images[kind]

    def load(self, kind: LayoutKind, take: Callable[[WeightImage], None]) -> None:
        """Start: `take` is to make the arena of the image of `kind`, the layout that will be in force.

        Raises:
            ImageBrokenError, MissingMemoryError: one of the two cannot be had.
        """
        image = self._images[kind]
        image.load()
        take(image)
        if image.can_be_cold:
            image.spill()
        other = self._images[kind.other]
        other.load()
        if other.can_be_cold:
            other.store()

    def need_next(self, kind: LayoutKind) -> None:
        """The image of `kind` is what the next flip needs: begins to bring it to memory, and the other one to disk."""
        wanted, other = self._images[kind], self._images[kind.other]
        is_under_way = self._work is not None and not self._work.has_ended
        goes_cold = other.can_be_cold and other.state is ImageState.READY
        if is_under_way or (wanted.state is ImageState.READY and not goes_cold):
            return

        def work(check: Callable[[int], None]) -> None:
            if goes_cold:
                other.spill(check)
            wanted.promote(check)

        self._work = Background(f"image of {kind.value}", work)

    def obstacle(self, kind: LayoutKind, wait_s: float) -> str | None:
        """Why the image of `kind` is not in memory, after as long a wait; None: it is, and nothing is on its way."""
        image, work = self._images[kind], self._work
        if work is not None and not work.wait(wait_s):
            return (
                f"{image.name} is not in memory after {wait_s:g} s, {work.done_bytes} of {image.num_bytes} bytes of "
                "what is on its way are done: the flip can be tried again"
            )
        if image.state is ImageState.READY:
            return None
        error = work.error if work is not None else None
        self.need_next(kind)
        return f"{image.name} is {image.state.name} ({error or image.lost_reason}); it is being had back"

    def had(self, kind: LayoutKind) -> WeightImage:
        """The image of `kind`, in memory, whatever that takes: within a time that is enough to read it.

        Raises:
            ImageError, MissingMemoryError: it cannot be had.
        """
        image = self._images[kind]
        deadline_s = READ_FIXED_S + sum(one.num_bytes for one in self._images.values()) / 2**20 * READ_S_PER_MIB
        if self._work is not None and not self._work.wait(deadline_s):
            raise ImageError(f"{image.name}: what is on its way has not ended within {deadline_s:.1f} s")
        image.promote()
        return image

    def close(self) -> None:
        """Ends what is on its way and returns the memory; files stay for the next start."""
        if self._work is not None:
            self._work.cancel()
            if not self._work.wait(CANCEL_WAIT_S):
                raise ImageError(f"a read or write of an image has not ended in {CANCEL_WAIT_S} s: its disk hangs")
        for image in self._images.values():
            image.close()
