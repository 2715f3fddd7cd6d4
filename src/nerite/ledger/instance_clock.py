"""The time of one instance: every moment since its load is counted once, as used or as idle. No I/O, no clock."""

from __future__ import annotations

from typing import Final, NamedTuple

_DAY_NS: Final = 86_400_000_000_000


class InstanceTime(NamedTuple):
    """How an instance spent a UTC day, or the part of it that has passed. Times of the day are Unix times."""

    number: int
    """Unique within the session of the server."""
    model: str
    version: str
    instance: str
    day: int
    """Days since 1970-01-01."""
    since: float
    until: float
    idle_ns: int
    used_ns: int


class InstanceClock:
    """Divides the time of an instance into idle and used, up to ``until_ns``."""

    __slots__ = (
        "_begin",
        "_day",
        "_last",
        "_leased_ns",
        "_leases",
        "idle_ns",
        "number",
        "until_ns",
        "used_ns",
    )

    def __init__(self, number: int, now: int) -> None:
        """``now``: the instance was loaded."""
        self.number = number
        self.until_ns = now
        """The time is divided up to here."""
        self.idle_ns = self.used_ns = 0
        self._leases = 0
        self._leased_ns = now
        self._day = -1
        self._begin = self._last = (now, 0, 0)
        """``until_ns``, ``idle_ns`` and ``used_ns`` at the beginning of the day, and at the last reading."""

    @property
    def leased(self) -> bool:
        """Whether the instance has a batch."""
        return self._leases > 0

    def lease(self, now: int) -> None:
        """Record that the instance gets a batch, perhaps beside another."""
        self._leases += 1
        if self._leases == 1:
            self._leased_ns = now

    def end_lease(self) -> None:
        """Record that a batch came back."""
        self._leases -= 1

    def use(self, began: int, ended: int) -> int:
        """Count a period as used, except for what was counted before; return how much that is."""
        began = max(began, self.until_ns)
        if ended <= began:
            return 0
        self.idle_ns += began - self.until_ns
        self.used_ns += ended - began
        self.until_ns = ended
        return ended - began

    def use_lease(self, now: int) -> int:
        """Count the time of a batch that died as used, from its start until ``now``."""
        return self.use(self._leased_ns, now)

    def rest(self, now: int) -> None:
        """Count the time until ``now`` as idle."""
        if now > self.until_ns:
            self.idle_ns += now - self.until_ns
            self.until_ns = now

    def is_set_back(self, wall_ns: int) -> bool:
        """Return whether the next reading is of an earlier day than the last, which it must not replace."""
        return (self.until_ns + wall_ns) // _DAY_NS < self._day

    def reading(self, model: str, version: str, instance: str, wall_ns: int) -> InstanceTime:
        """Return how the present UTC day was spent so far; a day begins with the first reading on it.

        ``wall_ns``: Unix time at zero of the monotonic clock.
        """
        day = (self.until_ns + wall_ns) // _DAY_NS
        if day != self._day:
            self._day, self._begin = day, self._last
        self._last = self.until_ns, self.idle_ns, self.used_ns
        since_ns, idle_ns, used_ns = self._begin
        return InstanceTime(
            self.number,
            model,
            version,
            instance,
            day,
            (since_ns + wall_ns) / 1e9,
            (self.until_ns + wall_ns) / 1e9,
            self.idle_ns - idle_ns,
            self.used_ns - used_ns,
        )
