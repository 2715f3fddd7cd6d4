"""How many requests a second leave a queue in which there is always somebody."""

from __future__ import annotations

from typing import Final

_LEAST_NS: Final = 50_000_000
_SPAN_NS: Final = 1_000_000_000


class Pace:
    """Measured over the last one to two seconds; over more, if nobody left in that time."""

    __slots__ = ("_earlier", "_later", "per_second")

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin anew: the queue was empty, and what left it says nothing about how many could have."""
        self._earlier: tuple[int, int] | None = None
        self._later = (0, 0)
        self.per_second: float | None = None
        """None as long as nothing can be said."""

    def note(self, begun: int, now: int) -> None:
        """Note how many have left so far."""
        if self._earlier is None:
            self._earlier = self._later = (begun, now)
        elif now - self._later[1] >= _SPAN_NS and begun > self._later[0]:
            self._earlier, self._later = self._later, (begun, now)
        passed = now - self._earlier[1]
        if passed >= _LEAST_NS:
            self.per_second = (begun - self._earlier[0]) / passed * 1e9
