"""Figures of models that are loaded on demand, and their metrics."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Final

from nerite.core.sizes import size_text
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.observability.histogram import Histogram
from nerite.scheduling.model_residency import ModelResidency

_BOUNDS: Final = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Seconds."""


_REASONS: Final = {
    "memory": "another model needs its memory, and it was the least recently used",
    "drained": "another model needs its memory, and no other was idle; its requests have been answered",
    "keep-alive": "it had no request for as long as its keep-alive",
}
_log = logging.getLogger("nerite.repository")


class DemandFigures:
    """What became of loads and evictions, and what is in memory."""

    def __init__(self, residency: ModelResidency) -> None:
        self.residency = residency
        self.loads: Counter[str] = Counter({"loaded": 0, "failed": 0, "refused": 0})
        """By what became of them."""
        self.evictions: Counter[str] = Counter({"memory": 0, "drained": 0, "keep-alive": 0})
        """By reason."""
        self.sleeps = 0
        """Models that were put to sleep instead of unloaded."""
        self.wakes = 0
        self.load_seconds = Histogram(_BOUNDS)
        self.waiting: Callable[[], int] = lambda: 0
        """Returns the number of requests that wait for models, in all processes."""
        self.waits: Callable[[], int] = lambda: 0
        """Returns the number of requests that have waited for models so far."""
        self.refused: Callable[[], int] = lambda: 0
        """Returns the number of requests whose wait was refused, or has ended without their model."""

    def log_loaded(self, name: str, seconds: float) -> None:
        """Log what a model takes, and what is used of the budget."""
        took = " and ".join(f"{size_text(size)} of {place}" for place, size in self.residency.size(name).items())
        used = self.residency.used_bytes()
        rest = ", ".join(
            f"{size_text(used.get(place, 0))} of {size_text(limit)} of {place} memory are used"
            for place, limit in self.residency.budget.items()
        )
        _log.info("loaded '%s' on demand in %.2f s; it takes %s memory; %s", name, seconds, took or "no", rest)

    def evicted(self, name: str, reason: str) -> None:
        """Count and log that a model was unloaded."""
        self.evictions[reason] += 1
        _log.info("evicted '%s': %s", name, _REASONS[reason])

    def sizes(self, place: str) -> dict[str, int]:
        """Return what each model that is in memory or asleep takes of a place."""
        names = (*self.residency.in_memory(), *self.residency.asleep())
        return {name: self.residency.taken(name).get(place, 0) for name in names}

    def write_metrics(self, page: Page) -> None:
        """Write the metrics."""
        page.write(METRICS, [METRICS.row(self)])
        page.write(PLACES, [PLACES.row((self, place), place) for place in self.residency.budget])


METRICS: Final = MetricTable[DemandFigures]((
    Metric("nerite_demand_models", "gauge", "Models that are loaded on demand or pinned",
           lambda figures: sum(1 for _ in figures.residency)),
    Metric("nerite_demand_models_in_memory", "gauge", "Models in memory of those that are loaded on demand or pinned",
           lambda figures: len(figures.residency.in_memory())),
    Metric("nerite_demand_loads_total", "counter", "Loads on demand by outcome",
           lambda figures: dict(figures.loads), "outcome"),
    Metric("nerite_demand_evictions_total", "counter", "Models that were unloaded to make room, or after their "
           "keep-alive, by reason", lambda figures: dict(figures.evictions), "reason"),
    Metric("nerite_demand_sleeps_total", "counter", "Models that were put to sleep to make room, instead of unloaded",
           lambda figures: figures.sleeps),
    Metric("nerite_demand_wakes_total", "counter", "Models that a request has woken", lambda figures: figures.wakes),
    Metric("nerite_demand_load_seconds", "histogram", "Duration of loads on demand",
           lambda figures: figures.load_seconds),
    Metric("nerite_demand_waiting_requests", "gauge", "Requests that wait for a model to be loaded",
           lambda figures: figures.waiting()),
    Metric("nerite_demand_waits_total", "counter", "Requests whose model was not loaded when they came",
           lambda figures: figures.waits()),
    Metric("nerite_demand_refused_requests_total", "counter", "Requests that were refused because too many waited for "
           "models, or whose model was not loaded in time", lambda figures: figures.refused()),
))  # fmt: skip
PLACES: Final = MetricTable[tuple[DemandFigures, str]]((
    Metric("nerite_memory_budget_bytes", "gauge", "Memory that models may take of the host and of each GPU",
           lambda place: place[0].residency.budget[place[1]]),
    Metric("nerite_memory_used_bytes", "gauge", "Memory used of the budget: by models that are loading, loaded or "
           "leaving, and by the server", lambda place: place[0].residency.used_bytes().get(place[1], 0)),
    Metric("nerite_model_resident_bytes", "gauge", "Memory of each model that is loaded on demand or pinned, as "
           "measured; also while it sleeps", lambda place: place[0].sizes(place[1]), "model"),
), ("place",))  # fmt: skip
