"""What a request will take, read without an engine."""

from __future__ import annotations

import json
from typing import Any

import pytest

from doubles import Caller
from nerite.core import tensor as dtypes
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.tensor import TensorSpec, join_bytes
from nerite.llm.demand import Demand, demand, limit


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
        (request(b"[" * 100_000), 16, 1),
        (request({"n": 129, "max_tokens": 5}), 5, 1),
        (request(n=10**6, max_tokens=5), 5, 1),
        (request({"max_tokens": 5, "stop": "x" * 2**20}), 16, 1),
    ],
)
def test_demand(asked: InferenceRequest, most: int, sequences: int) -> None:
    assert demand(asked) == Demand(7, most, sequences)


@pytest.mark.parametrize(
    ("asked", "priority"),
    [
        (request(), 0),
        (request(priority=3), 3),
        (request({"priority": 3}), 3),
        (request({"priority": -3}), 0),
        (request({"priority": "x"}), 0),
    ],
)
def test_priority(asked: InferenceRequest, priority: int) -> None:
    assert demand(asked).priority == priority
    asked.header = asked.header.changed(priority=7)
    assert demand(asked).priority == (priority or 7)


def test_no_prompt() -> None:
    assert demand(InferenceRequest(RequestHeader("m", "", []), [], Caller(), 0)) == Demand(0, 16, 1)


def test_images() -> None:
    specs = [TensorSpec("text_input", dtypes.BYTES, (1,)), TensorSpec("image", dtypes.BYTES, (3,))]
    data = [join_bytes([b"what"]), join_bytes([b"aGk="] * 3)]
    asked = InferenceRequest(RequestHeader("m", "", specs), data, Caller(), 0)
    assert demand(asked) == Demand(4, 16, 1, images=3)


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        (request(), 0),
        (request({"n": 2}), 0),
        (request({}), 0),
        (request({"max_tokens": 16}), 16),
        (request(max_tokens=16), 16),
        (request(b"{"), 16),
    ],
)
def test_who_says_nothing_gets_what_is_allowed(asked: InferenceRequest, most: int) -> None:
    assert demand(asked, 15).most == most
    assert demand(asked, 32).most == 16 * demand(asked).sequences


@pytest.mark.parametrize("said", [{"max_tokens": None, "seed": 3}, {"seed": 3}])
def test_limit(said: dict[str, Any]) -> None:
    asked = request(said)
    limit(asked, 9)
    assert json.loads(bytes(asked.data[1])[4:]) == {"max_tokens": 9, "seed": 3}


def test_limit_of_a_request_with_parameters_of_its_own() -> None:
    asked = request(seed=3)
    before = asked.header
    before.route = ("epoch", "version")
    limit(asked, 9)
    assert asked.header.parameters == {"seed": 3, "max_tokens": 9}
    assert (asked.header.route, before.parameters) == (before.route, {"seed": 3})


def test_no_limit_for_who_has_one_or_is_wrong() -> None:
    for other in (request({"max_tokens": 20}), request(b"{"), request(max_tokens=0)):
        before, header = list(other.data), other.header
        limit(other, 9)
        assert (other.data, other.header) == (before, header)


def test_more_sequences_than_an_engine_runs() -> None:
    asked = request({"n": 5, "max_tokens": 2})
    assert [demand(asked, 0, most).sequences for most in (4, 5)] == [1, 5]
