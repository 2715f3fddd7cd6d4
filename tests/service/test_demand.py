"""Models that are loaded when requests ask for them, over every protocol, within a budget of memory."""

from __future__ import annotations

import json
import shlex
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http

from llm_models import language_model
from nerite.client import Client
from pages import Page
from serving import Serving, adds, ensemble, eventually, pbtxt, python_model, serving, step

ON_DEMAND = "unloaded: on demand"
SLOW = """
def initialize(self, args):
    time.sleep(0.5)
def execute(self, requests):
    return [
        pb_utils.InferenceResponse(
            [pb_utils.Tensor("OUTPUT0", pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy() + 1)]
        )
        for request in requests
    ]
"""
SLEEPS = """
def execute(self, requests):
    time.sleep(2)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros((1, 1), np.float32))]) for _ in requests]
"""
BIG = """
def initialize(self, args):
    self.weights = np.ones(%d << 20, np.uint8)
def execute(self, requests):
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", np.zeros((1, 1), np.float32))]) for _ in requests]
"""
CALLS = """
def execute(self, requests):
    answers = []
    for request in requests:
        tensor = pb_utils.get_input_tensor_by_name(request, "INPUT0")
        called = pb_utils.InferenceRequest(
            model_name="one", requested_output_names=["OUTPUT0"], inputs=[pb_utils.Tensor("INPUT0", tensor.as_numpy())]
        ).exec()
        assert not called.has_error(), called.error().message()
        output = pb_utils.get_output_tensor_by_name(called, "OUTPUT0").as_numpy()
        answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", output)]))
    return answers
"""


@contextmanager
def demanding(models: Path, *flags: str) -> Iterator[Serving]:
    state = {"XDG_STATE_HOME": str(models.parent / "state")}
    with serving(models, models.parent / "log", "--model-control-mode=demand", *flags, environment=state) as server:
        yield server


def states(server: Serving) -> dict[str, tuple[str, str]]:
    return {
        each["name"]: (each.get("state", ""), each.get("reason", ""))
        for each in server.json("POST", "/v2/repository/index")
    }


def together(*calls: Any) -> list[Any]:
    """Run calls at the same time; return what each returned, or the error that it raised."""
    results: list[Any] = [None] * len(calls)

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def stream(server: Serving, model: str, *values: float) -> list[float]:
    """Send requests over one stream; return the answers."""
    answers: list[Any] = []
    done = threading.Semaphore(0)

    def take(result: Any, error: Any) -> None:
        answers.append(error or float(result.as_numpy("OUTPUT0")[0, 0]))
        done.release()

    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(take)
        for value in values:
            tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.array([[value]], np.float32))
            client.async_stream_infer(model, [tensor])
        for _ in values:
            assert done.acquire(timeout=60)
        client.stop_stream()
    return answers


def over_grpc(server: Serving, model: str, value: float) -> float:
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[value]], np.float32))
        return float(client.infer(model, [tensor]).as_numpy("OUTPUT0")[0, 0])


def over_binary_http(server: Serving, model: str, value: float) -> float:
    with tritonclient.http.InferenceServerClient(server.http) as client:
        tensor = tritonclient.http.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[value]], np.float32))
        return float(client.infer(model, [tensor]).as_numpy("OUTPUT0")[0, 0])


@pytest.mark.parametrize("flags", [(), ("--front-processes=2",)], ids=["alone", "fronts"])
def test_every_protocol_waits_for_one_load(tmp_path: Path, flags: tuple[str, ...]) -> None:
    models = tmp_path / "models"
    python_model(models, "one", SLOW)
    python_model(models, "other", adds(2))
    python_model(models, "caller", CALLS)
    ensemble(models, "twice", step("other", "INPUT0", "between"), step("other", "between", "OUTPUT0"))
    with demanding(models, *flags) as server:
        assert server.ready()
        assert server.workers() == {}
        assert states(server) == dict.fromkeys(("one", "other", "caller", "twice"), ("UNAVAILABLE", ON_DEMAND))
        assert server.ready("one"), "a request would be answered"
        answers = together(
            lambda: server.infer("one", [1.0]),
            lambda: server.infer("one", [2.0]),
            lambda: over_binary_http(server, "one", 3.0),
            lambda: over_grpc(server, "one", 4.0),
            lambda: stream(server, "one", 5.0, 6.0),
            lambda: server.json("GET", "/v2/models/one")["inputs"][0]["name"],
            lambda: server.infer("caller", [7.0]),
            lambda: server.infer("twice", [8.0]),
        )
        assert answers == [[2.0], [3.0], 4.0, 5.0, [6.0, 7.0], "INPUT0", [8.0], [12.0]]
        assert server.text.count("loading: one:1") == 1
        assert {name: state for name, (state, _) in states(server).items()} == dict.fromkeys(states(server), "READY")
        assert server.ask("POST", "/v2/repository/models/one/unload")[0] == 200
        eventually(lambda: states(server)["one"] == ("UNAVAILABLE", ON_DEMAND))
        assert server.json("GET", "/v2/models/one")["inputs"][0]["name"] == "INPUT0"
        assert server.json("GET", "/v2/models/one/config")["backend"] == "python"
        assert server.state("one") == "UNAVAILABLE", "what it is like was remembered"
        assert server.infer("one", [1.0]) == [2.0]
        # A load is measured, and then counted, after its requests have been answered.
        eventually(lambda: server.metrics()['nerite_demand_loads_total{outcome="loaded"}'] == 4)
        figures = server.metrics()
        assert figures['nerite_model_resident_bytes{model="one",place="host"}'] > 1 << 20
        assert figures['nerite_memory_used_bytes{place="host"}'] < figures['nerite_memory_budget_bytes{place="host"}']
        assert "Models are loaded when they are asked for" in server.text
        assert "Load a model: " not in server.text, "nobody has to"
        assert "failed to load" not in server.text


