"""Metrics of batches: items by state, and how the predicted end of each batch compares with its deadline."""

from __future__ import annotations

import time
from typing import Final, NamedTuple

from nerite.batches.runner import BatchRunner
from nerite.batches.running_batch import RunningBatch
from nerite.observability.exposition import Metric, MetricTable, Page


class _OpenBatch(NamedTuple):
    batch: RunningBatch
    predicted_end: float | None
    needs: int


RUNNER: Final = MetricTable[BatchRunner]((
    Metric("nerite_batch_items_total", "counter",
           "Items of batches by what became of them; one may be refused or retried several times",
           lambda runner: dict(runner.items.counts), "outcome"),
    Metric("nerite_batch_items_under_way", "gauge",
           "Items that the server executes, in idle room or raised to the class of their tenant",
           lambda runner: _under_way(runner), "lane"),
    Metric("nerite_batches_open", "gauge", "Batches that have not ended", lambda runner: len(runner.batches)),
))  # fmt: skip

OPEN: Final = MetricTable[_OpenBatch]((
    Metric("nerite_batch_items_left", "gauge", "Items of a batch without an answer",
           lambda each: each.batch.record.left),
    Metric("nerite_batch_deadline_seconds", "gauge", "Seconds until the deadline of a batch",
           lambda each: each.batch.record.expires_at - time.time()),
    Metric("nerite_batch_predicted_seconds", "gauge",
           "Seconds until the predicted end of a batch, at the rate that was measured",
           lambda each: None if each.predicted_end is None else max(each.predicted_end - time.time(), 0.0)),
    Metric("nerite_batch_raised_items", "gauge",
           "Items of a batch that have to be under way to reach its deadline; 0 if idle room is enough",
           lambda each: each.needs),
), labels=("batch", "model", "tenant"))  # fmt: skip


def _under_way(runner: BatchRunner) -> dict[str, float]:
    items = [item for batch in runner.batches.values() for item in batch.under_way.values()]
    raised = sum(item.raised for item in items)
    return {"idle": len(items) - raised, "raised": raised}


def write_batch_metrics(runner: BatchRunner, page: Page) -> None:
    """Write the metrics of all batches that have not ended."""
    now = time.time()
    rows = []
    for key, batch in runner.batches.items():
        found = _OpenBatch(batch, runner.planner.predicted_end(key, now), runner.planner.needs(key, now))
        rows.append(OPEN.row(found, key, batch.record.model, batch.record.tenant))
    page.write(RUNNER, [RUNNER.row(runner)])
    page.write(OPEN, rows)
