"""Custom metrics of models: families of counters, gauges and histograms, and the store that keeps their values."""

from __future__ import annotations

import bisect
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, Final, NamedTuple, SupportsFloat, TypeAlias

from nerite.core.text import MAX_VALUE, text_error
from triton_python_backend_utils import arguments
from triton_python_backend_utils.arguments import BindingEnum, Mismatch, Text
from triton_python_backend_utils.errors import TritonModelException, incompatible, incompatible_call

# The values stay in the model's process until the server reads them: an update is an addition under a lock. When the
# metrics are requested, the host of the model calls ``collect``, and the server sums the readings of all processes. A
# model's own ``value()`` returns the value of its process.

Labels: TypeAlias = tuple[tuple[str, str], ...]

_FAMILY_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_LABEL_NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


class MetricKind(BindingEnum):
    """Kinds of metrics, with Triton's numbers."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2


class MetricSample:
    """Metric of a family with one set of labels. A histogram has buckets, the other kinds a value."""

    __slots__ = ("bounds", "counts", "holders", "labels", "set_ns", "value")

    def __init__(self, labels: Labels, bounds: Sequence[float]) -> None:
        self.labels = labels
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """Number of observations in each bucket; the last bucket has no upper bound."""
        self.value = 0.0
        """The value of a counter or gauge; the sum of a histogram's observations."""
        self.set_ns = 0
        """When a gauge was last set (``time.monotonic_ns``); 0 if it was only incremented and decremented."""
        self.holders = 0


class StoredFamily:
    """All metrics of one name, as the store keeps them."""

    __slots__ = ("description", "holders", "kind", "name", "samples")

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        self.name = name
        self.description = description
        self.kind = kind
        self.samples: dict[Labels, MetricSample] = {}
        self.holders = 0


class MetricHolding:
    """Reference of one ``MetricFamily`` object to a family and to the metrics created through it, until released."""

    __slots__ = ("family", "released", "samples", "store")

    def __init__(self, store: MetricStore, family: StoredFamily) -> None:
        self.store = store
        self.family = family
        self.samples: dict[Labels, MetricSample] = {}
        self.released = False


class MetricReading(NamedTuple):
    """Snapshot of a family; plain data that can be sent to another process."""

    name: str
    description: str
    kind: int
    samples: list[tuple[Labels, float, tuple[float, ...], list[int], int]]
    """Labels, value, bucket bounds, bucket counts and ``set_ns`` of each metric."""


class MetricStore:
    """Custom metrics of one process. Thread-safe.

    Methods raise ``ValueError`` with Triton's text for operations that a metric does not support.
    """

    def __init__(self) -> None:
        # Reentrant, because garbage collection within a method may delete a family, which releases its metrics.
        self._lock = threading.RLock()
        self._families: dict[str, StoredFamily] = {}
        self.on_change: Callable[[], None] = lambda: None
        """Called at the first change after ``collect``, on the thread that makes the change."""
        self._notified = False

    def family(self, name: str, description: str, kind: MetricKind) -> MetricHolding:
        """Return a reference to the family ``name``, creating it if necessary.

        Families and metrics are reference-counted: each stays until all its holders have released it.
        """
        if _FAMILY_NAME.fullmatch(name) is None:
            raise ValueError("Invalid metric name")
        with self._lock:
            family = self._families.setdefault(name, StoredFamily(name, description, kind))
            if family.kind != kind:
                raise ValueError("Family name already exists with different type")
            family.holders += 1
        return MetricHolding(self, family)

    def metric(self, holding: MetricHolding, labels: Mapping[str, str], bounds: Sequence[float]) -> MetricSample:
        """Return the metric of a family with these labels, creating it if necessary."""
        for name, value in labels.items():
            if not isinstance(value, str):
                raise ValueError("attempt to access JSON non-string as string")
            if _LABEL_NAME.fullmatch(name) is None:
                raise ValueError("Invalid label name")
            if (mistake := text_error(value, MAX_VALUE)) is not None:
                raise ValueError(f"the value of label '{name}' {mistake}")
        key = tuple(sorted(labels.items()))
        with self._lock:
            sample = holding.samples.get(key)
            if sample is None:
                sample = holding.samples[key] = holding.family.samples.setdefault(key, MetricSample(key, bounds))
                sample.holders += 1
                self._notify()
        return sample

    def release(self, holding: MetricHolding) -> None:
        """Release a reference: its metrics can no longer be used, and those without other holders are removed."""
        family = holding.family
        with self._lock:
            holding.released = True
            for sample in holding.samples.values():
                sample.holders -= 1
                if not sample.holders:
                    del family.samples[sample.labels]
                    self._notify()
            family.holders -= 1
            if not family.holders:
                del self._families[family.name]

    def increment(self, holding: MetricHolding, sample: MetricSample, value: float) -> None:
        """Add to a counter or a gauge."""
        family = _live_family(holding)
        if family.kind == MetricKind.HISTOGRAM:
            raise _cannot(family, "Increment")
        if family.kind == MetricKind.COUNTER and value < 0:
            raise ValueError(
                "TRITONSERVER_METRIC_KIND_COUNTER can only be incremented monotonically by non-negative values."
            )
        with self._lock:
            sample.value += value
            self._notify()

    def set(self, holding: MetricHolding, sample: MetricSample, value: float) -> None:
        """Set a gauge."""
        family = _live_family(holding)
        if family.kind != MetricKind.GAUGE:
            raise _cannot(family, "Set")
        with self._lock:
            sample.value = value
            sample.set_ns = time.monotonic_ns()
            self._notify()

    def observe(self, holding: MetricHolding, sample: MetricSample, value: float) -> None:
        """Add an observation to a histogram."""
        family = _live_family(holding)
        if family.kind != MetricKind.HISTOGRAM:
            raise _cannot(family, "Observe")
        with self._lock:
            sample.value += value
            sample.counts[bisect.bisect_left(sample.bounds, value)] += 1
            self._notify()

    def value(self, holding: MetricHolding, sample: MetricSample) -> float:
        """Return the value of a counter or a gauge."""
        family = _live_family(holding)
        if family.kind == MetricKind.HISTOGRAM:
            raise _cannot(family, "Value")
        return sample.value

    def collect(self) -> list[MetricReading]:
        """Return a snapshot of all families."""
        with self._lock:
            self._notified = False
            return [
                MetricReading(
                    family.name,
                    family.description,
                    int(family.kind),
                    [
                        (one.labels, one.value, one.bounds, list(one.counts), one.set_ns)
                        for one in list(family.samples.values())
                    ],
                )
                for family in list(self._families.values())
            ]

    def _notify(self) -> None:
        if not self._notified:
            self._notified = True
            self.on_change()


