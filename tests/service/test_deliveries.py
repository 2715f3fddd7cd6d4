"""Loads that bring a configuration or files along, and what the index says of what is served."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

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


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """The same for all tests whose loads are refused. Beside its log is what is sent to it."""
    folder = tmp_path_factory.mktemp("unchanged")
    python_model(folder / "models", "m", IDENTITY)
    (folder / "temporary").mkdir()
    flags = ("--model-control-mode=explicit", "--load-model=m")
    environment = {"TMPDIR": str(folder / "temporary")}
    with serving(folder / "models", folder / "log", *flags, environment=environment) as running:
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
        ({"config": "{}", "file:1": "", "file:1/model.py": ""}, "'file:1' is a file and not a directory"),
        ({"config": "{"}, "Invalid config override"),
        ({"config": '{"max_batch": 3}'}, "max_batch_size"),
    ],
)
def test_what_cannot_be_loaded(unchanged: Serving, parameters: dict[str, str], words: str) -> None:
    status, error = load(unchanged, "m", **parameters)
    assert status == 500
    assert error.startswith("failed to load 'm', failed to poll from model repository\n")
    assert words in error
    assert unchanged.infer("m", [1.0]) == [1.0]
    assert not delivered(unchanged.log.parent / "temporary")


def test_files_of_loads_that_fail_are_freed(server: Serving) -> None:
    def resident() -> int:
        return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096 // 10**6

    parameters = {"config": json.dumps(CONFIG), "file:1/model.py": base64.b64encode(b"x = 1").decode()}
    parameters["file:1/weights"] = base64.b64encode(bytes(8_000_000)).decode()
    before = 0
    for number in range(20):
        assert load(server, "m", **parameters)[0] == 400
        before = before or (resident() if number == 4 else 0)
    assert resident() - before < 100


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"config": "{}", f"file:1/{'a' * 300}": ""}, f"Invalid file parameter 'file:1/{'a' * 50}"),
        ({"config": "{}", f"file:{'a/' * 600}x": ""}, "the name of a load parameter is 1206 characters long"),
        ({"config": " " * (2**20 + 1)}, "load parameter 'config' is 1048577 characters long"),
    ],
)
def test_parameters_that_are_too_long(unchanged: Serving, parameters: dict[str, str], words: str) -> None:
    status, error = load(unchanged, "m", **parameters)
    assert (status, error.startswith(words)) == (400, True), error
    assert unchanged.infer("m", [1.0]) == [1.0]


def test_files_that_cannot_be_written(server: Serving, places: Path, tmp_path: Path) -> None:
    parameters = {"config": json.dumps(CONFIG), "file:1/model.py": source(tmp_path, NEGATIVE)}
    assert load(server, "m", **parameters) == (200, "")
    aside = places.rename(tmp_path / "aside")
    status, error = load(server, "m", **parameters)
    aside.rename(places)
    assert (status, "load request cannot be written: No such file or directory: " in error) == (500, True), error
    assert server.infer("m", [1.0]) == [-1.0]
    assert len(delivered(places)) == 1
    assert load(server, "m", **parameters) == (200, "")
    eventually(lambda: len(delivered(places)) == 1)


def test_a_step_of_an_ensemble_is_no_path(unchanged: Serving) -> None:
    python_model(unchanged.log.parent / "elsewhere", "secret", IDENTITY)
    config = {
        "platform": "ensemble",
        "input": CONFIG["input"],
        "output": CONFIG["output"],
        "ensemble_scheduling": {
            "step": [
                {
                    "model_name": "../elsewhere/secret",
                    "model_version": -1,
                    "input_map": {"INPUT0": "INPUT0"},
                    "output_map": {"OUTPUT0": "OUTPUT0"},
                }
            ]
        },
    }
    status, error = load(unchanged, "pipeline", **{"config": json.dumps(config), "file:1/x": ""})
    assert status == 400
    assert "contains models that are not available" in error


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


def test_a_configuration_names_no_program_outside_the_model(unchanged: Serving) -> None:
    program = unchanged.log.with_name("evil.py")
    program.write_text("raise SystemExit('it ran')")
    for name in (str(program), f"../../../{program.name}"):
        config = json.dumps({**CONFIG, "default_model_filename": name})
        _, error = load(unchanged, "m", config=config)
        assert "failed to poll from model repository" in error
        assert f"default_model_filename '{name}' must stay within the directory of the version" in error
    assert "it ran" not in unchanged.text
    assert unchanged.infer("m", [1.0]) == [1.0]


def test_an_ensemble_names_no_model_outside_the_repository(unchanged: Serving) -> None:
    secret = python_model(unchanged.log.parent, "secret", IDENTITY)
    for name in ("../secret", "m/../../secret", str(secret)):
        step = {"model_name": name, "input_map": {"INPUT0": "IN"}, "output_map": {"OUTPUT0": "OUT"}}
        config = {"platform": "ensemble", "max_batch_size": 8, "ensemble_scheduling": {"step": [step]}}
        tensors = {"data_type": "TYPE_FP32", "dims": [-1]}
        config |= {"input": [{"name": "IN", **tensors}], "output": [{"name": "OUT", **tensors}]}
        status, error = load(unchanged, "m", config=json.dumps(config))
        assert status == 400
        assert f"contains models that are not available or ambiguous: {name}" in error
        assert unchanged.infer("m", [1.0]) == [1.0]


@pytest.mark.parametrize("name", ["../secret", "/etc", "..", "m/../../secret"])
def test_a_load_names_no_directory_outside_the_repository(unchanged: Serving, name: str) -> None:
    python_model(unchanged.log.parent, "secret", "print('it ran')\n" + IDENTITY)
    with grpcclient.InferenceServerClient(unchanged.grpc) as client:
        for parameters in ({}, {"config": json.dumps(CONFIG)}):
            with pytest.raises(InferenceServerException, match="must not contain path traversal characters"):
                client.load_model(name, **parameters)
    assert load(unchanged, quote(name, safe=""))[0] in (400, 500)
    assert "it ran" not in unchanged.text
