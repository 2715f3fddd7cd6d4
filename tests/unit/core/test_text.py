"""Client text: what is refused, and how messages show it. Tables: closed boxes, every cell in them, never too wide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nerite.core import errors
from nerite.core.text import MAX_MESSAGE, MAX_SHOWN, bounded, cut, quoted_text, render_table, share, text_error


def test_plain_text_has_no_mistake() -> None:
    assert text_error("größe/tensor:0") is None
    assert text_error("") is None


def test_text_that_is_too_long_says_by_how_much() -> None:
    assert text_error("x" * 11, 10) == "is 11 characters long, more than the 10 that are allowed"


@pytest.mark.parametrize("raw", [b"ab\xff", b"ab\xed\xa0\x80"])
def test_bytes_that_are_not_utf8_are_a_mistake(raw: bytes) -> None:
    assert text_error(raw.decode(errors="surrogateescape")) == "is not valid UTF-8 at character 2"


def test_shown_text_keeps_both_ends() -> None:
    text = quoted_text("a" * 500 + "z" * 500)
    assert len(text) == MAX_SHOWN
    assert text.startswith("aaa") and text.endswith("zzz") and "…" in text
    assert quoted_text("short") == "short"
    quoted_text("\udcff").encode()


def test_messages_of_errors_are_bounded() -> None:
    long = "n" * 5_000
    message = errors.InvalidArgument(f"unexpected input '{long}' for model {long}").message
    assert message.startswith("unexpected input 'nnn") and message.count("…") == 2
    assert len(message) < 2 * MAX_SHOWN + 50
    assert len(errors.Internal("word " * 10_000_000).message) < MAX_MESSAGE + 50
    errors.Internal("half a character \ud800").message.encode()


def test_text_that_is_cut_says_how_much_is_missing() -> None:
    assert cut("x" * 12, 10) == "x" * 10 + "… (2 more characters)"
    assert cut("x" * 10, 10) == "x" * 10


def test_a_message_of_usual_length_is_not_changed() -> None:
    message = "model 'add' does not exist\n    There are: 'add_sub', 'identity'. " * 100
    assert bounded(message) == message
    message = f"model 'add' cannot do what {'it was asked to do ' * 20}: leave 'parameters' out, it's the model's"
    assert bounded(message) == message


def test_bounding_is_not_quadratic() -> None:
    # A quadratic expression would exceed the time limit of the test.
    for unit in ("'", "'a", "'" + "a " * MAX_MESSAGE, "a" * 199 + " "):
        text = unit * (1 + MAX_MESSAGE // len(unit))
        for _ in range(20):
            bounded(text)


cell = st.text(st.sampled_from("abc xyz\n"), max_size=30)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    columns = draw(st.integers(1, 5))
    row = st.lists(cell, min_size=columns, max_size=columns)
    return draw(row), draw(st.lists(row, max_size=4))


def test_a_table() -> None:
    assert render_table(
        ["Model", "Version", "Status"], [["echo", "1", "READY"], ["bad", "1", "UNAVAILABLE:\nno file"]]
    ) == (
        "+-------+---------+--------------+\n"
        "| Model | Version | Status       |\n"
        "+-------+---------+--------------+\n"
        "| echo  | 1       | READY        |\n"
        "| bad   | 1       | UNAVAILABLE: |\n"
        "|       |         | no file      |\n"
        "+-------+---------+--------------+"
    )


def test_no_rows() -> None:
    assert (
        render_table(["Backend", "Path"], [])
        == "+---------+------+\n| Backend | Path |\n+---------+------+\n+---------+------+"
    )


def test_what_does_not_fit_is_wrapped_in_the_wide_column() -> None:
    assert render_table(["A", "B"], [["1", "abcdefghij"]], 14) == (
        "+---+--------+\n"
        "| A | B      |\n"
        "+---+--------+\n"
        "| 1 | abcdef |\n"
        "|   | ghij   |\n"
        "+---+--------+"
    )  # fmt: skip


@given(tables(), st.integers(1, 120))
def test_every_line_has_the_same_width_and_none_is_too_wide(
    table: tuple[list[str], list[list[str]]], width: int
) -> None:
    headings, rows = table
    lines = render_table(headings, rows, width).split("\n")
    smallest = 4 * len(headings) + 1
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= max(width, smallest)
    assert [line[0] for line in lines].count("+") == 3


@given(tables(), st.integers(1, 120))
def test_nothing_is_lost(table: tuple[list[str], list[list[str]]], width: int) -> None:
    headings, rows = table
    drawn = render_table(headings, rows, width)
    text = "".join(cell for row in (headings, *rows) for cell in row)
    for char in "abcxyz":
        assert drawn.count(char) == text.count(char)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 100))
def test_a_column_that_needs_little_leaves_the_rest_to_the_others(natural: list[int], available: int) -> None:
    widths = share(natural, available)
    assert sum(widths) <= max(available, len(natural)) + natural.count(0)
    if sum(max(1, size) for size in natural) <= available:
        assert widths == [max(1, size) for size in natural]
