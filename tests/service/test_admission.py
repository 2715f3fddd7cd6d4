"""A server with a policy file: who is let in, on each protocol, while the file changes, and when clients go."""

from __future__ import annotations

import csv
import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from test_overload import PATIENT, Held, grpc_request
from tritonclient.grpc import service_pb2_grpc
from tritonclient.utils import InferenceServerException

from grpc_streams import Stream
from pages import run
from serving import ALL_TENANTS, IDENTITY, Serving, ensemble, eventually, pbtxt, python_model, serving, step

BODY: dict[str, Any] = {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.0]}]}
POLICY = """
header = "x-tenant"

[classes.fast]
order = 1

[classes.slow]
order = 2

[tenants.{name}]
keys = ["key of {name}"]
class = "fast"
requests_per_minute = 1
requests_burst = {burst}

[tenants.steady]
keys = ["key of steady"]
class = "fast"
concurrency = 2

[models.patient]
max_requests = 1

[models.identity]
max_bytes = 64
"""
PARROT = """
@staticmethod
def auto_complete_config(config):
    config.add_input({"name": "text_input", "data_type": "TYPE_STRING", "dims": [1]})
    config.add_output({"name": "text_output", "data_type": "TYPE_STRING", "dims": [1]})
    return config

def execute(self, requests):
    return [
        pb_utils.InferenceResponse([pb_utils.Tensor("text_output", np.array([b"squawk"], object))])
        for request in requests
    ]
"""


class House(Held):
    """A server that holds one model, and its policy file."""

    def __init__(self, server: Serving, hold: Path, policy: Path) -> None:
        super().__init__(server, hold)
        self.policy = policy

    def follow(self, text: str) -> None:
        """Change the policy; return when the server has taken note."""
        self.server.follow(self.policy, text)

    def infer(self, name: str, model: str = "identity", body: Any = BODY, **headers: str) -> tuple[int, Any, bytes]:
        return self.server.ask(
            "POST", f"/v2/models/{model}/infer", body, authorization=f"Bearer key of {name}", **headers
        )

    def quota(self, kind: str = "use", **named: str) -> dict[str, Any]:
        found = self.server.json("GET", "/v2/quota")[kind]
        (one,) = [each for each in found if all(each[key.strip("_")] == value for key, value in named.items())]
        return dict(one)


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("policy")
    python_model(folder / "models", "identity", IDENTITY)
    python_model(folder / "models", "patient", PATIENT, pbtxt(more=""))
    twice = (step("identity", "INPUT0", "between"), step("identity", "between", "OUTPUT0"))
    ensemble(folder / "models", "twice", *twice)
    python_model(folder / "models", "parrot", PARROT, 'backend: "python"')
    hold, policy = folder / "hold", folder / "policy.toml"
    policy.write_text(POLICY.format(name="first", burst=1))
    flags = (
        f"--policy-file={policy}",
        ALL_TENANTS,
    )
    with serving(folder / "models", folder / "log", *flags, environment={"HOLD": str(hold)}) as server:
        yield House(server, hold, policy)


@pytest.fixture
def of(request: pytest.FixtureRequest, house: House) -> str:
    """A tenant that may ask once a minute."""
    name = request.node.name.replace("_", "-")
    house.follow(POLICY.format(name=name, burst=1))
    return name


def test_over_http(house: House, of: str) -> None:
    assert house.infer(of)[0] == 200
    status, headers, body = house.infer(of)
    assert (status, 50 <= int(headers["Retry-After"]) <= 60) == (429, True)
    text = json.loads(body)["error"]
    assert "requests_per_minute of tenant 'test-over-http' is 1, now 0 left of 1" in text
    assert house.infer("nobody")[0] == 200, "others may"
    status, _, body = house.infer(of, x_nerite_class="none")
    assert (status, "class of tenant" in json.loads(body)["error"]) == (400, True)
    assert house.infer("nobody", x_nerite_timeout_ms="soon")[0] == 400
    big = {"inputs": [{"name": "INPUT0", "shape": [1, 17], "datatype": "FP32", "data": [1.0] * 17}]}
    status, headers, body = house.infer("nobody", body=big)
    assert (status, "Retry-After" in headers) == (413, False)
    assert "max_bytes of model 'identity' is 64, now 68" in json.loads(body)["error"]
    use = house.quota(tenant=of, model="identity")
    assert (use["class"], use["admitted"], use["refused"]) == ("fast", 1, {"requests_per_minute": 1, "class": 1})


