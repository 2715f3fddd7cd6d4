"""A router before real servers: tensors and texts pass through, and a server that is killed fails no request."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import openai

from routing import pool, routing, samples
from serving import IDENTITY, IN_PROCESS, PATIENCE, Serving, binary_request, eventually, pbtxt, python_model, serving

WORDS = """
def execute(self, requests):
    for request in requests:
        prompt = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().reshape(-1)[0].decode()
        sender = request.get_response_sender()
        for word in prompt.split(" "):
            while word == "wait" and not sender.is_cancelled():
                time.sleep(0.01)
            tensor = pb_utils.Tensor("text_output", np.array([(word + " ").encode()], object))
            sender.send(pb_utils.InferenceResponse([tensor]))
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
TEXT = """
backend: "python"
max_batch_size: 0
model_transaction_policy { decoupled: true }
input [{ name: "text_input" data_type: TYPE_STRING dims: [ 1 ] }]
output [{ name: "text_output" data_type: TYPE_STRING dims: [ -1 ] }]
instance_group [{ kind: KIND_CPU count: 2 }]
"""


@contextmanager
def servers(folder: Path, count: int) -> Iterator[list[Serving]]:
    """Run so many servers of the same models."""
    models = folder / "models"
    python_model(models, "identity", IDENTITY, pbtxt(parameters=IN_PROCESS))
    python_model(models, "words", WORDS, TEXT)
    with ExitStack() as stack:
        yield [stack.enter_context(serving(models, folder / f"log-{number}", clean=False)) for number in range(count)]


def test_tensors_and_texts(tmp_path: Path) -> None:
    with servers(tmp_path, 2) as members, routing(tmp_path, pool(*(each.http for each in members))) as router:
        assert router.infer("identity", [1.0, 2.0]) == [1.0, 2.0]
        array = np.random.default_rng(0).random((1, 500_000), np.float32)
        body, headers = binary_request(array)
        status, told, answer = router.ask("POST", "/v2/models/identity/infer", body, **headers)
        assert status == 200
        assert answer[int(told["Inference-Header-Content-Length"]) :] == array.tobytes()
        assert router.json("GET", "/v2/models/identity")["name"] == "identity"
        assert router.ready("identity")
        assert router.ready()
        index = router.json("POST", "/v2/repository/index")
        assert [(each["name"], each["state"]) for each in index] == [("identity", "READY"), ("words", "READY")]
        status, _, answer = router.ask("POST", "/v2/models/words/generate_stream", {"text_input": "one two"})
        assert [json.loads(line[6:])["text_output"] for line in answer.decode().split("\n\n") if line] == [
            "one ", "two ",
        ]  # fmt: skip
        assert router.ask("POST", "/v2/models/none/infer", b"{}")[0] == 404
        wrong = "POST", "/v2/models/identity/infer", b"{}"
        assert router.ask(*wrong)[::2] == members[0].ask(*wrong)[::2]
        with openai.OpenAI(base_url=f"http://{router.http}/v1", api_key="none", max_retries=0) as client:
            assert [model.id for model in client.models.list()] == ["words"]
            stream = client.completions.create(model="words", prompt="one two three", stream=True)
            assert "".join(part.choices[0].text for part in stream) == "one two three "


def test_a_killed_server_fails_no_request(tmp_path: Path) -> None:
    body = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]})
    statuses: Counter[int] = Counter()
    over = threading.Event()

    def ask(router: Serving) -> None:
        connection = http.client.HTTPConnection(router.http, timeout=PATIENCE)
        while not over.is_set():
            connection.request("POST", "/v2/models/identity/infer", body)
            answer = connection.getresponse()
            answer.read()
            statuses[answer.status] += 1
        connection.close()

    with servers(tmp_path, 2) as members, routing(tmp_path, pool(*(each.http for each in members))) as router:
        askers = [threading.Thread(target=ask, args=(router,)) for _ in range(4)]
        for each in askers:
            each.start()
        try:
            eventually(lambda: len(samples(router, "nerite_router_requests")) == 2 and statuses[200] > 100)
            members[0].process.kill()
            members[0].process.wait()
            enough = statuses[200] + 200
            eventually(lambda: statuses[200] > enough)
        finally:
            over.set()
            for each in askers:
                each.join()
        assert set(statuses) == {200}
        eventually(
            lambda: samples(router, "nerite_router_members_ready")['nerite_router_members_ready{pool="main"}'] == 1
        )


def test_a_server_that_is_killed_in_a_stream(tmp_path: Path) -> None:
    with (
        servers(tmp_path, 2) as members,
        routing(tmp_path, pool(*(each.http for each in members))) as router,
        openai.OpenAI(base_url=f"http://{router.http}/v1", api_key="none", max_retries=0) as client,
    ):
        stream = iter(client.completions.create(model="words", prompt="one wait", stream=True))
        assert next(stream).choices[0].text == "one "
        requests = samples(router, "nerite_router_member_requests")
        (busy,) = [key for key, count in requests.items() if count]
        (member,) = [each for each in members if each.http in busy]
        member.process.kill()
        began = time.monotonic()
        told = ""
        try:
            for _ in stream:
                pass
        except openai.APIError as error:
            told = error.message
        assert "closed the connection before the end of its answer" in told
        assert time.monotonic() - began < PATIENCE / 2
        client.close()
