"""Lenient JSON: what protobuf's parser takes, as a Triton was asked, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.config.json_form import parse_lenient_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@given(value=JSON, ascii=st.booleans(), indent=st.sampled_from([None, 1]))
def test_all_of_json(value: Any, ascii: bool, indent: int | None) -> None:
    assert parse_lenient_json(json.dumps(value, ensure_ascii=ascii, indent=indent)) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("{a:1,_b$2:2,nullx:3}", {"a": 1, "_b$2": 2, "nullx": 3}),
        ("{'a': 'it\\'s \"b\"'}", {"a": 'it\'s "b"'}),
        ('{"a": 1, "b": [1, 2,],}', {"a": 1, "b": [1, 2]}),
        ("\v[\f3.]\r\n", [3.0]),
        ('["a\n\tb", "\\q\\x6f\\v", "\\ud83d\\ude00"]', ["a\n\tb", "qx6f\v", "😀"]),
        ('{"a": 1, "a": 2}', {"a": 2}),
        ("[-0, 1e2, -1.5E-1]", [0, 100.0, -0.15]),
    ],
)
def test_what_is_taken_beyond_it(text: str, value: Any) -> None:
    assert parse_lenient_json(text) == value


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "Expected a value at line 1 column 1, got nothing"),
        ("{} x", "Expected the end at line 1 column 4, got 'x'"),
        ("[,1]", "Expected a value at line 1 column 2"),
        ("{,}", "Expected the name of a field"),
        ('{"a": 1,,}', "Expected the name of a field"),
        ('{"a": 1 "b": 2}', "Expected ',' or '}'"),
        ("[1 2]", "Expected ',' or ']'"),
        ("{a 1}", "Expected ':'"),
        ("{1: 2}", "Expected the name of a field"),
        ("{true: 2}", "Expected the name of a field"),
        ("{a.b: 2}", "Expected ':'"),
        ("{\n  /* c */}", "Expected the name of a field at line 2 column 3"),
        ("[0x3]", "Expected ',' or ']'"),
        ("[03]", "Expected ',' or ']'"),
        ("[+3]", "Expected a value"),
        ("[True]", "Expected a value"),
        ("[NaN]", "Expected a value"),
        ("[TYPE_INT32]", "Expected a value"),
        ("['a", "Expected the end of the string, which begins here, at line 1 column 2"),
        ("['\\u12']", "Expected the end of the string"),
        ("\ufeff{}", "Expected a value"),
        ("{", "Expected the name of a field at line 1 column 2, got nothing"),
        ("9" * 5000, "Expected a value"),
    ],
)
def test_what_is_refused(text: str, says: str) -> None:
    with pytest.raises(ValueError) as refused:
        parse_lenient_json(text)
    assert str(refused.value).startswith(says)
