"""Measures a model's step on a CUDA device through the backend: `python -m kernels.bench.decode_step`.

The geometry is an 8B dense model's (36 layers, 4096 wide, 32 query and 8 KV heads of 128, feed-forward 12288,
vocabulary 151936), weights are random, the whole step is one graph. Prints medians beside the floor: bytes of weights
and of rows read, at the rate at which this device copies memory. Changes nothing.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import Activation, AttentionShape, Rotary, StepInputs
from kernels.cuda.backend import CudaBackend
from kernels.rotary import rope_table
from kernels.weights import Matrix

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 4096, 32, 8, 128, 12288, 151_936
EPSILON, REPEATS, WARM_UP = 1e-6, 20, 3
BLOCK_SLOTS = 16
COPY_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of one layer."""

    norms: tuple[Tensor, Tensor]
    head_norms: tuple[Tensor, Tensor]
    qkv: Matrix
    output: Matrix
    gate_up: Matrix
    down: Matrix


class Model:
    """Random weights, and buffers of one step at fixed addresses."""

    def __init__(self, backend: CudaBackend, num_layers: int, num_rows: int) -> None:
        self.backend, self.num_rows = backend, num_rows
        self.layers = [self._layer() for _ in range(num_layers)]
        self.table, self.head = self._matrix(VOCAB, HIDDEN), self._matrix(VOCAB, HIDDEN)
        self.norm = self._ones(HIDDEN)
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.hidden, self.normed = self._rows(HIDDEN), self._rows(HIDDEN)
        self.qkv, self.attended = self._rows(width), self._rows(HEADS * HEAD_DIM)
        self.gate_up, self.gated = self._rows(2 * FFN), self._rows(FFN)
        self.logits = self._rows(VOCAB)

    def _rows(self, width: int) -> Tensor:
        return torch.zeros(self.num_rows, width, dtype=self.backend.compute_dtype, device=self.backend.device)

    def _ones(self, width: int) -> Tensor:
        return torch.ones(width, dtype=self.backend.compute_dtype, device=self.backend.device)

    def _matrix(self, rows: int, columns: int) -> Matrix:
        weight = torch.randn(rows, columns, dtype=self.backend.compute_dtype, device=self.backend.device)
        return Matrix.from_tensor(weight * columns**-0.5)

    def _layer(self) -> Layer:
        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        return Layer(
            (self._ones(HIDDEN), self._ones(HIDDEN)),
            (self._ones(HEAD_DIM), self._ones(HEAD_DIM)),
            self._matrix(width, HIDDEN),
            self._matrix(HIDDEN, HEADS * HEAD_DIM),
            self._matrix(2 * FFN, HIDDEN),
            self._matrix(HIDDEN, FFN),
        )

    @property
    def weight_bytes(self) -> int:
        """That a step of one row reads."""
        per_layer = (HEADS + 2 * KV_HEADS) * HEAD_DIM * HIDDEN + HEADS * HEAD_DIM * HIDDEN + 3 * FFN * HIDDEN
        return 2 * (len(self.layers) * per_layer + VOCAB * HIDDEN)

    def step(self, inputs: StepInputs, planned: object, pools: list[tuple[Tensor, Tensor]], rotary: Rotary) -> None:
        """One step, rows sampled or not."""
        kernels, sizes = self.backend, [HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM]
        kernels.embed(self.table, inputs.input_ids, self.hidden)
        for layer, (keys, values) in zip(self.layers, pools, strict=True):
            kernels.norm(self.hidden, layer.norms[0], EPSILON, self.normed)
            kernels.linear(self.normed, layer.qkv, self.qkv)
            q, k, v = (part.view(self.num_rows, -1, HEAD_DIM) for part in torch.split(self.qkv, sizes, dim=1))
            kernels.norm(q, layer.head_norms[0], EPSILON, q)
            kernels.norm(k, layer.head_norms[1], EPSILON, k)
            kernels.rope_and_store(planned, q, k, v, rotary, keys, values)
            kernels.attend(planned, q, keys, values, self.attended.view(self.num_rows, HEADS, HEAD_DIM))
            kernels.linear(self.attended, layer.output, self.hidden, accumulate=True)
            kernels.norm(self.hidden, layer.norms[1], EPSILON, self.normed)
            kernels.linear(self.normed, layer.gate_up, self.gate_up)
            gate, up = self.gate_up.chunk(2, dim=1)
            kernels.gate(gate, up, self.gated, Activation.SILU)
            kernels.linear(self.gated, layer.down, self.hidden, accumulate=True)
        kernels.norm(self.hidden, self.norm, EPSILON, self.normed)
        kernels.linear(self.normed, self.head, self.logits)


