"""Reads what load is wanted: a number, several, or a range."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from typing import Final

_RANGE: Final = re.compile(r"([\d.]+):([\d.]+)(?::(\*?)([\d.]+))?")
_MOST_LEVELS: Final = 100


def numbers(text: str) -> tuple[float, ...]:
    """Read ``8``, ``1,2,4``, ``1:32`` (each of them), ``1:32:4`` (in steps) or ``1:32:*2`` (doubling)."""
    found: list[float] = []
    try:
        for part in text.split(","):
            match = _RANGE.fullmatch(part)
            if match is None:
                found.append(float(part))
            else:
                first, last, times, step = match.groups("")
                found.extend(_range(float(first), float(last), bool(times), float(step or 1)))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is neither a number nor a range: write 8, 1,2,4, 1:32:4 or 1:32:*2"
        ) from None
    if len(found) > _MOST_LEVELS:
        raise argparse.ArgumentTypeError(f"'{text}' is more than {_MOST_LEVELS} levels: write 1:1000:50 or 1:1000:*2")
    if not all(number > 0 for number in found):
        raise argparse.ArgumentTypeError(f"'{text}': a load is more than 0")
    return tuple(found)


def counts(text: str) -> tuple[int, ...]:
    """Read the same for what is counted."""
    found = numbers(text)
    if any(number % 1 for number in found):
        raise argparse.ArgumentTypeError(f"'{text}': so many requests under way are whole numbers")
    return tuple(map(int, found))


def _range(first: float, last: float, times: bool, step: float) -> Iterator[float]:
    if first <= 0 or last < first or step <= (1 if times else 0):
        raise ValueError
    number = first
    # One more than there may be, so that it is known that there are too many.
    for given in range(1, _MOST_LEVELS + 2):
        if number > last:
            return
        yield number
        number = number * step if times else first + given * step
