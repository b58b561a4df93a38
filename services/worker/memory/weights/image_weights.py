"""One rank's weights in one arena that is filled from the host image of the layout in force, and views of both layouts.

Views are handed out once and stay valid: a flip copies other bytes under them, then adds them up where they lie and
compares with the image's checksums, chunk by chunk. No weights cross between ranks. Norms lie beside the arena, for
both layouts. Behind an outcome the image that the next flip needs is brought to memory in the background; a flip that
comes before that waits a little, and is refused with the numbers then.

Invariant: `active` is the layout whose every byte is in the arena as it was loaded, None while it is not known.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from kernels.cpu.checksum import checksum
from services.core.flip.work import WeightsKind
from services.core.flip.work_asks import FillWeights, HaveWeights
from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout
from services.models.model_files import ModelFiles
from services.placement.compatibility import Device, expanded_by
from services.placement.layouts import cut_within_blocks, shard_units
from services.placement.pieces import Piece, canonical_tensors, matrices, resident_pieces, total_bytes
from services.worker.memory.flip_plan import NotDoneError, Performs
from services.worker.memory.images.chunks import CHUNK_BYTES, chunk_ranges, host_checksum
from services.worker.memory.images.cold_image import ColdForm, ColdImage
from services.worker.memory.images.image_pair import ImagePair
from services.worker.memory.images.images import ImageError, WeightImage
from services.worker.memory.pages.backing import Backing, BackingError, MakeBacking
from services.worker.memory.tally import Tally
from services.worker.memory.weights.mapped import files_identity
from services.worker.memory.weights.owned_weights import OwnedWeights, load_pieces, release_mapped


class ImageWeights:
    """See RankWeights."""

    kind = WeightsKind.FILLED

    def __init__(
        self, arena: Backing, num_bytes: int, images: ImagePair, views: Mapping[LayoutKind, OwnedWeights], tally: Tally
    ) -> None:
        """`num_bytes`: of the larger image, which the arena has room for; `views`: of it, under each layout."""
        self._backing, self._arena, self._views, self._tally = arena, arena.flat[:num_bytes], views, tally
        self.images = images
        self.active: LayoutKind | None = None

    @property
    def num_bytes(self) -> int:
        """Of the arena: the larger of the two layouts."""
        return self._arena.numel()

    def of(self, kind: LayoutKind) -> OwnedWeights:
        """What a stage of this layout sees; its bytes are there while the layout is active."""
        return self._views[kind]

    def load(self, kind: LayoutKind) -> None:
        """Start-up: both images from the files, and `kind` in the arena.

        Raises:
            BackingError: there is no memory for an image, or the arena does not keep what is written to it.
        """

        def take(image: WeightImage) -> None:
            if wrong := self._copied(image):
                raise BackingError(f"the arena does not keep what is copied to it: {wrong}")

        self.images.load(kind, take)
        self.active = kind

    @property
    def usable(self) -> frozenset[LayoutKind]:
        """See RankWeights: what the arena holds, where that is known."""
        return frozenset() if self.active is None else frozenset((self.active,))

    @property
    def performs(self) -> Performs:
        """See RankWeights."""
        return {FillWeights: self._fill, HaveWeights: lambda ask: self.make_whole(ask.layout)}

    def plan_hash(self, target: LayoutKind) -> int:
        """See RankWeights: nothing is sent."""
        return 0

    def obstacle(self, target: LayoutKind, wait_s: float) -> str:
        """See RankWeights: the image is not in memory."""
        return self.images.obstacle(target, wait_s) or ""

    def _fill(self, ask: FillWeights) -> None:
        if wrong := self.take(ask.layout):
            raise NotDoneError(wrong)

    def take(self, kind: LayoutKind) -> str:
        """Makes `kind` what the arena holds, if its image is right; else what is wrong. The image is in memory."""
        image = self.images[kind]
        self.active = None
        wrong = self._copied(image)
        if not wrong:
            self.active = kind
        elif not image.is_right():
            image.discard(f"{wrong}: the image itself has changed")
        return wrong

    def make_whole(self, kind: LayoutKind) -> None:
        """See RankWeights: from the image, its file on disk or the model's files. The other image is needed next.

        Raises:
            NotDoneError: none of them has its bytes.
        """
        if self.active is not kind:
            self._restore(kind)
        self.images.need_next(kind.other)

    def _restore(self, kind: LayoutKind) -> None:
        wrong = ""
        try:
            for _ in range(2):
                self.images.had(kind)
                wrong = self.take(kind)
                if not wrong:
                    return
        except (ImageError, BackingError) as error:
            raise NotDoneError(f"the weights of {kind.value} cannot be had back: {error}") from error
        raise NotDoneError(f"the weights of {kind.value} cannot be had back: {wrong}")

    def close(self) -> None:
        """Returns the memory of arena and images, when what is on its way has stopped."""
        self.active = None
        self.images.close()
        self._backing.close()

    def _copied(self, image: WeightImage) -> str:
        """Copies, and adds up where the bytes are now: which chunk is not what was loaded; empty: none."""
        into = self._arena[: image.num_bytes]
        with self._tally.timed("write_ns"):
            into.copy_(image.flat)
        with self._tally.timed("verify_ns"):
            return self._wrong_chunk(into, image) or ""

    def _wrong_chunk(self, into: Tensor, image: WeightImage) -> str | None:
        ranges = chunk_ranges(image.num_bytes, image.chunk_bytes)
        for index, ((begin, end), wanted) in enumerate(zip(ranges, image.checksums, strict=True)):
            if checksum(into[begin:end]) != wanted:
                return f"{image.name}: chunk {index} of {len(image.checksums)} in the arena is not what was loaded"
        return None


def layout_pieces(
    files: ModelFiles, layouts: Mapping[LayoutKind, Layout], rank: int, device: Device = Device.CPU
) -> tuple[dict[LayoutKind, tuple[Piece, ...]], dict[str, str]]:
    """What each layout's image of a rank has, by place, and each tensor's source.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
    """
    geometry = files.geometry
    cut = cut_within_blocks(geometry, files.tensors, layouts.values()) | expanded_by(device, files.tensors)
    tensors = matrices(canonical_tensors(files.tensors, cut, is_tied=geometry.tied_embeddings))
    units = shard_units(geometry, files.tensors)
    pieces = {kind: resident_pieces(rank, (layout,), units, tensors, cut) for kind, layout in layouts.items()}
    return pieces, {tensor.name: tensor.source for tensor in tensors}


def cold_image(
    directory: Path, files: ModelFiles, kind: LayoutKind, rank: Rank, pieces: Sequence[Piece], chunk_bytes: int
) -> ColdImage:
    """The file that one image of a rank may go to.

    Raises:
        ColdImageError: the directory cannot be used, or another process has the file.
    """
    digest = hashlib.blake2b(files_identity(files), digest_size=32)
    digest.update(repr(tuple(pieces)).encode())
    form = ColdForm(digest.digest(), total_bytes(pieces), chunk_bytes, host_checksum)
    return ColdImage(directory / f"worker-{rank}-{kind.value}.image", form)


def make_image(
    files: ModelFiles,
    kind: LayoutKind,
    rank: Rank,
    pieces: Sequence[Piece],
    backing: Backing,
    directory: Path | None,
    chunk_bytes: int = CHUNK_BYTES,
) -> WeightImage:
    """One layout's image, empty yet; `directory`: where it may be cold, None: nowhere. Raises like `cold_image`."""

    def load(memory: Tensor) -> None:
        load_pieces(memory, pieces, files)
        release_mapped(files)

    cold = None if directory is None else cold_image(directory, files, kind, rank, pieces, chunk_bytes)
    name = f"image of {kind.value}, rank {rank}"
    return WeightImage(name, backing, total_bytes(pieces), load, host_checksum, cold, chunk_bytes)


