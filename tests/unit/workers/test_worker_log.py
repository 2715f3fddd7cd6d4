"""What a model logs in a worker, on its way to the server."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from nerite.workers.child.worker import OutboxLogHandler


class Outbox:
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []

    def log(self, level: str, text: str, _file: str, _line: int) -> None:
        self.lines.append((level, text))


@pytest.fixture
def outbox() -> Outbox:
    return Outbox()


@pytest.fixture
def logger(outbox: Outbox) -> logging.Logger:
    made = logging.Logger("mine")
    made.addHandler(OutboxLogHandler(outbox))  # type: ignore[arg-type]
    return made


def test_the_traceback_of_an_exception_is_bounded(logger: logging.Logger, outbox: Outbox) -> None:
    def deep(left: int) -> None:
        if not left:
            raise ValueError("x" * 10_000_000)
        deep(left - 1)

    try:
        deep(500)
    except ValueError:
        logger.exception("it failed")
    ((level, text),) = outbox.lines
    assert level == "ERROR"
    assert text.startswith("it failed\nTraceback (most recent call last):\n") and "ValueError: xxx" in text
    assert len(text) < 40_000


class Unprintable:
    def __repr__(self) -> str:
        raise ValueError("no text")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (("%s of %s", 1, 2), "1 of 2"),
        (("%d", "one"), "%d (not formatted: ('one',))"),
        (("none",), "none"),
        (("%s", Unprintable()), "%s (not formatted: <tuple that raises ValueError>)"),
        ((Unprintable(),), "<Unprintable that raises ValueError> (not formatted: ())"),
    ],
)
def test_a_line_that_cannot_be_formatted_is_sent_as_it_is(
    logger: logging.Logger, outbox: Outbox, said: tuple[Any, ...], expected: str
) -> None:
    logger.info(*said)
    assert outbox.lines == [("INFO", expected)]
