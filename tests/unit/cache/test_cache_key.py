"""Requests that may be answered alike have one key, and others do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import Caller
from nerite.cache import frontend
from nerite.cache.frontend import CacheKeys
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import ByteBudget
from nerite.core.request import MIXED, InferenceRequest, RequestedOutput, RequestHeader
from nerite.core.request import Caller as Tenant
from nerite.core.tensor import TensorSpec, encode_bytes

A = TensorSpec("A", dtypes.INT32, (2,))
B = TensorSpec("B", dtypes.INT32, (1,))
DATA = [b"\1\0\0\0\2\0\0\0", b"\3\0\0\0"]


def keys(origin: str = "model/1/x") -> CacheKeys:
    made = CacheKeys(["X", "Y"])
    made.renew(origin)
    return made


def request(inputs: Any = (A, B), data: Any = DATA, outputs: Any = (), id: str = "", **said: Any) -> InferenceRequest:
    header = RequestHeader(said.pop("model", "model"), "", inputs, outputs, **said)
    return InferenceRequest(header, data, Caller(), 0, id)


PLAIN = keys().of(request())


def test_the_same_of_equal_requests() -> None:
    of = keys()
    assert of.of(request()) == of.of(request()) == PLAIN
    assert len(PLAIN) == 32


@pytest.mark.parametrize(
    "other",
    [
        request((B, A), DATA[::-1]),
        request(data=[memoryview(bytearray(DATA[0])), bytearray(DATA[1])]),
        request(id="x"),
        request(priority=2, timeout_us=3),
        request(binary_by_default=True),
        request(outputs=[RequestedOutput("Y"), RequestedOutput("X")]),
    ],
    ids=["order", "buffers", "id", "urgency", "form", "all outputs"],
)
def test_what_does_not_matter(other: InferenceRequest) -> None:
    assert keys().of(other) == PLAIN


@pytest.mark.parametrize(
    "other",
    [
        request(data=[DATA[0], b"\4\0\0\0"]),
        request((TensorSpec("A", dtypes.INT32, (2, 1)), B)),
        request((TensorSpec("A", dtypes.UINT32, (2,)), B)),
        request((TensorSpec("A", dtypes.INT32, (1,)), TensorSpec("B", dtypes.INT32, (2,)))),
        request((TensorSpec("C", dtypes.INT32, (2,)), B)),
        request((A,), DATA[:1]),
        request(outputs=[RequestedOutput("X")]),
        request(parameters={"x": 1}),
        request(sequence_id=3),
        request(sequence_start=True),
    ],
    ids=["data", "shape", "datatype", "other sizes", "name", "fewer", "outputs", "parameters", "sequence", "start"],
)
def test_what_matters(other: InferenceRequest) -> None:
    assert keys().of(other) != PLAIN


def test_where_an_answer_comes_from() -> None:
    assert keys("model/1/y").of(request()) != PLAIN
    of = keys()
    asked = request()
    of.of(asked)
    of.renew("model/1/y")
    assert of.of(asked) == keys("model/1/y").of(request())


WORDS = st.lists(st.binary(max_size=4), max_size=4)


def strings(*tensors: list[bytes]) -> InferenceRequest:
    specs = [TensorSpec(f"I{place}", dtypes.BYTES, (len(each),)) for place, each in enumerate(tensors)]
    return request(specs, [encode_bytes(np.array(each, object)) for each in tensors])


def test_tenants_have_answers_of_their_own_unless_they_share_them() -> None:
    asked = [request(), *(request(caller=Tenant(name)) for name in ("a", "b", "ab"))]
    own = keys()
    assert len({own.of(each) for each in asked}) == 4
    assert own.of(asked[1]) == own.of(request(caller=Tenant("a", "batch", 5, retry=True)))
    assert own.of(asked[0]) == PLAIN
    shared = CacheKeys(["X", "Y"], shared=True)
    shared.renew("model/1/x")
    assert {shared.of(each) for each in asked} == {PLAIN}


def test_what_is_for_several_tenants_has_no_key() -> None:
    asked = request(caller=MIXED)
    assert keys().of(asked) == b""
    shared = CacheKeys(["X", "Y"], shared=True)
    shared.renew("model/1/x")
    assert shared.of(asked) == PLAIN


@given(st.text(max_size=3), st.text(max_size=3), WORDS, WORDS)
def test_a_tenant_is_not_taken_for_data(one: str, other: str, a: list[bytes], b: list[bytes]) -> None:
    def of(tenant: str, words: list[bytes]) -> bytes:
        asked = strings(words)
        asked.header.caller = Tenant(tenant)
        return keys().of(asked)

    assert (of(one, a) == of(other, b)) == ((one, a) == (other, b))


def test_an_output_in_another_form() -> None:
    one = request(outputs=[RequestedOutput("X", binary=True)])
    other = request(outputs=[RequestedOutput("X", classification=2)])
    assert keys().of(one) == keys().of(other)


@pytest.mark.parametrize(("one", "other"), [(1, True), (1, 1.0), (0, False), ("1", 1)])
def test_parameters_that_python_calls_equal(one: Any, other: Any) -> None:
    assert keys().of(request(parameters={"x": one})) != keys().of(request(parameters={"x": other}))


@given(WORDS, WORDS, WORDS, WORDS)
def test_strings_do_not_run_into_each_other(a: list[bytes], b: list[bytes], c: list[bytes], d: list[bytes]) -> None:
    assert (keys().of(strings(a, b)) == keys().of(strings(c, d))) == ((a, b) == (c, d))


def test_headers_are_kept_as_far_as_the_budget_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = ByteBudget("test", 64 * 1024)
    monkeypatch.setattr(frontend, "CACHE_KEYS", budget)
    of = keys()
    for number in range(100):
        of.of(request(parameters={"x": number}))
        assert budget.used <= budget.limit
    assert 0 < budget.evictions < 100
    kept = budget.used, budget.evictions
    of.of(request(parameters={"x": "x" * 200_000}))
    assert (budget.used, budget.evictions) == kept, "one that is very large is not kept"
    without = keys("")
    without.of(request())
    assert (budget.used, budget.evictions) == kept, "nor is one while it is not known where answers come from"