def image_weights(
    files: ModelFiles,
    layouts: Mapping[LayoutKind, Layout],
    rank: Rank,
    kind: LayoutKind,
    make_arena: MakeBacking,
    make_image_memory: MakeBacking,
    cold_directory: Path | None,
    device: Device,
    tally: Tally,
) -> ImageWeights:
    """Takes the memory and loads both images, with the layout `kind` in the arena; images lie in host memory.

    Raises:
        LayoutError: a layout cuts a tensor where it cannot be cut.
        ColdImageError: the directory for cold images cannot be used.
        BackingError: there is no memory for arena and images.
    """
    pieces, sources = layout_pieces(files, layouts, rank, device)
    num_bytes = max(total_bytes(parts) for parts in pieces.values())
    arena = make_arena("weights arena", num_bytes)
    arena.back(0, arena.num_bytes)
    views = {each: OwnedWeights(files, parts, sources, arena.flat[:num_bytes]) for each, parts in pieces.items()}
    images = {}
    for each, parts in pieces.items():
        memory = make_image_memory(f"image of {each.value}", total_bytes(parts))
        images[each] = make_image(files, each, rank, parts, memory, cold_directory)
    weights = ImageWeights(arena, num_bytes, ImagePair(images), views, tally)
    weights.load(kind)
    return weights
