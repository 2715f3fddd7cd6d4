"""Counting: what the statistics extension and the metrics page read. Additions only; the work is done by the reader.

All of it happens on the loop's thread, so nothing is locked and nothing is lost.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence

from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest


class Outcome(enum.Enum):
    """Why a request failed, as the ``reason`` label of the metrics says it."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


class Duration:
    """How often, and how long in total."""

    __slots__ = ("count", "ns")

    def __init__(self) -> None:
        self.count = 0
        self.ns = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Note ``count`` events that took ``ns`` together."""
        self.count += count
        self.ns += ns


class BatchStatistics:
    """The executions of one batch size."""

    __slots__ = ("compute_infer", "compute_input", "compute_output")

    def __init__(self) -> None:
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()


class VersionStatistics:
    """Everything counted for one model version, from its load to its unload."""

    __slots__ = (
        "batches",
        "compute_infer",
        "compute_input",
        "compute_output",
        "execution_count",
        "fail",
        "failures",
        "inference_count",
        "last_inference_ms",
        "queue",
        "success",
    )

    def __init__(self) -> None:
        self.inference_count = 0
        self.execution_count = 0
        self.last_inference_ms = 0
        self.success = Duration()
        self.fail = Duration()
        self.queue = Duration()
        self.compute_input = Duration()
        self.compute_infer = Duration()
        self.compute_output = Duration()
        self.failures = dict.fromkeys(Outcome, 0)
        self.batches: dict[int, BatchStatistics] = {}

    def failed(self, outcome: Outcome, arrived_ns: int) -> None:
        """Note a request that never ran."""
        self.failures[outcome] += 1
        self.fail.add(time.monotonic_ns() - arrived_ns)

    def executed(
        self,
        batch: Sequence[InferenceRequest],
        marks: Marks | None,
        now: int,
    ) -> None:
        """Note a batch that ran. ``marks`` is None if its worker died under it.

        The times of a batch count once for each of its requests, as each of them waited for all of it. A response
        that is an error counts as a success of the server, unless the execution as a whole failed.
        """
        size = len(batch)
        self.execution_count += 1
        self.last_inference_ms = time.time_ns() // 1_000_000
        if marks is None:
            self._failed_batch(batch, now)
            return
        if marks.failed:
            self._failed_batch(batch, now)
            self._of_size(sum(request.header.batch_size for request in batch), marks)
            return
        rows = total = queued = 0
        started = marks.started_ns
        for request in batch:
            rows += request.header.batch_size
            total += now - request.arrived_ns
            queued += started - request.queued_ns
        self.inference_count += rows
        success, queue = self.success, self.queue
        success.count += size
        success.ns += total
        queue.count += size
        queue.ns += queued
        before = marks.inputs_ready_ns - started
        during = marks.computed_ns - marks.inputs_ready_ns
        after = marks.ended_ns - marks.computed_ns
        self.compute_input.add(before * size, size)
        self.compute_infer.add(during * size, size)
        self.compute_output.add(after * size, size)
        self._of_size(rows, marks)

    def _failed_batch(self, batch: Sequence[InferenceRequest], now: int) -> None:
        size = len(batch)
        self.failures[Outcome.BACKEND] += size
        self.fail.add(sum(now - request.arrived_ns for request in batch), size)

    def _of_size(self, rows: int, marks: Marks) -> None:
        """Note an execution of ``rows`` rows."""
        of_size = self.batches.get(rows)
        if of_size is None:
            of_size = self.batches[rows] = BatchStatistics()
        of_size.compute_input.add(marks.inputs_ready_ns - marks.started_ns)
        of_size.compute_infer.add(marks.computed_ns - marks.inputs_ready_ns)
        of_size.compute_output.add(marks.ended_ns - marks.computed_ns)
