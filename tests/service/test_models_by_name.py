"""Models by name, as people serve and add them: from the hub, MLflow, an object store, and a file."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from test_mlflow_deployments import logged

from checkpoints import language_checkpoint
from gguf_files import gguf_model
from hub_stand_in import TOKEN, HubStandIn, hub_stand_in
from llm_models import TEMPLATE, language_model
from nerite.cli.main import main
from object_store import BUCKET, KEYS, object_store
from serving import Serving, serving

Command = Callable[..., str]
HANDLER = """
import json, os

class Doubler:
    def initialize(self, context):
        self.factor = float(open(os.path.join(context.system_properties["model_dir"], "factor.txt")).read())
        self.name = context.manifest["model"]["modelName"]

    def handle(self, data, context):
        context.metrics.add_time("handled", 1)
        for number, each in enumerate(data):
            if each["body"] == b"bad":
                context.set_response_status(code=422, phrase="no number", idx=number)
        return [
            {"doubled": each["body"]["x"] * self.factor} if isinstance(each["body"], dict) else each["body"] * 2
            for each in data
        ]
"""


@pytest.fixture(scope="module")
def running() -> Iterator[HubStandIn]:
    with hub_stand_in() as hub:
        yield hub


@pytest.fixture
def hub(running: HubStandIn) -> HubStandIn:
    running.reset()
    return running


@pytest.fixture
def nerite(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs a command in this process, and returns all that it has printed."""

    def run(*arguments: str | Path, environment: Mapping[str, str], status: int = 0) -> str:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            capfd.readouterr()
            ended = main([str(argument) for argument in arguments])
            said = "".join(reversed(capfd.readouterr()))
        assert ended == status, said
        return said

    return run


def says(server: Serving, model: str) -> str:
    """Return the answer of a chat model."""
    said = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "temperature": 0}
    status, _, body = server.ask("POST", "/v1/chat/completions", said)
    assert status == 200, body
    return str(json.loads(body)["choices"][0]["message"]["content"])


def openvino_files(folder: Path) -> Path:
    """Write a chat model as it is published for OpenVINO."""
    language_model(folder, context=1000)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "eos_token": "</s>"}))
    return folder


def test_a_chat_model_of_the_hub(hub: HubStandIn, tmp_path: Path, nerite: Command) -> None:
    commit = hub.publish("tiny/chat-0.1B-ov", openvino_files(tmp_path / "files"), licence="mit")
    hub.gated = {"tiny/chat-0.1B-ov"}
    environment = hub.environment(tmp_path / "home", TOKEN)
    with serving("tiny/chat-0.1B-ov", tmp_path / "log", environment=environment) as server:
        assert f"nerite: hf:tiny/chat-0.1B-ov@{commit}: " in server.text
        assert "to download; licence: mit" in server.text
        assert "nerite: downloaded 'tiny/chat-0.1B-ov': " in server.text
        assert says(server, "tiny/chat-0.1B-ov") == says(server, "chat-0.1B-ov") != ""
        names = {each["id"] for each in server.json("GET", "/v1/models")["data"]}
        assert names == {"tiny/chat-0.1B-ov", "chat-0.1B-ov"}
        removal = nerite("downloads", "rm", "tiny/chat-0.1B-ov", environment=environment, status=1)
        assert "is not removed: a server uses it" in removal
        assert TOKEN not in server.text
    assert "0 bytes" not in (listed := nerite("downloads", "ls", environment=environment))
    assert "tiny/chat-0.1B-ov" in listed
    assert "removed hf:tiny/chat-0.1B-ov: " in nerite("downloads", "rm", "tiny/chat-0.1B-ov", environment=environment)
    assert "No models in" in nerite("downloads", "ls", environment=environment)


def test_a_checkpoint_of_the_hub_is_converted_and_served(hub: HubStandIn, tmp_path: Path) -> None:
    hub.publish("tiny/llama", language_checkpoint(tmp_path / "files"))
    flag = f"--environment-directory={tmp_path / 'kept'}"
    with serving("tiny/llama", tmp_path / "log", flag, environment=hub.environment(tmp_path / "home")) as server:
        says(server, "tiny/llama")
        assert "converting '" in server.text


