"""One rank's weights in one arena that is filled from the host image of the layout in force, and views of both layouts.

Views are handed out once and stay valid: a flip copies other bytes under them, then adds them up where they lie and
compares with the image's checksums, chunk by chunk. Norms lie beside the arena, for both layouts.

Invariant: `held` is the layout whose every byte is in the arena as it was loaded, None while it is not known.
"""

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from kernels.cpu.checksum import checksum
from services.core.ids import LayoutKind, Rank
from services.core.layout import Layout
from services.models.model_files import ModelFiles
from services.placement.compatibility import Device, expanded_by
from services.placement.layouts import cut_within_blocks, shard_units
from services.placement.pieces import Piece, canonical_tensors, matrices, resident_pieces, total_bytes
from services.worker.memory.images.chunks import CHUNK_BYTES, chunk_ranges, host_checksum
from services.worker.memory.images.cold_image import ColdForm, ColdImage
from services.worker.memory.images.image_pair import ImagePair
from services.worker.memory.images.images import ImageError, WeightImage
from services.worker.memory.pages.backing import Backing, BackingError
from services.worker.memory.rank_memory import DataPlaneLostError
from services.worker.memory.weights.mapped import files_identity
from services.worker.memory.weights.owned_weights import OwnedWeights, load_pieces, release_mapped


@dataclass(frozen=True, slots=True)
class Taken:
    """What came of filling the arena."""

    wrong: str | None
    """Which chunk is not what was loaded; None: the arena holds the layout."""
    copy_ns: int
    verify_ns: int


class ImageWeights:
    """See RankMemory for the order of calls. Use from one thread."""

    def __init__(self, arena: Tensor, images: ImagePair, views: Mapping[LayoutKind, OwnedWeights]) -> None:
        """`arena`: uint8, as long as the larger image; `views`: of it, under each layout."""
        self._arena, self._views = arena, views
        self.images = images
        self.held: LayoutKind | None = None

    @property
    def num_bytes(self) -> int:
        """Of the arena: the larger of the two layouts."""
        return self._arena.numel()

    def of(self, kind: LayoutKind) -> OwnedWeights:
        """What a stage of this layout sees; its bytes are there while the layout is held."""
        return self._views[kind]

    def load(self, kind: LayoutKind) -> None:
        """Start-up: both images from the files, and `kind` in the arena.

        Raises:
            BackingError: there is no memory for an image, or the arena does not keep what is written to it.
        """

        def take(image: WeightImage) -> None:
            if (wrong := self._copied(image).wrong) is not None:
                raise BackingError(f"the arena does not keep what is copied to it: {wrong}")

        self.images.load(kind, take)
        self.held = kind

    def take(self, kind: LayoutKind) -> Taken:
        """Makes `kind` what the arena holds, if its image is right. The image is in memory."""
        image = self.images[kind]
        self.held = None
        taken = self._copied(image)
        if taken.wrong is None:
            self.held = kind
        elif not image.is_right():
            image.discard(f"{taken.wrong}: the image itself has changed")
        return taken

    def restore(self, kind: LayoutKind) -> None:
        """Makes `kind` what the arena holds, from its image, its file on disk or the model's files.

        Raises:
            DataPlaneLostError: none of them has its bytes.
        """
        try:
            for _ in range(2):
                self.images.had(kind)
                wrong = self.take(kind).wrong
                if wrong is None:
                    return
        except (ImageError, BackingError) as error:
            raise DataPlaneLostError(f"the weights of {kind.value} cannot be had back: {error}") from error
        raise DataPlaneLostError(f"the weights of {kind.value} cannot be had back: {wrong}")

    def close(self) -> None:
        """Returns the images' memory, when what is on its way has stopped."""
        self.held = None
        self.images.close()

    def _copied(self, image: WeightImage) -> Taken:
        """Copies, and adds up where the bytes are now."""
        began_ns = time.perf_counter_ns()
        into = self._arena[: image.num_bytes]
        into.copy_(image.flat)
        copied_ns = time.perf_counter_ns()
        wrong = self._wrong_chunk(into, image)
        return Taken(wrong, copied_ns - began_ns, time.perf_counter_ns() - copied_ns)

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
