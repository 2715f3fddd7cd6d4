"""Chooses the connections that a front passes on, and has their clients reconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Final, TypeVar
from weakref import WeakSet

from nerite.transports.limits import ConnectionEntry, ConnectionTable

_MEASURE: Final = 1.0
"""Seconds for which the requests of each connection are counted before some are chosen."""
_GAIN: Final = 0.9
"""Part of the upper limit that is used: with more than that another front would soon be the busiest."""
_WEIGHED: Final = 64
"""Number of connections, the busiest first, of which all sums are compared."""
_STEPS: Final = 128
"""Resolution of these sums."""

Connection = TypeVar("Connection")


def choose_connections(rates: Mapping[Connection, float], wanted: float, most: float) -> list[Connection]:
    """Return connections whose requests per second together come closest to ``wanted``, and stay well below ``most``.

    Returns none if no choice is better than none.
    """
    limit = most * _GAIN
    busiest_first = sorted((each for each in rates if 0 < rates[each] <= limit), key=lambda each: -rates[each])
    sums: dict[int, tuple[float, tuple[Connection, ...]]] = {0: (0.0, ())}
    for connection in busiest_first[:_WEIGHED]:
        for before, chosen in tuple(sums.values()):
            rate = before + rates[connection]
            if rate <= limit:
                sums.setdefault(round(rate / limit * _STEPS), (rate, (*chosen, connection)))
    rate, chosen = min(sums.values(), key=lambda each: (abs(each[0] - wanted), each[0]))
    found = list(chosen)
    for connection in busiest_first[_WEIGHED:]:
        if rate + rates[connection] <= wanted:
            rate += rates[connection]
            found.append(connection)
    return found


class ConnectionRetirement:
    """Has clients reconnect. Connections are measured only when some are to be passed on."""

    def __init__(self, table: ConnectionTable, loop: asyncio.AbstractEventLoop) -> None:
        self._table = table
        self._loop = loop
        self._retired: WeakSet[ConnectionEntry] = WeakSet()
        """Connections whose clients were told, until they are closed."""
        self._measuring = False

    def begin(self, share: float, most: float) -> None:
        """Measure, then have clients reconnect that send about ``share`` of the requests, and well below ``most``."""
        if not self._measuring:
            self._measuring = True
            served = {each: each.served for each in self._table}
            self._loop.call_later(_MEASURE, self._retire, served, share, most)

    def _retire(self, before: Mapping[ConnectionEntry, int], share: float, most: float) -> None:
        self._measuring = False
        rates = {each: (each.served - before.get(each, each.served)) / _MEASURE for each in self._table}
        total = sum(rates.values())
        # A retired connection may go on for long, with a stream.
        movable = {each: rate for each, rate in rates.items() if each not in self._retired}
        for connection in choose_connections(movable, share * total, most * total):
            self._retired.add(connection)
            connection.drain()
