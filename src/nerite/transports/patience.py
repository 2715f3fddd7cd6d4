"""When to give up on a request that arrives too slowly, over HTTP and gRPC: a decider without a clock."""

from __future__ import annotations

from typing import Final

PROGRESS: Final = 16 * 1024
"""Bytes of a request that have to arrive within the time that is granted, unless it is complete before that."""


class Patience:
    """One connection's record, or one call's. Told now and then what has arrived.

    A slow client is not a mistake, a dead one is.
    """

    __slots__ = ("_number", "_received", "_since")

    def __init__(self) -> None:
        self._number = 0
        self._received = 0
        self._since = 0.0

    def exhausted(self, arriving: tuple[int, int] | None, now: float, seconds: float) -> bool:
        """Return whether the request that arrives has not come on for so many seconds.

        ``arriving`` is its number on the connection, from 1, and how much of it is here; None if none is on its way.
        """
        number, received = arriving or (0, 0)
        if number != self._number or received - self._received >= PROGRESS:
            self._number, self._received, self._since = number, received, now
        return number > 0 and now - self._since >= seconds
