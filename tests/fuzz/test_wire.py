"""Hostile bodies, calls and templates at a running router: it answers each, and a good request after every hundred."""

import asyncio
import secrets
from pathlib import Path
from random import Random

import grpc.aio
import pytest

from services.mesh.rpc import CHANNEL_OPTIONS
from services.router.text.renderer import ChatRenderer, RenderBounds
from services.router.text.templates import ChatRefusedError
from tests.fuzz.targets import draw_body, draw_generate
from tests.support.router_stand import ALPHABET, Stand, alphabet, stand

PATHS = ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize")
GENERATE = "/flipmesh.router.v1.InferenceService/GenerateText"
ANSWERS = {200, 400, 401, 404, 413, 415, 429}
CODES = {grpc.StatusCode[name] for name in ("OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "INTERNAL")}
few_and_many = pytest.mark.parametrize(
    ("first", "count"), [(0, 100), pytest.param(secrets.randbits(62), 3000, marks=pytest.mark.slow)]
)


async def is_well(at: Stand) -> None:
    answer = await at.complete(prompt="x", max_tokens=4)
    assert answer.json()["choices"][0]["text"] == ALPHABET[:4].decode()
    assert at.router.admission.receiving_bytes == at.router.admission.tokenising_chars == 0


@few_and_many
async def test_bodies(tmp_path: Path, first: int, count: int) -> None:
    async with stand(tmp_path, alphabet, max_request_bytes=1_000_000) as at:
        for seed in range(first, first + count):
            draw = Random(seed)
            path, body = draw.choice(PATHS), draw_body(draw, tmp_path)
            answer = await at.http.post(path, content=body, headers={"content-type": "application/json"})
            assert answer.status_code in ANSWERS, f"seed {seed}: {answer.status_code} {answer.text[:500]}"
            if seed % 100 == 0:
                await is_well(at)
        await is_well(at)


@few_and_many
async def test_calls(tmp_path: Path, first: int, count: int) -> None:
    async with stand(tmp_path, alphabet, tcp=True) as at:
        address = at.shell.paths.address("router", "grpc").read_text().strip()
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            generate: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(GENERATE)
            for seed in range(first, first + count):
                call = generate(draw_generate(Random(seed), tmp_path), timeout=10.0)
                async with asyncio.timeout(20):
                    code, details = await call.code(), await call.details() or ""
                # What is no message at all the library refuses in its own words.
                assert code in CODES or "DecodeError" in details, f"seed {seed}: {code} {details}"
                if seed % 100 == 0:
                    await is_well(at)
        await is_well(at)


PIECES = (
    "{% for i in range(99999) %}", "{% endfor %}", "{% set x = x ~ x %}", "{% set x = 'a' * 9999 %}", "{{ x }}",
    "{{ messages }}", "{% macro m(a) %}", "{% endmacro %}", "{{ m(m) }}", "{{ x + x }}", "{{ '%99999999d' % 1 }}",
    "{{ messages[0].content * 10 ** 9 }}", "{{ 9 ** 9 ** 9 }}", "{{ range(10 ** 18) | list }}", "{% if x %}",
    "{% endif %}", "{{ messages | tojson | length }}", "{% set ns = namespace(s='x') %}", "{{ x | batch(2) | list }}",
    "{{ [x] * 9999 }}", "{{ x.__class__ }}", "{{ cycler(1).next() }}", "{{ lipsum(n=99999) }}", "{{ x | wordwrap(1) }}",
)  # fmt: skip


@pytest.mark.parametrize(
    ("first", "count"),
    [(0, 6), pytest.param(secrets.randbits(62), 200, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
)
async def test_templates(first: int, count: int) -> None:
    """Each is a stranger's; whatever it does for one chat, the next one is rendered."""
    bounds = RenderBounds(processor_s=0.5, wall_s=60.0, memory_bytes=256 * 1024 * 1024)
    for seed in range(first, first + count):
        draw = Random(seed)
        pieces = "".join(draw.choice(PIECES) for _ in range(draw.randint(1, 8)))
        # Broken ones are left as they are; in the others a chat decides whether the pieces are run.
        template = "{% if messages[0].content == 'evil' %}" + pieces + "{% endif %}ok"
        renderer = ChatRenderer({"default": template}, {}, bounds=bounds)
        async with renderer.running():
            refused = False
            for content in ("evil", "good", "evil", "good"):
                try:
                    chat = await renderer.render([{"role": "user", "content": content}])
                    assert chat.text.endswith("ok"), f"seed {seed}"
                except ChatRefusedError as error:
                    is_broken = "cannot be used" in str(error) or refused
                    assert content == "evil" or is_broken, f"seed {seed}, {pieces}: {error}"
                    refused = "cannot be used" in str(error)
