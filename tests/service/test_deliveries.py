"""Loads that bring a configuration or files along, and what the index says of what is served."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serving import IDENTITY, Serving, eventually, pbtxt, python_model, serving

CONFIG = {
    "backend": "python",
    "max_batch_size": 3,
    "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
    "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [-1]}],
}
NEGATIVE = IDENTITY.replace(".as_numpy()", ".as_numpy() * -1")


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the server keeps what is sent to it."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return folder


@pytest.fixture
def server(tmp_path: Path, places: Path) -> Iterator[Serving]:
    python_model(tmp_path / "models", "m", IDENTITY)
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit", "--load-model=m") as running:
        yield running


def load(server: Serving, model: str, **parameters: str) -> tuple[int, Any]:
    body = {"parameters": parameters} if parameters else b""
    status, _, answer = server.ask("POST", f"/v2/repository/models/{model}/load", body)
    return status, json.loads(answer)["error"] if answer else ""


def source(folder: Path, code: str) -> str:
    return base64.b64encode((python_model(folder, "source", code) / "1" / "model.py").read_bytes()).decode()


def delivered(places: Path) -> list[Path]:
    return list(places.glob("nerite-model-*"))


def content(server: Serving, model: str) -> list[str]:
    entries = server.json("POST", "/v2/repository/index")
    return [entry["content_hash"] for entry in entries if entry["name"] == model and "content_hash" in entry]


def test_a_configuration(server: Serving) -> None:
    assert load(server, "m", config=json.dumps(CONFIG)) == (200, "")
    assert server.json("GET", "/v2/models/m/config")["max_batch_size"] == 3
    assert server.infer("m", [1.0]) == [1.0]
    assert load(server, "m") == (200, "")
    assert server.json("GET", "/v2/models/m/config")["max_batch_size"] == 8


def test_files_and_then_what_the_repository_has(server: Serving, places: Path, tmp_path: Path) -> None:
    code = source(tmp_path, NEGATIVE)
    assert load(server, "m", **{"config": json.dumps(CONFIG), "file:1/model.py": code}) == (200, "")
    assert server.infer("m", [1.0]) == [-1.0]
    assert len(delivered(places)) == 1
    assert load(server, "m") == (200, "")
    assert server.infer("m", [1.0]) == [1.0]
    eventually(lambda: not delivered(places))


def test_a_model_that_no_repository_has(server: Serving, places: Path, tmp_path: Path) -> None:
    parameters = {"config": json.dumps(CONFIG), "file:1/model.py": source(tmp_path, NEGATIVE)}
    parameters["file:2/model.py"] = source(tmp_path, IDENTITY)
    parameters["config"] = json.dumps(CONFIG | {"version_policy": {"all": {}}})
    assert load(server, "sent", **parameters) == (200, "")
    assert server.infer("sent", [1.0]) == [1.0]
    assert server.infer("sent/versions/1", [1.0]) == [-1.0]
    status, error = load(server, "sent")
    assert (status, error) == (500, "failed to load 'sent', failed to poll from model repository")
    assert server.infer("sent", [1.0]) == [1.0]
    assert server.ask("POST", "/v2/repository/models/sent/unload")[0] == 200
    eventually(lambda: not delivered(places))


def test_files_that_do_not_load(server: Serving, places: Path) -> None:
    code = base64.b64encode(b"raise RuntimeError('no')").decode()
    status, error = load(server, "m", **{"config": json.dumps(CONFIG), "file:1/model.py": code})
    assert status == 400
    assert "RuntimeError: no" in error
    assert server.infer("m", [1.0]) == [1.0]
    eventually(lambda: not delivered(places))


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"file:1/model.py": ""}, "Load parameter 'config' must be specified for model file override"),
        (
            {"config": "{}", "file:../../x": ""},
            "Invalid file parameter 'file:../../x' with normalized path '../../x' must stay within model directory.",
        ),
        ({"config": "{"}, "Invalid config override"),
        ({"config": '{"max_batch": 3}'}, "max_batch_size"),
    ],
)
def test_what_cannot_be_loaded(server: Serving, places: Path, parameters: dict[str, str], words: str) -> None:
    status, error = load(server, "m", **parameters)
    assert status == 500
    assert error.startswith("failed to load 'm', failed to poll from model repository\n")
    assert words in error
    assert server.infer("m", [1.0]) == [1.0]
    assert not delivered(places)


def test_what_is_left_when_the_server_ends(tmp_path: Path, places: Path) -> None:
    python_model(tmp_path / "models", "m", IDENTITY)
    with serving(tmp_path / "models", tmp_path / "log", "--model-control-mode=explicit") as server:
        parameters = {"config": json.dumps(CONFIG), "file:1/model.py": source(tmp_path, NEGATIVE)}
        assert load(server, "sent", **parameters) == (200, "")
    assert not delivered(places)


def test_the_hash_of_what_is_served(server: Serving, tmp_path: Path) -> None:
    eventually(lambda: len(content(server, "m")) == 1)
    first = content(server, "m")
    python_model(tmp_path / "models", "m", NEGATIVE)
    assert content(server, "m") == first
    assert load(server, "m") == (200, "")
    eventually(lambda: content(server, "m") not in ([], first))
    python_model(tmp_path / "models", "m", IDENTITY, "# the same\n" + pbtxt())
    assert load(server, "m") == (200, "")
    eventually(lambda: content(server, "m") == first)
    assert server.ask("POST", "/v2/repository/models/m/unload")[0] == 200
    eventually(lambda: server.state("m") == "UNAVAILABLE")
    assert content(server, "m") == []