def test_a_client_unloads_a_model_while_it_is_measured(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "other", adds(2))
    with demanding(models) as server:
        for _ in range(12):
            assert server.infer("other", [1.0]) == [3.0]
            assert server.ask("POST", "/v2/repository/models/other/unload")[0] == 200
            assert server.json("GET", "/v2/models/other")["inputs"][0]["name"] == "INPUT0"
        eventually(lambda: server.state("other") == "UNAVAILABLE")
        eventually(lambda: 'nerite_model_resident_bytes{model="other",place="host"}' not in server.metrics())
        assert "internal error" not in server.text


def test_a_language_model_is_listed_and_loaded(tmp_path: Path) -> None:
    models = tmp_path / "models"
    language_model(models / "talker" / "1")
    (models / "talker" / "config.pbtxt").write_text('backend: "llm"\n')
    with demanding(models, "--demand-keep-alive=1") as server:
        (listed,) = server.json("GET", "/v1/models")["data"]
        assert (listed["id"], listed["task"]) == ("talker", "generate")
        with Client(server.http) as client:
            assert client.chat_models() == ["talker"]
        assert server.state("talker") == "UNAVAILABLE", "whoever looks for a language model loads none"
        asked = {"model": "talker", "prompt": "ab", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        status, _, body = server.ask("POST", "/v1/completions", asked)
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 4)
        eventually(lambda: states(server)["talker"] == ("UNAVAILABLE", ON_DEMAND))
        assert "evicted 'talker': it had no request for as long as its keep-alive" in server.text
        assert server.metrics()['nerite_demand_evictions_total{reason="keep-alive"}'] == 1
        large = json.dumps(asked).encode() + b" " * 70_000  # parsed in a helper
        status, _, body = server.ask("POST", "/v1/completions", large)
        assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 4)


def test_the_least_recently_used_makes_room(tmp_path: Path) -> None:
    models = tmp_path / "models"
    for name in ("a", "b", "c"):
        python_model(models, name, BIG % 60)
    python_model(models, "busy", SLEEPS)
    python_model(models, "pinned", BIG % 30, pbtxt(parameters=parameter("LOAD_ON_DEMAND", "pinned")))
    python_model(models, "huge", BIG % 250)
    with demanding(models, "--demand-host-memory=250MiB", "--demand-wait-seconds=30") as server:
        assert server.state("pinned") == "READY"
        server.infer("a", [0.0])
        server.infer("b", [0.0])
        server.infer("a", [0.0])
        together(lambda: server.infer("busy", [0.0]), lambda: server.infer("c", [0.0]))
        assert server.state("pinned") == "READY"
        assert server.state("c") == "READY"
        eventually(lambda: server.state("b") == "UNAVAILABLE")  # once it is known what the new one takes
        assert "evicted 'b'" in server.text
        assert "evicted 'busy'" not in server.text
        status, _, body = server.ask("POST", "/v2/models/huge/infer", asked(0.0))
        if status == 200:  # it was estimated by its files; now it is known
            eventually(lambda: server.state("huge") == "UNAVAILABLE")
            status, _, body = server.ask("POST", "/v2/models/huge/infer", asked(0.0))
        assert status == 503, body
        assert "of host memory" in body.decode()
        assert "pinned (pinned)" in body.decode()
        used = server.metrics()['nerite_memory_used_bytes{place="host"}']
        assert used <= 250 << 20
    with demanding(models, "--demand-host-memory=250MiB") as server:
        status, _, body = server.ask("POST", "/v2/models/huge/infer", asked(0.0))
        assert status == 503, "what was measured is known after a restart"


