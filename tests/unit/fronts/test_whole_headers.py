"""What crosses between core and front in JSON: whole request headers, and errors."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core import errors
from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError
from nerite.core.headers import whole_header_from_json, whole_header_to_json
from nerite.core.request import Assignment, Caller, IdempotencyKey, RequestedOutput, RequestHeader, SharedMemoryInput
from nerite.core.tensor import TensorSpec
from nerite.core.text import bounded
from nerite.workers.ipc import messages

DERIVED = {"sizes", "wanted", "classifies", "shared"}
"""What the other attributes imply. ``shared`` does not cross: the front has read what is not on a GPU."""
MEMOS = {"route", "batch_size", "batch_key", "call", "replies"}
NAMES = st.text(max_size=8)
PARAMETERS = st.one_of(st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(allow_nan=False), NAMES)
SPECS = st.builds(
    TensorSpec,
    NAMES,
    st.sampled_from(dtypes.ALL),
    st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
)
OUTPUTS = st.builds(
    RequestedOutput, NAMES, binary=st.booleans(), base64=st.booleans(), classification=st.integers(0, 1000)
)
HEADERS = st.builds(
    RequestHeader,
    NAMES,
    NAMES,
    st.lists(SPECS, max_size=3),
    st.lists(OUTPUTS, max_size=3),
    parameters=st.dictionaries(NAMES, PARAMETERS, max_size=3),
    priority=st.integers(0, 2**64 - 1),
    timeout_us=st.integers(0, 2**64 - 1),
    sequence_id=st.one_of(st.integers(0, 2**64 - 1), NAMES),
    sequence_start=st.booleans(),
    sequence_end=st.booleans(),
    binary_by_default=st.booleans(),
    base64_by_default=st.booleans(),
    empty_final=st.booleans(),
    caller=st.none() | st.builds(Caller, NAMES, NAMES, st.integers(0, 2**63), st.booleans()),
    idempotency_key=st.none() | st.builds(IdempotencyKey, NAMES, st.integers(0, 9), st.integers(1, 9)),
    forwarded=st.lists(NAMES, max_size=2),
    sticky_fields=st.none() | st.dictionaries(NAMES, NAMES, min_size=1, max_size=3),
    assignment=st.none() | st.builds(Assignment, NAMES, NAMES, st.booleans(), st.floats(0, 1), st.integers(0, 2**64)),
)


def content(header: RequestHeader) -> dict[str, Any]:
    """Return every attribute, outputs as tuples."""
    found = {name: getattr(header, name) for name in RequestHeader.__slots__ if name not in MEMOS}
    found["outputs"] = [(each.name, each.binary, each.base64, each.classification) for each in header.outputs]
    # 1, 1.0 and True are equal, but a model can tell them apart.
    found["forwarded"] = [*header.forwarded]
    found["parameters"] = {name: repr(value) for name, value in header.parameters.items()}
    return found


def crossed_header(header: RequestHeader) -> RequestHeader:
    return whole_header_from_json(json.loads(json.dumps(whole_header_to_json(header))))


@given(HEADERS)
def test_a_header_arrives_whole(header: RequestHeader) -> None:
    arrived = crossed_header(header)
    assert content(arrived) == content(header)
    assert arrived.identity() == header.identity()
    assert isinstance(arrived.caller, Caller | None)
    assert isinstance(arrived.idempotency_key, IdempotencyKey | None)


def test_no_attribute_is_forgotten() -> None:
    """Each attribute of this header differs from its default, so one that does not cross would be missed."""
    header = RequestHeader(
        "m",
        "3",
        [TensorSpec("IN", dtypes.FP32, (2,))],
        [RequestedOutput("OUT", binary=True, base64=True, classification=4)],
        parameters={"a": 1},
        priority=2,
        timeout_us=3,
        sequence_id="s",
        sequence_start=True,
        sequence_end=True,
        binary_by_default=True,
        base64_by_default=True,
        empty_final=True,
        caller=Caller("t", "c", 5, True),
        idempotency_key=IdempotencyKey("k", 1, 2),
        sticky_fields={"x-user": "me"},
        forwarded=["a"],
        assignment=Assignment("m", "m:2", True, 0.1, 3),
    )
    default = content(RequestHeader("", "", ()))
    not_sent = {"_variant", "device_outputs", "preferred_device", "shared"}
    assert {name for name, value in content(header).items() if value == default[name]} == not_sent
    assert content(crossed_header(header)) == content(header)
    assert set(RequestHeader.__slots__) > DERIVED | MEMOS


def test_values_in_shared_memory_arrive_as_bytes() -> None:
    assert not crossed_header(RequestHeader("m", "", (), shared=True)).shared


def test_places_of_outputs_on_gpus_arrive() -> None:
    places = {name: SharedMemoryInput(f"region of {name}", 64, 16) for name in ("device", "host")}
    outputs = [RequestedOutput("other"), *(RequestedOutput(name, place=place) for name, place in places.items())]
    arrived = crossed_header(RequestHeader("m", "", (), outputs, device_outputs=frozenset(("device",))))
    assert [each.name for each in arrived.outputs if each.place is not None] == ["device"]
    place = arrived.outputs[1].place
    assert place is not None and (place.region, place.offset, place.byte_size) == ("region of device", 64, 16)
    assert arrived.shared and arrived.device_outputs == {"device"}


@pytest.mark.parametrize("kind", errors.BY_NAME.values(), ids=errors.BY_NAME)
@given(st.text(max_size=40), st.integers(0, 100), st.booleans())
def test_an_error_arrives_as_it_was(kind: type[NeriteError], text: str, retry_after: int, begun: bool) -> None:
    error = kind(text, retry_after)
    error.begun = begun
    arrived = messages.error_of(json.loads(json.dumps(messages.error_json(error))))
    assert type(arrived) is kind
    assert (arrived.message, arrived.retry_after, arrived.begun) == (bounded(text), retry_after, begun)
    assert (arrived.http_status, arrived.grpc_status) == (error.http_status, error.grpc_status)


def test_a_class_of_a_model_arrives_as_the_nearest_one_known() -> None:
    class Special(errors.Overloaded):
        """A class that the other process does not know."""

    assert type(messages.error_of(messages.error_json(Special("full")))) is errors.Overloaded
