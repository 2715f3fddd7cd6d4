"""Sequences of tenants: what a client sends under an id reaches its own sequence, however it is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from routing import ROUTER, routing
from serving import Serving, ensemble, pbtxt, python_model, serving, step

KEPT = """
def execute(self, requests):
    responses = []
    for request in requests:
        given = {each.name(): each.as_numpy() for each in request.inputs()}
        total = given["before"] + given["INPUT0"]
        outputs = [pb_utils.Tensor("OUTPUT0", total), pb_utils.Tensor("after", total)]
        responses.append(pb_utils.InferenceResponse(outputs))
    return responses
"""
STATE = """
  state { input_name: "before" output_name: "after" data_type: TYPE_FP32 dims: [ 1 ] }
"""
OWN = """
def initialize(self, args):
    self.totals = {}

def execute(self, requests):
    responses = []
    for request in requests:
        of = request.tenant(), request.correlation_id()
        if request.flags() & pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self.totals[of] = 0
        value = request.inputs()[0].as_numpy()
        if of[1]:  # a slot may be empty
            value = self.totals[of] = self.totals[of] + value
        responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]))
    return responses
"""
CALLS = """
def execute(self, requests):
    responses = []
    for request in requests:
        call = pb_utils.InferenceRequest(
            model_name="kept",
            requested_output_names=["OUTPUT0"],
            inputs=request.inputs(),
            correlation_id=request.correlation_id(),
            flags=request.flags(),
        )
        answer = call.exec()
        error = answer.error() if answer.has_error() else None
        responses.append(pb_utils.InferenceResponse([] if error else answer.output_tensors(), error))
    return responses
"""
POLICY = """
[tenants.alice]
keys = ["alice's"]

[tenants.bob]
keys = ["bob's"]
"""
START: Final = {"sequence_start": True}
END: Final = {"sequence_end": True}
ROUTER_KEY: Final = "a router's"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tenants")
    models = folder / "models"
    sequences = "sequence_batching { max_sequence_idle_microseconds: 600000000 %s }"
    oldest = f"{STATE} oldest {{ max_candidate_sequences: 8 }}"
    python_model(models, "kept", KEPT, pbtxt(batch=8, dims="1", more=sequences % STATE))
    python_model(models, "oldest", KEPT, pbtxt(batch=8, dims="1", more=sequences % oldest))
    python_model(models, "own", OWN, pbtxt(batch=8, dims="1", more=sequences % ""))
    python_model(models, "calls", CALLS, pbtxt(batch=1, dims="1"))
    ensemble(models, "steps", step("kept", "INPUT0", "OUTPUT0"))
    (folder / "policy.toml").write_text(POLICY)
    (folder / "routers").write_text(ROUTER_KEY)
    return folder


class Client:
    """Sends over HTTP as a tenant. Returns the sum, or what is wrong."""

    def __init__(self, server: Serving, tenant: str) -> None:
        self.server = server
        self.headers = {"authorization": f"Bearer {tenant}'s"} if tenant else {}

    def ask(self, model: str, of: int | str, value: float, **flags: bool) -> float | str:
        tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [value]}
        asked = {"inputs": [tensor], "parameters": {"sequence_id": of, **flags}}
        body = self.server.ask("POST", f"/v2/models/{model}/infer", asked, **self.headers)[2]
        answer = json.loads(body)
        return answer["error"] if "error" in answer else answer["outputs"][0]["data"][0]


class GrpcClient(Client):
    """Sends over gRPC."""

    def ask(self, model: str, of: int | str, value: float, **flags: bool) -> float | str:
        tensor = grpcclient.InferInput("INPUT0", [1, 1], "FP32")
        tensor.set_data_from_numpy(np.array([[value]], np.float32))
        with grpcclient.InferenceServerClient(self.server.grpc) as client:
            try:
                answer = client.infer(model, [tensor], sequence_id=of, headers=self.headers, **flags)
            except InferenceServerException as error:
                return error.message()
        return float(answer.as_numpy("OUTPUT0")[0][0])


@pytest.fixture(scope="module", params=["1", "2", "router"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[Serving]:
    """A server without and with front processes, and one behind a router."""
    policy = f"--policy-file={folder / 'policy.toml'}"
    with ExitStack() as running:
        if request.param != "router":
            log = folder / f"log{request.param}"
            yield running.enter_context(serving(folder / "models", log, policy, f"--front-processes={request.param}"))
            return
        place = folder / "router"
        place.mkdir()
        keys = f"--router-key-file={folder / 'routers'}"
        member = running.enter_context(serving(folder / "models", folder / "member", keys))
        settings = f'{ROUTER}policy-file = "{folder / "policy.toml"}"\nmember-key-file = "{folder / "routers"}"\n'
        yield running.enter_context(routing(place, _members(member), router=settings))


def _members(*members: Serving) -> str:
    rows = ", ".join(f'{{ http = "{each.http}", grpc = "{each.grpc}" }}' for each in members)
    return f'[[pool]]\nname = "main"\nhealth-interval = "200ms"\nmembers = [{rows}]\n'


@pytest.mark.parametrize("form", [Client, GrpcClient])
@pytest.mark.parametrize("name", [42, "a call"])
@pytest.mark.parametrize("model", ["kept", "oldest", "own", "steps", "calls"])
def test_nobody_reads_writes_or_ends_the_sequence_of_another(
    server: Serving, model: str, name: int | str, form: type[Client]
) -> None:
    alice, bob, anybody = (form(server, tenant) for tenant in ("alice", "bob", ""))
    assert alice.ask(model, name, 1000, **START) == 1000
    for thief in (bob, anybody):
        for flags in ({}, END):
            assert "must specify the START flag" in str(thief.ask(model, name, 1, **flags))
        assert thief.ask(model, name, 1, **START) == 1
    assert alice.ask(model, name, 5) == 1005
    for thief in (bob, anybody):
        assert thief.ask(model, name, 1, **END) == 2
    assert alice.ask(model, name, 5, **END) == 1010


def test_a_tenant_leaves_slots_for_others(server: Serving) -> None:
    """Of eight slots, one tenant gets six, however many sequences it begins and never ends."""
    alice, bob = (Client(server, tenant) for tenant in ("alice", "bob"))
    begun = [bob.ask("own", number, 1, **START) for number in range(1, 7)]
    assert begun == [1] * 6
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1]}
    asked = {"inputs": [tensor], "parameters": {"sequence_id": 7, "timeout": 500_000, **START}}
    status, _, body = server.ask("POST", "/v2/models/own/infer", asked, **bob.headers)
    assert status == 503, body  # it has waited: the sequence batcher says so, or admission control
    assert b"timeout" in body or b"deadline" in body
    assert [alice.ask("own", number, 2, **START) for number in (1, 2)] == [2, 2]
    for number in range(1, 7):
        bob.ask("own", number, 1, **END)
    for number in (1, 2):
        alice.ask("own", number, 1, **END)