@pytest.mark.parametrize("flags", [(), ("--front-processes=1",)], ids=["one process", "front process"])
def test_a_storm_of_one_tenant_costs_another_neither_its_place_nor_its_models(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    models = tmp_path / "models"
    storm = [f"alice{number}" for number in range(20)]
    for name in ("warm", "cold", *storm):
        python_model(models, name, BIG % 30)
    policy = tmp_path / "policy.toml"
    tenants = "".join(f'[tenants.{name}]\nheader_values = ["{name}"]\n' for name in ("alice", "bob"))
    policy.write_text(f'header = "x-tenant"\n{tenants}')
    flags = (f"--policy-file={policy}", "--demand-max-waiting=10", "--model-load-thread-count=1", *flags)
    stop = threading.Event()
    with demanding(models, "--demand-host-memory=330MiB", *flags) as server:

        def ask(model: str, tenant: str) -> int:
            return server.ask("POST", f"/v2/models/{model}/infer", asked(0.0), x_tenant=tenant)[0]

        def storms(model: str) -> None:
            while not stop.wait(0.05):
                ask(model, "alice")

        assert ask("warm", "bob") == 200
        threads = [threading.Thread(target=storms, args=(model,)) for model in storm]
        for thread in threads:
            thread.start()
        try:
            eventually(lambda: server.text.count("evicted 'alice") > 5)
            before = server.text.count("on demand in")
            assert ask("cold", "bob") == 200
            assert server.text.count("on demand in") - before < 5, "its turn came after that of one of the others"
            assert ask("warm", "bob") == 200
            assert "evicted 'warm'" not in server.text
        finally:
            stop.set()
            for thread in threads:
                thread.join()


def parameter(key: str, value: str) -> str:
    return f'parameters {{ key: "{key}" value: {{ string_value: "{value}" }} }}'


def asked(value: float) -> dict[str, Any]:
    return {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}]}


def test_a_load_that_fails_is_told_and_not_tried_by_every_request(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "broken", "def initialize(self, args):\n    raise ValueError('no weights')")
    with demanding(models) as server:
        answers = together(*[lambda: server.ask("POST", "/v2/models/broken/infer", asked(1.0))] * 4)
        for status, headers, body in answers:
            assert status == 503
            assert b"no weights" in body
            assert int(headers["Retry-After"]) >= 1
        assert server.text.count("loading: broken:1") == 1
        assert not server.ready("broken")
        assert server.ready()


def test_a_wait_has_an_end(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "slow", "def initialize(self, args):\n    time.sleep(3)\n" + adds(1))
    python_model(models, "other", adds(1))
    flags = ("--demand-max-waiting=2", "--demand-wait-seconds=1", "--model-load-thread-count=1")
    with demanding(models, *flags) as server:
        answers = together(*[lambda: server.ask("POST", "/v2/models/slow/infer", asked(1.0))] * 3)
        texts = sorted(body.decode() for _, _, body in answers)
        assert {status for status, _, _ in answers} == {503}
        assert sum("as many as --demand-max-waiting allows" in text for text in texts) == 1
        assert sum("was not loaded within 1 s (--demand-wait-seconds)" in text for text in texts) == 2
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            tensor = tritonclient.grpc.InferInput("INPUT0", [1, 1], "FP32")
            tensor.set_data_from_numpy(np.zeros((1, 1), np.float32))
            with pytest.raises(tritonclient.grpc.InferenceServerException, match="DEADLINE_EXCEEDED"):
                client.infer("slow", [tensor], client_timeout=0.2)
        eventually(lambda: server.metrics()["nerite_demand_waiting_requests"] == 0)
        eventually(lambda: server.state("slow") == "READY")
        assert server.infer("slow", [1.0]) == [2.0]


def test_in_explicit_mode_those_that_say_so_are_loaded_on_demand(tmp_path: Path) -> None:
    models = tmp_path / "models"
    python_model(models, "willing", adds(1), pbtxt(parameters=parameter("LOAD_ON_DEMAND", "true")))
    python_model(models, "other", adds(1))
    log = tmp_path / "log"
    with serving(models, log, "--model-control-mode=explicit", environment={"XDG_STATE_HOME": str(tmp_path)}) as server:
        assert server.infer("willing", [1.0]) == [2.0]
        assert server.ask("POST", "/v2/models/other/infer", asked(1.0))[0] == 404
        assert states(server)["other"] == ("", "")


def test_a_new_model_is_found_by_the_server_of_the_page(tmp_path: Path) -> None:
    *command, mode, budget = shlex.split(Page("docs/demand.md").block("nerite serve"))
    assert (command, mode) == (["nerite", "serve", "models"], "--model-control-mode=demand")
    models = tmp_path / "models"
    python_model(models, "first", adds(1))
    with demanding(models, "--repository-poll-secs=1", budget) as server:
        assert server.ask("POST", "/v2/models/second/infer", asked(1.0))[0] == 404
        python_model(models, "second", adds(2))
        eventually(lambda: states(server).get("second") == ("UNAVAILABLE", ON_DEMAND))
        assert server.infer("second", [1.0]) == [3.0]
