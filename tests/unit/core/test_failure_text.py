"""What exceptions say, at whatever length they say it."""

from __future__ import annotations

import sys

from nerite.core.failures import message_of, traceback_of
from nerite.core.text import MAX_MESSAGE


class Broken(Exception):
    def __str__(self) -> str:
        raise ValueError


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_messages() -> None:
    assert message_of(ValueError("wrong")) == "wrong"
    assert message_of(ValueError()) == ""
    assert message_of(Broken()) == "<MESSAGE UNAVAILABLE>"
    long = message_of(ValueError("x" * 60_000_000))
    assert len(long) < MAX_MESSAGE + 50
    assert long.endswith(f"… ({60_000_000 - MAX_MESSAGE} more characters)")


def test_a_traceback_is_that_of_python() -> None:
    text = traceback_of(raised(ValueError("wrong"), KeyError("first")))
    lines = text.splitlines()
    assert lines[0] == "KeyError: 'first'"
    assert "The above exception was the direct cause of the following exception:" in lines
    assert lines[-1] == "ValueError: wrong"
    assert "in raised\n    raise error from cause" in text


def test_a_traceback_of_a_long_message_keeps_its_end() -> None:
    text = traceback_of(raised(ValueError("x" * 60_000_000), ValueError("y" * 60_000_000)))
    assert len(text) <= 32 * 1024
    assert text.endswith("more characters)")
    traceback_of(raised(ValueError("half a character \ud800"))).encode()


def test_a_traceback_out_of_any_depth_has_the_innermost_frames() -> None:
    def deep(level: int) -> None:
        if not level:
            raise ValueError("bottom")
        deep(level - 1)

    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 5_000)
    try:
        deep(4_000)
    except ValueError as error:
        text = traceback_of(error)
    finally:
        sys.setrecursionlimit(before)
    assert len(text) < 8 * 1024
    assert text.endswith("ValueError: bottom")
