"""What ``nerite top`` makes of two looks at a server, and what it shows of that."""

from __future__ import annotations

import re

import pytest

from nerite.client import ModelVersion
from nerite.client.models import MetricsPage
from nerite.tools.top import (
    ServerSample,
    VersionActivity,
    activity_between,
    background_text,
    frame,
    ordered_activity,
    table,
    total_activity,
)

READY = [ModelVersion("a", "1", "READY"), ModelVersion("b", "1", "READY"), ModelVersion("spare")]


def look(at: float, counts: dict[str, float], models: list[ModelVersion] = READY, **gauges: float) -> ServerSample:
    lines = [f"{name} {value}" for name, value in gauges.items()]
    for model, count in counts.items():
        labels = f'model="{model}",version="1"'
        lines += [
            f"nv_inference_request_success{{{labels}}} {count}",
            f'nv_inference_request_failure{{{labels},reason="OTHER"}} {count / 10}',
            f'nv_inference_request_failure{{{labels},reason="REJECTED"}} {count / 10}',
            f"nv_inference_count{{{labels}}} {count * 4}",
            f"nv_inference_exec_count{{{labels}}} {count}",
            f"nv_inference_pending_request_count{{{labels}}} 7",
            f"nerite_model_memory_bytes{{{labels}}} 5e7",
            f'nerite_request_duration_seconds_bucket{{{labels},le="0.01"}} {count / 2}',
            f'nerite_request_duration_seconds_bucket{{{labels},le="0.02"}} {count}',
            f'nerite_request_duration_seconds_bucket{{{labels},le="+Inf"}} {count}',
        ]
    return ServerSample(at, models, MetricsPage("\n".join(lines)))


def test_between_two_looks() -> None:
    a, b, spare = activity_between(look(1, {"a": 100}), look(3, {"a": 300, "b": 10}))
    assert (a.requests, a.failures, a.batch, a.waiting, a.memory, a.restarts) == (100, 20, 4, 7, 5e7, None)
    assert (a.median, a.slowest) == (0.01, pytest.approx(0.0198))
    assert b.requests == 5  # loaded meanwhile: it began with nothing
    assert (spare.state, spare.requests, spare.median, spare.batch) == ("", None, None, None)


def test_a_model_that_was_loaded_anew_counts_from_nothing() -> None:
    (a, *_) = activity_between(look(1, {"a": 100}), look(2, {"a": 10}))
    assert (a.requests, a.slowest) == (10, pytest.approx(0.0198))


def test_nothing_happened() -> None:
    (a, *_) = activity_between(look(1, {"a": 100}), look(2, {"a": 100}))
    assert (a.requests, a.median, a.batch) == (0, None, None)


def test_the_whole() -> None:
    last = look(
        2, {"a": 30, "b": 30}, nv_cpu_utilization=0.5, nv_cpu_memory_used_bytes=1e9, nv_cpu_memory_total_bytes=4e9
    )
    happened = activity_between(look(1, {"a": 10, "b": 10}), last)
    assert total_activity(happened, last) == {
        "requests": 40,
        "failures": 8,
        "waiting": 14,
        "processors": 0.5,
        "memory": 0.25,
    }


LINES = [
    VersionActivity("small", "1", "READY", requests=5.0, slowest=0.2),
    VersionActivity("busy", "1", "READY", requests=900.0, slowest=0.1),
    VersionActivity("absent", "", ""),
]


def test_orders() -> None:
    assert [each.model for each in ordered_activity(LINES, "name")] == ["absent", "busy", "small"]
    assert [each.model for each in ordered_activity(LINES, "requests")] == ["busy", "small", "absent"]
    assert [each.model for each in ordered_activity(LINES, "p99")] == ["small", "busy", "absent"]


def test_a_table() -> None:
    assert "≈ 2 MB" in table([VersionActivity("m", "2", "READY", memory=2e6, estimated=True)]).lines[1]
    shown = table([VersionActivity("m", "2", "READY", 1234.5, 0, 0.0005, 0.25, 3, 7.5, 61.0, 2.5e9, 1), LINES[2]])
    assert [line.split() for line in shown.lines[1:]] == [
        ["m", "2", "READY", "1,234", "0", "0.50", "250", "3", "7.5", "61", "2.5", "GB", "1"],
        ["absent", "not", "loaded", *["-"] * 9],
    ]


