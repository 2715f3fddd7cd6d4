"""Weighted routes through a real server, with and without front processes, over HTTP, gRPC, ``/v1`` and from models."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from serving import IN_PROCESS, Serving, adds, ensemble, eventually, pbtxt, python_model, serving, step

DIES = """
def execute(self, requests):
    time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)
"""
CALLS = """
def execute(self, requests):
    answers = []
    for request in requests:
        call = pb_utils.InferenceRequest(
            model_name="scorer", requested_output_names=["OUTPUT0"], inputs=request.inputs()
        )
        answers.append(pb_utils.InferenceResponse(call.exec().output_tensors()))
    return answers
"""
ECHO = """
def execute(self, requests):
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("text_output", np.array([b"%s:" + request.inputs()[0].as_numpy().reshape(-1)[0]], object))]
        )
        for request in requests
    ]
"""
TEXT = (
    'backend: "python"\nmax_batch_size: 0\n'
    'input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]\n'
    'output [{ name: "text_output" data_type: TYPE_STRING dims: [ 1 ] }]\n' + IN_PROCESS
)
COUNTS = """
def execute(self, requests):
    answers = []
    for request in requests:
        start = pb_utils.get_input_tensor_by_name(request, "START").as_numpy().flat[0]
        self.count = 1 if start else self.count + 1
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.array([[self.count]], np.float32))]))
    return answers
