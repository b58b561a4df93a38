"""Measures the products of the CPU's backend: `python -m kernels.bench.linear [TYPE ...] [--lanes 4|8|16] [--model]`.

Prints, for each type and shape at 1, 4, 8 and 32 rows of x, on one thread: the median time, the rate at which weights
are read, the rate of arithmetic, and two ratios: to the rate at which this machine reads memory (measured in the same
run) and to torch's float32 product with a dequantised copy. Times are processor time of the thread, which other work on
the machine disturbs least. The weights are random and walked through in turn, as a model's layers are, over more memory
than caches hold. `--model` prints instead one pass over all linear layers of SmolLM2-135M, Q4_1 with a Q8_0 head.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from kernels.cpu.backend import CpuBackend
from kernels.cpu.linear import WIDEST_LANES, dequantize
from kernels.weights import Matrix
from services.models.ggml_types import GgmlType, block_length, row_bytes

SHAPES = ((576, 576), (1536, 576), (576, 1536), (49152, 576))
NUM_TOKENS = (1, 4, 8, 32)
# More than the last-level cache of common machines, so that weights come from memory.
WORKING_SET_BYTES = 96 << 20
NUM_REPEATS = 7
# One layer of SmolLM2-135M: query, key, value, output, gate, up, down; 30 of them and a head.
LAYER_SHAPES = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))
NUM_LAYERS = 30
HEAD_SHAPE = (49152, 576)


@dataclass(frozen=True, slots=True)
class Figure:
    """One line of the table; rates per second, `torch_ns` for the same product by torch."""

    label: str
    num_tokens: int
    elapsed_ns: float
    torch_ns: float
    weight_bytes: int
    num_weights: int

    def line(self, read_bytes_per_ns: float) -> str:
        """The figures as text."""
        rate = self.weight_bytes / self.elapsed_ns
        arithmetic = 2 * self.num_weights * self.num_tokens / self.elapsed_ns
        return (
            f"{self.label:<22}{self.num_tokens:>5}{self.elapsed_ns / 1e3:>11.1f}{rate:>9.2f}{arithmetic:>10.1f}"
            f"{rate / read_bytes_per_ns:>12.2f}{self.torch_ns / self.elapsed_ns:>12.2f}"
        )


HEADER = f"{'type and shape':<22}{'rows':>5}{'us':>11}{'GB/s':>9}{'GFLOP/s':>10}{'of memory':>12}{'over torch':>12}"


def median_ns(work: Callable[[], object]) -> float:
    """The median processor time of NUM_REPEATS runs of `work`, after one to warm up."""
    work()
    times = []
    for _ in range(NUM_REPEATS):
        begin = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - begin)
    return statistics.median(times)


def memory_read_rate() -> float:
    """Bytes per nanosecond at which one thread sums a large tensor."""
    data = torch.ones(WORKING_SET_BYTES // 8, dtype=torch.int64)
    return WORKING_SET_BYTES / median_ns(data.sum)


def random_matrix(kind: GgmlType, num_rows: int, num_columns: int) -> Matrix:
    """Random blocks whose float16 scales are finite: the bits that could make an infinity are cleared everywhere."""
    packed = torch.randint(0, 256, (num_rows, row_bytes(kind, num_columns)), dtype=torch.uint8) & 0xBB
    return Matrix.from_buffer(memoryview(packed.numpy().data), 0, kind, num_rows, num_columns)


def measure(kind: GgmlType, num_rows: int, num_columns: int, lanes: int) -> Iterator[Figure]:
    """The figures of one type and shape for every count in NUM_TOKENS."""
    linear, size_bytes = CpuBackend(lanes).linear, num_rows * row_bytes(kind, num_columns)
    copies = [random_matrix(kind, num_rows, num_columns) for _ in range(max(1, WORKING_SET_BYTES // size_bytes))]
    num_dense = max(1, WORKING_SET_BYTES // (num_rows * num_columns * 4))
    dense = [torch.empty(num_rows, num_columns) for _ in range(num_dense)]
    for i, weight in enumerate(dense):
        dequantize(copies[i % len(copies)], weight)
    for num_tokens in NUM_TOKENS:
        x, out = torch.randn(num_tokens, num_columns), torch.empty(num_tokens, num_rows)

        def ours(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            for matrix in copies:
                linear(x, matrix, out)

        def theirs(x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            for weight in dense:
                torch.mm(x, weight.T, out=out)

        yield Figure(
            label=f"{kind.name} {num_rows}x{num_columns}",
            num_tokens=num_tokens,
            elapsed_ns=median_ns(ours) / len(copies),
            torch_ns=median_ns(theirs) / len(dense),
            weight_bytes=size_bytes,
            num_weights=num_rows * num_columns,
        )


def measure_model(lanes: int) -> Iterator[Figure]:
    """One pass over all linear layers of SmolLM2-135M; torch's pass is over float32 copies of the same shapes."""
    linear, shapes = CpuBackend(lanes).linear, LAYER_SHAPES * NUM_LAYERS
    matrices = [random_matrix(GgmlType.Q4_1, *shape) for shape in shapes]
    matrices.append(random_matrix(GgmlType.Q8_0, *HEAD_SHAPE))
    dense = [torch.randn(matrix.num_rows, matrix.num_columns) for matrix in matrices]
    for num_tokens in NUM_TOKENS:
        x = torch.randn(num_tokens, max(matrix.num_columns for matrix in matrices))
        xs = [x[:, : matrix.num_columns].contiguous() for matrix in matrices]
        outs = [torch.empty(num_tokens, matrix.num_rows) for matrix in matrices]

        def ours(xs: list[torch.Tensor] = xs, outs: list[torch.Tensor] = outs) -> None:
            for x, matrix, out in zip(xs, matrices, outs, strict=True):
                linear(x, matrix, out)

        def theirs(xs: list[torch.Tensor] = xs, outs: list[torch.Tensor] = outs) -> None:
            for x, weight, out in zip(xs, dense, outs, strict=True):
                torch.mm(x, weight.T, out=out)

        yield Figure(
            label="SmolLM2-135M Q4_1",
            num_tokens=num_tokens,
            elapsed_ns=median_ns(ours),
            torch_ns=median_ns(theirs),
            weight_bytes=sum(matrix.num_rows * row_bytes(matrix.ggml_type, matrix.num_columns) for matrix in matrices),
            num_weights=sum(matrix.num_rows * matrix.num_columns for matrix in matrices),
        )


def measure_all(kinds: list[GgmlType], lanes: int) -> Iterator[Figure]:
    """Every type in every shape; columns that a type's blocks do not divide are cut to those they do."""
    for kind in kinds:
        for num_rows, num_columns in SHAPES:
            yield from measure(kind, num_rows, num_columns // block_length(kind) * block_length(kind), lanes)


def main() -> None:
    """Reads the command line and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.linear", description="measure quantised products")
    parser.add_argument(
        "types", nargs="*", default=[], help=f"of {', '.join(kind.name for kind in GgmlType)}; default: all"
    )
    parser.add_argument("--lanes", type=int, choices=(4, 8, 16), default=WIDEST_LANES, help="widest vectors to use")
    parser.add_argument("--model", action="store_true", help="one pass over the linear layers of SmolLM2-135M")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = [GgmlType[name] for name in arguments.types] or list(GgmlType)
    read_rate = memory_read_rate()
    sys.stdout.write(f"memory is read at {read_rate:.1f} GB/s by one thread\n{HEADER}\n")
    for figure in measure_model(arguments.lanes) if arguments.model else measure_all(kinds, arguments.lanes):
        sys.stdout.write(figure.line(read_rate) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
