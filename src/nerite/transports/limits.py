"""Limits on what all clients use together, on all ports: connections, and bytes of requests in flight.

Also times out requests that arrive too slowly. Small requests that arrive in one piece are not counted: waiting ones
are bounded by the queues of their models.
"""

from __future__ import annotations

import resource
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator
from typing import Final, Literal, Protocol, TypeAlias, get_args

from nerite.core.errors import Exhausted
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.transports.unpacking import BackgroundThreads, ThreadedWork

# Connection table: decides which connections are closed to make room or because they are idle. Has no clock.

_RESCAN_SECONDS: Final = 1.0
"""Minimum interval between scans of a full table for connections that have become idle, in seconds."""


class ConnectionEntry(Protocol):
    """A connection, as the table sees it."""

    @property
    def busy(self) -> bool:
        """Whether a request is being received or answered."""

    @property
    def served(self) -> int:
        """Number of requests so far."""

    def retire(self) -> None:
        """Close the connection, which is idle."""

    def drain(self) -> None:
        """Have the client send further requests over another connection; answer those in progress."""


class ConnectionTable:
    """Open connections of all ports. Idle ones are found by scanning, so that requests incur no cost here."""

    def __init__(self, limit: int, idle_seconds: float) -> None:
        """0 means unlimited."""
        self.limit = limit
        self._idle_seconds = idle_seconds
        self._activity: dict[ConnectionEntry, tuple[int, float]] = {}
        """For each connection, its ``served`` count and the time since which that has not changed."""
        self._idle: OrderedDict[ConnectionEntry, int] = OrderedDict()
        """Idle connections with their ``served`` count, longest idle first; includes those used since the last scan."""
        self._scanned_at = float("-inf")

    def __len__(self) -> int:
        return len(self._activity)

    def __iter__(self) -> Iterator[ConnectionEntry]:
        return iter(self._activity)

    @property
    def full(self) -> bool:
        """Whether the limit is reached."""
        return 0 < self.limit <= len(self._activity)

    def add(self, connection: ConnectionEntry, now: float) -> None:
        """Register an accepted connection."""
        self._activity[connection] = (connection.served, now)
        self._idle[connection] = connection.served

    def remove(self, connection: ConnectionEntry) -> None:
        """Remove a closed connection. Idempotent."""
        self._activity.pop(connection, None)
        self._idle.pop(connection, None)

    def make_room(self, now: float) -> ConnectionEntry | None:
        """Remove and return the connection that has been idle longest, to be closed; None if all are busy."""
        found = self._longest_idle()
        if found is None and now - self._scanned_at >= _RESCAN_SECONDS:
            self._scan(now)
            found = self._longest_idle()
        return found

    def idle(self, now: float) -> list[ConnectionEntry]:
        """Remove and return the connections whose idle time has expired, to be closed."""
        self._scan(now)
        found = []
        if self._idle_seconds:
            for connection in self._idle:
                if now - self._activity[connection][1] < self._idle_seconds:
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

    def _scan(self, now: float) -> None:
        """Rebuild the list of idle connections in order of idle time."""
        self._scanned_at = now
        idle: list[tuple[float, int, ConnectionEntry]] = []
        for number, (connection, (served, since)) in enumerate(self._activity.items()):
            if connection.busy or connection.served != served:
                self._activity[connection] = (connection.served, now)
            else:
                idle.append((since, number, connection))
        idle.sort()
        self._idle = OrderedDict((connection, connection.served) for _, _, connection in idle)


COUNTED: Final = 16 * 1024
"""Size from which a request that arrives in one piece is counted. Requests in several pieces always are."""

CHECKS: Final = 8
"""Number of progress checks within the time limit for arriving requests."""
_MAX_CONNECTIONS: Final = 16_384
_MIN_BYTES: Final = 64 * 1024 * 1024
_HIGH_USE: Final = 0.75
"""Fraction of the bytes in flight from which requests must arrive eight times as fast."""

Refusal: TypeAlias = Literal["message_size", "fields", "stalled"]
Closing: TypeAlias = Literal["refused", "displaced", "idle", "stalled"]