def test_a_frame_fits() -> None:
    many = [VersionActivity(f"model-{number}", "1", "READY", 1.0) for number in range(30)]
    told = {"requests": 30.0, "failures": 0.0, "waiting": 0.0, "processors": None, "memory": None}
    drawn = frame("http://here:8000", told, table(many, 60), (60, 12), "name")
    lines = [re.sub(r"\x1b\[[\d?]*[A-Za-z]", "", line) for line in drawn.split("\r\n")]
    assert len(lines) == 12
    assert max(map(len, lines)) <= 60
    assert "http://here:8000   30 requests/s" in lines[0]
    assert "... and 24 more" in lines[9]
    assert lines[11].startswith("sorted by name  q quit")
    assert lines[1] == "machine: CPU -, memory -"
    assert lines[10].startswith("not shown: ")
    lost = frame("http://here:8000", told, table(many, 60), (60, 12), "name", "nobody answers").split("\r\n")
    assert (lost[1], len(lost), lost[2:]) == ("stale: nobody answers\x1b[K", 12, drawn.split("\r\n")[2:])


def test_what_stands_beside_the_requests() -> None:
    def told(*lines: str) -> str:
        return background_text(ServerSample(1, [], MetricsPage("\n".join(lines))))

    well = (
        'nerite_background_stalled{about="",loop="audit"} 0',
        'nerite_background_set_aside{about="",loop="audit"} 0',
    )
    assert told() == told(*well) == ""
    ill = (
        'nerite_background_stalled{about="",loop="ledger"} 1',
        'nerite_background_set_aside{about="pool a",loop="rollouts"} 2',
        'nerite_background_set_aside{about="pool b",loop="rollouts"} 1',
    )
    assert told(*well, *ill) == "BACKGROUND: ledger is stalled, rollouts has set 3 aside (nerite background)"


def test_what_a_narrow_window_leaves_out() -> None:
    several = [
        VersionActivity("embedder", "3", "READY", 1234.5, 0, 0.0005, 0.25, 3, 7.5, None, 2.5e9, 1),
        VersionActivity("a-model-with-a-long-name", "12", "UNAVAILABLE", 1.5, 0.5, 0.5, 1.5, 100, 1, None, 2.5e6, 0),
    ]
    whole = table(several)
    assert (whole.left_out, whole.note) == ([], "")
    assert table(several, whole.whole_width) == whole
    narrow = table(several, 80)
    assert max(map(len, narrow.lines)) <= 80
    # What says nothing goes first, then what is the least important.
    left_out = ["Version", "p50 ms", "Batch", "Tokens/s", "Memory", "Restarts"]
    assert narrow.left_out == left_out
    assert narrow.note == f"not shown: {', '.join(left_out)} (needs width {whole.whole_width})"
    assert len(narrow.note) <= 80
    assert table(several, 5).lines[0].split() == ["Model", "State", "Requests/s"]


def test_a_window_of_80_columns() -> None:
    told = {"requests": 30.0, "failures": 0.0, "waiting": 0.0, "processors": 0.5, "memory": 0.25}
    drawn = frame("http://here:8000", told, table(LINES, 80), (80, 12), "requests")
    lines = [re.sub(r"\x1b\[[\d?]*[A-Za-z]", "", line) for line in drawn.split("\r\n")]
    assert lines[:2] == [
        "http://here:8000   30 requests/s, 0 failures/s, 0 waiting",
        "machine: CPU 50%, memory 25%",
    ]
    assert lines[10].startswith("not shown: ")
    assert lines[11].endswith("m memory")
    wide = frame("http://here:8000", told, table(LINES), (200, 12), "requests").split("\r\n")
    assert wide[0].endswith("machine: CPU 50%, memory 25%\x1b[K")
