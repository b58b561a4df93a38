"""Mode `image`: one arena a rank holds the layout in force; a flip fills it from a host image, and moves live rows.

Rows go first, and the group says that all of them are right before a byte of the weights is overwritten. Then each rank
copies the other layout's image and adds up what lies in its arena; no weights cross between ranks. One verdict of the
group follows: on a mismatch anywhere all ranks go back to the image of the layout before, which is read from disk where
it is cold and from the model's files where it is lost. After an outcome the image that the next flip needs is brought
to memory in the background; a flip that comes before that waits a little, and is refused with the numbers then.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from services.core.ids import LayoutKind
from services.core.layout import Layout
from services.core.step import FlipEntry
from services.models.model_files import ModelFiles
from services.placement.compatibility import Device
from services.placement.pieces import total_bytes
from services.placement.reshard import stable_hash
from services.worker.memory.images.image_pair import ImagePair
from services.worker.memory.pages.backing import Backing, MakeBacking
from services.worker.memory.rank_memory import FlipPlan, Moved, RestorableError
from services.worker.memory.rows.kv_cache import Pool
from services.worker.memory.rows.row_pools import RowPools
from services.worker.memory.weights.image_weights import ImageWeights, layout_pieces, make_image
from services.worker.memory.weights.owned_weights import OwnedWeights
from services.worker.memory.wire import Wire
from services.worker.model.stage import Weights


class ImageMemory:
    """See RankMemory."""

    def __init__(self, weights: ImageWeights, arena: Backing, rows: RowPools, wire: Wire) -> None:
        self._weights, self._arena, self._rows, self._wire = weights, arena, rows, wire

    @property
    def weights_bytes(self) -> int:
        """See RankMemory: owned; images are not in it."""
        return self._weights.num_bytes

    def weights(self, kind: LayoutKind) -> Weights:
        """See RankMemory: there while the layout is in force."""
        return self._weights.of(kind)

    def open_pools(self, num_blocks: int, kind: LayoutKind) -> Mapping[LayoutKind, Pool]:
        """See RankMemory."""
        self._settle_weights(kind)
        return self._rows.open(num_blocks, kind)

    def release_above(self, num_blocks: int) -> int:
        """See RankMemory."""
        return self._rows.release_above(num_blocks)

    def back_below(self, num_blocks: int) -> None:
        """See RankMemory."""
        self._rows.back_below(num_blocks)

    def plan(self, flip: FlipEntry) -> FlipPlan:
        """See RankMemory: refused where the image is not in memory, after a wait that is bounded."""
        rows = self._rows.plan(flip)
        obstacle = self._weights.images.obstacle(flip.target, self._wire.bounds.verdict_wait_s)
        return FlipPlan(rows.hash, rows.refusal or obstacle or "")

    def move(self, flip: FlipEntry) -> Moved:
        """See RankMemory."""
        digest = stable_hash([flip.flip_id, flip.target])
        moved, failure = Moved(), self._obstacle(flip.target)
        try:
            moved = self._rows.move(flip)
        except RestorableError as error:
            failure = error
        with self._wire.guarded():
            self._agree(failure, digest, flip.target.other)
        taken = self._weights.take(flip.target)
        with self._wire.guarded():
            self._agree(RestorableError(taken.wrong) if taken.wrong else None, digest, flip.target.other)
        return replace(moved, write_ns=moved.write_ns + taken.copy_ns, verify_ns=moved.verify_ns + taken.verify_ns)

    def _obstacle(self, target: LayoutKind) -> RestorableError | None:
        """Nobody waits here: that was done for the verdict."""
        obstacle = self._weights.images.obstacle(target, 0)
        return None if obstacle is None else RestorableError(obstacle)

    def _agree(self, failure: RestorableError | None, digest: int, before: LayoutKind) -> None:
        """One verdict of the group; on a failure anywhere every rank goes back to the layout before."""
        try:
            self._wire.agree(failure, digest)
        except RestorableError:
            self._settle_weights(before)
            self._rows.settle(before)
            raise

    def settle(self, kind: LayoutKind) -> None:
        """See RankMemory: the other layout's image is needed next."""
        self._settle_weights(kind)
        self._rows.settle(kind)

    def _settle_weights(self, kind: LayoutKind) -> None:
        if self._weights.held is not kind:
            self._weights.restore(kind)
        self._weights.images.need_next(kind.other)

    def close(self) -> None:
        """Returns the memory of arena, images and pools; no view of it may be touched from here on."""
        self._weights.close()
        self._arena.close()
        self._rows.close()


def image_memory(
    files: ModelFiles,
    layouts: Mapping[LayoutKind, Layout],
    wire: Wire,
    rows: RowPools,
    kind: LayoutKind,
    make_arena: MakeBacking,
    make_image_memory: MakeBacking,
    cold_directory: Path | None,
    device: Device = Device.CPU,
) -> ImageMemory:
    """Takes the memory and loads both images, with the layout `kind` in the arena; images lie in host memory.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
        ColdImageError: the directory for cold images cannot be used.
        BackingError: there is no memory for arena and images.
    """
    pieces, sources = layout_pieces(files, layouts, wire.rank, device)
    num_bytes = max(total_bytes(held) for held in pieces.values())
    arena = make_arena("weights arena", num_bytes)
    arena.back(0, arena.num_bytes)
    views = {held: OwnedWeights(files, pieces[held], sources, arena.flat[:num_bytes]) for held in pieces}
    images = {}
    for held, parts in pieces.items():
        memory = make_image_memory(f"image of {held.value}", total_bytes(parts))
        images[held] = make_image(files, held, wire.rank, parts, memory, cold_directory)
    weights = ImageWeights(arena.flat[:num_bytes], ImagePair(images), views)
    weights.load(kind)
    return ImageMemory(weights, arena, rows, wire)
