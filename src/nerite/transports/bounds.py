"""What clients may have of the server together, over all ports: connections, and bytes of requests.

Small requests that arrive in one piece are not counted: those that wait are bounded by the queues of their models.
"""

from __future__ import annotations

import resource
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Final, Literal, TypeAlias, get_args

from nerite.core.errors import Exhausted
from nerite.observability.exposition import UNLABELLED, Family, label
from nerite.transports.aside import Aside, Threads
from nerite.transports.connection_table import ConnectionTable

COUNTED: Final = 16 * 1024
"""Bytes from which on a request is counted that arrives in one piece. Those in several pieces are counted anyhow."""

LOOKS: Final = 8
"""How often requests that arrive are looked at within the time in which they have to come on."""
_MOST_CONNECTIONS: Final = 16_384
_FEWEST_BYTES: Final = 64 * 1024 * 1024
_PRESSED: Final = 0.75
"""Share of the bytes from which on requests have to come on eight times as fast."""

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


class Share:
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

    def absorb(self, other: Share) -> None:
        """Take over what another has."""
        self.size += other.size
        other.size = 0


class Bounds:
    """Those of a server."""

    def __init__(
        self,
        *,
        max_bytes: int = 0,
        max_connections: int = 0,
        idle_seconds: float = 0,
        aside: Aside | None = None,
    ) -> None:
        """0 is no limit."""
        self.bytes = BytesInFlight(max_bytes)
        self.connections = ConnectionTable(max_connections, idle_seconds)
        self.aside: Aside = Threads() if aside is None else aside
        # Zeros are there from the start, or an alert would miss the first increase.
        self.refused: Counter[Refusal] = Counter(dict.fromkeys(get_args(Refusal), 0))
        """Requests that were refused as they arrived, by reason, beside those that there was no room for."""
        self.closed: Counter[Closing] = Counter(dict.fromkeys(get_args(Closing), 0))
        """Connections that the server closed or did not take, by reason."""

    def families(self, open_by_port: Mapping[str, int]) -> list[Family]:
        """Return the metrics of all this."""
        return [
            Family(
                "nerite_connections",
                "Connections that are open, by port",
                "gauge",
                [(label("port", port), count) for port, count in open_by_port.items()],
            ),
            Family(
                "nerite_connections_limit",
                "Connections that may be open on all ports together, 0 for any number",
                "gauge",
                [(UNLABELLED, self.connections.limit)],
            ),
            Family(
                "nerite_connections_closed_total",
                "Connections that were closed, or not taken, because of a limit",
                "counter",
                [(label("reason", why), count) for why, count in self.closed.items()],
            ),
            Family(
                "nerite_bytes_in_flight",
                "Bytes of requests that arrive, wait or run",
                "gauge",
                [(UNLABELLED, self.bytes.used)],
            ),
            Family(
                "nerite_bytes_in_flight_limit",
                "Bytes that they may take, 0 for any number",
                "gauge",
                [(UNLABELLED, self.bytes.limit)],
            ),
            Family(
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
