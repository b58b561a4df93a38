"""What every weight format has in common: a directory of tensors inside one file, and one error.

Never opens a file and never reads a weight. A tensor entry is only made by a parser that has checked that its bytes lie
inside the file, so that nobody after the parser checks again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.models.ggml_types import GgmlType


class ModelFileError(ValueError):
    """A model's files cannot be used as they are; the message names the file, the tensor or key, and both numbers."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of one file."""

    name: str
    ggml_type: GgmlType
    shape: tuple[int, ...]
    """Outermost first; the last is the contiguous one (a GGUF file writes them the other way round)."""
    offset: int
    """From the start of the file."""
    num_bytes: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.offset + self.num_bytes


def check_extents(file_name: str, tensors: Sequence[TensorEntry], num_file_bytes: int) -> None:
    """Raises `ModelFileError` unless names are unique and all byte ranges are apart and inside the file."""
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise ModelFileError(f"{file_name}: tensor {tensor.name!r} is listed twice")
        seen.add(tensor.name)
        if tensor.end > num_file_bytes:
            raise ModelFileError(
                f"{file_name}: tensor {tensor.name!r} ends at byte {tensor.end}, but the file has {num_file_bytes}: "
                "it is truncated; fetch it again"
            )
    by_offset = sorted(tensors, key=lambda tensor: tensor.offset)
    for before, after in pairwise(by_offset):
        if after.offset < before.end:
            raise ModelFileError(
                f"{file_name}: tensor {after.name!r} starts at byte {after.offset}, before {before.name!r} ends at "
                f"byte {before.end}"
            )
