"""Inference, with each thing that a request may say besides its tensors."""

import json
import threading
from typing import Any

import numpy as np

from conformance.stock import GRPC, HTTP, StockClient, exercise

PAIR = np.array([[3, 4]], np.int32)
ONE = np.array([1], np.int32)


def seen(client: StockClient, **options: Any) -> dict[str, Any]:
    """Return what a model sees of a request that is made with ``options``."""
    result = client.infer("request", [client.tensor("IN", ONE)], **options)
    told: dict[str, Any] = json.loads(result.as_numpy("REQUEST")[0])
    return told


@exercise("infer")
def infer(client: StockClient) -> None:
    result = client.infer("echo", [client.tensor("IN", PAIR)])
    assert result.as_numpy("OUT").tolist() == PAIR.tolist()
    assert result.as_numpy("nobody") is None


@exercise("infer")
def whole_response(client: StockClient) -> None:
    result = client.infer("echo", [client.tensor("IN", PAIR)], request_id="7")
    response = result.get_response(as_json=True) if client.is_grpc else result.get_response()
    assert (response["model_name"], response["model_version"], response["id"]) == ("echo", "1", "7")
    # The client for gRPC drops what it is asked for as JSON here, so that only the message can be looked at.
    output = result.get_output("OUT")
    told = (output.datatype, list(output.shape)) if client.is_grpc else (output["datatype"], output["shape"])
    assert told == ("INT32", [1, 2])
    assert result.get_output("nobody") is None


@exercise("infer")
def version(client: StockClient) -> None:
    for number in ("1", "3"):
        result = client.infer("versions", [client.tensor("IN", ONE.reshape(1, 1))], model_version=number)
        assert result.as_numpy("VERSION").tolist() == [[int(number)]]
    text = client.refused("infer", "versions", [client.tensor("IN", ONE.reshape(1, 1))], model_version="9")[1]
    assert "Request for unknown model: 'versions' version 9" in text


@exercise("infer")
def sequence(client: StockClient) -> None:
    told = seen(client, request_id="r", sequence_id=42, sequence_start=True, sequence_end=True)
    assert (told["id"], told["correlation_id"], told["flags"]) == ("r", 42, 3)
    assert seen(client, sequence_id=42, sequence_end=True)["flags"] == 2
    assert seen(client, sequence_id="talk", sequence_start=True)["correlation_id"] == "talk"


@exercise("infer")
def timeout_and_priority(client: StockClient) -> None:
    told = seen(client, timeout=5_000_000, priority=1)
    assert told["timeout"] == 5_000_000
    assert not {"timeout", "priority"} & told["parameters"].keys()
    short = [client.tensor("SECONDS", np.array([[0.01]], np.float32))]
    assert client.infer("queue", short, priority=1, timeout=900_000).as_numpy("SECONDS_OUT").shape == (1, 1)


@exercise("infer")
def parameters(client: StockClient) -> None:
    sent = {"text": "a", "number": 3, "yes": True, "fraction": 0.5}
    told = seen(client, parameters=sent, headers=None)["parameters"]
    assert told == sent
    assert "reserved" in client.refused("infer", "request", [client.tensor("IN", ONE)], parameters={"priority": 1})[1]


@exercise("infer")
def forwarded_headers(client: StockClient) -> None:
    told = seen(client, headers={"x-who": "me", "other": "you"})["parameters"]
    assert {name.lower(): value for name, value in told.items()} == {"x-who": "me"}


@exercise("infer", *HTTP)
def compressed_both_ways(client: StockClient) -> None:
    many = np.ones(4000, np.float32)
    for there in ("gzip", "deflate", None):
        for back in ("gzip", "deflate", None):
            result = client.infer(
                "types",
                [client.tensor("IN_FP32", many)],
                request_compression_algorithm=there,
                response_compression_algorithm=back,
            )
            assert result.as_numpy("OUT_FP32").tolist() == many.tolist()


