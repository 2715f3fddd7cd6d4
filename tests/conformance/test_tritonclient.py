"""Every public method of every kind of tritonclient, against a server.

Which methods there are is asked of the installed clients: one that no exercise uses is a test that fails.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from conformance.repositories import repository, write
from conformance.stock import KINDS, Exercise, StockClient, exercises, public_methods
from serving import Serving, pbtxt, python_model, serving

COPIED = ("classes", "echo", "many", "queue", "request", "text", "trouble", "types", "versions", "arguments")
AT_START = (*COPIED[:-1], "endless", "slow", "words")
SLOW = """
def execute(self, requests):
    time.sleep(1)
    return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", r.inputs()[0].as_numpy())]) for r in requests]
"""
ENDLESS = """
def execute(self, requests):
    for request in requests:
        sender = request.get_response_sender()
        tensor = pb_utils.Tensor("OUTPUT0", request.inputs()[0].as_numpy())
        while not sender.is_cancelled():
            sender.send(pb_utils.InferenceResponse([tensor]))
            time.sleep(0.01)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
DECOUPLED = pbtxt(batch=0, more="model_transaction_policy { decoupled: true }")
WORDS = """
def execute(self, requests):
    # numpy has no type for BF16.
    return [pb_utils.InferenceResponse([pb_utils.Tensor.from_dlpack("OUTPUT0", r.inputs()[0])]) for r in requests]
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("tritonclient")
    models = {**repository("streams"), **repository("good")}
    for name in COPIED:
        write(models[name], folder / "models" / name)
    python_model(folder / "models", "slow", SLOW)
    python_model(folder / "models", "endless", ENDLESS, DECOUPLED)
    python_model(folder / "models", "words", WORDS, pbtxt(datatype="TYPE_BF16"))
    flags = ["--model-control-mode=explicit", *(f"--load-model={name}" for name in AT_START)]
    flags += ["--allow-client-shm=true", "--http-header-forward-pattern=authorization|x-.*"]
    flags += ["--grpc-header-forward-pattern=authorization|x-.*"]
    with serving(folder / "models", folder / "log", *flags) as running:
        yield running


@pytest.fixture(scope="module")
def clients(server: Serving) -> Iterator[dict[str, StockClient]]:
    made = {kind: StockClient(kind, server) for kind in KINDS}
    yield made
    for client in made.values():
        client.end()


CASES = [
    pytest.param(kind, exercise, id=f"{kind}-{exercise.method}-{exercise.play.__name__}")
    for exercise in exercises()
    for kind in exercise.kinds
]


@pytest.mark.parametrize(("kind", "exercise"), CASES)
def test_method(clients: dict[str, StockClient], kind: str, exercise: Exercise) -> None:
    client = clients[kind]
    client.used.clear()
    exercise.play(client)
    assert exercise.method in client.used


@pytest.mark.parametrize("kind", KINDS)
def test_every_public_method_is_exercised(kind: str) -> None:
    exercised = {exercise.method for exercise in exercises() if kind in exercise.kinds}
    assert sorted(public_methods(kind).keys() - exercised) == []
