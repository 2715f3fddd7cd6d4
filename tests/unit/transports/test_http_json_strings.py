"""Strings in JSON: text, and base64 for what is no text."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core import tensor as dtypes
from nerite.core.errors import Internal, InvalidArgument
from nerite.core.tensor import TensorSpec, join_bytes
from nerite.transports.http import json_tensors


def spec(count: int) -> TensorSpec:
    return TensorSpec("IN", dtypes.BYTES, (count,))


def b64(raw: bytes) -> dict[str, str]:
    return {"b64": base64.b64encode(raw).decode()}


def test_texts_and_base64_stand_side_by_side_and_nested() -> None:
    value = [["a", b64(b"\xff\x00")], [b64(b""), "é"]]
    assert bytes(json_tensors.read_tensor(spec(4), value)) == join_bytes([b"a", b"\xff\x00", b"", "é".encode()])


def test_base64_is_written_where_it_is_asked_for() -> None:
    raw = join_bytes([b"\xff\x00", b"a"])
    assert json_tensors.write_tensor(spec(2), raw, base64=True) == b'[{"b64":"/wA="},{"b64":"YQ=="}]'
    assert json_tensors.write_tensor(spec(1), join_bytes([b"a"])) == b'["a"]'


@given(st.lists(st.binary(max_size=20), max_size=5))
def test_what_is_got_can_be_sent_back(elements: list[bytes]) -> None:
    raw = join_bytes(elements)
    written = json.loads(json_tensors.write_tensor(spec(len(elements)), raw, base64=True))
    assert [base64.b64decode(element["b64"]) for element in written] == elements
    assert bytes(json_tensors.read_tensor(spec(len(elements)), written)) == raw


@pytest.mark.parametrize("wrong", ["abc", "a", "YQ==YQ==", "YW\nJj", " YQ==", "YW-_", "YWé="])
def test_base64_that_is_none(wrong: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        json_tensors.read_tensor(spec(2), ["text", {"b64": wrong}])
    said, _, reason = caught.value.message.partition(": ")
    assert said == "element 1 of input 'IN' is not valid base64"
    assert reason.partition(". ")[2] == (
        "Use the standard alphabet (A-Z a-z 0-9 + /), padded with '=', without line breaks"
    )


@pytest.mark.parametrize("wrong", [{}, {"b64": 1}, {"b64": None}, {"b64": "YQ==", "more": 1}, {"base64": "YQ=="}])
def test_objects_that_are_none_of_ours(wrong: dict[str, Any]) -> None:
    with pytest.raises(Internal) as caught:
        json_tensors.read_tensor(spec(2), ["text", wrong])
    assert caught.value.message == (
        "Unable to parse JSON bytes array: attempt to access JSON non-string as string "
        '(element 1 of input \'IN\' is an object, and the only one that stands for bytes is {"b64": "…"})'
    )


def test_bytes_are_only_for_strings() -> None:
    with pytest.raises(Internal, match="attempt to access JSON non-number as double"):
        json_tensors.read_tensor(TensorSpec("IN", dtypes.FP32, (1,)), [b64(b"abcd")])
