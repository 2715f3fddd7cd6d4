"""Custom metrics: what may be done with each kind, and what the server reads."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

import triton_python_backend_utils as pb_utils
from triton_python_backend_utils import metrics
from triton_python_backend_utils.metrics import MetricStore

COUNTER, GAUGE, HISTOGRAM = pb_utils.MetricFamily.COUNTER, pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.HISTOGRAM


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[MetricStore]:
    fresh = MetricStore()
    with monkeypatch.context() as patch:
        patch.setattr(metrics, "STORE", fresh)
        yield fresh
        gc.collect()


def test_kinds() -> None:
    kinds = pb_utils.MetricKind
    assert (kinds.COUNTER, kinds.GAUGE, kinds.HISTOGRAM) == (COUNTER, GAUGE, HISTOGRAM) == (0, 1, 2)


def test_counter() -> None:
    family = pb_utils.MetricFamily("c", "counts", COUNTER)
    metric = family.Metric(labels={"a": "1"})
    metric.increment(2)
    metric.increment(0.5)
    assert metric.value() == 2.5


def test_gauge() -> None:
    family = pb_utils.MetricFamily("g", "measures", GAUGE)
    metric = family.Metric()
    assert isinstance(metric, pb_utils.Metric)
    metric.increment(-2.5)
    assert metric.value() == -2.5
    metric.set(4)
    assert metric.value() == 4


def test_histogram(store: MetricStore) -> None:
    family = pb_utils.MetricFamily("h", "spreads", HISTOGRAM)
    metric = family.Metric(labels={}, buckets=[0.1, 1, 10])
    for value in (0.1, 0.5, 1, 5, 100):
        metric.observe(value)
    assert store.collect() == [
        ("h", "spreads", 2, [((), 106.6, (0.1, 1, 10), [1, 2, 1, 1], 0)]),
    ]


_KIND = "TRITONSERVER_METRIC_KIND_"


@pytest.mark.parametrize(
    ("kind", "call", "text"),
    [
        (COUNTER, "increment(-1)", f"Failed to increment metric value: {_KIND}COUNTER can only be incremented "
                                   "monotonically by non-negative values."),
        (COUNTER, "set(3)", f"Failed to set metric value: {_KIND}COUNTER does not support Set"),
        (COUNTER, "observe(1)", f"Failed to observe metric value: {_KIND}COUNTER does not support Observe"),
        (GAUGE, "observe(1)", f"Failed to observe metric value: {_KIND}GAUGE does not support Observe"),
        (HISTOGRAM, "increment(1)", f"Failed to increment metric value: {_KIND}HISTOGRAM does not support Increment"),
        (HISTOGRAM, "set(1)", f"Failed to set metric value: {_KIND}HISTOGRAM does not support Set"),
        (HISTOGRAM, "value()", f"Failed to get metric value: {_KIND}HISTOGRAM does not support Value"),
    ],
)  # fmt: skip
def test_what_a_kind_cannot_do(kind: pb_utils.MetricKind, call: str, text: str) -> None:
    family = pb_utils.MetricFamily("m", "x", kind)
    metric = family.Metric(buckets=[1.0] if kind is HISTOGRAM else None)
    with pytest.raises(pb_utils.TritonModelException) as refused:
        eval(f"metric.{call}", {"metric": metric})
    assert str(refused.value) == text


@pytest.mark.parametrize(
    ("kind", "arguments", "text"),
    [
        (COUNTER, {"labels": "x"}, "Failed to create metric. Labels must be a dictionary."),
        (COUNTER, {"labels": {"a": 1}}, "Error when creating Metric: attempt to access JSON non-string as string"),
        (COUNTER, {"labels": {"bad-name": "1"}}, "Error when creating Metric: Invalid label name"),
        (COUNTER, {"buckets": [1]}, "Failed to create metric. Unexpected buckets found."),
        (HISTOGRAM, {"buckets": (1,)}, "Failed to create metric. Buckets must be a list."),
        (HISTOGRAM, {}, "Failed to create metric. Missing required buckets."),
    ],
)
def test_metrics_that_cannot_be(kind: pb_utils.MetricKind, arguments: dict[str, object], text: str) -> None:
    family = pb_utils.MetricFamily("m", "x", kind)
    with pytest.raises(pb_utils.TritonModelException) as refused:
        family.Metric(**arguments)  # type: ignore[arg-type]  # that is the point
    assert str(refused.value) == text


def test_families_that_cannot_be() -> None:
    kept = pb_utils.MetricFamily("m", "x", COUNTER)
    with pytest.raises(pb_utils.TritonModelException) as refused:
        pb_utils.MetricFamily("m", "x", GAUGE)
    assert str(refused.value) == "Error when creating MetricFamily: Family name already exists with different type"
    with pytest.raises(pb_utils.TritonModelException, match=r"^Error when creating MetricFamily: Invalid metric name$"):
        pb_utils.MetricFamily("bad name", "x", COUNTER)
    with pytest.raises(
        TypeError, match=r"kind: c_python_backend_utils\.MetricKind\)\n\nInvoked with: kwargs: name='k'"
    ):
        pb_utils.MetricFamily(name="k", description="x", kind=1)  # type: ignore[arg-type]  # that is the point
    assert kept is not None


def test_two_doors_to_one_metric(store: MetricStore) -> None:
    one, two = (pb_utils.MetricFamily("m", "x", COUNTER) for _ in range(2))
    one.Metric(labels={"a": "1", "b": "2"}).increment(1)
    two.Metric(labels={"b": "2", "a": "1"}).increment(1)
    assert store.collect() == [("m", "x", 0, [((("a", "1"), ("b", "2")), 2.0, (), [0], 0)])]


def test_a_metric_stays_while_its_family_lives(store: MetricStore) -> None:
    """The usual way is ``family.Metric(labels=...).increment(1)``, with nobody keeping the metric."""
    family = pb_utils.MetricFamily("m", "x", COUNTER)
    for _ in range(3):
        family.Metric(labels={"a": "1"}).increment(1)
    assert family.Metric(labels={"a": "1"}).value() == 3
    other = pb_utils.MetricFamily("m", "x", COUNTER)
    other.Metric(labels={"a": "1"}).increment(1)
    del family
    assert len(store.collect()[0].samples) == 1
    del other
    assert store.collect() == []


@pytest.mark.parametrize(("kind", "call"), [
    (COUNTER, "increment(1)"), (GAUGE, "set(1)"), (HISTOGRAM, "observe(1)"), (COUNTER, "value()"),
])  # fmt: skip
def test_a_metric_ends_with_its_family(store: MetricStore, kind: pb_utils.MetricKind, call: str) -> None:
    """Also where another object of the same family keeps the metric of these labels."""
    buckets = [1.0] if kind is HISTOGRAM else None
    family, other = (pb_utils.MetricFamily("m", "x", kind) for _ in range(2))
    metric = family.Metric(buckets=buckets)
    other.Metric(buckets=buckets)
    before = store.collect()
    del family
    with pytest.raises(pb_utils.TritonModelException, match="the corresponding 'MetricFamily' has been deleted"):
        eval(f"metric.{call}", {"metric": metric})
    assert store.collect() == before
    del other
    assert store.collect() == []


def test_a_name_is_free_when_its_family_is_gone() -> None:
    family = pb_utils.MetricFamily("m", "x", COUNTER)
    del family
    other = pb_utils.MetricFamily("m", "x", GAUGE)
    other.Metric().set(1)


def test_counting_from_several_threads_is_exact() -> None:
    family = pb_utils.MetricFamily("m", "x", COUNTER)
    metric = family.Metric()

    def count() -> None:
        for _ in range(2000):
            metric.increment(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metric.value() == 8000
