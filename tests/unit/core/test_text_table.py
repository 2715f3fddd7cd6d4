"""Tables: closed boxes, every cell in them, never wider than asked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nerite.core.text_table import render, share

cell = st.text(st.sampled_from("abc xyz\n"), max_size=30)


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[str], list[list[str]]]:
    columns = draw(st.integers(1, 5))
    row = st.lists(cell, min_size=columns, max_size=columns)
    return draw(row), draw(st.lists(row, max_size=4))


def test_a_table() -> None:
    assert render(["Model", "Version", "Status"], [["echo", "1", "READY"], ["bad", "1", "UNAVAILABLE:\nno file"]]) == (
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
        render(["Backend", "Path"], [])
        == "+---------+------+\n| Backend | Path |\n+---------+------+\n+---------+------+"
    )


def test_what_does_not_fit_is_wrapped_in_the_wide_column() -> None:
    assert render(["A", "B"], [["1", "abcdefghij"]], 14) == (
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
    lines = render(headings, rows, width).split("\n")
    smallest = 4 * len(headings) + 1
    assert {len(line) for line in lines} == {len(lines[0])}
    assert len(lines[0]) <= max(width, smallest)
    assert [line[0] for line in lines].count("+") == 3


@given(tables(), st.integers(1, 120))
def test_nothing_is_lost(table: tuple[list[str], list[list[str]]], width: int) -> None:
    headings, rows = table
    drawn = render(headings, rows, width)
    text = "".join(cell for row in (headings, *rows) for cell in row)
    for char in "abcxyz":
        assert drawn.count(char) == text.count(char)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 100))
def test_a_column_that_needs_little_leaves_the_rest_to_the_others(natural: list[int], available: int) -> None:
    widths = share(natural, available)
    assert sum(widths) <= max(available, len(natural)) + natural.count(0)
    if sum(max(1, size) for size in natural) <= available:
        assert widths == [max(1, size) for size in natural]
