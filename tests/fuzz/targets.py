"""What is fuzzed within one process: each target draws an input and reads it; only its refusals may come out."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from flipmesh.router.v1 import inference_service_pb2
from flipmesh.scheduler.v1 import scheduler_service_pb2
from flipmesh.worker.v1 import worker_service_pb2
from google.protobuf.message import DecodeError, Message

from services.core.errors import ConfigurationError
from services.mesh.codec import flip, scheduler, worker
from services.mesh.codec.common import CodecError
from services.models.model_files import open_model
from services.router.grpc_requests import parse_generate
from services.router.http.body import decode
from services.router.openai.refusal import RefusalError
from services.router.openai.requests import parse_chat, parse_completion
from services.router.openai.text_requests import parse_detokenize, parse_tokenize
from services.router.openai.wanted import RequestBounds
from services.router.text.tokens import open_tokens
from tests.fuzz.mutations import VALUES, as_json, changed, damaged, filled
from tests.support.gguf_bytes import GgufBytes
from tests.support.small_model import METADATA, gguf_tensors

BOUNDS = RequestBounds(vocabulary_size=258, max_context_tokens=512)
CODECS: tuple[tuple[type[Message], Callable[[Any], object]], ...] = (
    (worker_service_pb2.ExecuteStepsRequest, worker.entry_from_proto),
    (worker_service_pb2.StepReport, worker.report_from_proto),
    (scheduler_service_pb2.SubmitRequest, scheduler.submission_from_proto),
    (scheduler_service_pb2.RequestEvent, scheduler.event_from_proto),
    (worker_service_pb2.JoinFlipRequest, flip.command_from_proto),
    (worker_service_pb2.JoinFlipResponse, flip.event_from_proto),
)


@dataclass(frozen=True)
class Target:
    """`draw(random, base)` makes an input, `read(input, folder)` reads it; `base` has good files, `folder` is empty."""

    draw: Callable[[Random, Path], bytes]
    read: Callable[[bytes, Path], object]
    refusals: tuple[type[Exception], ...]


def _draw_gguf(draw: Random, base: Path) -> bytes:
    tokens = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "ab"],
        "tokenizer.ggml.merges": ["a b"],
    }
    metadata: dict[str, object] = {**METADATA, **tokens}
    if draw.random() < 0.5:
        return damaged(draw, GgufBytes(metadata, gguf_tensors()).build())
    entries = [value for value in VALUES if isinstance(value, str | bool) or value in (0.5, [])]
    numbers = [value for value in VALUES if type(value) is int and 0 <= value < 2**32]
    for _ in range(draw.randint(1, 3)):
        metadata[draw.choice(list(metadata))] = draw.choice([*entries, *numbers])
    return GgufBytes(metadata, gguf_tensors()).build()


def _read_gguf(raw: bytes, folder: Path) -> object:
    path = folder / "m.gguf"
    path.write_bytes(raw)
    model = open_model(path)
    assert all(place.file_index == 0 for place in model.tensors.values())
    return open_tokens(model)


def _folder_target(name: str) -> Target:
    """One file of a safetensors directory is drawn, the others are good."""

    def draw_file(draw: Random, base: Path) -> bytes:
        raw = (base / name).read_bytes()
        if name.endswith(".json"):
            return as_json(draw, changed(draw, json.loads(raw)))
        size = int.from_bytes(raw[:8], "little")
        if draw.random() < 0.5:
            return damaged(draw, raw[: 8 + size]) + raw[8 + size :]
        header = as_json(draw, changed(draw, json.loads(raw[8 : 8 + size])))
        return len(header).to_bytes(8, "little") + header + raw[8 + size :]

    def read(raw: bytes, folder: Path) -> object:
        (folder / name).unlink()
        (folder / name).write_bytes(raw)
        return open_model(folder)

    return Target(draw_file, read, (ConfigurationError,))


def _bodies() -> list[dict[str, Any]]:
    message = {
        "role": "user",
        "content": [{"type": "text", "text": "x"}],
        "tool_calls": [{"function": {"arguments": "{}"}}],
    }
    common = {
        "model": "scripted",
        "n": 1,
        "stop": ["a"],
        "logit_bias": {"1": 1.0},
        "max_tokens": 2,
        "seed": 1,
        "top_p": 1.0,
    }
    return [
        {**common, "messages": [message, {"role": "assistant", "content": "y"}], "top_logprobs": 1, "logprobs": True},
        {**common, "prompt": ["a", "b"], "echo": True, "stream": True, "stream_options": {"include_usage": True}},
        {"prompt": "x", "add_special_tokens": True},
        {"tokens": [1, 2]},
    ]


def draw_body(draw: Random, base: Path) -> bytes:
    return as_json(draw, changed(draw, draw.choice(_bodies())))


def _read_body(raw: bytes, folder: Path) -> None:
    document = decode(raw, 1024)
    parsers: tuple[Callable[[object], object], ...] = (
        lambda value: parse_chat(value, BOUNDS),
        lambda value: parse_completion(value, BOUNDS),
        parse_tokenize,
        lambda value: parse_detokenize(value, BOUNDS),
    )
    for parse in parsers:
        try:
            parse(document)
        except RefusalError as error:
            assert len(str(error.body())) < 8192


def draw_generate(draw: Random, base: Path) -> bytes:
    raw = filled(draw, inference_service_pb2.GenerateTextRequest()).SerializeToString()
    return damaged(draw, raw) if draw.random() < 0.3 else raw


def _draw_codec(draw: Random, base: Path) -> bytes:
    index = draw.randrange(len(CODECS))
    raw = filled(draw, CODECS[index][0]()).SerializeToString()
    return bytes([index]) + (damaged(draw, raw) if draw.random() < 0.3 else raw)


def _read_codec(raw: bytes, folder: Path) -> object:
    kind, read = CODECS[raw[0] % len(CODECS)] if raw else CODECS[0]
    message = kind()
    message.ParseFromString(raw[1:])
    return read(message)


def _read_generate(raw: bytes, folder: Path) -> object:
    return parse_generate(inference_service_pb2.GenerateTextRequest.FromString(raw), BOUNDS)


def _read_stuck(raw: bytes, folder: Path) -> object:
    """For the harness alone: what each kind of fault looks like."""
    match raw[:1]:
        case b"t":
            while True:
                pass
        case b"m":
            return bytearray(2**40)
        case b"e":
            raise KeyError("unexpected")
        case b"k":
            import os

            os.kill(os.getpid(), 11)
        case b"r":
            raise ConfigurationError("refused")
    return None


TARGETS = {
    "gguf": Target(_draw_gguf, _read_gguf, (ConfigurationError,)),
    "safetensors": _folder_target("model.safetensors"),
    "index": _folder_target("model.safetensors.index.json"),
    "config": _folder_target("config.json"),
    "body": Target(draw_body, _read_body, (RefusalError,)),
    "generate": Target(draw_generate, _read_generate, (RefusalError, DecodeError)),
    "codec": Target(_draw_codec, _read_codec, (CodecError, DecodeError)),
    "stuck": Target(
        lambda draw, base: draw.choice((b"", b"r", b"t", b"m", b"e", b"k")), _read_stuck, (ConfigurationError,)
    ),
}
