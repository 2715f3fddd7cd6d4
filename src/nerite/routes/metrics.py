"""Metrics of routes: the weight of each arm, and what it was sent.

The latency of an arm is that of its model version, which has metrics of its own.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from nerite.observability.exposition import Labels, Metric, MetricTable, Page
from nerite.routes.table import ArmCounters, RouteTable


class ArmMetrics(NamedTuple):
    """An arm of a route, as its metrics see it."""

    weight: float
    counters: ArmCounters


def write_route_metrics(table: RouteTable, page: Page) -> None:
    """Write the metrics of all routes."""
    rows: list[tuple[Labels, ArmMetrics]] = []
    for route in table:
        counters = table.counters(route.name)
        for arm in route.arms:
            rows.append(METRICS.row(ArmMetrics(arm.weight, counters[arm.label]), route.name, arm.label))
    if rows:
        page.write(METRICS, rows)


METRICS: Final = MetricTable[ArmMetrics]((
    Metric("nerite_route_weight", "gauge", "Weight of each arm of a route", lambda arm: arm.weight),
    Metric("nerite_route_requests_total", "counter", "Requests that were assigned to each arm of a route",
           lambda arm: arm.counters.requests),
    Metric("nerite_route_errors_total", "counter",
           "Requests assigned to each arm that failed, timed out or were refused while the route was observed",
           lambda arm: arm.counters.errors),
    Metric("nerite_route_handed_over_total", "counter",
           "Requests assigned to each arm that were handed over to another, because it had lost them",
           lambda arm: arm.counters.handed_over),
), ("route", "arm"))  # fmt: skip
