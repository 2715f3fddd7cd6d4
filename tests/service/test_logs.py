"""The log of a real server: lines about a request have its id, and with ``--log-format json`` every line is JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from serving import IDENTITY, IN_PROCESS, Serving, eventually, pbtxt, python_model, serving

TALKS = """
def execute(self, requests):
    import logging
    import warnings
    value = float(requests[0].inputs()[0].as_numpy().reshape(-1)[0])
    if value < 0:
        raise ValueError("below zero")
    if value > 9:
        os._exit(3)
    print("a print,", end=" ")
    print("in two pieces")
    print("to stderr", file=__import__("sys").stderr)
    os.write(1, b"past Python\\n")
    logging.getLogger("mine").warning("by logging")
    logging.getLogger("mine").info("for information")
    logging.warning("a number: %d", "none")
    pb_utils.Logger.log_error("by the logger")
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]

def finalize(self):
    print("the end")
"""
TURNS = """
async def execute(self, requests):
    import asyncio
    for request in requests:
        for turn in range(3):
            print(request.request_id(), "has turn", turn)
            await asyncio.sleep(0.01)
        sender = request.get_response_sender()
        sender.send(
            pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())]),
            pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL,
        )
"""
DETAILS = """
@staticmethod
def auto_complete_config(config):
    pb_utils.Logger.log_verbose("detail of the configuration")
    return config

def initialize(self, args):
    pb_utils.Logger.log("detail of the beginning", pb_utils.Logger.VERBOSE)

def execute(self, requests):
    pb_utils.Logger.log_verbose("detail of a batch")
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]

def finalize(self):
    pb_utils.Logger.log_verbose("detail of the end")
