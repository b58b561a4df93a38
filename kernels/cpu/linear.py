"""Weights as they lie in memory (float32 to 2-bit blocks) and their products with float32 rows, on one core; on a
device that C does not reach, of float32 weights alone and by torch.

A `Matrix` is a view: it owns no bytes, keeps their owner alive, and is cut by rows or columns without copying. Products
are exact to float32 rounding: weights become what ggml says they are, x is never quantised, sums are float32.
In C nothing allocates tensors, starts threads or keeps state; other Python threads run during every call.

Shapes: T rows of x (tokens), K input features (columns of the matrix), N output features (rows of the matrix).
"""

from dataclasses import dataclass, replace

import torch

import kernels._native as _native
from kernels.cpu import paths
from kernels.reference import products
from services.models.ggml_types import GgmlType, block_bytes, block_length, row_bytes

# Vectors of 16 floats are the widest there are (AVX-512); 8 stands for AVX2 and 4 for portable code.
WIDEST_LANES = 16


@dataclass(frozen=True, slots=True)
class Matrix:
    """A view of `num_rows` x `num_columns` weights of one type at `address`; `owner` keeps the memory mapped.

    A linear layer's weight: rows are its output features, columns its input features, columns whole blocks.
    """

    address: int
    ggml_type: GgmlType
    num_rows: int
    num_columns: int
    row_stride_bytes: int
    owner: object

    def __post_init__(self) -> None:
        """Refuses negative counts, rows that are not whole blocks, and rows that overlap."""
        least = row_bytes(self.ggml_type, self.num_columns)
        if self.num_rows < 0 or (self.num_rows > 1 and self.row_stride_bytes < least):
            raise ValueError(
                f"{self.num_rows} rows of {least} bytes ({self.ggml_type.name}, {self.num_columns} columns) cannot lie "
                f"{self.row_stride_bytes} bytes apart"
            )

    @staticmethod
    def from_buffer(
        buffer: memoryview, offset_bytes: int, ggml_type: GgmlType, num_rows: int, num_columns: int
    ) -> "Matrix":
        """The packed matrix at `offset_bytes` of a contiguous buffer, which may be read-only and stays exported.

        Raises ValueError if the matrix does not lie within the buffer.
        """
        address, num_bytes = _native.buffer_address(buffer)
        stride = row_bytes(ggml_type, num_columns)
        end = offset_bytes + num_rows * stride
        if offset_bytes < 0 or end > num_bytes:
            raise ValueError(
                f"a {ggml_type.name} matrix of {num_rows} x {num_columns} needs bytes [{offset_bytes}, {end}), "
                f"but the buffer has {num_bytes}: the file is cut short or its header is wrong"
            )
        return Matrix(address + offset_bytes, ggml_type, num_rows, num_columns, stride, buffer)

    @staticmethod
    def from_tensor(weight_NK: torch.Tensor) -> "Matrix":
        """A float32 tensor of the CPU with unit inner stride, as a matrix; raises ValueError for any other."""
        is_plain = weight_NK.dtype is torch.float32 and weight_NK.dim() == 2 and weight_NK.device.type == "cpu"
        if not is_plain or (weight_NK.stride(1) != 1 and weight_NK.shape[1] > 1):
            raise ValueError(
                f"a float32 matrix on the CPU with inner stride 1 is needed, got {weight_NK.dtype} of shape "
                f"{list(weight_NK.shape)} with strides {list(weight_NK.stride())} on {weight_NK.device}"
            )
        num_rows, num_columns = weight_NK.shape
        stride_bytes = weight_NK.stride(0) * weight_NK.element_size()
        return Matrix(weight_NK.data_ptr(), GgmlType.F32, num_rows, num_columns, stride_bytes, weight_NK)

    def tensor(self) -> torch.Tensor:
        """[num_rows, num_columns] over the same memory; ValueError for all but a part of a float32 tensor."""
        if self.ggml_type is not GgmlType.F32 or not isinstance(self.owner, torch.Tensor):
            raise ValueError(
                f"weights of type {self.ggml_type.name} in a {type(self.owner).__name__} cannot be seen as a float32 "
                "tensor: expand them when they are loaded"
            )
        storage = self.owner.untyped_storage()
        offset = (self.address - storage.data_ptr()) // torch.float32.itemsize
        strides = (self.row_stride_bytes // torch.float32.itemsize, 1)
        whole = torch.empty(0, dtype=torch.float32, device=self.owner.device)
        return whole.set_(storage, offset, (self.num_rows, self.num_columns), strides)

    def rows(self, begin: int, end: int) -> "Matrix":
        """Rows [begin, end) of the same memory; raises ValueError outside the matrix."""
        _check_range("rows", begin, end, self.num_rows)
        return replace(self, address=self.address + begin * self.row_stride_bytes, num_rows=end - begin)

    def columns(self, begin: int, end: int) -> "Matrix":
        """Columns [begin, end) of the same memory; raises ValueError outside the matrix or within a block."""
        _check_range("columns", begin, end, self.num_columns)
        length = block_length(self.ggml_type)
        if begin % length or end % length:
            raise ValueError(
                f"columns [{begin}, {end}) cut a {self.ggml_type.name} block: both ends must be multiples of its "
                f"length, {length}"
            )
        address = self.address + begin // length * block_bytes(self.ggml_type)
        return replace(self, address=address, num_columns=end - begin)


def _check_range(what: str, begin: int, end: int, count: int) -> None:
    if not 0 <= begin <= end <= count:
        raise ValueError(f"{what} [{begin}, {end}) are not within the matrix's {what} [0, {count})")


def multiply(
    x_TK: torch.Tensor,
    matrix: Matrix,
    out_TN: torch.Tensor,
    *,
    accumulate: bool = False,
    max_lanes: int = WIDEST_LANES,
) -> None:
    """out = x @ W^T, or out += x @ W^T; x and out are float32 with unit inner stride and must not overlap.

    `max_lanes` bounds the vectors used, for tests and benches. Raises ValueError if types, shapes or strides misfit.
    """
    if x_TK.dtype is not torch.float32 or out_TN.dtype is not torch.float32:
        raise ValueError(f"x and out must be float32, got {x_TK.dtype} and {out_TN.dtype}")
    if paths.takes_torch(x_TK):
        products.multiply(x_TK, matrix.tensor(), out_TN, accumulate=accumulate)
        return
    _native.linear_multiply(
        matrix.ggml_type,
        matrix.address,
        matrix.row_stride_bytes,
        matrix.num_rows,
        matrix.num_columns,
        x_TK.data_ptr(),
        x_TK.shape,
        x_TK.stride(),
        out_TN.data_ptr(),
        out_TN.shape,
        out_TN.stride(),
        accumulate,
        max_lanes,
    )


def dequantize(matrix: Matrix, out_NK: torch.Tensor, *, max_lanes: int = WIDEST_LANES) -> None:
    """Writes the weights as float32, bit for bit what ggml's reference makes of them; raises ValueError on a misfit."""
    if out_NK.dtype is not torch.float32:
        raise ValueError(f"out must be float32, got {out_NK.dtype}")
    _native.linear_dequantize(
        matrix.ggml_type,
        matrix.address,
        matrix.row_stride_bytes,
        matrix.num_rows,
        matrix.num_columns,
        out_NK.data_ptr(),
        out_NK.shape,
        out_NK.stride(),
        max_lanes,
    )


def take_rows(matrix: Matrix, ids_T: torch.Tensor, out_TK: torch.Tensor, *, max_lanes: int = WIDEST_LANES) -> None:
    """out[t] = row ids[t] of the matrix as float32 (the embedding look-up); ids are int32 or int64.

    Raises IndexError, before anything is read or written, if an id is outside the rows, and ValueError on a misfit.
    """
    if ids_T.dtype not in (torch.int32, torch.int64) or ids_T.dim() != 1 or out_TK.dtype is not torch.float32:
        raise ValueError(
            f"ids must be int32 or int64 in one dimension and out float32, got {ids_T.dtype} of shape "
            f"{list(ids_T.shape)} and {out_TK.dtype}"
        )
    if paths.takes_torch(out_TK):
        products.take_rows(matrix.tensor(), ids_T, out_TK)
        return
    _native.linear_take_rows(
        matrix.ggml_type,
        matrix.address,
        matrix.row_stride_bytes,
        matrix.num_rows,
        matrix.num_columns,
        ids_T.data_ptr(),
        ids_T.shape[0],
        ids_T.stride(0),
        ids_T.element_size(),
        out_TK.data_ptr(),
        out_TK.shape,
        out_TK.stride(),
        max_lanes,
    )
