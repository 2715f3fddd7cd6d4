"""An hour of samples of the model versions, for the plots of the console. Pure: it is given the readings and the time.

Memory is bounded: each series is a ring of equally many samples, and there are at most so many series. A version has a
series from its first request on. If there are too many, that of the version that was idle for longest is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from nerite.core.tensor import Array
from nerite.observability.histogram import BOUNDS, Histogram, quantile_of
from nerite.observability.statistics import VersionStatistics
from nerite.observability.token_statistics import TokenStatistics, kv_utilization

INTERVAL: Final = 5.0
"""Seconds between samples."""
SAMPLES: Final = 720
"""Samples of a series: those of an hour."""
MAX_SERIES: Final = 256
SPARKS: Final = 60
"""Values of a version in the summary of all versions."""

VersionKey: TypeAlias = tuple[str, str]
"""Name and version of a model."""

TOTALS: Final = ("requests", "failures", "queue")
LINES: Final = ("requests", "failures", "rows", "p50", "p90", "p99", "queue", "batch")
TOKEN_LINES: Final = (
    "prompt_tokens", "generated_tokens", "first_token_p50", "first_token_p99", "between_p50", "between_p99", "running",
    "waiting", "kv_usage",
)  # fmt: skip
"""Lines of versions that run on engines, in addition to ``LINES``. Times are in seconds, counts per second."""


class VersionReading(NamedTuple):
    """What is known of a version at one moment. The counts are cumulative."""

    statistics: VersionStatistics
    tokens: TokenStatistics | None
    queued: int
    """Requests that wait for an instance."""
    pending: int
    """Requests that wait, before an engine or an instance."""


class _Counts(NamedTuple):
    """Cumulative counts of a version at one moment; histograms by bucket."""

    success: int = 0
    failures: int = 0
    rows: int = 0
    executions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    whole: Sequence[int] = ()
    first_token: Sequence[int] = ()
    between_tokens: Sequence[int] = ()

    @classmethod
    def of(cls, reading: VersionReading) -> _Counts:
        counted, tokens = reading.statistics, reading.tokens
        whole = () if counted.stages is None else tuple(counted.stages.whole)
        made = cls(
            counted.success.count,
            sum(counted.failures.values()),
            counted.inference_count,
            counted.execution_count,
            whole=whole,
        )
        if tokens is None:
            return made
        return made._replace(
            prompt_tokens=tokens.prompt_tokens,
            generated_tokens=tokens.generated_tokens,
            first_token=tuple(tokens.first_token.counts),
            between_tokens=tuple(tokens.between_tokens.counts),
        )


_NOTHING: Final = _Counts()


class _Series:
    """The ring of samples of one version."""

    __slots__ = ("active", "before", "names", "samples")

    def __init__(self, names: Sequence[str], samples: int, before: _Counts = _NOTHING) -> None:
        self.names = names
        self.samples: Array = np.full((len(names), samples), np.nan, np.float32)
        """One row for each name, one column for each place in the ring."""
        self.before = before
        """The counts as of the last sample."""
        self.active = 0
        """Number of the last sample in which the version had requests."""

    def extend(self, names: Sequence[str]) -> None:
        """Add lines, which have no samples yet."""
        more = np.full((len(names), self.samples.shape[1]), np.nan, np.float32)
        self.names = (*self.names, *names)
        self.samples = np.concatenate((self.samples, more))


class MetricsHistory:
    """Keeps the last samples of all versions. A sample is ``begin``, ``note`` for each version, and ``end``."""

    def __init__(self, samples: int = SAMPLES, most: int = MAX_SERIES) -> None:
        self._size = samples + 1
        """Places of the ring: one more, for the sample that is being taken."""
        self._most = most
        self._times: Array = np.zeros(self._size)
        self._begun = self._complete = 0
        """Number of samples."""
        self._seconds = 0.0
        self._totals = _Series(TOTALS, self._size)
        self._series: dict[VersionKey, _Series] = {}
        self._answered: dict[VersionKey, int] = {}
        """Requests to each version until the last sample."""
        self._noted: dict[VersionKey, int] = {}

    def begin(self, now: float, seconds: float) -> None:
        """Begin a sample at ``now``, in seconds since the epoch, ``seconds`` after the last one."""
        place = self._begun % self._size
        self._times[place] = now
        self._seconds = seconds
        for series in self._series.values():
            series.samples[:, place] = np.nan
        self._totals.samples[:, place] = 0.0
        self._noted = {}
        self._begun += 1

    def note(self, version: VersionKey, reading: VersionReading) -> None:
        """Note a version that runs. Of several with one name, in different namespaces, the first counts."""
        if version in self._noted:
            return
        counted = reading.statistics
        answered = self._noted[version] = counted.success.count + sum(counted.failures.values())
        before = self._answered.get(version, 0)
        works = answered != before or bool(reading.queued)
        series = self._series.get(version)
        if series is None:
            if not works:
                return
            # One whose series was dropped does not begin with all its requests so far.
            series = self._add(version, _Counts.of(reading) if before else _NOTHING)
        if works:
            series.active = self._begun
        if reading.tokens is not None and len(series.names) == len(LINES):
            series.extend(TOKEN_LINES)
        now = _Counts.of(reading)
        # The counts of a reloaded version restart at zero.
        base = _NOTHING if now.success < series.before.success else series.before
        place = (self._begun - 1) % self._size
        values = dict(_lines(reading, base, now, self._seconds))
        series.samples[:, place] = [values.get(name, math.nan) for name in series.names]
        series.before = now
        self._totals.samples[:, place] += [values[name] for name in TOTALS]

    def end(self) -> None:
        """Complete the sample: it can be read from now on."""
        self._complete = self._begun
        self._answered = self._noted
        oldest = self._complete - self._size
        for version in [version for version, series in self._series.items() if series.active < oldest]:
            del self._series[version]

    def _add(self, version: VersionKey, before: _Counts) -> _Series:
        if len(self._series) >= self._most:
            del self._series[min(self._series, key=lambda each: self._series[each].active)]
        series = self._series[version] = _Series(LINES, self._size, before)
        return series

    def of_all(self, seconds: float) -> dict[str, Any]:
        """Return the sums over all versions in the last ``seconds``: times, and a list of values for each line."""
        return self._document(self._totals, seconds)

    def of_version(self, version: VersionKey, seconds: float) -> dict[str, Any]:
        """Return the lines of a version in the last ``seconds``; NaN where nothing is known."""
        series = self._series.get(version) or _Series(LINES, self._size)
        return self._document(series, seconds)

    def requests(self, seconds: float) -> Iterator[tuple[VersionKey, Array]]:
        """Lazily yield each version that had requests, with at most ``SPARKS`` values of its rate, evenly spaced."""
        places = self._places(seconds)
        steps = max(math.ceil(len(places) / SPARKS), 1)
        lead = -len(places) % steps
        for version, series in list(self._series.items()):
            rates = np.nan_to_num(series.samples[0, places])
            padded = np.concatenate((np.zeros(lead, np.float32), rates))
            yield version, padded.reshape(-1, steps).mean(axis=1)

    def _places(self, seconds: float) -> Array:
        """Return the places of the last samples in the ring, oldest first."""
        count = min(math.ceil(seconds / INTERVAL), self._complete, self._size - 1)
        return np.arange(self._complete - count, self._complete) % self._size

    def _document(self, series: _Series, seconds: float) -> dict[str, Any]:
        places = self._places(seconds)
        found = {name: row[places] for name, row in zip(series.names, series.samples, strict=True)}
        return {"interval": INTERVAL, "times": self._times[places], "lines": found}


def _lines(reading: VersionReading, before: _Counts, now: _Counts, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield the value of each line at a sample that ends ``seconds`` with these counts."""

    def rate(name: str) -> float:
        return (getattr(now, name) - getattr(before, name)) / seconds if seconds > 0 else 0.0

    yield "requests", rate("success") + rate("failures")
    yield "failures", rate("failures")
    yield "rows", rate("rows")
    yield "queue", reading.queued
    executions = now.executions - before.executions
    if executions > 0:
        yield "batch", (now.rows - before.rows) / executions
    whole = _grown(before.whole, now.whole)
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        yield name, quantile_of(BOUNDS, whole, share)
    if reading.tokens is not None:
        yield from _token_lines(reading.tokens, reading.pending, before, now)
        yield "prompt_tokens", rate("prompt_tokens")
        yield "generated_tokens", rate("generated_tokens")


def _token_lines(tokens: TokenStatistics, pending: int, before: _Counts, now: _Counts) -> Iterator[tuple[str, float]]:
    reports = tokens.latest
    yield "running", sum(each.running for each in reports)
    yield "waiting", pending + sum(each.waiting for each in reports)
    yield "kv_usage", kv_utilization(reports)
    pairs: Mapping[str, tuple[Histogram, Sequence[int]]] = {
        "first_token": (tokens.first_token, _grown(before.first_token, now.first_token)),
        "between": (tokens.between_tokens, _grown(before.between_tokens, now.between_tokens)),
    }
    for name, (histogram, counts) in pairs.items():
        yield f"{name}_p50", quantile_of(histogram.bounds, counts, 0.5)
        yield f"{name}_p99", quantile_of(histogram.bounds, counts, 0.99)


def _grown(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """Return by how much each bucket has grown."""
    if len(before) != len(now):
        return list(now)
    return [count - earlier for count, earlier in zip(now, before, strict=True)]
