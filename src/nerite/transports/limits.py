"""What clients may have of the server together, over all ports: connections, and bytes of requests.

Small requests that arrive in one piece are not counted: those that wait are bounded by the queues of their models.
"""

from __future__ import annotations

import resource
import threading
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Final, Literal, Protocol, TypeAlias, get_args

from nerite.core.errors import Exhausted
from nerite.observability.exposition import UNLABELLED, MetricFamily, label
from nerite.transports.unpacking import BackgroundThreads, BackgroundWork

# Which connections are open, and which of them are closed to make room or as unused: a decider without a clock.

_LOOK_AGAIN: Final = 1.0
"""Seconds after which a full table looks once more for connections that have become idle."""


class ConnectionEntry(Protocol):
    """A connection, as the table sees it."""

    @property
    def busy(self) -> bool:
        """Whether a request is being received or answered."""

    @property
    def served(self) -> int:
        """A number that changes with each request."""

    def retire(self) -> None:
        """Close, as nothing is under way."""


class ConnectionTable:
    """Those of all ports. A connection costs nothing here while it is used: idle ones are found by looking."""

    def __init__(self, limit: int, idle_seconds: float) -> None:
        """0 is no limit."""
        self.limit = limit
        self._idle_seconds = idle_seconds
        self._noted: dict[ConnectionEntry, tuple[int, float]] = {}
        """What each had served, and since when it has not served more."""
        self._idle: OrderedDict[ConnectionEntry, int] = OrderedDict()
        """The longest idle first, with what they had served. Those that were used meanwhile are in it still."""
        self._looked_at = float("-inf")

    def __len__(self) -> int:
        return len(self._noted)

    @property
    def full(self) -> bool:
        """Whether one more would be too many."""
        return 0 < self.limit <= len(self._noted)

    def add(self, connection: ConnectionEntry, now: float) -> None:
        """Note that a connection was accepted."""
        self._noted[connection] = (connection.served, now)
        self._idle[connection] = connection.served

    def remove(self, connection: ConnectionEntry) -> None:
        """Note that a connection is closed. It may have been removed before."""
        self._noted.pop(connection, None)
        self._idle.pop(connection, None)

    def make_room(self, now: float) -> ConnectionEntry | None:
        """Remove the connection that has been idle longest, and return it to be closed; None if all are busy."""
        found = self._longest_idle()
        if found is None and now - self._looked_at >= _LOOK_AGAIN:
            self._look(now)
            found = self._longest_idle()
        return found

    def idle(self, now: float) -> list[ConnectionEntry]:
        """Remove the connections that have been idle for too long, and return them to be closed."""
        self._look(now)
        found = []
        if self._idle_seconds:
            for connection in self._idle:
                if now - self._noted[connection][1] < self._idle_seconds:
                    break
                found.append(connection)
            for connection in found:
                self.remove(connection)
        return found

    def _longest_idle(self) -> ConnectionEntry | None:
        while self._idle:
            connection, served = self._idle.popitem(last=False)
            if connection.served == served and not connection.busy:
                self.remove(connection)
                return connection
        return None

    def _look(self, now: float) -> None:
        """Put those that are idle in order."""
        self._looked_at = now
        idle: list[tuple[float, int, ConnectionEntry]] = []
        for number, (connection, (served, since)) in enumerate(self._noted.items()):
            if connection.busy or connection.served != served:
                self._noted[connection] = (connection.served, now)
            else:
                idle.append((since, number, connection))
        idle.sort()
        self._idle = OrderedDict((connection, connection.served) for _, _, connection in idle)


COUNTED: Final = 16 * 1024
"""Bytes from which on a request is counted that arrives in one piece. Those in several pieces are counted anyhow."""

LOOKS: Final = 8
"""How often requests that arrive are looked at within the time in which they have to come on."""
_MOST_CONNECTIONS: Final = 16_384
_FEWEST_BYTES: Final = 64 * 1024 * 1024
_PRESSED: Final = 0.75
"""ByteReservation of the bytes from which on requests have to come on eight times as fast."""

Refusal: TypeAlias = Literal["message_size", "fields", "stalled"]
Closing: TypeAlias = Literal["refused", "displaced", "idle", "stalled"]


class BytesInFlight:
    """The bytes of requests that arrive, wait or run. May be told from any thread."""

    __slots__ = ("_lock", "limit", "refused", "used")

    def __init__(self, limit: int) -> None:
        """0 is no limit."""
        self.limit = limit
        self.used = 0
        self.refused = 0
        """Requests that there was no room for."""
        self._lock = threading.Lock()

    def fits(self, size: int) -> bool:
        """Return whether there is room for ``size`` bytes now."""
        return not self.limit or self.used + size <= self.limit

    def take(self, size: int) -> bool:
        """Count ``size`` bytes; False, and nothing is counted, if there is no room for them."""
        with self._lock:
            if self.limit and self.used + size > self.limit:
                return False
            self.used += size
            return True

    def give_back(self, size: int) -> None:
        """Count no longer what was taken."""
        with self._lock:
            self.used -= size

    def refusal(self, size: int) -> Exhausted:
        """Count a request for whose ``size`` bytes there is no room, and return what it is told."""
        with self._lock:
            self.refused += 1
        # The same words each time: a server of which too much is asked refuses cheaply.
        if size > self.limit:
            return Exhausted(f"the request is larger than the {self.limit} bytes that --max-bytes-in-flight allows")
        return Exhausted(
            f"the requests under way take the {self.limit} bytes that --max-bytes-in-flight allows. Try again in 1 s", 1
        )


