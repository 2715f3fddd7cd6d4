"""TensorRT-LLM behind a server: what verifies the engine on a machine with a GPU; and what is said without one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import serving
from checkpoints import language_checkpoint
from nerite.backends.python.environments import environments_folder
from nerite.llm import installation
from nerite.observability.gpus import driver_is_loaded

CONFIG = """
backend: "tensorrt_llm"
instance_group [ { kind: KIND_MODEL } ]
parameters { key: "KV_CACHE_GB" value { string_value: "1" } }
"""
FEW = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not driver_is_loaded() or installation.found(installation.TENSORRT_LLM, environments_folder()) is None,
    reason="there is no GPU, or TensorRT-LLM is not installed: nerite engines install tensorrt-llm",
)
def test_it_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "PATIENCE", 800)
    language_checkpoint(tmp_path / "models" / "chat" / "1")
    (tmp_path / "models" / "chat" / "config.pbtxt").write_text(CONFIG)
    with serving.serving(tmp_path / "models", tmp_path / "log") as server:
        asked = {"text_input": "once", "parameters": FEW, "exclude_input_in_output": True}
        status, _, body = server.ask("POST", "/v2/models/chat/generate", asked)
        assert status == 200, body
        whole = json.loads(body)["text_output"]
        status, _, body = server.ask("POST", "/v2/models/chat/generate_stream", {**asked, "stream": True})
        lines = [line for line in body.decode().splitlines() if line.startswith("data: ")]
        assert len(lines) > 3
        assert "".join(json.loads(line[6:])["text_output"] for line in lines) == whole
        status, _, body = server.ask(
            "POST", "/v2/models/chat/generate", {**asked, "parameters": {**FEW, "logprobs": 3}}
        )
        assert (status, "reports the probability of the chosen token only" in json.loads(body)["error"]) == (400, True)


@pytest.mark.skipif(driver_is_loaded(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path) -> None:
    language_checkpoint(tmp_path / "models" / "chat" / "1")
    (tmp_path / "models" / "chat" / "config.pbtxt").write_text(CONFIG)
    with serving.serving(tmp_path / "models", tmp_path / "log", "--exit-on-error=false") as server:
        (entry,) = server.json("POST", "/v2/repository/index")
        assert entry["state"] == "UNAVAILABLE"
        assert "the engine tensorrt_llm needs an NVIDIA GPU, but this machine has no NVIDIA driver" in entry["reason"]