class BytesInFlight:
    """Bytes of requests that arrive, wait or run. Thread-safe."""

    __slots__ = ("_lock", "limit", "refused", "setting", "used")

    def __init__(self, limit: int, setting: str = "--max-bytes-in-flight") -> None:
        """0 means unlimited. ``setting`` is what sets the limit, for error texts."""
        self.limit = limit
        self.setting = setting
        self.used = 0
        self.refused = 0
        """Number of requests refused because the limit was reached."""
        self._lock = threading.Lock()

    @property
    def total(self) -> int:
        """Bytes in flight in all processes of the server."""
        return self.used

    def fits(self, size: int) -> bool:
        """Return whether ``size`` more bytes fit now."""
        return not self.limit or self.total + size <= self.limit

    def take(self, size: int) -> bool:
        """Add ``size`` bytes; return False, without adding any, if they do not fit."""
        with self._lock:
            if self.limit and self.used + size > self.limit:
                return False
            self.used += size
            return True

    def give_back(self, size: int) -> None:
        """Release bytes that were taken."""
        with self._lock:
            self.used -= size

    def refusal(self, size: int) -> Exhausted:
        """Count a request whose ``size`` bytes do not fit, and return the error."""
        with self._lock:
            self.refused += 1
        # The text is constant, so that the encoded reply can be memoized: an overloaded server must refuse cheaply.
        if size > self.limit:
            return Exhausted(f"the request is larger than the {self.limit} bytes that {self.setting} allows")
        return Exhausted(f"requests in progress use the {self.limit} bytes of {self.setting}. Try again in 1 s", 1)


class SharedBytesInFlight(BytesInFlight):
    """Bytes in flight of a server with several processes: each counts its own in a slot of shared memory.

    Processes that take bytes at the same moment may exceed the limit, each by one request.
    """

    __slots__ = ("_own", "_slots")

    def __init__(self, limit: int, slots: memoryview, own: int) -> None:
        """``slots`` has one unsigned number of 64 bits for each process; ``own`` is the index of this one."""
        super().__init__(limit)
        self._slots = slots
        self._own = own

    @property
    def total(self) -> int:
        """Bytes in flight in all processes of the server."""
        return sum(self._slots)

    def take(self, size: int) -> bool:
        """Add ``size`` bytes; return False, without adding any, if they do not fit."""
        with self._lock:
            if self.limit and self.total + size > self.limit:
                return False
            self.used += size
            self._slots[self._own] = self.used
            return True

    def give_back(self, size: int) -> None:
        """Release bytes that were taken."""
        with self._lock:
            self.used -= size
            self._slots[self._own] = self.used

    def ended(self, process: int) -> None:
        """Release the bytes of a process that has ended."""
        self._slots[process] = 0


class ByteReservation:
    """Share of one request or connection in the bytes in flight."""

    __slots__ = ("_budget", "size")

    def __init__(self, budget: BytesInFlight) -> None:
        self._budget = budget
        self.size = 0

    def take(self, size: int) -> bool:
        """Reserve more bytes; return False, without reserving any, if they do not fit."""
        if not self._budget.take(size):
            return False
        self.size += size
        return True

    def cover(self, arrived: int, whole: int) -> bool:
        """Reserve ``arrived`` of the ``whole`` bytes of a message; return False if they do not fit.

        If possible, up to twice as much is reserved, so that a message in many pieces needs few reservations.
        """
        missing = arrived - self.size
        return missing <= 0 or self.take(missing + min(arrived, whole - arrived)) or self.take(missing)

    def take_or_raise(self, size: int) -> None:
        """Reserve more bytes. Raises ``Exhausted`` if they do not fit."""
        if not self.take(size):
            raise self._budget.refusal(size)

    def give_back(self, size: int | None = None) -> None:
        """Release ``size`` bytes, or all of them."""
        given = self.size if size is None else size
        self._budget.give_back(given)
        self.size -= given

    def absorb(self, other: ByteReservation) -> None:
        """Take over the bytes of another reservation."""
        self.size += other.size
        other.size = 0


