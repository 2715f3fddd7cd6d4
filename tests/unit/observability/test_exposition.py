from __future__ import annotations

import math
import re
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from doubles import request, written
from nerite.config.options import MetricsOptions
from nerite.core.request import CancelReason
from nerite.observability.exposition import UNLABELLED, Metric, MetricTable, Page, Value, labels
from nerite.observability.histogram import Exemplar, Histogram, StageTimes
from nerite.observability.model_metrics import TABLES, MeteredVersion, version_labels
from nerite.observability.statistics import OptionalTimes, RequestOutcome, VersionStatistics

OPTIONS = MetricsOptions()
Kind = Literal["counter", "gauge", "histogram", "summary"]


def declared(name: str, kind: Kind, text: str) -> MetricTable[Value]:
    """Return the declaration of a metric that is its own owner."""
    return MetricTable((Metric(name, kind, text, lambda value: value),))


def of_one(
    name: str, kind: Kind, text: str, *samples: tuple[dict[str, str], Value], openmetrics: bool = False
) -> bytes:
    """Return the page of one metric."""
    rows = [(labels(pairs), value) for pairs, value in samples]
    return written(lambda page: page.write(declared(name, kind, text), rows), openmetrics=openmetrics)


def of_versions(*versions: MeteredVersion, options: MetricsOptions = OPTIONS, openmetrics: bool = False) -> bytes:
    """Return the page of some model versions."""

    def write(page: Page) -> None:
        for table in TABLES:
            if table.enabled(options):
                page.write(table, [(version_labels(each), each) for each in versions])

    return written(write, openmetrics=openmetrics)


def test_a_page() -> None:
    def write(page: Page) -> None:
        page.write(declared("one_count", "counter", "How many"), [(labels(dict(LABELLED)), 7), (UNLABELLED, 0.25)])
        page.write(declared("other", "gauge", "How much"), [])

    assert written(write) == (
        b"# HELP one_count How many\n"
        b"# TYPE one_count counter\n"
        b'one_count{model="m",version="3"} 7\n'
        b"one_count 0.25\n"
        b"# HELP other How much\n"
        b"# TYPE other gauge\n"
    )