@exercise("infer", *GRPC)
def compressed(client: StockClient) -> None:
    many = np.ones(4000, np.float32)
    for algorithm in ("gzip", "deflate", None):
        result = client.infer("types", [client.tensor("IN_FP32", many)], compression_algorithm=algorithm)
        assert result.as_numpy("OUT_FP32").tolist() == many.tolist()


@exercise("infer", *GRPC)
def too_slow(client: StockClient) -> None:
    slow = [client.tensor("INPUT0", np.ones((1, 1), np.float32))]
    assert client.refused("infer", "slow", slow, client_timeout=0.1)[0] == "DEADLINE_EXCEEDED"


@exercise("infer")
def refusals(client: StockClient) -> None:
    refused = "INVALID_ARGUMENT" if client.is_grpc else "400"
    for inputs, text in (
        ([], "expected 1 inputs but got 0 inputs for model 'echo'"),
        ([client.tensor("IN", PAIR.astype(np.float32))], "inference input 'IN' data-type is 'FP32'"),
        ([client.tensor("IN", np.ones((1, 3), np.int32))], "unexpected shape for input 'IN' for model 'echo'"),
        ([client.tensor("WRONG", PAIR)], "unexpected inference input 'WRONG' for model 'echo'"),
    ):
        status, told = client.refused("infer", "echo", inputs)
        assert status == refused
        assert text in told
    wanted = [client.tensors.InferRequestedOutput("WRONG")]
    status, told = client.refused("infer", "echo", [client.tensor("IN", PAIR)], outputs=wanted)
    assert (status, told) == (refused, "unexpected inference output 'WRONG' for model 'echo'")


@exercise("infer")
def error_of_a_model(client: StockClient) -> None:
    def told(kind: str) -> tuple[str, str]:
        return client.refused("infer", "trouble", [client.tensor("KIND", np.array([kind], object))])

    assert told("NOT_FOUND") == ("NOT_FOUND" if client.is_grpc else "404", "code NOT_FOUND")
    assert told("UNAVAILABLE") == ("UNAVAILABLE" if client.is_grpc else "503", "code UNAVAILABLE")
    assert "something broke" in told("raise")[1]


@exercise("async_infer", "http")
def later(client: StockClient) -> None:
    pending = [client.async_infer("echo", [client.tensor("IN", PAIR + number)]) for number in range(3)]
    assert [one.get_result().as_numpy("OUT")[0, 0] for one in pending] == [3, 4, 5]
    (failing,) = [client.async_infer("nobody", [client.tensor("IN", PAIR)], request_compression_algorithm="gzip")]
    try:
        failing.get_result(timeout=20)
    except Exception as error:  # what is raised is looked at
        assert "Request for unknown model: 'nobody' is not found" in str(error)
    else:
        raise AssertionError("a model that does not exist has answered")


@exercise("async_infer", "grpc")
def called_back(client: StockClient) -> None:
    assert called(client, "echo", client.tensor("IN", PAIR)).as_numpy("OUT").tolist() == PAIR.tolist()
    error = called(client, "nobody", client.tensor("IN", PAIR), compression_algorithm="gzip", client_timeout=20)
    assert (error.status(), error.message()) == (
        "StatusCode.NOT_FOUND",
        "Request for unknown model: 'nobody' is not found",
    )


@exercise("async_infer", "grpc")
def cancelled(client: StockClient) -> None:
    done = threading.Event()
    came: list[Any] = []

    def answered(result: Any, error: Any) -> None:
        came.append(error)
        done.set()

    slow = client.tensor("INPUT0", np.ones((1, 1), np.float32))
    client.async_infer("slow", [slow], answered).cancel()
    assert done.wait(20)
    assert came[0].status() == "StatusCode.CANCELLED"


def called(client: StockClient, model: str, tensor: Any, **options: Any) -> Any:
    """Return the result or the error that a callback was given."""
    done = threading.Event()
    came: list[Any] = []

    def answered(result: Any, error: Any) -> None:
        came.append(error or result)
        done.set()

    client.async_infer(model, [tensor], answered, **options)
    assert done.wait(20)
    return came[0]
