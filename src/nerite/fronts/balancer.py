"""Decides which front gets a new connection, and when a front should pass on some of its connections. Pure.

Connections live long and differ in load, so fronts are compared by their requests per second. A new connection shows no
load yet; it counts as an average one until the next measurement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

_SMOOTHING: Final = 0.5
"""Weight of the latest measurement in a rate."""
_TOLERANCE: Final = 1.15
"""Load of the busiest front, in proportion to the mean, from which connections should move."""
_PATIENCE: Final = 3
"""Number of measurements in a row that show too high a load before connections move."""
_REST: Final = 5
"""Number of measurements after a move before the next one."""
_SIGNIFICANT: Final = 100.0
"""Requests per second of a front below which a difference does not matter."""


class FrontLoad(NamedTuple):
    """What a front has done and has at hand."""

    calls: int
    """Inferences so far."""
    in_flight: int
    connections: int


class Move(NamedTuple):
    """Decision that a front should pass on connections."""

    front: int
    share: float
    """The share of its requests that is too much."""
    most: float
    """The share of its requests from which another front would be left with as much as this one has now."""


class FrontBalancer:
    """Compares fronts by index."""

    def __init__(self, count: int) -> None:
        self._calls = [0] * count
        self._rates = [0.0] * count
        self._new = [0] * count
        """Connections since the last measurement."""
        self._high = 0
        """Number of measurements in a row that show too high a load."""
        self._rest = 0
        self._moves = 0
        self._moved = [0] * count
        """Number of the last move from each front."""

    @property
    def rates(self) -> Sequence[float]:
        """Requests per second of each front."""
        return self._rates

    def restarted(self, front: int) -> None:
        """Forget the load of a front, which was replaced."""
        self._calls[front] = self._new[front] = self._moved[front] = 0
        self._rates[front] = 0.0

    def choose(self, loads: Sequence[FrontLoad | None]) -> int | None:
        """Return the front that gets a new connection; None if there is none. ``loads`` has None for absent fronts."""
        present = [(index, load) for index, load in enumerate(loads) if load is not None]
        if not present:
            return None
        connections = sum(load.connections for _, load in present)
        average = sum(self._rates[index] for index, _ in present) / connections if connections else 0.0

        def cost(index: int, load: FrontLoad) -> tuple[float, int, int]:
            return self._rates[index] + average * self._new[index], load.connections, load.in_flight

        chosen = min(present, key=lambda each: cost(*each))[0]
        self._new[chosen] += 1
        return chosen

    def measured(self, loads: Sequence[FrontLoad | None], seconds: float) -> Move | None:
        """Take the loads after ``seconds``; return a move if one front has had too much for a while.

        Of several such fronts, each has its turn: some may have no connections whose closing helps.
        """
        for index, load in enumerate(loads):
            if load is not None:
                rate = (load.calls - self._calls[index]) / seconds
                self._rates[index] += _SMOOTHING * (rate - self._rates[index])
                self._calls[index] = load.calls
            self._new[index] = 0
        rates = {index: self._rates[index] for index, load in enumerate(loads) if load is not None}
        if self._rest:
            self._rest -= 1
            return None
        mean = sum(rates.values()) / len(rates) if rates else 0.0
        high = [index for index, rate in rates.items() if rate >= _SIGNIFICANT and rate > _TOLERANCE * mean]
        if not high:
            self._high = 0
            return None
        self._high += 1
        if self._high < _PATIENCE:
            return None
        self._high = 0
        self._rest = _REST
        front = min(high, key=lambda index: (self._moved[index], -rates[index]))
        self._moves += 1
        self._moved[front] = self._moves
        rate = rates[front]
        return Move(front, (rate - mean) / rate, (rate - min(rates.values())) / rate)