class TransportLimits:
    """Limits of a server, with their counters and metrics."""

    def __init__(
        self,
        *,
        max_bytes: int = 0,
        max_connections: int = 0,
        idle_seconds: float = 0,
        exit_keepalive: float = 0,
        aside: ThreadedWork | None = None,
        bytes_setting: str = "--max-bytes-in-flight",
        connections_setting: str = "--max-connections",
    ) -> None:
        """0 means unlimited. The settings are what sets the limits, for error texts."""
        self.connections_setting = connections_setting
        self.bytes = BytesInFlight(max_bytes, bytes_setting)
        self.connections = ConnectionTable(max_connections, idle_seconds)
        self.exit_keepalive = exit_keepalive
        """Seconds that an idle connection waits for a last request when the server stops."""
        self.aside: ThreadedWork = BackgroundThreads() if aside is None else aside
        # All labels start at zero, otherwise an alert would miss the first increase.
        self.refused: Counter[Refusal] = Counter(dict.fromkeys(get_args(Refusal), 0))
        """Requests refused while they arrived, by reason, not including those over the limit of bytes in flight."""
        self.closed: Counter[Closing] = Counter(dict.fromkeys(get_args(Closing), 0))
        """Connections that the server closed or did not accept, by reason."""

    @property
    def refusals(self) -> dict[str, int]:
        """Number of requests refused while they arrived, by reason."""
        return {"bytes_in_flight": self.bytes.refused, **{str(why): count for why, count in self.refused.items()}}

    def write_metrics(self, page: Page) -> None:
        """Write the metrics of all limits."""
        page.write(METRICS, [METRICS.row(self)])

    def patience(self, seconds: float) -> float:
        """Return how long a request may make no progress: ``seconds``, or less when the bytes in flight run out."""
        taken = self.bytes
        return seconds / CHECKS if taken.limit and taken.total > taken.limit * _HIGH_USE else seconds


METRICS: Final = MetricTable[TransportLimits]((
    Metric("nerite_connections_limit", "gauge",
           "Maximum number of open connections on all ports together, 0 for unlimited",
           lambda limits: limits.connections.limit),
    Metric("nerite_connections_closed_total", "counter",
           "Connections that were closed or refused because of a limit",
           lambda limits: {str(why): count for why, count in limits.closed.items()}, "reason"),
    Metric("nerite_bytes_in_flight", "gauge",
           "Bytes of requests that arrive, wait or run", lambda limits: limits.bytes.total),
    Metric("nerite_bytes_in_flight_limit", "gauge",
           "Maximum bytes of requests in flight, 0 for unlimited", lambda limits: limits.bytes.limit),
    Metric("nerite_arrivals_refused_total", "counter",
           "Requests that were refused while they arrived, by limit",
           lambda limits: limits.refusals, "reason"),
))  # fmt: skip


def connections_for(files: int, most: int = _MAX_CONNECTIONS) -> int:
    """Return the maximum number of connections, no more than ``most``, for a limit of open file descriptors.

    A quarter is left for models, workers and their files; of a very small limit, half.
    """
    if files == resource.RLIM_INFINITY:
        return most
    return min(files - max(files // 4, min(files // 2, 256)), most)


def bytes_for(memory: int) -> int:
    """Return the maximum bytes of requests for a memory size: a quarter. 0, unlimited, if the size is unknown."""
    return max(memory // 4, _MIN_BYTES) if memory else 0


# Timeout of requests that arrive too slowly, over HTTP and gRPC. Has no clock.

PROGRESS: Final = 16 * 1024
"""Bytes of a request that must arrive within the time limit, unless the request completes earlier."""


class ArrivalTimeout:
    """Progress of the arriving request of one connection or call, updated periodically.

    It tolerates slow clients, and detects those whose connection is lost.
    """

    __slots__ = ("_number", "_received", "_since")

    def __init__(self) -> None:
        self._number = 0
        self._received = 0
        self._since = 0.0

    def exhausted(self, arriving: tuple[int, int] | None, now: float, seconds: float) -> bool:
        """Return whether the arriving request has made no progress for ``seconds``.

        ``arriving`` is its number on the connection, from 1, and its bytes received; None if no request is arriving.
        """
        number, received = arriving or (0, 0)
        if number != self._number or received - self._received >= PROGRESS:
            self._number, self._received, self._since = number, received, now
        return number > 0 and now - self._since >= seconds
