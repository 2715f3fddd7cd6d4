"""What the clients of PyTriton's interface make of URLs, arguments and responses; no server is asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from nerite.pytriton.client.auth import create_auth_headers
from nerite.pytriton.client.calls import (
    ServerAddress,
    batched_inputs,
    checked_parameters,
    headers_of,
    read_config,
    results_of,
)
from nerite.pytriton.client.exceptions import (
    PyTritonClientInvalidUrlError,
    PyTritonClientModelDoesntSupportBatchingError,
    PyTritonClientValueError,
)

DOCUMENT = {
    "name": "model",
    "max_batch_size": 8,
    "input": [{"name": "a", "data_type": "TYPE_FP32", "dims": ["-1"]}, {"name": "b", "data_type": "TYPE_STRING"}],
    "output": [{"name": "out", "data_type": "TYPE_FP32", "dims": [2]}],
}
CONFIG = read_config(DOCUMENT)
ALONE = read_config({**DOCUMENT, "max_batch_size": 0})


class Result:
    def as_numpy(self, name: str) -> Any:
        return np.ones((1, 2)) if name == "out" else None


@pytest.mark.parametrize(
    ("url", "address", "protocol", "secure"),
    [
        ("localhost", "localhost:8000", "http", False),
        ("localhost:9000", "localhost:9000", "http", False),
        ("https://host", "host:8000", "http", True),
        ("grpc://localhost", "localhost:8001", "grpc", False),
        ("grpcs://[::1]:5", "[::1]:5", "grpc", True),
    ],
)
def test_urls(url: str, address: str, protocol: str, secure: bool) -> None:
    found = ServerAddress.parse(url)
    assert (found.authority, found.protocol, found.secure) == (address, protocol, secure)


@pytest.mark.parametrize("url", ["", "ftp://host", "http://", "host:port", None])
def test_urls_that_are_refused(url: Any) -> None:
    with pytest.raises(PyTritonClientInvalidUrlError):
        ServerAddress.parse(url)


def test_inputs_by_position_and_by_name() -> None:
    one, text = np.ones(3, np.float32), np.array(["é"])
    found = batched_inputs(CONFIG, (one, text), {}, sample=True)
    assert {name: array.shape for name, array in found.items()} == {"a": (1, 3), "b": (1, 1)}
    assert found["b"].tolist() == [["é".encode()]]
    assert batched_inputs(CONFIG, (), {"a": one[np.newaxis]}, sample=False)["a"].shape == (1, 3)
    assert batched_inputs(ALONE, (one,), {}, sample=True)["a"].shape == (3,)


def test_inputs_that_are_refused() -> None:
    one = np.ones((2, 1))
    for inputs, named in (((one,), {"a": one}), ((), {}), ((one, one, one), {}), ((), {"c": one}), (([1],), {})):
        with pytest.raises(PyTritonClientValueError):
            batched_inputs(CONFIG, inputs, named, sample=True)
    with pytest.raises(PyTritonClientValueError, match="same number of rows"):
        batched_inputs(CONFIG, (one, one[:1]), {}, sample=False)
    with pytest.raises(PyTritonClientModelDoesntSupportBatchingError):
        batched_inputs(ALONE, (one,), {}, sample=False)


def test_results() -> None:
    assert results_of(CONFIG, Result(), sample=True)["out"].shape == (2,)
    assert results_of(CONFIG, Result(), sample=False)["out"].shape == (1, 2)


def test_headers_and_parameters() -> None:
    http, grpc = ServerAddress.parse("localhost"), ServerAddress.parse("grpc://localhost")
    assert headers_of(http, {"divisor": 3}, "key") == {"divisor": "3", "triton-access-token": "key"}
    assert headers_of(grpc, None, "key") == create_auth_headers("key", "grpc")
    assert checked_parameters({"a": 1}) == {"a": 1}
    with pytest.raises(PyTritonClientValueError):
        checked_parameters({"a": 1.5})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="must be 'http' or 'grpc'"):
        create_auth_headers("key", "ftp")