def decode_inputs(num_rows: int, context: int) -> tuple[StepInputs, int]:
    """Every row with a context of its own; the blocks that they take."""
    per_row = -(-context // BLOCK_SLOTS)
    tables = torch.randperm(num_rows * per_row, device="cuda").to(torch.int32).view(num_rows, per_row)
    positions = torch.full((num_rows,), context - 1, dtype=torch.int32, device="cuda")
    rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
    slots = tables[:, (context - 1) // BLOCK_SLOTS] * BLOCK_SLOTS + (context - 1) % BLOCK_SLOTS
    start = torch.arange(num_rows + 1, dtype=torch.int32, device="cuda")
    inputs = StepInputs(num_rows, rows.clone(), positions, slots, tables, rows, start, positions + 1, rows.long())
    return inputs, num_rows * per_row


def prefill_inputs(num_tokens: int) -> tuple[StepInputs, int]:
    """One prompt."""
    per_row = -(-num_tokens // BLOCK_SLOTS)
    tables = torch.randperm(per_row, device="cuda").to(torch.int32)[None]
    positions = torch.arange(num_tokens, dtype=torch.int32, device="cuda")
    slots = tables[0, positions.long() // BLOCK_SLOTS] * BLOCK_SLOTS + positions % BLOCK_SLOTS
    ends = torch.tensor([0, num_tokens], dtype=torch.int32, device="cuda")
    row = torch.zeros(1, dtype=torch.int32, device="cuda")
    inputs = StepInputs(num_tokens, positions.clone(), positions, slots, tables, row, ends, ends[1:], ends[:1].long())
    return inputs, per_row


def timed(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds, by the device's clock."""
    for _ in range(WARM_UP):
        call()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e-3)
    return float(statistics.median(found))


def captured(call: Callable[[], None]) -> torch.cuda.CUDAGraph:
    """The call as a graph, after it has run on the capturing stream."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph


def copy_rate() -> float:
    """Bytes read and written a second by a copy of memory."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    into = torch.empty_like(source)
    return 2 * COPY_BYTES / timed(lambda: into.copy_(source))


def measure_decode(backend: CudaBackend, num_layers: int, rate: float, num_rows: int, context: int) -> str:
    """One line: replay, eager, plan, floor."""
    model = Model(backend, num_layers, num_rows)
    inputs, num_blocks = decode_inputs(num_rows, context)
    pools = _pools(num_layers, num_blocks, backend.compute_dtype)
    rotary = Rotary(rope_table(HEAD_DIM, 1e6, context + 1).cuda(), False)
    shape = AttentionShape(HEADS, KV_HEADS, 0, HEAD_DIM, HEAD_DIM**-0.5)
    planned = backend.plan(inputs, shape)
    graph = captured(lambda: model.step(inputs, planned, pools, rotary))
    replay_s, eager_s = timed(graph.replay), timed(lambda: model.step(inputs, planned, pools, rotary))
    plan_s = timed(lambda: backend.plan(inputs, shape))
    row_bytes = num_layers * num_rows * context * 2 * KV_HEADS * HEAD_DIM * 2
    floor_s = (model.weight_bytes + row_bytes) / rate
    return (
        f"decode {num_rows:4d} x {context:5d}: replay {replay_s * 1e3:7.3f} ms, eager {eager_s * 1e3:7.3f}, plan "
        f"{plan_s * 1e3:6.3f}, floor {floor_s * 1e3:7.3f}, ratio {replay_s / floor_s:.3f}"
    )


def measure_prefill(backend: CudaBackend, num_layers: int, num_tokens: int) -> str:
    """One line."""
    model = Model(backend, num_layers, num_tokens)
    model.logits = model.logits[:1]
    inputs, num_blocks = prefill_inputs(num_tokens)
    pools = _pools(num_layers, num_blocks, backend.compute_dtype)
    rotary = Rotary(rope_table(HEAD_DIM, 1e6, num_tokens).cuda(), False)
    shape = AttentionShape(HEADS, KV_HEADS, 0, HEAD_DIM, HEAD_DIM**-0.5)
    planned = backend.plan(inputs, shape)

    def call() -> None:
        head, model.head = model.head, model.head.rows(0, 16)
        logits, model.logits = model.logits, torch.empty(num_tokens, 16, dtype=backend.compute_dtype, device="cuda")
        model.step(inputs, planned, pools, rotary)
        model.head, model.logits = head, logits

    seconds = timed(call, 5)
    return f"prefill {num_tokens:6d}: {seconds * 1e3:8.2f} ms, {num_tokens / seconds:9.0f} tokens/s"


def _pools(num_layers: int, num_blocks: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    shape = (num_layers, 2, num_blocks, KV_HEADS, BLOCK_SLOTS, HEAD_DIM)
    planes = torch.zeros(shape, dtype=dtype, device="cuda")
    return [(layer[0], layer[1]) for layer in planes]


def say(line: str) -> None:
    """To standard output, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench.decode_step", description="measure a model's step")
    parser.add_argument("--layers", type=int, default=36)
    arguments = parser.parse_args()
    backend, rate = CudaBackend(torch.device("cuda"), torch.bfloat16), copy_rate()
    say(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {rate / 1e9:.0f} GB/s")
    for num_rows, context in ((1, 512), (32, 576), (128, 576), (64, 4160)):
        say(measure_decode(backend, arguments.layers, rate, num_rows, context))
        torch.cuda.empty_cache()
    for num_tokens in (8192, 32768):
        say(measure_prefill(backend, arguments.layers, num_tokens))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
