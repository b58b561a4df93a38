"""The tensor types of GGUF files that flipmesh reads: ggml's numbers and how many bytes a block of each takes.

Never reads a file and never touches a tensor. Invariant: a row is a whole number of blocks, so a tensor may be cut
between columns only on a block border.
"""

from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType


class GgmlTypeError(ValueError):
    """A tensor type that flipmesh does not read, or a row that is not a whole number of its blocks."""


class GgmlType(IntEnum):
    """The types that can be read; the values are ggml's own numbers, as they stand in a file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    BF16 = 30


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How a type packs consecutive elements of a row: `length` elements take `size_bytes` bytes."""

    length: int
    size_bytes: int


LAYOUTS = MappingProxyType(
    {
        GgmlType.F32: BlockLayout(1, 4),
        GgmlType.F16: BlockLayout(1, 2),
        GgmlType.BF16: BlockLayout(1, 2),
        GgmlType.Q4_0: BlockLayout(32, 18),
        GgmlType.Q4_1: BlockLayout(32, 20),
        GgmlType.Q5_0: BlockLayout(32, 22),
        GgmlType.Q5_1: BlockLayout(32, 24),
        GgmlType.Q8_0: BlockLayout(32, 34),
        GgmlType.Q2_K: BlockLayout(256, 84),
        GgmlType.Q3_K: BlockLayout(256, 110),
        GgmlType.Q4_K: BlockLayout(256, 144),
        GgmlType.Q5_K: BlockLayout(256, 176),
        GgmlType.Q6_K: BlockLayout(256, 210),
    }
)

# Numbers that ggml defines and this code cannot read: the error names them, so that a user knows what to convert.
_UNREADABLE = MappingProxyType(
    {
        4: "Q4_2 (removed from ggml)",
        5: "Q4_3 (removed from ggml)",
        9: "Q8_1",
        15: "Q8_K",
        16: "IQ2_XXS",
        17: "IQ2_XS",
        18: "IQ3_XXS",
        19: "IQ1_S",
        20: "IQ4_NL",
        21: "IQ3_S",
        22: "IQ2_S",
        23: "IQ4_XS",
        24: "I8",
        25: "I16",
        26: "I32",
        27: "I64",
        28: "F64",
        29: "IQ1_M",
        31: "Q4_0_4_4 (removed from ggml)",
        32: "Q4_0_4_8 (removed from ggml)",
        33: "Q4_0_8_8 (removed from ggml)",
        34: "TQ1_0",
        35: "TQ2_0",
        36: "IQ4_NL_4_4 (removed from ggml)",
        37: "IQ4_NL_4_8 (removed from ggml)",
        38: "IQ4_NL_8_8 (removed from ggml)",
        39: "MXFP4",
        40: "NVFP4",
        41: "Q1_0",
    }
)


def ggml_type(number: int) -> GgmlType:
    """The type with ggml's `number`; raises GgmlTypeError, with ggml's name for it, if it cannot be read."""
    try:
        return GgmlType(number)
    except ValueError:
        name = _UNREADABLE.get(number)
        what = f"tensor type {number} ({name}) is not supported" if name else f"tensor type {number} is unknown"
        readable = ", ".join(member.name for member in GgmlType)
        raise GgmlTypeError(f"{what}; convert the file to one of {readable}") from None


def block_length(kind: GgmlType) -> int:
    """Elements in a block."""
    return LAYOUTS[kind].length


def block_bytes(kind: GgmlType) -> int:
    """Bytes in a block."""
    return LAYOUTS[kind].size_bytes


def row_bytes(kind: GgmlType, num_columns: int) -> int:
    """Bytes of a row of `num_columns` elements; raises GgmlTypeError unless that is a whole number of blocks."""
    layout = LAYOUTS[kind]
    num_blocks, rest = divmod(num_columns, layout.length)
    if rest or num_columns < 0:
        raise GgmlTypeError(
            f"a row of {num_columns} elements is not a whole number of {kind.name} blocks of {layout.length} elements"
        )
    return num_blocks * layout.size_bytes