def test_over_grpc(house: House, of: str) -> None:
    tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    key = {"authorization": f"Bearer key of {of}"}
    with grpcclient.InferenceServerClient(house.server.grpc) as client:
        client.infer("identity", [tensor], headers=key)
        with pytest.raises(InferenceServerException, match="requests_per_minute of tenant") as refused:
            client.infer("identity", [tensor], headers=key)
        assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    with grpc.insecure_channel(house.server.grpc) as channel:
        message = grpc_request()
        message.model_name = "identity"
        with pytest.raises(grpc.RpcError) as error:
            service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelInfer(
                message, metadata=[("authorization", key["authorization"])]
            )
        assert int(dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 1000
    stream = Stream(house.server, headers=key)
    stream.ask("identity", 1.0)
    assert "requests_per_minute of tenant" in stream.next()
    stream.close()


def test_as_openai_has_it(house: House, of: str) -> None:
    def complete() -> tuple[int, dict[str, str], Any]:
        asked = {"model": "parrot", "prompt": "Polly"}
        status, headers, body = house.server.ask(
            "POST", "/v1/completions", asked, authorization=f"Bearer key of {of}", x_stainless_retry_count="1"
        )
        return status, headers, json.loads(body)

    assert complete()[2]["choices"][0]["text"] == "squawk"
    status, headers, body = complete()
    assert (status, int(headers["Retry-After"]) > 1) == (429, True)
    assert (body["error"]["type"], body["error"]["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert house.quota(tenant=of)["retries"] == 2


def test_an_ensemble_is_one_request(house: House, of: str) -> None:
    assert house.infer(of, "twice")[0] == 200
    status, _, body = house.infer(of, "twice")
    assert (status, b"requests_per_minute" in body) == (429, True)
    uses = [each["model"] for each in house.server.json("GET", "/v2/quota")["use"] if each["tenant"] == of]
    assert uses == ["twice"]


def test_by_header(house: House) -> None:
    house.follow(POLICY.format(name="by-header", burst=1) + '[tenants.other]\nheader_values = ["o"]\n')
    assert house.infer("nobody", x_tenant="o")[0] == 200
    assert house.quota(tenant="other")["class"] == "slow"


def test_a_mistake_in_the_file(house: House, of: str) -> None:
    assert house.infer(of)[0] == 200
    good = house.policy.read_text()
    house.follow(good.replace("requests_burst", "request_burst"))
    eventually(lambda: "request_burst: is not known. Did you mean requests_burst?" in house.server.text)
    assert house.infer(of)[0] == 429, "what was in force still is"
    house.follow("")
    eventually(lambda: f"the policy file '{house.policy}' is empty" in house.server.text)
    assert house.infer(of)[0] == 429, "nobody has lifted the limits"
    house.follow(good.replace("requests_burst = 1", "requests_burst = 3"))
    assert [house.infer(of)[0] for _ in range(3)] == [200, 200, 429]


@pytest.fixture
def held(house: House) -> Iterator[House]:
    house.policy.touch()
    house.hold.touch()
    yield house
    house.hold.unlink(missing_ok=True)


def waiting(house: House) -> int:
    return int(house.quota("models", model="patient")["waiting"])


def test_waiting(held: House, of: str) -> None:
    """One runs. Of those that wait one gives up, one is too late, and one is let in."""
    held.ask("runs")
    eventually(lambda: held.quota("models", model="patient")["running"] == 1)
    host, port = held.server.http.split(":")
    body = json.dumps(BODY).encode()
    with socket.create_connection((host, int(port)), timeout=20) as client:
        head = f"POST /v2/models/patient/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        eventually(lambda: waiting(held) == 1)
        assert held.metric("nv_inference_pending_request_count") == 1
    eventually(lambda: waiting(held) == 0)
    assert held.quota(model="patient", tenant="default")["withdrawn"] == 1
    held.ask("waits")
    eventually(lambda: waiting(held) == 1)
    status, headers, text = held.infer("nobody", "patient", x_nerite_timeout_ms="50")
    assert (status, "Retry-After" in headers) == (503, False)
    assert b"deadline of the request" in text
    tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 1), np.float32))
    with (
        grpcclient.InferenceServerClient(held.server.grpc) as client,
        pytest.raises(InferenceServerException) as refused,
    ):
        client.infer("patient", [tensor], client_timeout=0.05)
    assert refused.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    eventually(lambda: waiting(held) == 1)
    assert held.let_go() == {"runs": 200, "waits": 200}
    metrics = held.server.metrics()
    assert metrics['nerite_admission_waiting{model="patient"}'] == 0
    assert metrics['nerite_admission_refused{class="slow",model="patient",reason="deadline",tenant="default"}'] >= 1


def test_the_command(house: House, of: str) -> None:
    house.infer(of), house.infer(of)
    reaches = ["--url", house.server.http, "--header", "x-admin-key: tests"]
    table = run(["nerite", "quota", of, *reaches])
    assert "requests_per_minute" in table
    (row,) = csv.DictReader(io.StringIO(run(["nerite", "quota", of, "--csv", *reaches])))
    assert (row["model"], row["tenant"], row["admitted"], row["refused"]) == ("identity", of, "1", "1")
    assert (row["input_bytes"], row["output_tokens"]) == ("4", "")
    endings = ("complete", "cancelled", "deadline", "failed", "refused_after_all")
    assert [row[ending] for ending in endings] == ["1", "0", "0", "0", "0"]
    told = json.loads(run(["nerite", "quota", "--json", *reaches]))
    assert {each["tenant"] for each in told["tenants"]} == {of, "steady", "default"}


def test_a_file_with_a_mistake_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    policy = tmp_path / "p.toml"
    policy.write_text("[default]\nweight = 0\n")
    with (
        pytest.raises(RuntimeError, match=r"p\.toml:2: default\.weight: must be an integer >= 1"),
        serving(tmp_path / "models", tmp_path / "log", f"--policy-file={policy}", clean=False),
    ):
        pass