"""
SEQUENCES = """
sequence_batching { control_input [{
  name: "START" control [{ kind: CONTROL_SEQUENCE_START fp32_false_true: [ 0, 1 ] }]
}] }"""
ONE = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}


def route(repository: Path, name: str, *arms: tuple[str, float], sticky: Sequence[str] = ()) -> None:
    """Write a route; each arm is a version number or the name of a model, with its weight."""
    (repository / name).mkdir(exist_ok=True)
    text = f"sticky = {json.dumps(list(sticky))}\n"
    for arm, weight in arms:
        what = f"version = {arm}" if arm.isdigit() else f'model = "{arm}"'
        text += f"[[arm]]\n{what}\nweight = {weight}\n"
    new = repository / name / ".route.toml.new"
    new.write_text(text)
    new.rename(repository / name / "route.toml")


def write(repository: Path) -> Path:
    python_model(repository, "scorer_v1", adds(1), pbtxt(more=IN_PROCESS))
    python_model(repository, "scorer_v2", adds(2), pbtxt(more=IN_PROCESS))
    route(repository, "scorer", ("scorer_v1", 75), ("scorer_v2", 25), sticky=["header:x-user"])
    for version in (1, 2):
        python_model(repository, "m", adds(version), pbtxt(more=IN_PROCESS), version)
        directory = python_model(repository, "text", ECHO % f"v{version}", TEXT, version) / str(version)
        (directory / "chat_template.jinja").write_text(f"template {version}")
        python_model(repository, "fragile", DIES if version == 2 else adds(1), pbtxt(), version)
    route(repository, "m", ("1", 90), ("2", 10))
    route(repository, "text", ("1", 50), ("2", 50), sticky=["user", "prompt:16"])
    route(repository, "fragile", ("1", 50), ("2", 50))
    (repository / "writer").mkdir()
    (repository / "writer" / "route.toml").write_text('[[arm]]\nmodel = "text"\nversion = 2\nweight = 1\n')
    ensemble(repository, "outer", step("scorer", "INPUT0", "OUTPUT0"))
    python_model(repository, "caller", CALLS, pbtxt(more=""))
    return repository


@pytest.fixture(scope="module", params=["1", "2"], ids=["one process", "front processes"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("routes")
    repository = write(folder / "models")
    with serving(repository, folder / "log", f"--front-processes={request.param}") as running:
        yield running


def added(server: Serving, model: str, **headers: str) -> int:
    """Return what a model has added to one: 1 or 2."""
    status, _, body = server.ask("POST", f"/v2/models/{model}/infer", ONE, **headers)
    assert status == 200, body
    return int(json.loads(body)["outputs"][0]["data"][0]) - 1


@pytest.mark.parametrize(("model", "share"), [("m", 0.1), ("scorer", 0.25), ("outer", 0.25), ("caller", 0.25)])
def test_requests_are_divided_by_weight(server: Serving, model: str, share: float) -> None:
    """In an ensemble and in calls of models, too. Six standard deviations are one failure in 500 million runs."""
    count = 500
    found = Counter(added(server, model) for _ in range(count))
    assert set(found) == {1, 2}
    assert abs(found[2] / count - share) < 6 * (share * (1 - share) / count) ** 0.5


def test_a_version_that_is_named_answers(server: Serving) -> None:
    for version in (1, 2):
        for _ in range(20):
            answer = server.json("POST", f"/v2/models/m/versions/{version}/infer", ONE)
            assert answer["model_version"] == str(version)


def test_an_answer_says_who_has_given_it(server: Serving) -> None:
    answers = [server.json("POST", "/v2/models/scorer/infer", ONE) for _ in range(60)]
    assert {(each["model_name"], each["outputs"][0]["data"][0]) for each in answers} == {
        ("scorer_v1", 2.0),
        ("scorer_v2", 3.0),
    }


def test_a_name_that_only_a_route_has_is_described_as_its_heaviest_arm(server: Serving) -> None:
    assert server.ready("scorer")
    metadata = server.json("GET", "/v2/models/scorer")
    assert (metadata["name"], metadata["versions"]) == ("scorer", ["1"])
    assert server.json("GET", "/v2/models/scorer/config")["name"] == "scorer_v1"
    (statistics,) = server.json("GET", "/v2/models/scorer/stats")["model_stats"]
    assert statistics["name"] == "scorer_v1"
    index = {each["name"]: each for each in server.json("POST", "/v2/repository/index", {"ready": True})}
    assert index["scorer"] == {"name": "scorer", "state": "READY", "reason": "route: scorer_v1 75, scorer_v2 25"}
    status, _, body = server.ask("POST", "/v2/models/scorer/versions/1/infer", ONE)
    assert (status, json.loads(body)["error"]) == (
        404,
        "Request for unknown model: 'scorer' is a route and has no versions of its own",
    )


def test_a_client_of_grpc_gets_what_one_of_http_gets(server: Serving) -> None:
    client = grpcclient.InferenceServerClient(server.grpc)
    assert client.is_model_ready("scorer")
    assert client.get_model_metadata("scorer").name == "scorer"
    assert client.get_model_config("scorer").config.name == "scorer_v1"
    value = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
    value.set_data_from_numpy(np.ones((1, 1), np.float32))
    for user in ("ann", "bob", "eve", "joe"):
        wanted = added(server, "scorer", x_user=user)
        for _ in range(5):
            result = client.infer("scorer", [value], headers={"x-user": user})
            assert result.as_numpy("OUTPUT0")[0, 0] == 1 + wanted
    answers: list[Any] = []
    client.start_stream(lambda result, error: answers.append(error or result.get_response().model_name))
    for _ in range(40):
        client.async_stream_infer("scorer", [value])
    client.stop_stream()
    assert set(answers) == {"scorer_v1", "scorer_v2"}
    client.close()


def test_users_stay_where_they_are(server: Serving) -> None:
    users = [f"user {number}" for number in range(30)]
    first = [added(server, "scorer", x_user=user) for user in users]
    assert set(first) == {1, 2}
    assert [added(server, "scorer", x_user=user) for user in users] == first


def test_the_template_of_a_chat_is_that_of_its_arm(server: Serving) -> None:
    def chat(text: str, user: str = "") -> str:
        body = {"model": "text", "messages": [{"role": "user", "content": text}], **({"user": user} if user else {})}
        content: str = server.json("POST", "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        return content

    found = [chat("hello", f"user {number}") for number in range(16)]
    assert set(found) == {"v1:template 1", "v2:template 2"}
    assert [chat("another", f"user {number}") for number in range(16)] == found
    found = [chat(f"{number} begins alike, whatever comes then") for number in range(16)]
    assert set(found) == {"v1:template 1", "v2:template 2"}


def test_completions_stay_with_the_beginning_of_their_prompt(server: Serving) -> None:
    def complete(prompt: str) -> str:
        answer = server.json("POST", "/v1/completions", {"model": "text", "prompt": prompt, "max_tokens": 5})
        return str(answer["choices"][0]["text"]).partition(":")[0]

    beginnings = [f"{number:016}" for number in range(16)]
    found = [complete(beginning) for beginning in beginnings]
    assert set(found) == {"v1", "v2"}
    assert [complete(f"{beginning} and more") for beginning in beginnings] == found
    # The same key, whichever protocol it comes by.
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES"}
    for beginning, arm in zip(beginnings, found, strict=True):
        answer = server.json("POST", "/v2/models/text/infer", {"inputs": [{**tensor, "data": [beginning]}]})
        assert answer["outputs"][0]["data"][0].startswith(arm)


def test_models_behind_a_route_are_listed(server: Serving) -> None:
    names = [each["id"] for each in server.json("GET", "/v1/models")["data"]]
    assert {"text", "writer"} <= {*names} and "scorer" not in names
    answer = server.json("POST", "/v1/completions", {"model": "writer", "prompt": "a prompt", "max_tokens": 5})
    assert (answer["model"], answer["choices"][0]["text"]) == ("writer", "v2:a prompt")


def test_what_a_worker_loses_the_other_arm_answers(server: Serving) -> None:
    """Those that it executes, and those that wait for it."""
    answers: list[int] = []

    def ask() -> None:
        answers.append(added(server, "fragile"))

    threads = [threading.Thread(target=ask) for _ in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [1] * 24
    assert server.metrics()['nerite_route_handed_over_total{arm="fragile:2",route="fragile"}'] > 0


def test_metrics_tell_the_arms_apart(server: Serving) -> None:
    def requests(arm: str) -> float:
        return server.metrics()[f'nerite_route_requests_total{{arm="m:{arm}",route="m"}}']

    before = requests("1") + requests("2")
    found = Counter(added(server, "m") for _ in range(50))
    assert requests("1") + requests("2") == before + 50
    assert found[1] + found[2] == 50
    assert server.metrics()['nerite_route_weight{arm="m:2",route="m"}'] == 10


def test_users_stay_where_they_are_when_a_server_restarts_and_weights_change(tmp_path: Path) -> None:
    repository = write(tmp_path / "models")
    users = [f"user {number}" for number in range(60)]
    found = []
    for weights in ((90, 10), (90, 10), (75, 25)):
        route(repository, "scorer", ("scorer_v1", weights[0]), ("scorer_v2", weights[1]), sticky=["header:x-user"])
        with serving(repository, tmp_path / "log") as server:
            found.append([added(server, "scorer", x_user=user) for user in users])
    first, again, later = found
    assert first == again
    assert {(old, new) for old, new in zip(first, later, strict=True) if old != new} <= {(1, 2)}


def test_a_file_that_changes_is_followed_and_models_stay_loaded(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for version in (1, 2):
        python_model(repository, "m", adds(version), pbtxt(), version)
    flags = ("--model-control-mode=poll", "--repository-poll-secs=1")
    with serving(repository, tmp_path / "log", *flags) as server:
        assert {added(server, "m") for _ in range(20)} == {2}
        route(repository, "m", ("1", 1), ("2", 0))
        eventually(lambda: added(server, "m") == 1)  # version 1, which the version policy leaves out, is loaded
        loads = server.text.count("loading: m:2")
        route(repository, "m", ("1", 0), ("2", 1))
        eventually(lambda: added(server, "m") == 2)
        assert server.text.count("loading: m:2") == loads
        (repository / "m" / "route.toml").write_text("[[arm]]\nversion = 1\nwieght = 1\n")
        eventually(lambda: "route.toml:3: 'wieght' is not known. An arm has: model, version, weight" in server.text)
        assert added(server, "m") == 2
        (repository / "m" / "route.toml").unlink()
        eventually(lambda: "nerite_route_weight" not in str(server.metrics()))
        assert added(server, "m") == 2


def test_an_arm_that_is_unloaded_gives_its_traffic_back(tmp_path: Path) -> None:
    repository = write(tmp_path / "models")
    flags = ("--model-control-mode=explicit", "--load-model=scorer", "--load-model=outer")
    with serving(repository, tmp_path / "log", *flags) as server:
        assert {added(server, "scorer") for _ in range(60)} == {1, 2}  # its arms were loaded with it
        server.ask("POST", "/v2/repository/models/scorer_v1/unload")
        assert {added(server, "scorer") for _ in range(20)} == {2}
        eventually(lambda: server.ready("outer"))
        assert {added(server, "outer") for _ in range(5)} == {2}
        server.ask("POST", "/v2/repository/models/scorer_v2/unload")
        # As long as the ensemble that needs it drains, it serves.
        eventually(lambda: server.ask("POST", "/v2/models/scorer/infer", ONE)[0] == 503)
        assert b"route 'scorer' has no arm that is ready" in server.ask("POST", "/v2/models/scorer/infer", ONE)[2]
        server.ask("POST", "/v2/repository/models/scorer/load")
        assert {added(server, "scorer") for _ in range(60)} == {1, 2}
        server.ask("POST", "/v2/repository/models/scorer/unload")
        assert server.ask("POST", "/v2/models/scorer/infer", ONE)[0] == 404


def test_a_load_with_a_mistake_in_the_route_fails_with_its_place(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    python_model(repository, "m", adds(1))
    route(repository, "m", ("1", 1), ("3", 1))
    with serving(repository, tmp_path / "log", "--model-control-mode=explicit") as server:
        status, _, body = server.ask("POST", "/v2/repository/models/m/load")
        text = json.loads(body)["error"]
        assert status == 400
        assert f"{repository}/m/route.toml:5: there is no version 3; there are: 1" in text


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_a_sequence_stays_where_it_began(tmp_path: Path, fronts: str) -> None:
    repository = tmp_path / "models"
    for version in (1, 2):
        python_model(repository, "m", COUNTS, pbtxt(batch=1, more=SEQUENCES, dims="1"), version)
    route(repository, "m", ("1", 1), ("2", 0))
    flags = ("--model-control-mode=explicit", "--load-model=m", f"--front-processes={fronts}")
    with serving(repository, tmp_path / "log", *flags) as server:

        def ask(number: int, *, start: bool = False, end: bool = False) -> tuple[str, int]:
            parameters = {"sequence_id": number, "sequence_start": start, "sequence_end": end}
            answer = server.json("POST", "/v2/models/m/infer", {**ONE, "parameters": parameters})
            return answer["model_version"], int(answer["outputs"][0]["data"][0])

        assert ask(7, start=True) == ("1", 1)
        route(repository, "m", ("1", 0), ("2", 1))
        server.ask("POST", "/v2/repository/models/m/load")
        assert ask(8, start=True) == ("2", 1)
        assert ask(7) == ("1", 2)
        assert ask(7, end=True) == ("1", 3)
        assert ask(7, start=True) == ("2", 1)


@pytest.mark.parametrize("fronts", ["1", "2"])
def test_a_route_is_changed_by_a_request(tmp_path: Path, fronts: str) -> None:
    """And whoever has the answer finds it changed in all processes."""
    repository = write(tmp_path / "models")
    with serving(repository, tmp_path / "log", f"--front-processes={fronts}") as server:
        assert server.json("GET", "/v2/models/scorer/route") == {
            "name": "scorer",
            "arm": [
                {"model": "scorer_v1", "version": "", "weight": 75},
                {"model": "scorer_v2", "version": "", "weight": 25},
            ],
            "sticky": ["header:x-user"],
            "salt": "",
        }
        for weights in ((0, 1), (1, 0)):
            arms = [{"version": number, "weight": weight} for number, weight in enumerate(weights, 1)]
            changed = server.json("POST", "/v2/models/m/route", {"arm": arms})
            assert [arm["weight"] for arm in changed["arm"]] == [*weights]
            assert {added(server, "m") for _ in range(20)} == {1 + weights[1]}
        assert server.ask("POST", "/v2/models/m/route", {})[0] == 200
        assert {added(server, "m") for _ in range(20)} == {2}
        assert server.ask("GET", "/v2/models/m/route")[0] == 404
        status, _, body = server.ask("POST", "/v2/models/m/route", {"arm": [{"version": 7, "weight": 1}]})
        assert (status, b"version 7 is not found" in body) == (404, True)
        status, _, body = server.ask("POST", "/v2/models/other/route", {"arm": [{"model": "scorer", "weight": 1}]})
        assert (status, b"routes cannot be chained: 'other' leads to 'scorer'" in body) == (400, True)
