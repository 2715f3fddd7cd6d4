"""Metrics that models count themselves, in their processes: what the processes report, and what that adds up to."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

from nerite.observability.exposition import MetricFamily, Sample, labels
from nerite.observability.histogram import Histogram

Reading: TypeAlias = Sequence[Any]
"""A family as ``triton_python_backend_utils.metrics.Reading`` has it, perhaps by way of JSON."""
_COUNTER, _GAUGE, _HISTOGRAM = range(3)
_TYPES: Final = ("counter", "gauge", "histogram")
_PATIENCE: Final = 0.5
"""Seconds that a page waits for reports that were announced; then what there is counts."""


class ReportedMetrics:
    """Those of the processes that follow each other as one worker. What was counted is not lost with a process."""

    def __init__(self) -> None:
        self._now: Sequence[Reading] = ()
        self._before: list[Reading] = []
        self._due = 0
        self._complete = asyncio.Event()
        self._complete.set()

    @property
    def readings(self) -> list[Reading]:
        """Everything, as far as it was reported."""
        return [*self._before, *self._now]

    def reported(self, changes: int, readings: Sequence[Reading]) -> None:
        """Take what the process has counted so far, with the ``changes`` that there were."""
        self._now = readings
        if changes >= self._due:
            self._complete.set()

    def due(self, changes: int) -> None:
        """Take note that a report with so many changes is to come: responses are there that go with it."""
        self._due = changes
        self._complete.clear()

    async def complete(self) -> None:
        """Wait until everything was reported that goes with a response which is there already."""
        await self._complete.wait()

    def process_ended(self) -> None:
        """Keep what the process has counted; what it measured is of no interest any more."""
        self._due = 0
        self._complete.set()
        counted = [reading for reading in self.readings if reading[2] != _GAUGE]
        self._before = [_as_reading(each) for each in _merged(counted)]
        self._now = ()


def store() -> Any:
    """Return where the models in this process count; None while there is none that could."""
    return getattr(sys.modules.get("triton_python_backend_utils.metrics"), "STORE", None)


async def complete(processes: Iterable[ReportedMetrics]) -> None:
    """Wait for the reports of several processes that are due, for a moment at the most."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PATIENCE):
            for each in processes:
                await each.complete()


def of_this_process() -> list[Reading]:
    """Return what models count that run in the server itself."""
    here = store()
    return [] if here is None else here.collect()


def families(readings: Iterable[Reading], taken: Iterable[str]) -> list[MetricFamily]:
    """Return the metrics that several processes count. Names that are ``taken`` keep their meaning.

    Counters and histograms add up. So do gauges that only go up and down; of one that is set, the last value counts.
    """
    own = set(taken)
    return [each.family() for each in _merged(readings) if each.name not in own]


class _Merged:
    """A family, as several processes count it."""

    def __init__(self, name: str, description: str, kind: int) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.samples: dict[tuple[tuple[str, str], ...], list[Any]] = {}
        """By labels: value, bounds, counts, and when it was set."""

    def add(self, pairs: Iterable[Sequence[str]], value: float, bounds: Any, counts: list[int], set_ns: int) -> None:
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

    def family(self) -> MetricFamily:
        samples: list[Sample] = [
            (labels(dict(pairs)), Histogram.of(bounds, counts, value) if self.kind == _HISTOGRAM else value)
            for pairs, (value, bounds, counts, _) in self.samples.items()
        ]
        return MetricFamily(self.name, self.description, _TYPES[self.kind], samples)


def _merged(readings: Iterable[Reading]) -> list[_Merged]:
    """Return the families that have metrics. Where two of a name are of different kinds, the first is meant."""
    found: dict[str, _Merged] = {}
    for name, description, kind, samples in readings:
        family = found.setdefault(name, _Merged(name, description, kind))
        if family.kind == kind:
            for sample in samples:
                family.add(*sample)
    return [family for family in found.values() if family.samples]


def _as_reading(family: _Merged) -> Reading:
    samples = [(labels, *sample) for labels, sample in family.samples.items()]
    return family.name, family.description, family.kind, samples
