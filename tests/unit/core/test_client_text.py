"""Text of clients: one at a time, and all that is in a JSON document."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core.client_text import (
    MAX_DEPTH,
    check_document,
    checked,
    checked_name,
    nested_deeper,
    target_error,
)
from nerite.core.errors import InvalidArgument

BAD = b"a\xff".decode(errors="surrogateescape")


def test_a_text_that_is_valid_is_returned() -> None:
    assert checked("größe\n", "'id'", 10) == "größe\n"


@pytest.mark.parametrize("name", ["größe", "a b", "模型", "a\u00a0b", "👩\u200d🚀", "", "x" * 1024])
def test_a_name_that_is_valid_is_returned(name: str) -> None:
    assert checked_name(name, "'id'") == name


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("a\0b", "'id' has the control character U+0000 at character 1"),
        ("a\r\nHost: b", "'id' has the control character U+000D at character 1"),
        ("\x7f", "'id' has the control character U+007F at character 0"),
        ("é\x9b2J", "'id' has the control character U+009B at character 1"),
        ("a\u2028", "'id' has the control character U+2028 at character 1"),
        ("👩\u2029", "'id' has the control character U+2029 at character 1"),
        (BAD, "'id' is not valid UTF-8 at character 1"),
        ("x" * 1025, "'id' is 1025 characters long, more than the 1024 that are allowed"),
    ],
)
def test_any_other_name_is_refused_by_its_field(name: str, told: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        checked_name(name, "'id'")
    assert refused.value.message == told


@pytest.mark.parametrize(
    ("text", "limit", "told"),
    [
        (BAD, 10, "'id' is not valid UTF-8 at character 1"),
        ("x" * 11, 10, "'id' is 11 characters long, more than the 10 that are allowed"),
    ],
)
def test_any_other_is_refused_by_its_field(text: str, limit: int, told: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        checked(text, "'id'", limit)
    assert refused.value.message == told


@pytest.mark.parametrize(
    ("document", "where"),
    [
        (BAD, "the JSON"),
        ([BAD], "member '[0]'"),
        ({"id": BAD}, "member 'id'"),
        ({"a": {"b": [1, {"c": BAD}]}}, "member 'a.b[1].c'"),
        ({"a": [[1, 2], [BAD, "x"]]}, "member 'a[1][0]'"),
        ({"a": {BAD: 1}}, "member 'a.a?' has a name that"),
        ({"n" * 500: BAD}, f"member '{'n' * 90}"),
    ],
)
def test_a_document_is_refused_by_its_member(document: Any, where: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        check_document(document)
    assert refused.value.message.startswith(where), refused.value.message
    assert "is not valid UTF-8 at character 1. Write text as UTF-8" in refused.value.message


DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text("aé\udcff", max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("aé\udcff", max_size=3), inner, max_size=4),
    max_leaves=20,
)


@given(DOCUMENTS)
def test_what_is_not_refused_can_be_encoded(document: Any) -> None:
    def texts(value: Any) -> list[str]:
        if isinstance(value, str):
            return [value]
        if isinstance(value, dict):
            return [*value, *(text for item in value.values() for text in texts(item))]
        return [text for item in value for text in texts(item)] if isinstance(value, list) else []

    valid = all("\udcff" not in text for text in texts(document))
    try:
        check_document(document)
    except InvalidArgument:
        assert not valid
    else:
        assert valid


def test_among_too_many_members_a_wrong_one_is_not_looked_for() -> None:
    check_document({"numbers": [1] * 200_000, "texts": ["x"] * 90_000, "lists": [[]] * 90_000})
    with pytest.raises(InvalidArgument, match="more than 20000 members outside input data"):
        check_document({"texts": [[]] * 30_000 + ["\udcff"]})


@pytest.mark.parametrize(
    "path",
    ["/", "/v2", "/v1/chat/completions", "/v2/models/a%20b/infer", "/v2/models/m.1-x/versions/3",
     "/v1/models/caf%C3%A9", "/v1/files/...", "/v1/files/a..b", "/v1/files/%2e%2e%2e", "/v1/a~b!c$&'()*+,;=:@"],
)  # fmt: skip
def test_a_path_that_everybody_reads_alike(path: str) -> None:
    assert target_error(path) is None


@pytest.mark.parametrize(
    "path",
    ["", "v1/x", "//", "/v1//x", "/v1/x/", "/./x", "/v1/.", "/v1/..", "/v1/../x", "/v1/..;a/x", "/v1/%2e%2E/x",
     "/v1/.%2e/x", "/v1/%2e", "/v1/a%2fb", "/v1/a%2Fb", "/v1/a%5cb", "/v1/a\\b", "/v1/%00", "/v1/%0d%0a", "/v1/%1F",
     "/v1/%7f",     "/v1/a b", "/v1/a\r\nX: 1", "/v1/a\tb", "/v1/a\0", "/v1/a\x7f", "/v1/caf\xe9", "/v1/a?b", "/v1/a#b",
     "/v1/x\n", "/v1/..\n"],
)  # fmt: skip
def test_a_path_that_servers_may_read_otherwise(path: str) -> None:
    assert target_error(path)


@pytest.mark.parametrize(
    ("text", "deeper"),
    [
        (b"[" * 100 + b"]" * 100, False),
        (b"[" * 101 + b"]" * 101, True),
        (b'{"a":' * 101 + b"1" + b"}" * 101, True),
        (b"[" + b"[]," * 5000 + b"0]", False),
        (b'["' + b"[" * 500 + b'"]', False),
        (b'["' + b"]" * 500 + b'",' + b"[" * 100 + b"]" * 101, True),
        (b'["\\"' + b"[" * 500 + b'"]', False),
        (b'["\\\\",' + b"[" * 100 + b"]" * 101, True),
        (b'["a\\\\\\"' + b"[" * 500 + b'"]', False),
    ],
)
def test_how_deep_a_document_is(text: bytes, deeper: bool) -> None:
    json.loads(text)
    assert nested_deeper(text) is deeper


@given(
    st.recursive(
        st.text() | st.integers(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    )
)
def test_any_document_has_a_depth(document: Any) -> None:
    def depth(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    text = json.dumps(document).encode()
    assert [nested_deeper(text, limit) for limit in range(12)] == [depth(document) > limit for limit in range(12)]


def test_nothing_that_is_deeper_can_be_written_again() -> None:
    orjson.dumps(json.loads(b"[" * 2 * MAX_DEPTH + b"]" * 2 * MAX_DEPTH))