NUMBERS = st.integers(-(2**63), 2**64) | st.floats(allow_nan=False)
LABELS = st.dictionaries(
    st.from_regex("[a-z_][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: not name.startswith("__")),
    st.text(st.characters(codec="utf-8"), max_size=10),
    max_size=3,
)


@given(st.lists(st.tuples(LABELS, NUMBERS), max_size=5))
def test_a_parser_reads_what_was_written(samples: list[tuple[dict[str, str], float]]) -> None:
    page = of_one("measure", "gauge", "What it is", *samples).decode()
    (read,) = text_string_to_metric_families(page)
    assert (read.name, read.documentation, read.type) == ("measure", "What it is", "gauge")
    assert [(sample.labels, float(sample.value)) for sample in read.samples] == [
        (labels, float(value)) for labels, value in samples
    ]


def test_what_models_write_cannot_break_the_page() -> None:
    text = "a\nb\\ \udcff" + "x" * 5_000
    page = of_one("measure", "gauge", text, ({"of": text}, 1)).decode()
    (read,) = text_string_to_metric_families(page)
    for told in (read.documentation, read.samples[0].labels["of"]):
        assert told.startswith("a\nb\\ ?xxx")
        assert len(told) == 1024


@pytest.mark.parametrize(("value", "text"), [(math.inf, "+Inf"), (-math.inf, "-Inf"), (math.nan, "NaN"), (2.0, "2")])
def test_numbers_at_the_edge(value: float, text: str) -> None:
    assert of_one("m", "gauge", "x", ({}, value)).endswith(f"\nm {text}\n".encode())


def version(statistics: VersionStatistics, tags: dict[str, str] | None = None, namespace: str = "") -> MeteredVersion:
    return MeteredVersion(
        "m", "3", namespace, tags or {}, statistics, 5, 0.125, 2, 4096, {1: 3, 2: 2}, {"full": 7}, 4, False
    )


def sample_of(page: bytes) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Samples by name and labels. The parser calls counters ``_total``, which Triton's are not."""
    return {
        (sample.name.removesuffix("_total"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
    }


LABELLED = (("model", "m"), ("version", "3"))


def test_the_metrics_of_a_version() -> None:
    statistics = VersionStatistics()
    statistics.inference_count = 40
    statistics.execution_count = 10
    statistics.success.add(2_500_999, 20)
    statistics.queue.add(3_000, 20)
    statistics.compute_input.add(4_000, 20)
    statistics.compute_infer.add(5_000, 20)
    statistics.compute_output.add(6_000, 20)
    statistics.failures[RequestOutcome.REJECTED] = 2
    statistics.failures[RequestOutcome.TIMED_OUT] = 1
    statistics.given_up[CancelReason.DISCONNECTED] = 4
    found = sample_of(of_versions(version(statistics)))
    expected = {
        "nv_inference_request_success": 20,
        "nv_inference_count": 40,
        "nv_inference_exec_count": 10,
        "nv_inference_request_duration_us": 2500,
        "nv_inference_queue_duration_us": 3,
        "nv_inference_compute_input_duration_us": 4,
        "nv_inference_compute_infer_duration_us": 5,
        "nv_inference_compute_output_duration_us": 6,
        "nv_inference_pending_request_count": 5,
        "nv_model_load_duration_secs": 0.125,
        "nerite_worker_restarts": 2,
        "nerite_model_memory_bytes": 4096,
    }
    reasons = {"REJECTED": 3, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}
    failures = {**{outcome.value: 0 for outcome in RequestOutcome}, "queue_full": 2, "queue_timeout": 1}
    labelled = {
        "nv_inference_request_failure": ("reason", reasons),
        "nerite_request_failures": ("reason", failures),
        "nerite_requests_given_up": ("reason", {"cancelled": 0, "disconnected": 4, "deadline": 0, "preempted": 0}),
        "nerite_batch_releases": ("reason", {"full": 7}),
        "nerite_queue_requests": ("priority", {"1": 3, "2": 2}),
    }
    assert found == {
        **{(name, LABELLED): value for name, value in expected.items()},
        **{
            (name, tuple(sorted((*LABELLED, (label, of))))): value
            for name, (label, values) in labelled.items()
            for of, value in values.items()
        },
    }


def test_counters_are_called_as_triton_calls_them() -> None:
    page = of_versions(version(VersionStatistics()))
    assert b'\nnv_inference_count{model="m",version="3"} 0\n' in page
    assert b"nv_" in page
    assert not re.search(rb"\bnv_\w+_total", page)


def test_tags_of_the_configuration_are_labels_with_an_underscore() -> None:
    found = sample_of(of_versions(version(VersionStatistics(), {"team": 'a "b" \\ c\nd'})))
    labels = {name for _, pairs in found for name, _ in pairs}
    assert labels == {"model", "version", "reason", "priority", "_team"}
    assert all(dict(pairs)["_team"] == 'a "b" \\ c\nd' for _, pairs in found)


def test_a_namespace_is_a_label() -> None:
    found = sample_of(of_versions(version(VersionStatistics(), namespace="/models")))
    assert all(dict(pairs)["namespace"] == "/models" for _, pairs in found)


def test_a_family_may_come_in_parts() -> None:
    first, second = (version(VersionStatistics())._replace(model=name) for name in ("a", "b"))

    def write(page: Page) -> None:
        for part in ([], [first], [second]):
            for table in TABLES:
                page.write(table, [(version_labels(each), each) for each in part])
        assert "nv_inference_count" in page.names

    every = MetricsOptions(summary_latencies=True, histogram_latencies=True)
    assert written(write) == of_versions(first, second, options=every)


@pytest.mark.parametrize("openmetrics", [False, True])
@pytest.mark.parametrize("text", ["50 %", "%d %s", "\x85\u2028\0", ""])
def test_labels_of_a_histogram_may_be_any_text(text: str, openmetrics: bool) -> None:
    sizes = Histogram((1, 10))
    sizes.note(5)
    sizes.exemplars = {1: Exemplar(7, 5, 1.5)}
    page = of_one("m", "histogram", "x", ({"of": text}, sizes), openmetrics=openmetrics).decode()
    lines = [line for line in page.split("\n") if line and line[0] != "#"]
    one, ten = ("1.0", "10.0") if openmetrics else ("1", "10")
    more = f' # {{trace_id="{7:032x}"}} 5 1.500' if openmetrics else ""
    assert lines == [
        f'm_bucket{{of="{text}",le="{one}"}} 0',
        f'm_bucket{{of="{text}",le="{ten}"}} 1{more}',
        f'm_bucket{{of="{text}",le="+Inf"}} 1',
        f'm_sum{{of="{text}"}} 5',
        f'm_count{{of="{text}"}} 1',
    ]


def test_without_models_every_family_is_there_and_empty() -> None:
    page = of_versions().decode()
    assert len(list(text_string_to_metric_families(page))) == 21
    assert not sample_of(page.encode())


def test_without_latencies_durations_and_the_cache_are_left_out() -> None:
    """As with Triton: what is counted, summaries and histograms stay."""
    statistics = VersionStatistics(StageTimes(), OptionalTimes((1,), (0.5,)))
    statistics.composed(request(1, arrived_ns=0), 0, 0, 0, 0, 1_000)
    counted = version(statistics)._replace(cached=True)
    every, rest = (
        {line.split()[2] for line in of_versions(counted, options=options).decode().splitlines() if "# TYPE" in line}
        for options in (
            MetricsOptions(summary_latencies=True, histogram_latencies=True, counter_latencies=so)
            for so in (True, False)
        )
    )
    left_out = every - rest
    assert len(left_out) == 9
    assert all(re.fullmatch(r"nv_inference_\w+_duration_us|nv_cache_\w+_per_model", name) for name in left_out)
    assert {"nv_inference_count", "nv_inference_queue_summary_us", "nerite_request_duration_seconds"} <= rest
    assert {"nv_cache_hit_summary_per_model", "nv_inference_first_response_histogram_ms"} <= rest


def test_labels_are_sorted_by_name_as_triton_writes_them() -> None:
    tagged = version(VersionStatistics(), {"team": 'a,reason="x"', "Zed": "\\"}, namespace="/m")
    page = of_versions(tagged).decode()
    labelled = r'_Zed="\\",_team="a,reason=\"x\"",model="m",namespace="/m"'
    assert f'nv_inference_count{{{labelled},version="3"}} 0\n' in page
    assert f'nv_inference_request_failure{{{labelled},reason="OTHER",version="3"}} 0\n' in page
    table = MetricTable[None]((Metric("m", "gauge", "x", lambda _: {"": 1}, "a0"),), labels=("a1", "a", "b"))
    assert written(lambda page: page.write(table, [table.row(None, "1", "2", "3")])).endswith(
        b'\nm{a="2",a0="",a1="1",b="3"} 1\n'
    )


def test_histograms_of_a_version_that_has_answered() -> None:
    statistics = VersionStatistics(StageTimes())
    assert not [name for name, _ in sample_of(of_versions(version(statistics))) if "duration_seconds" in name]
    statistics.composed(request(3, arrived_ns=0), 20_000, 0, 1_000_000, 60_000, 2_000_000)
    page = of_versions(version(statistics)).decode()
    assert 'nerite_request_duration_seconds_bucket{model="m",version="3",le="0.001"} 0\n' in page
    assert 'nerite_request_duration_seconds_bucket{model="m",version="3",le="0.0025"} 1\n' in page
    assert 'nerite_request_duration_seconds_sum{model="m",version="3"} 0.002\n' in page
    assert 'nerite_stage_duration_seconds_bucket{model="m",stage="queue",version="3",le="2.5e-05"} 1\n' in page
    assert 'nerite_stage_duration_seconds_sum{model="m",stage="output",version="3"} 6e-05\n' in page
    sizes = [line for line in page.splitlines() if line.startswith("nerite_batch_rows_bucket")]
    assert [line.partition("le=")[2] for line in sizes] == ['"1"} 0', '"2"} 0', '"4"} 1', '"+Inf"} 1']


def test_open_metrics_with_exemplars() -> None:
    stages = StageTimes()
    statistics = VersionStatistics(stages)
    statistics.composed(request(3, arrived_ns=0), 0, 0, 0, 0, 1_000_000_000)
    stages.traced(999_000_000, 0xABC, 1_500_000_000)
    page = of_versions(version(statistics), openmetrics=True).decode()
    read = {family.name: family for family in openmetrics.text_string_to_metric_families(page)}
    assert {name: read[name].type for name in ("nv_inference_count", "nerite_batch_releases")} == {
        "nv_inference_count": "unknown",
        "nerite_batch_releases": "counter",
    }
    assert {sample.name for sample in read["nerite_batch_releases"].samples} == {"nerite_batch_releases_total"}
    exemplars = {
        sample.labels["le"]: sample.exemplar
        for sample in read["nerite_request_duration_seconds"].samples
        if sample.exemplar
    }
    assert set(exemplars) == {"1.0"}
    assert (exemplars["1.0"].labels, exemplars["1.0"].value) == ({"trace_id": f"{0xABC:032x}"}, 0.999)
    assert b"trace_id" not in of_versions(version(statistics))