"""
DECOUPLED = pbtxt(0, "model_transaction_policy { decoupled: true }")


def ask(server: Serving, value: float, id: str = "", model: str = "talks", datatype: str = "FP32") -> int:
    body: dict[str, Any] = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": datatype, "data": [value]}]}
    if id:
        body["id"] = id
    return server.ask("POST", f"/v2/models/{model}/infer", body)[0]


def lines(server: Serving) -> list[dict[str, Any]]:
    return [json.loads(line) for line in server.text.splitlines()]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, source, config in (
        ("talks", TALKS, ""),
        ("talks_inside", TALKS, pbtxt(parameters=IN_PROCESS)),
        ("turns", TURNS, DECOUPLED),
        ("identity", IDENTITY, ""),
    ):
        python_model(tmp_path / "models", name, source, config)
    return tmp_path / "models"


@pytest.fixture
def server(repository: Path, tmp_path: Path) -> Iterator[Serving]:
    with serving(repository, tmp_path / "log", "--log-format=json", "--log-verbose=1") as server:
        yield server


def test_what_a_model_says_has_the_id_of_the_request(server: Serving) -> None:
    assert ask(server, 1.0, "first") == 200
    assert ask(server, 1.0) == 200
    eventually(lambda: sum("past Python" in line["message"] for line in lines(server)) == 2)
    said = [
        (line["message"], line["file"], line.get("request_id"))
        for line in lines(server)
        if line.get("instance") == "talks_0_0"
    ]
    with_id = [(message, file) for message, file, id in said if id == "first"]
    assert ("a print, in two pieces", "stdout") in with_id
    assert ("to stderr", "stderr") in with_id
    assert ("a number: %d (not formatted: ('none',))", "model.py") in with_id
    assert ("by logging", "model.py") in with_id and ("by the logger", "model.py") in with_id
    without = [message for message, _, id in said if id is None]
    assert {"a print, in two pieces", "to stderr", "by logging", "by the logger", "past Python"} <= set(without)


def test_what_a_model_in_the_server_says(server: Serving) -> None:
    assert ask(server, 1.0, "first", "talks_inside") == 200
    assert ask(server, 1.0, model="talks_inside") == 200
    documents = [json.loads(line) for line in server.text.splitlines() if line != "past Python"]
    for id in ("first", None):
        said = {(line["message"], line["file"]) for line in documents if line.get("request_id") == id}
        assert {("a print, in two pieces", "stdout"), ("to stderr", "stderr")} <= said
        assert {("mine: by logging", "model.py"), ("mine: for information", "model.py")} <= said
        assert ("by the logger", "model.py") in said


def test_what_the_server_says_of_a_failure_has_the_id(server: Serving) -> None:
    assert ask(server, -1.0, "raises") == 500
    assert ask(server, 1, "typed", datatype="INT32") == 400
    with grpcclient.InferenceServerClient(server.grpc) as client:
        tensor = grpcclient.InferInput("INPUT0", [1, 1], "INT32")
        tensor.set_data_from_numpy(np.zeros((1, 1), np.int32))
        with pytest.raises(InferenceServerException, match="data-type"):
            client.infer("talks", [tensor], request_id="called")
    assert ask(server, 10.0, "kills") == 500
    found = {(line["level"], line.get("request_id")) for line in lines(server)}
    assert {("error", "raises"), ("verbose", "raises"), ("verbose", "typed"), ("verbose", "called")} <= found
    assert ("error", "kills") in found


def test_the_ids_of_requests_that_take_turns(server: Serving) -> None:
    with grpcclient.InferenceServerClient(server.grpc) as client:
        answers: list[Any] = []
        client.start_stream(lambda result, error: answers.append(error))
        for number in range(6):
            tensor = grpcclient.InferInput("INPUT0", [1], "FP32")
            tensor.set_data_from_numpy(np.zeros(1, np.float32))
            client.async_stream_infer("turns", [tensor], request_id=f"r{number}")
        eventually(lambda: len(answers) == 6)
        client.stop_stream()
    assert [str(error) for error in answers if error] == []
    turns = [line for line in lines(server) if "has turn" in line["message"]]
    assert len(turns) == 18
    assert [line["message"].split()[0] for line in turns] == [line["request_id"] for line in turns]
    assert len({line["request_id"] for line in turns[:3]}) > 1, "they took no turns"


def test_the_id_stands_in_the_text(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", "--log-verbose=1") as server:
        ask(server, 1.0, "first")
        ask(server, 1, "typed", datatype="INT32")
        eventually(lambda: "past Python" in server.text)
        assert re.search(r'stdout:0\] "\[talks_0_0\] \[request id: first\] a print, in two pieces"', server.text)
        refused = re.compile(r'"\[request id: typed\] Infer failed: \[request id: typed\] inference input')
        eventually(lambda: refused.search(server.text) is not None)


def test_every_line_of_a_busy_session_is_json(repository: Path, tmp_path: Path) -> None:
    (repository / "broken" / "1").mkdir(parents=True)
    (repository / "broken" / "config.pbtxt").write_text('backend: "python" max_batch_size: "many"')
    python_model(repository, "raises", "def initialize(self, args):\n    raise ValueError('two\\nlines')\n")
    flags = ["--log-format=json", "--log-verbose=2", "--exit-on-error=false", "--access-log=true"]
    # Flags that are remarked upon when the server starts.
    flags += ["--strict-model-config=false", "--trace-config=nothing=1", "--http-thread-count=3"]
    with serving(repository, tmp_path / "log", *flags) as server:
        for value, id in ((1.0, "a"), (-1.0, "b"), (10.0, 'c"\n'), (1.0, "")):
            ask(server, value, id)
        ask(server, 1.0, "d", "identity")
        ask(server, 1.0, "e", "nobody")
        server.ask("GET", "/v2/nothing")
        eventually(lambda: server.ready("talks"))
    for line in server.text.splitlines():
        event = json.loads(line)
        assert event.keys() >= {"time", "level", "message", "file", "line", "pid"}, line
    tables = [event["table"] for event in lines(server) if "table" in event]
    assert any(row["model"] == "identity" and row["status"] == "READY" for row in tables[-1])
    assert "the end" in server.text


def test_where_the_time_of_a_load_went(server: Serving) -> None:
    told = {line["model"]: line for line in lines(server) if "stages" in line}
    assert told.keys() == {"talks", "talks_inside", "turns", "identity"}
    for model, line in told.items():
        stages = line["stages"]
        assert {"fetch", "configuration", "initialize"} <= stages.keys()
        assert ("start of workers" in stages) == (model != "talks_inside")
        assert max(stages.values()) <= line["seconds"] + 0.001
        written = re.match(rf"successfully loaded '{model}' in ([\d.]+) s", line["message"])
        assert written and float(written[1]) == pytest.approx(line["seconds"], abs=0.0101)


def test_an_error_that_repeats_itself(server: Serving) -> None:
    def counted() -> list[dict[str, Any]]:
        return [line for line in lines(server) if "repeated" in line]

    def written() -> int:
        said = [line for line in lines(server) if line["message"].startswith("Failed to process the request(s)")]
        return sum("repeated" not in line for line in said)

    asked = 0
    while not counted():
        assert ask(server, -1.0, f"r{asked}", "talks_inside") == 500
        asked += 1
    eventually(lambda: asked == written() + sum(line["repeated"] for line in counted()))
    first = counted()[0]
    assert (first["level"], first["file"]) == ("error", "instance.py")
    assert "ValueError: below zero (repeated " in first["message"]
    assert first["request_id"].startswith("r10, r11, ")


def accesses(server: Serving, count: int) -> list[dict[str, Any]]:
    """Return the lines of the access log, when there are ``count``."""

    def found() -> list[dict[str, Any]]:
        return [line for line in lines(server) if "milliseconds" in line]

    eventually(lambda: len(found()) == count)
    return found()


def test_the_access_log(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", "--log-format=json", "--access-log=true") as server:
        ask(server, 1.0, "mine", "identity")
        ask(server, 1, "typed", "identity", datatype="INT32")
        ask(server, 1.0, "", "nobody")
        server.ask("GET", "/v2/nothing")
        server.ask("POST", "/v2/models/talks/versions/1/generate", {"INPUT0": 1.0, "id": "made"})
        server.ask("POST", "/v2/models/talks/generate_stream", {"INPUT0": 1.0})
        over_http = accesses(server, 6)
        with grpcclient.InferenceServerClient(server.grpc) as client:
            assert client.is_server_live()
            tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
            client.infer("identity", [tensor], request_id="called")
            with pytest.raises(InferenceServerException):
                client.infer("nobody", [tensor], request_id="lost")
            client.start_stream(lambda result, error: None)
            for _ in range(3):
                client.async_stream_infer("identity", [tensor])
            client.stop_stream()
        over_grpc = accesses(server, 10)[len(over_http) :]
    prefix = "/v2/models"
    assert [
        (line["method"], line["path"], line["status"], line.get("model"), line.get("version"), line.get("request_id"))
        for line in over_http
    ] == [
        ("POST", f"{prefix}/identity/infer", 200, "identity", "1", "mine"),
        ("POST", f"{prefix}/identity/infer", 400, "identity", None, "typed"),
        ("POST", f"{prefix}/nobody/infer", 404, "nobody", None, None),
        ("GET", "/v2/nothing", 404, None, None, None),
        ("POST", f"{prefix}/talks/versions/1/generate", 200, "talks", "1", "made"),
        ("POST", f"{prefix}/talks/generate_stream", 200, "talks", "1", None),
    ]
    service = "/inference.GRPCInferenceService"
    assert [(line["path"], line["status"], line.get("model"), line.get("request_id")) for line in over_grpc] == [
        (f"{service}/ServerLive", "OK", None, None),
        (f"{service}/ModelInfer", "OK", "identity", "called"),
        (f"{service}/ModelInfer", "NOT_FOUND", "nobody", "lost"),
        (f"{service}/ModelStreamInfer", "OK", None, None),
    ]
    assert (over_grpc[-1]["requests"], over_grpc[-1]["responses"]) == (3, 3)
    for line in (*over_http, *over_grpc):
        assert line["peer"].startswith("127.0.0.1:") and line["milliseconds"] > 0
        assert (line["request_bytes"] > 0) == (line["method"] != "GET")
    assert over_http[0]["response_bytes"] > len('{"model_name":"identity"}')


def test_the_access_log_in_text(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", "--access-log=true") as server:
        ask(server, 1.0, "mine", "identity")
        assert server.ask("GET", "/v2/health/ready")[0] == 200
        form = r'\] "(\[request id: mine\] )?127\.0\.0\.1:\d+ (.*) \d+ \d+ [0-9.]+ ms( identity/1)?"'
        eventually(lambda: len(re.findall(form, server.text)) == 2)
        assert re.findall(form, server.text) == [
            ("[request id: mine] ", "POST /v2/models/identity/infer 200", " identity/1"),
            ("", "GET /v2/health/ready 200", ""),
        ]


def test_there_is_no_access_log_unless_it_is_asked_for(repository: Path, tmp_path: Path) -> None:
    with serving(repository, tmp_path / "log", "--log-format=json") as server:
        ask(server, 1.0, "mine", "identity")
        assert accesses(server, 0) == []


@pytest.mark.parametrize("parameters", ["", IN_PROCESS], ids=["worker", "in process"])
def test_details_are_logged_while_the_verbosity_asks_for_them(parameters: str, tmp_path: Path) -> None:
    python_model(tmp_path / "models", "details", DETAILS, pbtxt(parameters=parameters))

    def details(server: Serving) -> list[str]:
        return re.findall("detail of (?:the |a )([a-z]+)", server.text)

    def verbosity(server: Serving, level: int) -> None:
        assert server.ask("POST", "/v2/logging", {"log_verbose_level": level})[0] == 200

    with serving(tmp_path / "models", tmp_path / "log", "--log-verbose=1") as server:
        eventually(lambda: "beginning" in details(server))
        assert set(details(server)) >= {"configuration", "beginning"}
        assert ask(server, 1.0, "one", "details") == 200
        eventually(lambda: details(server).count("batch") == 1)
        assert '"HTTP request: 2 /v2/models/details/infer"' in server.text
        assert (
            "[request id: one] prepared: request id: one, model: details, requested version: -1, actual" in server.text
        )
        verbosity(server, 0)
        before = server.text
        assert ask(server, 1.0, "two", "details") == 200
        assert "detail" not in server.text.removeprefix(before).replace("/details/", "")
    with serving(tmp_path / "models", tmp_path / "log") as server:
        assert ask(server, 1.0, "one", "details") == 200
        assert details(server) == []
        verbosity(server, 2)
        assert ask(server, 1.0, "two", "details") == 200
        eventually(lambda: details(server) == ["batch"])
    assert details(server) == ["batch", "end"]
