"""Entries in Redis: what was written is read, and nothing else is believed."""

from __future__ import annotations

import json
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.cache.redis import MAGIC, BadEntry, EntryCodec
from nerite.core import tensor as dtypes
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import TensorSpec, encode_bytes

KEY = bytes(range(32))
HEADER = ResponseHeader(
    "model",
    "3",
    [TensorSpec("A", dtypes.FP32, (2, 1)), TensorSpec("B", dtypes.BYTES, (2,)), TensorSpec("C", dtypes.INT8, (0,))],
    {"x": 1, "y": 1.5, "z": True, "w": "ä"},
)
WORDS = encode_bytes(np.array([b"ab", b""], object))
ENTRY = EntryCodec().write(KEY, InferenceResponse(HEADER, [bytes(8), memoryview(WORDS), b""]))
SIZE = struct.Struct("<8s32sII").size
SAID: dict[str, Any] = {"model": "m", "version": "1", "tensors": [["A", "INT8", [2]]], "parameters": {}, "sizes": [2]}


def forged(said: object, body: bytes = b"12", *, magic: bytes = MAGIC, key: bytes = KEY) -> bytes:
    """An entry whose frame is right."""
    header = said if isinstance(said, bytes) else json.dumps(said).encode()
    return struct.pack("<8s32sII", magic, key, zlib.crc32(header + body), len(header)) + header + body


def test_what_was_written_is_read() -> None:
    form = EntryCodec()
    response = form.read(KEY, ENTRY)
    assert response.header is not None
    assert (response.header.model_name, response.header.model_version) == ("model", "3")
    assert response.header.outputs == HEADER.outputs
    assert [repr(value) for value in response.header.parameters.values()] == ["1", "1.5", "True", "'ä'"]
    assert [*map(bytes, response.data)] == [bytes(8), WORDS, b""]
    assert form.read(KEY, ENTRY).header is response.header, "transports keep on it what they made of it"


def test_a_right_frame() -> None:
    assert [*map(bytes, EntryCodec().read(KEY, forged(SAID)).data)] == [b"12"]


STRANGE = {
    "nothing": (b"", "too short"),
    "text": (b"hello, this is something that somebody else has written here", "not written by this version"),
    "another version": (forged(SAID, magic=b"nerite\0\2"), "not written by this version"),
    "another key": (forged(SAID, key=bytes(32)), "belongs to another key"),
    "cut off": (ENTRY[:-1], "damaged"),
    "changed": (ENTRY[:-1] + b"\7", "damaged"),
    "no JSON": (forged(b"{"), "header is invalid"),
    "no text": (forged(b"\xff\xfe"), "header is invalid"),
    "deep": (forged(b"[" * 100_000), "header is invalid"),
    "much": (forged([1] * 3_000_000), "header is too large"),
    "a list": (forged([1]), "header is invalid"),
    "nothing in it": (forged({}), "header is invalid"),
    "no such type": (forged({**SAID, "tensors": [["A", "INT9", [2]]]}), "header is invalid"),
    "a negative shape": (forged({**SAID, "tensors": [["A", "INT8", [-2, -1]]]}), "header is invalid"),
    "a shape beyond all numbers": (forged({**SAID, "tensors": [["A", "INT8", [10**400, 0.5]]]}), "header is invalid"),
    "no shape": (forged({**SAID, "tensors": [["A", "INT8", "2"]]}), "header is invalid"),
    "a name of the wrong kind": (forged({**SAID, "tensors": [[2, "INT8", [2]]]}), "header is invalid"),
    "a model of the wrong kind": (forged({**SAID, "model": 3}), "header is invalid"),
    "other sizes": (forged({**SAID, "sizes": [3]}), "header is invalid"),
    "too few sizes": (forged({**SAID, "sizes": []}), "header is invalid"),
    "sizes of the wrong kind": (forged({**SAID, "sizes": [True]}), "header is invalid"),
    "parameters of the wrong kind": (forged({**SAID, "parameters": {"x": []}}), "header is invalid"),
    "parameters without names": (forged({**SAID, "parameters": [1]}), "header is invalid"),
    "more behind it": (forged(SAID, b"123"), "do not have the sizes"),
    "less behind it": (forged(SAID, b"1"), "do not have the sizes"),
    "strings that end early": (
        forged({**SAID, "tensors": [["A", "BYTES", [1]]], "sizes": [5]}, b"\2\0\0\0a"),
        "strings of 'A'",
    ),
    "strings without a length": (forged({**SAID, "tensors": [["A", "BYTES", [1]]]}), "strings of 'A'"),
}


@pytest.mark.parametrize(("entry", "why"), STRANGE.values(), ids=STRANGE)
def test_what_is_not_believed(entry: bytes, why: str) -> None:
    with pytest.raises(BadEntry, match=why):
        EntryCodec().read(KEY, entry)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
TENSORS = st.lists(st.tuples(VALUES, st.sampled_from(["INT8", "BYTES", "FP32", "X"]), VALUES), max_size=2)


@given(st.fixed_dictionaries({"tensors": TENSORS | VALUES, "sizes": VALUES, "parameters": VALUES}), st.binary())
def test_whatever_is_written_with_a_right_frame_is_an_answer_or_none(said: dict[str, Any], body: bytes) -> None:
    try:
        response = EntryCodec().read(KEY, forged({**SAID, **said}, body))
    except BadEntry:
        return
    assert response.header is not None
    for spec, part in zip(response.header.outputs, response.data, strict=True):
        assert spec.byte_size in (-1, len(part))


@given(st.integers(0, len(ENTRY) - 1), st.integers(1, 255))
def test_no_byte_can_be_changed(at: int, change: int) -> None:
    changed = bytearray(ENTRY)
    changed[at] ^= change
    with pytest.raises(BadEntry):
        EntryCodec().read(KEY, bytes(changed))
