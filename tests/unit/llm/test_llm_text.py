"""Text out of tokens: what is handed out, joined, is the text of all tokens, whatever its pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.llm.streaming import TextStream


def decode(tokens: Sequence[int]) -> str:
    """Each token is a byte."""
    return bytes(tokens).decode(errors="replace")


def pieces(stream: TextStream, content: bytes) -> list[str]:
    found = []
    for place, token in enumerate(content):
        stream.add([token])
        found.append(stream.take(decode(stream.window), decode, last=place == len(content) - 1))
        if stream.stopped:
            break
    return found


@given(st.text(max_size=120))
def test_joined_it_is_the_whole(text: str) -> None:
    assert "".join(pieces(TextStream(), text.encode())) == text


@given(st.binary(max_size=120))
def test_also_of_bytes_that_are_no_text(content: bytes) -> None:
    assert "".join(pieces(TextStream(), content)) == content.decode(errors="replace")


def test_half_a_character_waits() -> None:
    assert pieces(TextStream(), "aé🐚b".encode()) == ["a", "", "é", "", "", "", "🐚", "b"]


@pytest.mark.parametrize(
    ("stop", "text", "expected"),
    [
        (["."], "one. two", ["o", "n", "e", ""]),
        (["ab"], "caad", ["c", "", "a", "ad"]),
        (["END"], "the EN", ["t", "h", "e", " ", "", "EN"]),
        (["b", "abc"], "zabc", ["z", "", "a"]),
    ],
)
def test_stop_strings(stop: list[str], text: str, expected: list[str]) -> None:
    assert pieces(TextStream(stop), text.encode()) == expected


@given(st.text("ab", max_size=40), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3))
def test_a_stop_string_is_never_in_the_text(text: str, stop: list[str]) -> None:
    found = "".join(pieces(TextStream(stop), text.encode()))
    assert text.startswith(found)
    assert not any(each in found for each in stop)
    assert found == text or any(text[len(found) :].startswith(each) for each in stop)


def test_the_stop_string_may_stay() -> None:
    stream = TextStream(["."], include_stop=True)
    assert (pieces(stream, b"a.b"), stream.stopped) == (["a", "."], True)


def test_nothing_stops_the_first_tokens() -> None:
    assert "".join(pieces(TextStream(["."], min_tokens=3), b"a.b.c")) == "a.b"
