"""LoRA adapters that are loaded into a running model, on a stand-in for vLLM, which says the name of the adapter."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llm_models import language_model
from pages import ROOT, Page, run
from serving import Serving, eventually, serving

PLACES = [str(ROOT / "tests" / "stand_ins" / "vllm"), os.environ.get("PYTHONPATH", "")]
STAND_IN = {"PYTHONPATH": os.pathsep.join(place for place in PLACES if place)}
HAND = ("--model-control-mode=explicit", "--load-model=*")
CONFIG = 'backend: "vllm"\n'


def repository(folder: Path, *names: str) -> Path:
    """Write models that take adapters, and an adapter beside their files."""
    models = folder / "models"
    for name in names:
        adapter = models / name / "1" / "adapters" / "poet"
        adapter.mkdir(parents=True)
        (models / name / "config.pbtxt").write_text(CONFIG)
        (models / name / "1" / "model.json").write_text(
            json.dumps({"model": "m", "enable_lora": True, "mortal": False})
        )
        (adapter / "adapter_config.json").write_text('{"r": 4}')
        (adapter / "adapter_model.safetensors").write_bytes(b"")
    return models


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("adapters")
    models = repository(folder, "base")
    language_model(models / "plain" / "1")
    with serving(models, folder / "log", *HAND, environment=STAND_IN) as running:
        yield running


def change(server: Serving, verb: str, name: str = "poet", **said: Any) -> tuple[int, str]:
    status, _, body = server.ask("POST", f"/v1/{verb}_lora_adapter", {"lora_name": name, **said})
    return status, body.decode()


def load(server: Serving, name: str = "poet", path: str = "adapters/poet", **said: Any) -> tuple[int, str]:
    return change(server, "load", name, lora_path=path, **said)


def said_by(server: Serving, model: str) -> tuple[int, str]:
    status, _, body = server.ask("POST", "/v1/completions", {"model": model, "prompt": "once", "max_tokens": 4})
    answer = json.loads(body)
    return status, answer["choices"][0]["text"] if status == 200 else answer["error"]["message"]


def names(server: Serving) -> dict[str, str]:
    return {each["id"]: each.get("parent", "") for each in server.json("GET", "/v1/models")["data"]}


def test_an_adapter_comes_and_goes(server: Serving) -> None:
    assert said_by(server, "poet")[0] == 404
    assert load(server, model="base") == (200, "Success: LoRA adapter 'poet' added successfully.")
    assert names(server) == {"base": "", "plain": "", "poet": "base"}
    assert (said_by(server, "poet"), said_by(server, "base")) == ((200, "poet"), (200, "abcd"))
    status, text = load(server, model="base")
    assert (status, "has already been loaded" in text) == (400, True)
    assert change(server, "unload") == (200, "Success: LoRA adapter 'poet' removed successfully.")
    assert said_by(server, "poet")[0] == 404
    assert names(server) == {"base": "", "plain": ""}
    assert change(server, "unload")[0] == 404


@pytest.mark.parametrize(
    ("said", "param", "text"),
    [
        ({"path": "adapters/novelist", "model": "base"}, "lora_path", "a directory of the server with a file"),
        ({"path": "", "model": "base"}, "lora_path", "Expected text"),
        ({"name": ""}, "lora_name", "Expected text"),
        ({"name": "plain", "model": "base"}, "lora_name", "has already been loaded"),
        ({}, "model", "Name the 'model' for the adapter. Language models: base, plain."),
        ({"model": "bass"}, "model", "Unknown model: bass. Did you mean 'base'?"),
        ({"model": "base", "rank": 4}, "rank", "Unknown parameter: 'rank'"),
    ],
)
def test_what_is_refused(server: Serving, said: dict[str, Any], param: str, text: str) -> None:
    status, body = load(server, **said)
    error = json.loads(body)["error"]
    assert (status, error["param"]) == (404 if text.startswith("Unknown model") else 400, param)
    assert text in error["message"]


def test_an_engine_that_takes_none_says_so(server: Serving) -> None:
    path = str(Path(server.log).parent / "models" / "base" / "1" / "adapters" / "poet")
    status, body = load(server, path=path, model="plain")
    assert status == 400
    assert "the engine openvino_genai has the LoRA adapter that its model was loaded with" in body


def test_a_worker_that_restarts_has_it_again(tmp_path: Path) -> None:
    with serving(repository(tmp_path, "base"), tmp_path / "log", *HAND, environment=STAND_IN) as server:
        assert load(server)[0] == 200
        (worker,) = [pid for name, pid in server.workers().items() if name.startswith("base")]
        os.kill(worker, signal.SIGKILL)
        eventually(lambda: "runs again" in server.text)
        assert said_by(server, "poet") == (200, "poet")


def test_front_processes_know_it_when_it_is_loaded(tmp_path: Path) -> None:
    flags = [*HAND, "--front-processes=2"]
    page = Page("docs/llm.md")
    with serving(repository(tmp_path, "base"), tmp_path / "log", *flags, environment=STAND_IN) as server:
        assert "added successfully" in run(page.block('"lora_path": "adapters/poet"'), server)
        assert {said_by(server, "poet") for _ in range(8)} == {(200, "poet")}
        assert "removed successfully" in run(page.block("/v1/unload_lora_adapter"), server)
        assert {said_by(server, "poet")[0] for _ in range(8)} == {404}


def test_only_where_models_are_controlled_by_hand_and_with_the_key(tmp_path: Path) -> None:
    models = repository(tmp_path, "base")
    lock = "--http-restricted-api=model-repository:admin-key=secret"
    with serving(models, tmp_path / "log", lock, environment=STAND_IN) as server:
        assert load(server)[0] == 401
        asked = {"lora_name": "poet", "lora_path": "adapters/poet"}
        status, _, body = server.ask("POST", "/v1/load_lora_adapter", asked, admin_key="secret")
        assert (status, json.loads(body)["error"]["code"]) == (400, "model_control_mode")
