"""How many requests to each model are under way on average, those that wait for a copy of it included.

A count that is sampled once a second misses short requests. Here the time that requests spend is added up, so that
the average over an interval is exact, however short they are.
"""

from __future__ import annotations

from typing import Final

_REFUSED_NS: Final = 1_000_000_000
"""A request that was refused for lack of a copy counts like one that took a second."""


class _Flow:
    """Of one model."""

    __slots__ = ("area", "count", "since_ns")

    def __init__(self, now_ns: int) -> None:
        self.count = 0
        self.area = 0
        """Nanoseconds that requests have spent since the last look, up to ``since_ns``."""
        self.since_ns = now_ns

    def advance(self, now_ns: int) -> None:
        """Add up the time until now."""
        self.area += self.count * max(now_ns - self.since_ns, 0)
        self.since_ns = now_ns


class ModelDemand:
    """Demand for the models of a pool. Its memory is bounded by the requests since the last look."""

    def __init__(self) -> None:
        self._flows: dict[str, _Flow] = {}
        self._looked_ns = 0

    def begin(self, model: str, now_ns: int) -> None:
        """Note that a request is sent to a member, or begins to wait for one."""
        flow = self._flows.get(model)
        if flow is None:
            flow = self._flows[model] = _Flow(now_ns)
        flow.advance(now_ns)
        flow.count += 1

    def end(self, model: str, now_ns: int) -> None:
        """Note that a request that has begun is at an end, or goes on elsewhere."""
        flow = self._flows[model]
        flow.advance(now_ns)
        flow.count -= 1

    def refused(self, model: str, now_ns: int) -> None:
        """Note that a request was refused because no member has the model."""
        self._flows.setdefault(model, _Flow(now_ns)).area += _REFUSED_NS

    def take(self, now_ns: int) -> dict[str, float]:
        """Return how many requests to each model were under way on average since the last look."""
        elapsed = max(now_ns - self._looked_ns, 1) if self._looked_ns else _REFUSED_NS
        self._looked_ns = now_ns
        averages = {}
        for model, flow in list(self._flows.items()):
            flow.advance(now_ns)
            if flow.area or flow.count:
                averages[model] = flow.area / elapsed
                flow.area = 0
            else:
                del self._flows[model]
        return averages
