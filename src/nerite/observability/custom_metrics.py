"""Metrics that models define, counted in the processes that run the models and summed by the server."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

from nerite.observability.exposition import Labels, Metric, MetricTable, Page, Value, labels
from nerite.observability.histogram import Histogram

Reading: TypeAlias = Sequence[Any]
"""Reading of a metric family: a ``triton_python_backend_utils.metrics.Reading``, possibly decoded from JSON."""
_GAUGE, _HISTOGRAM = 1, 2
_KINDS: Final[tuple[Literal["counter", "gauge", "histogram"], ...]] = ("counter", "gauge", "histogram")
REPORT_SECONDS: Final = 0.1
"""Within this time of its last report a process begins another, if something has changed."""
_FIRST_SECONDS: Final = 0.02
"""Time that a report takes to arrive."""
_TIMEOUT: Final = 0.5
"""Seconds that a page waits for announced reports; after that it uses the latest ones."""


class ReportedMetrics:
    """Metrics of one worker, across restarts: what was counted is not lost with the process."""

    def __init__(self) -> None:
        self._now: Sequence[Reading] = ()
        self._before: list[Reading] = []
        self._due = 0
        self._complete = asyncio.Event()
        self._complete.set()

    @property
    def readings(self) -> list[Reading]:
        """All readings reported so far."""
        return [*self._before, *self._now]

    def reported(self, changes: int, readings: Sequence[Reading]) -> None:
        """Take a report of the process, made after its ``changes``-th change."""
        self._now = readings
        if changes >= self._due:
            self._complete.set()

    def due(self, changes: int) -> None:
        """Expect a report with this number of changes: a response that they belong to has arrived already."""
        self._due = changes
        self._complete.clear()

    async def complete(self) -> None:
        """Wait until the changes that belong to the responses received so far were reported."""
        await self._complete.wait()

    def process_ended(self) -> None:
        """Keep the counters and histograms of the process, and drop its gauges."""
        self._due = 0
        self._complete.set()
        counted = [reading for reading in self.readings if reading[2] != _GAUGE]
        self._before = [each.reading() for each in _sums(counted)]
        self._now = ()


def store() -> Any:
    """Return the metrics store of the models in this process; None if no model has used it."""
    return getattr(sys.modules.get("triton_python_backend_utils.metrics"), "STORE", None)


async def complete(processes: Mapping[ReportedMetrics, bool]) -> None:
    """Wait until several processes have sent the reports that are due, for at most ``_TIMEOUT``.

    Of those that are busy, which is what the values say, wait for what they have counted in an execution that may be
    reading the page itself.
    """
    if busy := [each for each, is_busy in processes.items() if is_busy]:
        await asyncio.sleep(_FIRST_SECONDS + (REPORT_SECONDS if any(each.readings for each in busy) else 0.0))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TIMEOUT):
            for each in processes:
                await each.complete()


def of_this_process() -> list[Reading]:
    """Return the readings of models that run in the server process."""
    here = store()
    return [] if here is None else here.collect()


def write(readings: Iterable[Reading], page: Page) -> None:
    """Write the sums of the readings of several processes. Names that are on the page already are skipped.

    Counters and histograms are added up, as are gauges that are only incremented and decremented. Of a gauge that is
    set, the latest value counts.
    """
    taken = set(page.names)
    for each in _sums(readings):
        if each.name not in taken:
            page.write(each.table(), each.rows())


class _Sum:
    """Sum of a metric family over several processes."""

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.samples: dict[tuple[tuple[str, str], ...], list[Any]] = {}
        """Value, bounds, counts, and the time at which the value was set, by labels."""

    def add(self, pairs: Iterable[Sequence[str]], value: float, bounds: Any, counts: list[int], set_ns: int) -> None:
        """Add a sample."""
        key = tuple((name, text) for name, text in pairs)
        known = self.samples.get(key)
        if known is None:
            self.samples[key] = [value, tuple(bounds), list(counts), set_ns]
        elif self.kind == _GAUGE and (known[3] or set_ns):
            if set_ns > known[3]:
                known[0], known[3] = value, set_ns
        elif tuple(bounds) == known[1]:
            known[0] += value
            known[2] = [one + other for one, other in zip(known[2], counts, strict=True)]

    def table(self) -> MetricTable[Value]:
        """Return the declaration of the metric."""
        return MetricTable((Metric(self.name, _KINDS[self.kind], self.description, lambda value: value),))

    def rows(self) -> list[tuple[Labels, Value]]:
        """Return the samples to be written."""
        return [
            (labels(dict(pairs)), Histogram.of(bounds, counts, value) if self.kind == _HISTOGRAM else value)
            for pairs, (value, bounds, counts, _) in self.samples.items()
        ]

    def reading(self) -> Reading:
        """Return the sum as a reading."""
        samples = [(pairs, *sample) for pairs, sample in self.samples.items()]
        return self.name, self.description, self.kind, samples


def _sums(readings: Iterable[Reading]) -> list[_Sum]:
    """Return the sum of each family that has samples. If processes disagree on its kind, the first one counts."""
    found: dict[str, _Sum] = {}
    for name, description, kind, samples in readings:
        family = found.setdefault(name, _Sum(name, description, kind))
        if family.kind == kind:
            for sample in samples:
                family.add(*sample)
    return [family for family in found.values() if family.samples]
