"""What was probably meant by a name that is not known."""

from __future__ import annotations

import time

import pytest

from nerite.config.mistake import nearest


@pytest.mark.parametrize(
    ("wrong", "known", "meant"),
    [
        ("max_token", ["max_tokens", "min_tokens"], "max_tokens"),
        ("zebra", ["max_tokens", "min_tokens"], ""),
        ("modl_77", [f"model_{number}" for number in range(500)], "model_77"),
        ("x" * 101, ["x" * 100], ""),
        ("x" * 100, ["x" * 99, "y"], "x" * 99),
        ("x", [], ""),
    ],
)
def test_a_name_that_looks_like_it(wrong: str, known: list[str], meant: str) -> None:
    assert nearest(wrong, known) == meant


def test_a_suggestion_takes_little_time() -> None:
    began = time.monotonic()
    nearest("a" * 1_000_000, ["a" * 999_999])
    nearest("ab" * 50, [f"{'ba' * 48}{number}" for number in range(100_000)])
    assert time.monotonic() - began < 10
