"""The whole way, from a chat request to its answer, in either layout, and what is left behind: nothing."""

import json
import signal
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.mesh.support.meshes import Mesh, started
from tests.mesh.support.running import gone, open_pid, processes_with

QUESTION = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}


def ask(mesh: Mesh, path: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"{mesh.base_url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        found: dict[str, Any] = json.load(response)
        return found


def test_a_chat_is_answered_in_english(mesh: Mesh) -> None:
    answer = ask(mesh, "/v1/chat/completions", {**QUESTION, "max_tokens": 30})
    assert "Paris" in answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] == "stop"


def test_status_knows_every_process(mesh: Mesh) -> None:
    found = mesh.command("status", "--json")
    status = json.loads(found.stdout)
    assert found.returncode == 0
    assert status["ready"]
    assert set(status["processes"]) == {
        "router", "scheduler", "policy", "mover", "worker-0", "worker-1", "sentinel",
    }  # fmt: skip
    assert status["processes"]["scheduler"]["scheduler"]["layout"] == "LAYOUT_KIND_TP"


CUTS = [
    (3, "pp", "gloo"),
    *(pytest.param(*cut, marks=pytest.mark.slow) for cut in ((3, "pp", "shm"), (1, "tp", "shm"))),
]


@pytest.mark.parametrize(("num_ranks", "layout", "carrier"), CUTS)
def test_the_answer_is_the_same_however_the_model_is_cut(
    mesh: Mesh, tmp_path: Path, num_ranks: int, layout: str, carrier: str
) -> None:
    body = {**QUESTION, "max_tokens": 30}
    expected = ask(mesh, "/v1/chat/completions", body)["choices"]
    group = {"num_ranks": num_ranks, "layout": layout, "carrier": carrier}
    router = {"grpc_address": "127.0.0.1:0"}
    with started(tmp_path, group=group, router=router, policy={"mode": "manual"}) as other:
        assert ask(other, "/v1/chat/completions", body)["choices"] == expected
        told = other.status()["processes"]["router"]["router"]["grpc_address"]
        assert told == (other.state / "run" / "router.grpc").read_text().strip() != "127.0.0.1:0"


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_the_end_of_honcho_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path, policy={"mode": "manual"}) as mesh:
        pidfds = [open_pid(pid) for pid, _ in processes_with(str(mesh.config))]
        mesh.honcho.process.send_signal(number)
        assert [gone(pidfd) for pidfd in pidfds] == [True] * len(pidfds)
        assert not list((mesh.state / "run").glob("*.sock"))
        assert not [name for name in Path("/dev/shm").iterdir() if "flipmesh" in name.name]
