"""Tokens from bytes, before they are counted."""

from __future__ import annotations

from nerite.admission.estimates import TokenRatio


def test_nothing_is_known() -> None:
    ratio = TokenRatio()
    assert (ratio.expected(1001), ratio.least(1001)) == (501, 0)
    ratio.note(0, 3)
    for _ in range(7):
        ratio.note(100, 25)
    assert (ratio.expected(1000), ratio.least(1000)) == (500, 0), "a few are not enough"


def test_it_learns() -> None:
    ratio = TokenRatio()
    for _ in range(8):
        ratio.note(100, 25)
    assert (ratio.expected(1000), ratio.least(1000)) == (250, 125)
    for tokens in (20, 30) * 200:
        ratio.note(100, tokens)
    assert 280 <= ratio.expected(1000) <= 320, "cautious by what they differ"
    assert 110 <= ratio.least(1000) <= 130


def test_images() -> None:
    ratio = TokenRatio(500)
    assert (ratio.expected(0), ratio.expected(2), ratio.least(2)) == (0, 1000, 0)
    for _ in range(4):
        ratio.note(0, 0)
        ratio.note(1, 900)
        ratio.note(3, 2700)
    assert (ratio.expected(2), ratio.least(2)) == (1800, 900)
