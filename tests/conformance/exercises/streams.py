"""gRPC streams: several responses to a request, several requests on a stream."""

import queue
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from conformance.stock import StockClient, exercise


def asking(client: StockClient, words: str) -> Any:
    """Return the input that has the decoupled model do as ``words`` say."""
    return client.tensor("KIND", np.array([words], object))


def endless(client: StockClient) -> Any:
    """Return the input of the model that goes on answering until it is cancelled."""
    return client.tensor("INPUT0", np.ones(1, np.float32))


@contextmanager
def stream(client: StockClient, **options: Any) -> Iterator["queue.Queue[Any]"]:
    """Yield what comes on an open stream: results and errors."""
    came: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: came.put(error or result), **options)
    yield came
    client.stop_stream()


def parameter(result: Any, name: str) -> bool:
    return bool(result.get_response().parameters[name].bool_param)


@exercise("start_stream")
@exercise("async_stream_infer")
@exercise("stop_stream")
def several_responses(client: StockClient) -> None:
    with stream(client) as came:
        client.async_stream_infer("many", [asking(client, "send send last")], request_id="a")
        results = [came.get(timeout=20) for _ in range(3)]
    assert [result.as_numpy("X").tolist() for result in results] == [[0], [1], [2]]
    assert {result.get_response().id for result in results} == {"a"}
    assert [parameter(result, "triton_final_response") for result in results] == [False, False, True]


@exercise("async_stream_infer")
def empty_final_response(client: StockClient) -> None:
    with stream(client, compression_algorithm="gzip") as came:
        client.async_stream_infer("many", [asking(client, "send end")], enable_empty_final_response=True)
        first, last = came.get(timeout=20), came.get(timeout=20)
    assert first.as_numpy("X").tolist() == [0]
    assert (len(last.get_response().outputs), parameter(last, "triton_final_response")) == (0, True)


@exercise("async_stream_infer")
def every_argument(client: StockClient) -> None:
    wanted = [client.tensors.InferRequestedOutput("REQUEST")]
    with stream(client, stream_timeout=30) as came:
        client.async_stream_infer(
            "request",
            [client.tensor("IN", np.array([1], np.int32))],
            model_version="1",
            outputs=wanted,
            request_id="r",
            sequence_id=7,
            sequence_start=True,
            priority=1,
            timeout=1_000_000,
            parameters={"text": "a"},
        )
        told = came.get(timeout=20).as_numpy("REQUEST")[0].decode()
    for part in ('"id": "r"', '"correlation_id": 7', '"flags": 1', '"timeout": 1000000', '"text": "a"'):
        assert part in told


@exercise("async_stream_infer")
def an_error_does_not_end_the_stream(client: StockClient) -> None:
    with stream(client) as came:
        client.async_stream_infer("nobody", [asking(client, "last")])
        assert "Request for unknown model: 'nobody' is not found" in came.get(timeout=20).message()
        client.async_stream_infer("many", [asking(client, "send raise")])
        assert came.get(timeout=20).as_numpy("X").tolist() == [0]
        assert "gave up" in came.get(timeout=20).message()
        client.async_stream_infer("many", [asking(client, "last")])
        assert came.get(timeout=20).as_numpy("X").tolist() == [0]


@exercise("stop_stream")
def cancelled_stream(client: StockClient) -> None:
    came: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: came.put(error or result))
    client.async_stream_infer("endless", [endless(client)])
    assert came.get(timeout=20).as_numpy("OUTPUT0").tolist() == [1]
    client.stop_stream(cancel_requests=True)
    assert came.get(timeout=20).status() == "StatusCode.CANCELLED"


@exercise("start_stream")
def stream_out_of_time(client: StockClient) -> None:
    with stream(client, stream_timeout=0.2) as came:
        client.async_stream_infer("slow", [client.tensor("INPUT0", np.ones((1, 1), np.float32))])
        assert came.get(timeout=20).status() == "StatusCode.DEADLINE_EXCEEDED"


@exercise("stream_infer")
def iterated(client: StockClient) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "many", "inputs": [asking(client, "send last")], "request_id": "a"}
        yield {"model_name": "echo", "inputs": [client.tensor("IN", np.array([[3, 4]], np.int32))], "priority": 1}
        yield {"model_name": "nobody", "inputs": [asking(client, "last")]}

    async def answers() -> list[tuple[Any, Any]]:
        return [answer async for answer in client.stream_infer(requests(), compression_algorithm="gzip")]

    came = client.wait(answers())
    assert sorted(result.as_numpy("X").tolist() for result, _ in came if result and result.get_output("X")) == [
        [0],
        [1],
    ]
    assert [[3, 4]] in [result.as_numpy("OUT").tolist() for result, _ in came if result and result.get_output("OUT")]
    (error,) = [error for _, error in came if error]
    assert "Request for unknown model: 'nobody' is not found" in error.message()


@exercise("stream_infer")
def cancelled_iteration(client: StockClient) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        yield {"model_name": "endless", "inputs": [endless(client)]}

    async def first_and_whether_cancelled() -> tuple[Any, bool]:
        answers = client.stream_infer(requests(), stream_timeout=20)
        async for result, _ in answers:
            return result.as_numpy("OUTPUT0").tolist(), answers.cancel()
        raise AssertionError("nothing came")

    assert client.wait(first_and_whether_cancelled()) == ([1], True)
