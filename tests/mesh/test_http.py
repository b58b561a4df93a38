"""The HTTP front of a real mesh with the real model, as clients and operators meet it."""

import asyncio
import json
import os
import signal
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.mesh.support.meshes import Mesh, started

MODEL = "SmolLM2-135M-Instruct"
QUESTION = [{"role": "user", "content": "Count from one to five."}]
WAIT_S = 60.0


def chat(**body: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": QUESTION, "temperature": 0, **body}


def post(mesh: Mesh, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{mesh.base_url}{path}", json=body, timeout=WAIT_S)


def test_streamed_and_whole_answers_are_equal(mesh: Mesh) -> None:
    """P2.6"""
    with openai.OpenAI(base_url=f"{mesh.base_url}/v1", api_key="any", max_retries=0) as client:
        whole = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0, max_tokens=24)  # type: ignore[arg-type]
        stream = client.chat.completions.create(
            model=MODEL,
            messages=QUESTION,  # type: ignore[arg-type]
            temperature=0,
            max_tokens=24,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_greedy_logprobs_name_the_token_that_was_taken(mesh: Mesh) -> None:
    answer = post(mesh, "/v1/chat/completions", chat(max_tokens=6, logprobs=True, top_logprobs=3)).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == answer["usage"]["completion_tokens"]
    assert all(item["token"] == item["top_logprobs"][0]["token"] for item in content)
    assert all(item["logprob"] <= 0 for item in content)


def test_a_stop_string_of_the_models_own_words(mesh: Mesh) -> None:
    """P2.1"""
    whole = post(mesh, "/v1/completions", {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20}).json()
    text = whole["choices"][0]["text"]
    stop = text[8:16]
    body = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20, "stop": stop}
    cut = post(mesh, "/v1/completions", body).json()
    assert cut["choices"][0]["text"] == text[: text.find(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] < whole["usage"]["completion_tokens"]


def test_seeds_decide_and_absent_seeds_differ(mesh: Mesh) -> None:
    """P2.30"""
    body = chat(temperature=1.5, max_tokens=12)
    fixed = [post(mesh, "/v1/chat/completions", {**body, "seed": 11}).json()["choices"] for _ in range(2)]
    assert fixed[0] == fixed[1]
    drawn = post(mesh, "/v1/chat/completions", {**body, "n": 4}).json()["choices"]
    assert len({choice["message"]["content"] for choice in drawn}) > 1


def test_edges_leave_the_mesh_well(mesh: Mesh) -> None:
    """P2.11, P2.12, P2.13, P2.19"""
    for body in (
        {"prompt": [""]},
        {"prompt": [[]]},
        {"prompt": [[1, 99999999]]},
        {"prompt": "x", "logit_bias": {"99999999": 5}},
        {"prompt": "x", "max_tokens": -1},
        {"prompt": "word " * 20_000},
    ):
        answer = post(mesh, "/v1/completions", body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"]
    assert post(mesh, "/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200
    assert httpx.get(f"{mesh.base_url}/health").status_code == 200


def test_the_page_of_metrics_has_every_process(mesh: Mesh) -> None:
    """P5.14"""
    post(mesh, "/v1/completions", {"prompt": "x", "max_tokens": 2})
    page = httpx.get(f"{mesh.base_url}/metrics")
    assert page.status_code == 200
    for service in ("router", "scheduler", "worker"):
        assert f'service="{service}"' in page.text


@pytest.mark.parametrize("stream", [True, False])
async def test_closing_the_connection_frees_its_place(mesh: Mesh, stream: bool) -> None:
    """P2.17"""

    def num_resident() -> int:
        scheduler = mesh.status()["processes"]["scheduler"]["scheduler"]
        return int(scheduler.get("num_resident_requests", 0)) + int(scheduler.get("num_queued_requests", 0))

    async def until(count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while await asyncio.to_thread(num_resident) != count:
                pass

    async with httpx.AsyncClient(base_url=mesh.base_url, timeout=WAIT_S) as http:
        body = chat(max_tokens=4000, ignore_eos=True, stream=stream)
        asked = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await until(1)
        asked.cancel()
        await until(0)


@pytest.mark.slow
def test_a_killed_scheduler_is_not_seen_by_the_client(tmp_path: Path) -> None:
    """P1.10, P2.25"""
    body = chat(max_tokens=60, ignore_eos=True, stream=True)
    with started(tmp_path, policy={"mode": "manual"}) as mesh:
        expected = post(mesh, "/v1/chat/completions", {**body, "stream": False}).json()["choices"][0]
        with httpx.stream("POST", f"{mesh.base_url}/v1/chat/completions", json=body, timeout=WAIT_S) as answer:
            text, reasons = "", []
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                choice = event["choices"][0]
                if not text and choice["delta"].get("content"):
                    os.kill(mesh.pid("scheduler"), signal.SIGKILL)
                text += choice["delta"].get("content") or ""
                reasons.append(choice["finish_reason"])
        assert text == expected["message"]["content"]
        assert [reason for reason in reasons if reason] == ["length"]
        mesh.wait_ready()