def _live_family(holding: MetricHolding) -> StoredFamily:
    if holding.released:
        raise ValueError(
            "Invalid metric operation as the corresponding 'MetricFamily' has been deleted. The 'MetricFamily' object "
            "should be deleted AFTER its corresponding 'Metric' objects have been deleted. Keep it as long as its "
            "metrics: self.family = MetricFamily(...)."
        )
    return holding.family


def _cannot(family: StoredFamily, operation: str) -> ValueError:
    return ValueError(f"TRITONSERVER_METRIC_KIND_{family.kind.name} does not support {operation}")


STORE: Final = MetricStore()
"""The store of this process."""


class Metric:
    """One metric. Created by ``MetricFamily.Metric``, and usable only as long as that family object exists."""

    __slots__ = ("_holding", "_sample")

    def __init__(self, holding: MetricHolding, sample: MetricSample) -> None:
        self._holding = holding
        self._sample = sample

    def increment(self, value: SupportsFloat) -> None:
        """Add to a counter or a gauge. Raises ``TritonModelException`` if that is not allowed."""
        try:
            STORE.increment(self._holding, self._sample, self._number("increment", value))
        except ValueError as error:
            raise _exception("Failed to increment metric value", error) from None

    def set(self, value: SupportsFloat) -> None:
        """Set a gauge. Raises ``TritonModelException`` for the other kinds."""
        try:
            STORE.set(self._holding, self._sample, self._number("set", value))
        except ValueError as error:
            raise _exception("Failed to set metric value", error) from None

    def observe(self, value: SupportsFloat) -> None:
        """Add an observation to a histogram. Raises ``TritonModelException`` for the other kinds."""
        try:
            STORE.observe(self._holding, self._sample, self._number("observe", value))
        except ValueError as error:
            raise _exception("Failed to observe metric value", error) from None

    def value(self) -> float:
        """Return the value in this process. Raises ``TritonModelException`` for a histogram."""
        try:
            return STORE.value(self._holding, self._sample)
        except ValueError as error:
            raise _exception("Failed to get metric value", error) from None

    def _number(self, method: str, value: SupportsFloat) -> float:
        try:
            return arguments.number(value)
        except Mismatch as mismatch:
            signature = "(self: c_python_backend_utils.Metric, arg0: float) -> None"
            raise incompatible_call(method, signature, mismatch, self, value) from None


class MetricFamily:
    """All metrics of one name. The server exports them as long as this object exists.

    Objects with the same name and kind refer to the same metrics.
    """

    COUNTER: ClassVar[MetricKind] = MetricKind.COUNTER
    GAUGE: ClassVar[MetricKind] = MetricKind.GAUGE
    HISTOGRAM: ClassVar[MetricKind] = MetricKind.HISTOGRAM

    __slots__ = ("_holding",)

    def __init__(self, name: Text, description: Text, kind: MetricKind) -> None:
        self._holding: MetricHolding | None = None
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
            raise _exception("Error when creating MetricFamily", error) from None

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:
        """Return the metric with these labels. ``buckets`` are a histogram's upper bounds, in ascending order.

        Raises ``TypeError`` for labels that JSON cannot encode, ``TritonModelException`` for other invalid arguments.
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
            labels = json.loads(json.dumps(labels))  # labels are JSON in Triton, where each name is a string
        try:
            bounds = _bounds(buckets or ())
            return Metric(holding, STORE.metric(holding, labels or {}, bounds))
        except ValueError as error:
            raise _exception("Error when creating Metric", error) from None

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


def _exception(beginning: str, error: ValueError) -> TritonModelException:
    return TritonModelException(f"{beginning}: {error}")
