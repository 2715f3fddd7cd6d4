"""Traces on their way to a collector: batches, attempts, and what is said of those that do not arrive."""

from __future__ import annotations

from typing import Any

import pytest

from collector import Collector, collecting
from doubles import request
from nerite.config.options import OpenTelemetryOptions
from nerite.observability import otlp as module
from nerite.observability.otlp import Exporter, retry_delay
from nerite.observability.trace import OtelTrace, Sampler, TraceValues
from serving import eventually

SAMPLER = Sampler(TraceValues(frozenset(("TIMESTAMPS",)), 1, -1, 0))


def trace() -> OtelTrace:
    """A trace of two spans."""
    asked = request()
    made = OtelTrace(asked, 1, 1, SAMPLER, lambda _: None)
    made.answered_ns = made.final_ns = made.began_ns
    return made


def options(collector: Collector, **given: Any) -> OpenTelemetryOptions:
    return OpenTelemetryOptions(url=collector.url, **given)


def exporting(options: OpenTelemetryOptions, leave: list[OtelTrace] | None = None) -> Exporter:
    """An exporter that notes the traces that leave."""
    left = [] if leave is None else leave
    return Exporter(options, lambda trace, _: left.append(trace))


def test_a_batch_does_not_wait() -> None:
    with collecting() as collector:
        exporter = exporting(options(collector, bsp_schedule_delay=3_600_000, bsp_max_export_batch_size=4))
        exporter.add(trace())
        exporter.add(trace())
        assert len(collector.wait(4)) == 4
        exporter.add(trace())
        exporter.close()
        assert [len(post.spans) for post in collector.posts] == [4, 2]
        assert exporter.dropped == 0


def test_few_wait_for_the_delay() -> None:
    with collecting() as collector:
        left: list[OtelTrace] = []
        exporter = exporting(options(collector, bsp_schedule_delay=10), left)
        sent = trace()
        exporter.add(sent)
        collector.wait(2)
        exporter.close()
        assert left == [sent]


def test_nothing_begins_without_traces() -> None:
    exporter = exporting(OpenTelemetryOptions(url="http://127.0.0.1:9/v1/traces"))
    exporter.close()
    assert exporter.dropped == 0


def test_what_it_is_sent_with() -> None:
    with collecting() as collector:
        exporter = exporting(options(collector, headers={"api-key": "k"}, compress=True, resource={"a": "b"}))
        exporter.add(trace())
        exporter.close()
        (post,) = collector.posts
        assert post.path == "/v1/traces"
        assert post.headers["api-key"] == "k"
        assert post.headers["Content-Encoding"] == "gzip"
        assert post.headers["Content-Type"] == "application/x-protobuf"
        assert post.spans[0].resource["a"] == "b"
        assert post.spans[0].resource["telemetry.sdk.name"] == "nerite"


@pytest.mark.parametrize("status", [429, 503])
def test_a_collector_that_wants_it_later(status: int) -> None:
    with collecting() as collector:
        collector.refusals.append((status, {"Retry-After": "0"}))
        exporter = exporting(options(collector, bsp_schedule_delay=1))
        exporter.add(trace())
        collector.wait(2)
        exporter.close()
        assert collector.refused == 1
        assert exporter.dropped == 0


def test_a_collector_that_does_not_want_it(capfd: pytest.CaptureFixture[str]) -> None:
    with collecting() as collector:
        collector.refusals.append((400, {}))
        exporter = exporting(options(collector, bsp_schedule_delay=1))
        exporter.add(trace())
        eventually(lambda: exporter.dropped == 2)
        exporter.close()
        assert collector.refused == 1
    said = capfd.readouterr().err
    assert "2 spans were dropped: the collector answers 400" in said
    assert collector.url in said and "--trace-config opentelemetry,url" in said


def test_no_collector(capfd: pytest.CaptureFixture[str]) -> None:
    with collecting() as collector:
        pass
    exporter = exporting(options(collector, bsp_schedule_delay=1))
    exporter.add(trace())
    exporter.close()
    assert exporter.dropped == 2
    assert "2 spans were dropped: [Errno" in capfd.readouterr().err


def test_more_than_the_queue_holds(capfd: pytest.CaptureFixture[str]) -> None:
    with collecting() as collector:
        exporter = exporting(options(collector, bsp_schedule_delay=3_600_000, bsp_max_queue_size=4))
        collector.refusals.append((503, {"Retry-After": "3600"}))
        for _ in range(5):
            exporter.add(trace())
        eventually(lambda: collector.refused == 1)
        assert exporter.dropped == 6
        exporter.close()
    said = capfd.readouterr().err
    assert "spans were dropped" in said


def test_there_is_room_until_the_queue_is_full() -> None:
    with collecting() as collector:
        exporter = exporting(options(collector, bsp_schedule_delay=3_600_000, bsp_max_queue_size=6))
        assert exporter.has_room()
        exporter.add(trace())
        assert exporter.has_room() and exporter.dropped == 0
        exporter.add(trace())
        assert not exporter.has_room()
        assert exporter.dropped == 3
        exporter.close()
        assert sum(len(post.spans) for post in collector.posts) == 4


def test_drops_are_told_with_their_number_and_not_each_time(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        exporter = exporting(options(collector, bsp_schedule_delay=1))
        for refused in range(3):
            collector.refusals.append((400, {}))
            exporter.add(trace())
            eventually(lambda refused=refused: exporter.dropped == 2 * refused + 2)  # type: ignore[misc]
        eventually(lambda: "spans were dropped" in capfd.readouterr().err)
        exporter.close()
        lines = [line for line in capfd.readouterr().err.splitlines() if "dropped" in line]
    assert len(lines) == 1 and "4 spans were dropped" in lines[0]
    assert module.LOG_INTERVAL > 1


def test_pauses_grow_and_come_to_an_end() -> None:
    pauses = [retry_delay(failures, None) for failures in range(1, 7)]
    assert pauses[-1] is None
    seconds = [pause for pause in pauses if pause is not None]
    assert seconds == sorted(seconds) and seconds[0] >= 0.8 and seconds[-1] <= 20


def test_the_collectors_word_counts_within_reason() -> None:
    assert [retry_delay(1, 3.0), retry_delay(2, 9999.0)] == [3.0, 60.0]
