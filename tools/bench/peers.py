"""Other engines on the same weights, measured as the mesh is: `python -m tools.bench.peers ENGINE --model FILE`.

Each runs in a process of its own, so that neither its threads nor its memory meet another measurement. Engines are
optional: one that is not installed says so. Prints one JSON document: figures by name, each a list of samples.
"""

import argparse
import importlib
import importlib.util
import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.bench.mesh import DECODE_PROMPT_TOKENS, DECODE_TOKENS, PROMPT_LENGTHS, STREAM_COUNTS
from tools.load.http_load import prompt_ids

NOT_INSTALLED = 3
"""Exit code of an engine that is not here."""
CHUNK_TOKENS = 512
LLAMA_CPP_INSTALL = "CMAKE_ARGS=-DGGML_NATIVE=OFF pip install --no-binary llama-cpp-python llama-cpp-python"
"""A native build may use instructions that a virtual machine announces and does not have; it then ends in a signal."""

Figures = dict[str, list[float]]


def prefill_name(num_tokens: int) -> str:
    """How a figure is called, here and in the mesh's own table."""
    return f"prefill {num_tokens}"


def decode_name(num_streams: int) -> str:
    """How a figure is called, here and in the mesh's own table."""
    return f"decode, {num_streams} stream{'s' if num_streams > 1 else ''}"


def measure(prefill: Callable[[list[int]], None], decode: Callable[[int, int], float], repeat: int) -> Figures:
    """Samples of every figure, each after one that is thrown away. `decode(streams, tokens)` gives the seconds of all
    steps after the first.
    """
    figures: Figures = {}
    for num_tokens in PROMPT_LENGTHS:
        samples = [_rate(partial(prefill, prompt_ids(k, num_tokens)), num_tokens) for k in range(repeat + 1)]
        figures[prefill_name(num_tokens)] = samples[1:]
    for num_streams in STREAM_COUNTS:
        num_timed = (DECODE_TOKENS - 1) * num_streams
        samples = [num_timed / decode(num_streams, DECODE_TOKENS) for _ in range(repeat + 1)]
        figures[decode_name(num_streams)] = samples[1:]
    return figures


def _rate(work: Callable[[], None], num_tokens: int) -> float:
    began_s = time.perf_counter()
    work()
    return num_tokens / (time.perf_counter() - began_s)


def measure_transformers(model: Path, threads: int, repeat: int) -> Figures:
    """transformers in float32: what it makes of a GGUF file is dense."""
    import torch

    from tools.bench.transformers_llama import load_llama

    torch.set_num_threads(threads)
    loaded = load_llama(model)

    def prefill(ids: list[int]) -> None:
        with torch.inference_mode():
            int(loaded(torch.tensor([ids]), logits_to_keep=1).logits[0, -1].argmax())

    def decode(num_streams: int, num_tokens: int) -> float:
        prompts = torch.tensor([prompt_ids(stream, DECODE_PROMPT_TOKENS) for stream in range(num_streams)])
        with torch.inference_mode():
            out = loaded(prompts, use_cache=True, logits_to_keep=1)
            began_s = time.perf_counter()
            for _ in range(num_tokens - 1):
                following = out.logits[:, -1:].argmax(-1)
                out = loaded(following, past_key_values=out.past_key_values, use_cache=True)
            return time.perf_counter() - began_s

    return measure(prefill, decode, repeat)


