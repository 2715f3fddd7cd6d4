"""Text of clients: one at a time, and all that is in a JSON document."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core.client_text import check_document, checked, target_error
from nerite.core.errors import InvalidArgument

BAD = b"a\xff".decode(errors="surrogateescape")


def test_a_text_that_is_valid_is_returned() -> None:
    assert checked("größe", "'id'") == "größe"


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
