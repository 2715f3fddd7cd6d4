"""Queue of the requests that are sent to a shadow: bounded in number and bytes, and dropped rather than waited for."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Sequence
from typing import Final, Generic, TypeVar

MAX_HELD: Final = 256
"""Maximum number of requests of a route that are kept for its shadow, from their arrival to their comparison."""
MAX_BYTES: Final = 128 << 20
"""Maximum number of bytes of their inputs and answers."""

Item = TypeVar("Item")


class ShadowDrop(enum.StrEnum):
    """Reason why a request that was chosen for a shadow is not compared."""

    QUEUE_FULL = "queue_full"
    BYTES = "bytes"
    """Its inputs and answers do not fit in what is left of ``MAX_BYTES``."""
    SEQUENCE = "sequence"
    """It belongs to a sequence, whose other requests the shadow does not know."""
    ON_DEVICE = "on_device"
    """Its inputs are in the memory of a GPU, where its client may change them."""
    CANCELLED = "cancelled"
    """The caller cancelled it."""
    CHANGED = "changed"
    """The model changed the inputs in place."""
    NOT_READY = "not_ready"
    """The arm has no instance that is up, or it refuses such requests."""
    LATE = "late"
    """It waited for longer than the timeout, because requests of other classes come first."""
    TIMEOUT = "timeout"
    """The shadow did not answer in time and was cancelled."""
    REFUSED = "refused"
    """The shadow's queue was full."""
    STOPPED = "stopped"
    """The shadow was changed or removed, or the server stops."""


class ShadowQueue(Generic[Item]):
    """Decides which requests are kept for a shadow, and when one may be sent to it.

    A request holds a place, and its bytes, from ``hold`` until ``release``. Has no clock.
    """

    __slots__ = ("_concurrency", "_held", "_patience_ns", "_running", "_size", "_waiting")

    def __init__(self, concurrency: int, patience_ns: int) -> None:
        """``concurrency`` is the maximum number that run at once, ``patience_ns`` how long one may wait."""
        self._concurrency = concurrency
        self._patience_ns = patience_ns
        self._held = self._size = self._running = 0
        self._waiting: deque[tuple[int, Item]] = deque()

    @property
    def held(self) -> int:
        """Number of requests that hold a place."""
        return self._held

    @property
    def size(self) -> int:
        """Number of bytes that they hold."""
        return self._size

    @property
    def waiting(self) -> int:
        """Number of requests that wait until they are sent."""
        return len(self._waiting)

    def hold(self, size: int) -> ShadowDrop | None:
        """Reserve a place and bytes for a request; return why that is not possible."""
        if self._held >= MAX_HELD:
            return ShadowDrop.QUEUE_FULL
        if not self.grow(size):
            return ShadowDrop.BYTES
        self._held += 1
        return None

    def grow(self, size: int) -> bool:
        """Reserve more bytes for a request that holds a place; return False if there are not enough."""
        if self._size + size > MAX_BYTES:
            return False
        self._size += size
        return True

    def release(self, size: int) -> None:
        """Give back a place and the bytes of a request."""
        self._held -= 1
        self._size -= size

    def wait(self, item: Item, now: int) -> None:
        """Enqueue a request that holds a place."""
        self._waiting.append((now, item))

    def late(self, now: int) -> Sequence[Item]:
        """Remove and return the requests that have waited for too long."""
        found: list[Item] = []
        while self._waiting and self._waiting[0][0] + self._patience_ns <= now:
            found.append(self._waiting.popleft()[1])
        return found

    @property
    def first(self) -> Item | None:
        """The request to send next; None if none waits, or as many as may run at once do."""
        return self._waiting[0][1] if self._waiting and self._running < self._concurrency else None

    def begin(self) -> None:
        """Record that ``first`` is sent."""
        self._waiting.popleft()
        self._running += 1

    def end(self) -> None:
        """Record that a request which had begun has been answered."""
        self._running -= 1

    def drain(self) -> Sequence[Item]:
        """Remove and return all requests that wait."""
        found = [item for _, item in self._waiting]
        self._waiting.clear()
        return found
