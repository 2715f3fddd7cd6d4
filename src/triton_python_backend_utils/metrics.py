"""Metrics of a model's own: families of counters, gauges and histograms."""

from __future__ import annotations

from typing import ClassVar

from triton_python_backend_utils.errors import TritonModelException, incompatible
from triton_python_backend_utils.metric_store import STORE, Labels, MetricKind, Sample


class Metric:
    """One metric: made by ``MetricFamily.Metric``."""

    __slots__ = ("_owner", "_sample")

    def __init__(self, owner: MetricFamily, sample: Sample) -> None:
        self._owner = owner
        self._sample = sample

    def increment(self, value: float) -> None:
        """Add to a counter or a gauge. Raises ``TritonModelException`` if that cannot be."""
        try:
            STORE.increment(self._owner._family, self._sample, float(value))
        except ValueError as error:
            raise _refused("Failed to increment metric value", error) from None

    def set(self, value: float) -> None:
        """Set a gauge. Raises ``TritonModelException`` for the other kinds."""
        try:
            STORE.set(self._owner._family, self._sample, float(value))
        except ValueError as error:
            raise _refused("Failed to set metric value", error) from None

    def observe(self, value: float) -> None:
        """Count an observation in a histogram. Raises ``TritonModelException`` for the other kinds."""
        try:
            STORE.observe(self._owner._family, self._sample, float(value))
        except ValueError as error:
            raise _refused("Failed to observe metric value", error) from None

    def value(self) -> float:
        """Return what this process has counted. Raises ``TritonModelException`` for a histogram."""
        try:
            return STORE.value(self._owner._family, self._sample)
        except ValueError as error:
            raise _refused("Failed to get metric value", error) from None


class MetricFamily:
    """All metrics of one name. They stay among the server's metrics as long as this object, or one of theirs, lives.

    Two objects of one name and kind are two doors to the same metrics.
    """

    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM

    __slots__ = ("_family", "_held")

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self._held: dict[Labels, Sample] = {}
        if not isinstance(kind, MetricKind):
            raise incompatible(
                "MetricFamily(name: str, description: str, kind: c_python_backend_utils.MetricKind)",
                name=name,
                description=description,
                kind=kind,
            )
        try:
            self._family = STORE.family(name, description, kind)
        except ValueError as error:
            raise _refused("Error when creating MetricFamily", error) from None

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:
        """Return the metric with these labels. ``buckets`` are a histogram's upper bounds, in rising order."""
        is_histogram = self._family.kind is MetricKind.HISTOGRAM
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if buckets is not None and not is_histogram:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        if buckets is None and is_histogram:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        try:
            return Metric(self, STORE.hold(self._family, labels or {}, buckets or (), self._held))
        except ValueError as error:
            raise _refused("Error when creating Metric", error) from None

    def __del__(self) -> None:
        if self._held:
            STORE.release(self._family, self._held)


def _refused(beginning: str, error: ValueError) -> TritonModelException:
    return TritonModelException(f"{beginning}: {error}")
