"""Metrics of a model's own: families of counters, gauges and histograms."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import ClassVar, SupportsFloat

from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import Mismatch, Text
from triton_python_backend_utils.errors import TritonModelException, incompatible, incompatible_call
from triton_python_backend_utils.metric_store import STORE, Holding, MetricKind, Sample


class Metric:
    """One metric: made by ``MetricFamily.Metric``, and gone with that object."""

    __slots__ = ("_holding", "_sample")

    def __init__(self, holding: Holding, sample: Sample) -> None:
        self._holding = holding
        self._sample = sample

    def increment(self, value: SupportsFloat) -> None:
        """Add to a counter or a gauge. Raises ``TritonModelException`` if that cannot be."""
        try:
            STORE.increment(self._holding, self._sample, self._number("increment", value))
        except ValueError as error:
            raise _refused("Failed to increment metric value", error) from None

    def set(self, value: SupportsFloat) -> None:
        """Set a gauge. Raises ``TritonModelException`` for the other kinds."""
        try:
            STORE.set(self._holding, self._sample, self._number("set", value))
        except ValueError as error:
            raise _refused("Failed to set metric value", error) from None

    def observe(self, value: SupportsFloat) -> None:
        """Count an observation in a histogram. Raises ``TritonModelException`` for the other kinds."""
        try:
            STORE.observe(self._holding, self._sample, self._number("observe", value))
        except ValueError as error:
            raise _refused("Failed to observe metric value", error) from None

    def value(self) -> float:
        """Return what this process has counted. Raises ``TritonModelException`` for a histogram."""
        try:
            return STORE.value(self._holding, self._sample)
        except ValueError as error:
            raise _refused("Failed to get metric value", error) from None

    def _number(self, method: str, value: SupportsFloat) -> float:
        try:
            return arguments.number(value)
        except Mismatch as mismatch:
            signature = "(self: c_python_backend_utils.Metric, arg0: float) -> None"
            raise incompatible_call(method, signature, mismatch, self, value) from None


class MetricFamily:
    """All metrics of one name. They stay among the server's metrics as long as this object lives.

    Two objects of one name and kind are two doors to the same metrics.
    """

    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM

    __slots__ = ("_holding",)

    def __init__(self, name: Text, description: Text, kind: MetricKind) -> None:
        self._holding: Holding | None = None
        try:
            plain = arguments.text("name", name), arguments.text("description", description)
            arguments.instance(kind, MetricKind)
        except Mismatch as mismatch:
            raise incompatible(
                "MetricFamily(name: str, description: str, kind: c_python_backend_utils.MetricKind)",
                mismatch,
                name=name,
                description=description,
                kind=kind,
            ) from None
        try:
            self._holding = STORE.family(*plain, kind)
        except ValueError as error:
            raise _refused("Error when creating MetricFamily", error) from None

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:
        """Return the metric with these labels. ``buckets`` are a histogram's upper bounds, in rising order.

        Raises ``TypeError`` for labels that JSON does not have, ``TritonModelException`` for others that cannot be.
        """
        holding = self._holding
        assert holding is not None
        is_histogram = holding.family.kind is MetricKind.HISTOGRAM
        if labels is not None and not isinstance(labels, dict):
            raise TritonModelException("Failed to create metric. Labels must be a dictionary.")
        if buckets is not None and not isinstance(buckets, list):
            raise TritonModelException("Failed to create metric. Buckets must be a list.")
        if buckets is not None and not is_histogram:
            raise TritonModelException("Failed to create metric. Unexpected buckets found.")
        if buckets is None and is_histogram:
            raise TritonModelException("Failed to create metric. Missing required buckets.")
        if labels and not {str}.issuperset(map(type, (*labels, *labels.values()))):
            labels = json.loads(json.dumps(labels))  # labels are JSON in Triton, where each name is a text
        try:
            bounds = _bounds(buckets or ())
            return Metric(holding, STORE.metric(holding, labels or {}, bounds))
        except ValueError as error:
            raise _refused("Error when creating Metric", error) from None

    def __del__(self) -> None:
        if self._holding is not None:
            self._holding.store.release(self._holding)


def _bounds(buckets: Sequence[SupportsFloat]) -> list[float]:
    try:
        bounds = [arguments.number(bound) for bound in buckets]
    except Mismatch:
        raise TritonModelException("Failed to create metric. Buckets must be a list of numbers.") from None
    if not all(lower < upper for lower, upper in itertools.pairwise(bounds)):
        raise ValueError("Bucket Boundaries must be strictly sorted")
    return bounds


def _refused(beginning: str, error: ValueError) -> TritonModelException:
    return TritonModelException(f"{beginning}: {error}")
