"""How many tokens a request will probably generate, from those that finished before it."""

from __future__ import annotations

from typing import Final

_LATEST: Final = 1 / 32
"""How much the latest counts; among the first few all count alike."""
_MARGIN: Final = 1.0
"""Deviations above the mean that memory is promised for."""
_UNKNOWN: Final = 256
"""Tokens that memory is promised for as long as nothing is known: else the first that may have as many as there is room
for would have to run alone."""


class Experience:
    """Mean and mean deviation of what was seen, the latest more than the earlier."""

    __slots__ = ("_count", "deviation", "mean")

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0
        self.deviation = 0.0

    def note(self, value: float) -> None:
        """Take in one value more."""
        self._count += 1
        part = max(_LATEST, 1 / self._count)
        if self._count > 1:
            self.deviation += part * (abs(value - self.mean) - self.deviation)
        self.mean += part * (value - self.mean)

    @property
    def enough(self) -> bool:
        """Whether so much was seen that it counts."""
        return self._count >= 8


class Forecast:
    """For one model; learns for each tenant, and for all together as long as little is known of one."""

    __slots__ = ("_all", "_tenants")

    def __init__(self) -> None:
        self._all = Experience()
        self._tenants: dict[str, Experience] = {}

    def note(self, tenant: str, generated: int) -> None:
        """Learn from a request that ended by itself."""
        self._all.note(generated)
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = Experience()
        own.note(generated)

    def expected(self, tenant: str, most: int) -> int:
        """Return how many tokens a request will probably have that may have ``most``; ``most`` if nobody knows."""
        known = self._known(tenant)
        return most if known is None else max(1, min(most, round(known.mean)))

    def cautious(self, tenant: str, most: int, generated: int = 0) -> int:
        """Return how many tokens it will hardly exceed; for one that has ``generated`` some, more than those."""
        known = self._known(tenant)
        if known is None:
            return min(most, max(_UNKNOWN, 2 * generated))
        bound = known.mean + _MARGIN * known.deviation
        # One that is longer than most is as long again, for all anybody knows.
        return max(1, min(most, round(bound if generated < bound else generated + known.deviation + 1)))

    def _known(self, tenant: str) -> Experience | None:
        own = self._tenants.get(tenant)
        if own is not None and own.enough:
            return own
        return self._all if self._all.enough else None
