"""When requests are due in an open loop: at a steady pace, or at random as independent callers come."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np

_DRAWN_AT_ONCE = 1_024


def constant(rate: float, share: int = 0, shares: int = 1) -> Iterator[float]:
    """Yield the seconds after the beginning at which requests are due, ``rate`` of them in a second.

    Of several generators each takes its share: the first, and every ``shares``-th after it.
    """
    return (number / rate for number in itertools.count(share, shares))


def poisson(rate: float, share: int = 0, shares: int = 1, seed: int = 0) -> Iterator[float]:
    """Yield the same for arrivals that know nothing of each other. What several generators send adds up to ``rate``."""
    generator = np.random.default_rng([seed, share])
    due = 0.0
    while True:
        for gap in generator.exponential(shares / rate, _DRAWN_AT_ONCE).tolist():
            due += gap
            yield due
