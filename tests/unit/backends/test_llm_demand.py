"""What a request will take, read without an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from doubles import Caller
from nerite.backends.llm.demand import Demand, demand, limit
from nerite.core import dtype as dtypes
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.tensor import TensorSpec, join_bytes


def request(sampling: Any = None, prompt: bytes = b"one two", **parameters: Any) -> InferenceRequest:
    tensors = {"text_input": prompt}
    if sampling is not None:
        tensors["sampling_parameters"] = sampling if isinstance(sampling, bytes) else json.dumps(sampling).encode()
    specs = [TensorSpec(name, dtypes.BYTES, (1,)) for name in tensors]
    header = RequestHeader("m", "", specs, parameters=parameters)
    return InferenceRequest(header, [join_bytes([text]) for text in tensors.values()], Caller(), 0)


@pytest.mark.parametrize(
    ("asked", "most", "sequences"),
    [
        (request(), 16, 1),
        (request(max_tokens=5), 5, 1),
        (request({"max_tokens": 5, "n": 3}), 15, 3),
        (request({"max_tokens": "7"}), 7, 1),
        (request({"max_tokens": None}), 0, 1),
        (request({"max_tokens": None, "n": 2}), 0, 2),
        (request({}, max_tokens=5), 16, 1),
        # What the engine will refuse.
        (request({"max_tokens": "many", "n": "x"}), 0, 1),
        (request({"max_tokens": -3, "n": -1}), 0, 1),
        (request(b"{"), 16, 1),
        (request(b"[1]"), 16, 1),
        (request(b"\xff"), 16, 1),
    ],
)
def test_demand(asked: InferenceRequest, most: int, sequences: int) -> None:
    assert demand(asked) == Demand(7, most, sequences)


def test_no_prompt() -> None:
    assert demand(InferenceRequest(RequestHeader("m", "", []), [], Caller(), 0)) == Demand(0, 16, 1)


def test_limit() -> None:
    asked = request({"max_tokens": None, "seed": 3})
    limit(asked, 9)
    assert json.loads(bytes(asked.data[1])[4:]) == {"max_tokens": 9, "seed": 3}
    for other in (request({"max_tokens": 20}), request({}), request(b"{"), request(max_tokens=0)):
        before = list(other.data)
        limit(other, 9)
        assert other.data == before
