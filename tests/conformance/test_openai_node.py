"""OpenAI's client for Node with a language model on its real engine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from llm_models import language_model
from serving import Serving, eventually, serving
from tools import install_node_packages

NODE = Path(__file__).parent / "node"
PATIENCE = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("node")
    language_model(folder / "models" / "chat" / "1", context=1000)
    with serving(folder / "models", folder / "log") as running:
        yield running


@pytest.mark.timeout(240)
def test_openai_for_node(server: Serving) -> None:
    install_node_packages(NODE)
    done = subprocess.run(
        ["node", NODE / "openai.mjs", f"http://{server.http}/v1", "chat"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert got["ids"] == ["chat"]
    assert (got["whole"]["role"], got["whole"]["reason"]) == ("assistant", "length")
    assert got["whole"]["usage"]["completion_tokens"] == 8
    assert got["several"] == [[0, 8], [1, 8], [2, 8], [3, 8]]
    assert (got["streamed"]["text"], got["streamed"]["reason"]) == (got["whole"]["content"], "length")
    assert got["streamed"]["usage"] == got["whole"]["usage"]
    assert got["left"] == 3
    assert got["unknown"] == {"kind": "NotFoundError", "status": 404, "code": "model_not_found", "param": "model"}
    assert (got["wrong"]["kind"], got["wrong"]["param"]) == ("BadRequestError", "temperature")
    assert got["long"]["kind"] == "BadRequestError"
    eventually(lambda: told(server, "vllm:num_requests_running") == 0)


def told(server: Serving, name: str) -> float:
    """Return the only value of a metric."""
    [value] = [value for labelled, value in server.metrics().items() if labelled.partition("{")[0] == name]
    return value