def test_a_gguf_file(hub: HubStandIn, tmp_path: Path, nerite: Command) -> None:
    file = gguf_model(tmp_path / "tiny.gguf")
    flag = f"--environment-directory={tmp_path / 'kept'}"
    with serving(file, tmp_path / "log", flag) as server:
        assert says(server, "tiny") != ""
        assert "it reads GGUF files" in server.text
        assert "has no chat template" not in server.text
    hub.publish("tiny/llama-GGUF", {"tiny-Q8_0.gguf": file.read_bytes(), "tiny-F16.gguf": file.read_bytes()})
    environment = hub.environment(tmp_path / "home")
    refused = nerite("serve", "hf:tiny/llama-GGUF", environment=environment, status=1)
    assert "has 2 GGUF files. Name one:\n    hf:tiny/llama-GGUF/tiny-Q8_0.gguf" in refused
    models = tmp_path / "models"
    said = nerite("add", "hf:tiny/llama-GGUF/tiny-F16.gguf", "--no-load", environment={
        **environment, "NERITE_MODEL_REPOSITORY": str(models)})  # fmt: skip
    assert "GGUF model (llama)" in said
    config = (models / "tiny-F16" / "config.pbtxt").read_text()
    assert (
        f"added by nerite add from hf:tiny/llama-GGUF/tiny-F16.gguf@{hub.models['tiny/llama-GGUF']['main'].commit}"
        in (config)
    )
    assert json.loads((models / "tiny-F16" / "1" / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE


def test_an_onnx_model_of_the_hub_is_added(hub: HubStandIn, tmp_path: Path, nerite: Command) -> None:
    source = logged(tmp_path / "logged", 3) / "model.onnx"
    commit = hub.publish("org/net", {"onnx/model.onnx": source.read_bytes(), "README.md": b"x"}, licence="bsd-3-clause")
    environment = {**hub.environment(tmp_path / "home"), "NERITE_MODEL_REPOSITORY": str(tmp_path / "models")}
    said = nerite("add", "hf:org/net", "--no-measure", environment=environment)
    assert "licence: bsd-3-clause" in said
    assert f"hf:org/net@{commit}: ONNX model" in said
    assert "Added as model 'net', version 1" in said
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert server.infer("net", [1.0, 2.0], "x") == [3.0, 6.0]
    text = (tmp_path / "models" / "net" / "config.pbtxt").read_text()
    assert text.startswith(f"# ONNX model, added by nerite add from hf:org/net@{commit}.")
    again = nerite("add", "org/net", "--no-measure", "--offline", "--name", "twin", environment=environment)
    assert "Added as model 'twin'" in again
    nowhere = nerite("add", "hf:org/other", "--offline", environment=environment, status=1)
    assert "'hf:org/other' is not on this machine, and downloads are off" in nowhere


def test_a_name_that_is_nothing(hub: HubStandIn, tmp_path: Path, nerite: Command) -> None:
    environment = hub.environment(tmp_path / "home")
    refused = nerite("serve", "org/nothing", environment=environment, status=1)
    assert f"nerite serve: there is no model 'org/nothing' on {hub.url}" in refused
    hub.publish("org/pickled", {"pytorch_model.bin": b"x", "config.json": b"{}"})
    pickled = nerite("serve", "org/pickled", environment=environment, status=1)
    assert "only as pickles" in pickled
    assert hub.downloads == []


def test_a_model_of_mlflow(tmp_path: Path, nerite: Command) -> None:
    source = logged(tmp_path / "logged", 2)
    with serving(f"mlflow:{source}", tmp_path / "log") as server:
        assert server.infer("logged", [1.0, 2.0], "x") == [2.0, 4.0]
    repository = {"NERITE_MODEL_REPOSITORY": str(tmp_path / "models")}
    assert "Added as model 'logged'" in nerite("add", f"mlflow:{source}", "--no-load", environment=repository)
    missing = nerite("add", f"mlflow:{tmp_path}/nothing", environment=repository, status=1)
    assert "nerite add: " in missing


def test_a_model_in_an_object_store(tmp_path: Path, nerite: Command) -> None:
    source = logged(tmp_path / "logged", 2)
    with object_store() as store:
        store.put("trained/net.onnx", (source / "model.onnx").read_bytes())
        for path in source.iterdir():
            store.put(f"trained/run/{path.name}", path.read_bytes())
        environment = {**KEYS, "XDG_CACHE_HOME": str(tmp_path), "NERITE_MODEL_REPOSITORY": str(tmp_path / "models")}
        place = f"s3://{store.url}/{BUCKET}/trained"
        assert "Added as model 'net'" in nerite("add", f"{place}/net.onnx", "--no-load", environment=environment)
        assert "Added as model 'run'" in nerite("add", f"{place}/run", "--no-load", environment=environment)
        again = nerite("add", f"{place}/net.onnx", "--no-load", "--name", "b", environment=environment)
        assert "Added as model 'b'" in again
        assert store.downloads.count("trained/net.onnx") == 1
        missing = nerite("add", f"{place}/other.onnx", environment=environment, status=1)
        assert f"there is no object '{place}/other.onnx'" in missing
    assert f"from {place}/net.onnx." in (tmp_path / "models" / "net" / "config.pbtxt").read_text()
    assert sorted(path.name for path in (tmp_path / "models").iterdir()) == ["b", "net", "run"]


def test_an_archive_of_torchserve(tmp_path: Path, nerite: Command) -> None:
    manifest = {
        "runtime": "python",
        "model": {"modelName": "doubler", "handler": "doubler.py", "modelVersion": "1.0"},
        "archiverVersion": "0.12.0",
    }
    archive = tmp_path / "doubler.mar"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("MAR-INF/MANIFEST.json", json.dumps(manifest))
        file.writestr("doubler.py", HANDLER)
        file.writestr("factor.txt", "2")
    refused = nerite("serve", archive, environment={}, status=1)
    assert "it contains code, the handler 'doubler.py'" in refused
    with serving(archive, tmp_path / "log", "--trust") as server:
        assert server.infer("doubler", ["ab"], "body", "BYTES") == ["abab"]
        tensor = {"name": "body", "shape": [2, 1], "datatype": "BYTES", "data": ['{"x": 3}', '{"x": 4}']}
        request = {"inputs": [tensor], "parameters": {"content_type": "application/json"}}
        answer = server.json("POST", "/v2/models/doubler/infer", request)
        assert [json.loads(each) for each in answer["outputs"][0]["data"]] == [{"doubled": 6.0}, {"doubled": 8.0}]
        tensor = {"name": "body", "shape": [1, 1], "datatype": "BYTES", "data": ["bad"]}
        status, _, body = server.ask("POST", "/v2/models/doubler/infer", {"inputs": [tensor]})
        assert status != 200
        assert b"status 422 no number" in body