def measure_llama_cpp(model: Path, threads: int, repeat: int) -> Figures:
    """llama.cpp through its own batches, so that several streams share a step."""
    llama_cpp: Any = importlib.import_module("llama_cpp")
    streams = max(STREAM_COUNTS)
    context, vocabulary = _llama_context(llama_cpp, model, threads, streams)
    batch = llama_cpp.llama_batch_init(CHUNK_TOKENS, 0, streams)

    def step(rows: list[tuple[int, int, int, bool]]) -> None:
        """One step over (id, position, stream, wants logits)."""
        batch.n_tokens = len(rows)
        for place, (token, position, stream, wants) in enumerate(rows):
            batch.token[place], batch.pos[place], batch.logits[place] = token, position, wants
            batch.n_seq_id[place], batch.seq_id[place][0] = 1, stream
        if code := llama_cpp.llama_decode(context, batch):
            raise RuntimeError(f"llama_decode returned {code} for {len(rows)} rows")

    def best(place: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, place)
        return max(range(vocabulary), key=logits[:vocabulary].__getitem__)

    def clear() -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)

    def prefill(ids: list[int]) -> None:
        clear()
        for begin in range(0, len(ids), CHUNK_TOKENS):
            part = ids[begin : begin + CHUNK_TOKENS]
            step([(token, begin + place, 0, begin + place == len(ids) - 1) for place, token in enumerate(part)])
        best(len(part) - 1)

    def decode(num_streams: int, num_tokens: int) -> float:
        clear()
        following = list(range(300, 300 + num_streams))
        for stream in range(num_streams):
            ids = prompt_ids(stream, DECODE_PROMPT_TOKENS)
            step([(token, place, stream, False) for place, token in enumerate(ids)])
        step([(token, DECODE_PROMPT_TOKENS, stream, True) for stream, token in enumerate(following)])
        began_s = time.perf_counter()
        for done in range(1, num_tokens):
            # Which token follows costs the engine nothing; choosing it in Python would be charged to it.
            rows = [
                ((token + done) % vocabulary, DECODE_PROMPT_TOKENS + done, stream, True)
                for stream, token in enumerate(following)
            ]
            step(rows)
            llama_cpp.llama_get_logits_ith(context, num_streams - 1)[0]
        return time.perf_counter() - began_s

    return measure(prefill, decode, repeat)


def _llama_context(llama_cpp: Any, model: Path, threads: int, streams: int) -> tuple[Any, int]:
    """A context with room for so many streams, and the size of the vocabulary.

    `llama_cpp.Llama` would drop the number of streams without a word and then refuse the second one's rows.
    """
    parameters = llama_cpp.llama_context_default_params()
    parameters.n_ctx = max(PROMPT_LENGTHS) + streams * (DECODE_PROMPT_TOKENS + DECODE_TOKENS)
    parameters.n_batch = parameters.n_ubatch = CHUNK_TOKENS
    parameters.n_threads = parameters.n_threads_batch = threads
    parameters.n_seq_max, parameters.kv_unified = streams, True
    llama_cpp.llama_backend_init()
    loaded = llama_cpp.llama_model_load_from_file(str(model).encode(), llama_cpp.llama_model_default_params())
    context = llama_cpp.llama_init_from_model(loaded, parameters)
    if not context:
        raise RuntimeError(f"llama.cpp made no context of {parameters.n_ctx} tokens for {model.name}: its log says why")
    return context, llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(loaded))


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its name for people, the modules without which it cannot open a GGUF file, and its measurement."""

    name: str
    needs: tuple[str, ...]
    install: str
    """The command that brings the modules."""
    measure: Callable[[Path, int, int], Figures]


ENGINES = {
    "llama_cpp": Engine("llama.cpp", ("llama_cpp",), LLAMA_CPP_INSTALL, measure_llama_cpp),
    "transformers": Engine(
        "transformers", ("transformers", "gguf", "torch"), "pip install transformers gguf torch", measure_transformers
    ),
}


def failure_text(engine: str, code: int, stderr: str) -> str:
    """Why there are no figures, in one line, with the next step where there is one."""
    peer = ENGINES[engine]
    if code == NOT_INSTALLED:
        return f"not installed (needs {', '.join(peer.needs)}): {peer.install}"
    if code < 0:
        return f"failed: ended by {signal.Signals(-code).name}; a build for another processor? {peer.install}"
    words = stderr.strip().splitlines()
    return f"failed: {words[-1] if words else f'exit {code}'}"


def main() -> int:
    """Measures one engine."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.peers", description="measure another engine")
    parser.add_argument("engine", choices=list(ENGINES))
    parser.add_argument("--model", type=Path, required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    engine = ENGINES[arguments.engine]
    if any(importlib.util.find_spec(module) is None for module in engine.needs):
        return NOT_INSTALLED
    print(json.dumps(engine.measure(arguments.model, arguments.threads, arguments.repeat)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
