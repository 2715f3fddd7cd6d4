"""Load and unload, with what a load may bring along."""

import json

import numpy as np

from conformance.stock import GRPC, StockClient, exercise
from serving import eventually

CONFIG = {
    "name": "arguments",
    "backend": "python",
    "max_batch_size": 0,
    "parameters": {"greeting": {"string_value": "good day"}},
    "input": [{"name": "KEY", "data_type": "TYPE_STRING", "dims": [1]}],
    "output": [{"name": "VALUE", "data_type": "TYPE_STRING", "dims": [1]}],
}
SHOUTS = b"""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        keys = [request.inputs()[0].as_numpy()[0].decode() for request in requests]
        values = [pb_utils.Tensor("VALUE", np.array([key.upper()], object)) for key in keys]
        return [pb_utils.InferenceResponse([value]) for value in values]
"""


def answer(client: StockClient, key: str) -> str:
    """Return what the model of this page has to say about one of its arguments."""
    result = client.infer("arguments", [client.tensor("KEY", np.array([key], object))])
    text: str = result.as_numpy("VALUE")[0].decode()
    return text


def gone(client: StockClient) -> None:
    """Leave the model as it was found: not loaded."""
    client.unload_model("arguments")
    eventually(lambda: client.server.state("arguments") == "UNAVAILABLE")


@exercise("load_model")
def load(client: StockClient) -> None:
    client.load_model("arguments")
    assert client.is_model_ready("arguments")
    assert answer(client, "model_name") == "arguments"
    gone(client)


@exercise("load_model")
def load_nobody(client: StockClient) -> None:
    status, text = client.refused("load_model", "nobody")
    assert status == ("INTERNAL" if client.is_grpc else "500")
    assert "failed to load 'nobody', failed to poll from model repository" in text


@exercise("load_model")
def load_with_a_configuration(client: StockClient) -> None:
    client.load_model("arguments", config=json.dumps(CONFIG))
    assert "good day" in answer(client, "model_config")
    gone(client)
    client.load_model("arguments")
    assert "good day" not in answer(client, "model_config")
    gone(client)


@exercise("load_model")
def load_with_files(client: StockClient) -> None:
    client.load_model("arguments", config=json.dumps(CONFIG), files={"file:1/model.py": SHOUTS})
    assert answer(client, "quiet") == "QUIET"
    gone(client)


@exercise("load_model")
def load_with_files_and_no_configuration(client: StockClient) -> None:
    status, text = client.refused("load_model", "arguments", files={"file:1/model.py": SHOUTS})
    assert status == ("INTERNAL" if client.is_grpc else "500")
    assert "failed to load 'arguments', failed to poll from model repository" in text


@exercise("unload_model")
def unload(client: StockClient) -> None:
    client.load_model("arguments")
    gone(client)
    assert not client.is_model_ready("arguments")
    status, text = client.refused("infer", "arguments", [client.tensor("KEY", np.array(["x"], object))])
    assert status == ("NOT_FOUND" if client.is_grpc else "404")
    assert "Request for unknown model: 'arguments'" in text


@exercise("unload_model")
def unload_with_dependents(client: StockClient) -> None:
    client.load_model("arguments")
    client.unload_model("arguments", unload_dependents=True)
    eventually(lambda: client.server.state("arguments") == "UNAVAILABLE")


@exercise("unload_model")
def unload_nobody(client: StockClient) -> None:
    client.unload_model("nobody")


@exercise("load_model", *GRPC)
def load_in_time(client: StockClient) -> None:
    client.load_model("echo", client_timeout=20)
    assert client.is_model_ready("echo", client_timeout=20)