class ByteReservation:
    """What one request, or one connection, has of the bytes in flight."""

    __slots__ = ("_of", "size")

    def __init__(self, of: BytesInFlight) -> None:
        self._of = of
        self.size = 0

    def take(self, size: int) -> bool:
        """Count more bytes; False, and nothing is counted, if there is no room for them."""
        if not self._of.take(size):
            return False
        self.size += size
        return True

    def cover(self, arrived: int, whole: int) -> bool:
        """Count the ``arrived`` of the ``whole`` bytes of a message; False if there is no room for them.

        As many again are counted ahead where there is room, so that a message in many pieces is counted a few times.
        """
        missing = arrived - self.size
        return missing <= 0 or self.take(missing + min(arrived, whole - arrived)) or self.take(missing)

    def take_or_raise(self, size: int) -> None:
        """Count more bytes. Raises ``Exhausted`` if there is no room for them."""
        if not self.take(size):
            raise self._of.refusal(size)

    def give_back(self, size: int | None = None) -> None:
        """Count so many bytes no longer, or none of them."""
        given = self.size if size is None else size
        self._of.give_back(given)
        self.size -= given

    def absorb(self, other: ByteReservation) -> None:
        """Take over what another has."""
        self.size += other.size
        other.size = 0


class TransportLimits:
    """Those of a server."""

    def __init__(
        self,
        *,
        max_bytes: int = 0,
        max_connections: int = 0,
        idle_seconds: float = 0,
        aside: BackgroundWork | None = None,
    ) -> None:
        """0 is no limit."""
        self.bytes = BytesInFlight(max_bytes)
        self.connections = ConnectionTable(max_connections, idle_seconds)
        self.aside: BackgroundWork = BackgroundThreads() if aside is None else aside
        # Zeros are there from the start, or an alert would miss the first increase.
        self.refused: Counter[Refusal] = Counter(dict.fromkeys(get_args(Refusal), 0))
        """Requests that were refused as they arrived, by reason, beside those that there was no room for."""
        self.closed: Counter[Closing] = Counter(dict.fromkeys(get_args(Closing), 0))
        """Connections that the server closed or did not take, by reason."""

    def families(self, open_by_port: Mapping[str, int]) -> list[MetricFamily]:
        """Return the metrics of all this."""
        return [
            MetricFamily(
                "nerite_connections",
                "Connections that are open, by port",
                "gauge",
                [(label("port", port), count) for port, count in open_by_port.items()],
            ),
            MetricFamily(
                "nerite_connections_limit",
                "Connections that may be open on all ports together, 0 for any number",
                "gauge",
                [(UNLABELLED, self.connections.limit)],
            ),
            MetricFamily(
                "nerite_connections_closed_total",
                "Connections that were closed, or not taken, because of a limit",
                "counter",
                [(label("reason", why), count) for why, count in self.closed.items()],
            ),
            MetricFamily(
                "nerite_bytes_in_flight",
                "Bytes of requests that arrive, wait or run",
                "gauge",
                [(UNLABELLED, self.bytes.used)],
            ),
            MetricFamily(
                "nerite_bytes_in_flight_limit",
                "Bytes that they may take, 0 for any number",
                "gauge",
                [(UNLABELLED, self.bytes.limit)],
            ),
            MetricFamily(
                "nerite_arrivals_refused_total",
                "Requests that were refused while they arrived, by the limit that they met",
                "counter",
                [
                    (label("reason", "bytes_in_flight"), self.bytes.refused),
                    *((label("reason", why), count) for why, count in self.refused.items()),
                ],
            ),
        ]

    def patience(self, seconds: float) -> float:
        """Return for how long a request may stand still, of which it is ``seconds`` as long as there is much room."""
        taken = self.bytes
        return seconds / LOOKS if taken.limit and taken.used > taken.limit * _PRESSED else seconds


def connections_for(files: int) -> int:
    """Return how many connections there may be where so many files may be open.

    A quarter is left for models, their workers and their files, and half of what is very little.
    """
    if files == resource.RLIM_INFINITY:
        return _MOST_CONNECTIONS
    return min(files - max(files // 4, min(files // 2, 256)), _MOST_CONNECTIONS)


def bytes_for(memory: int) -> int:
    """Return how many bytes of requests there may be in so much memory: a quarter. 0, no limit, if it is not known."""
    return max(memory // 4, _FEWEST_BYTES) if memory else 0


# When to give up on a request that arrives too slowly, over HTTP and gRPC: a decider without a clock.

PROGRESS: Final = 16 * 1024
"""Bytes of a request that have to arrive within the time that is granted, unless it is complete before that."""


class ArrivalTimeout:
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
