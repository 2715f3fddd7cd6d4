"""A trace: what is noted of a request, whichever way it goes, and when it is complete."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from doubles import Caller, request
from nerite.config.options import OpenTelemetryOptions, TraceOptions
from nerite.core import tensor as dtypes
from nerite.core.errors import Unavailable
from nerite.core.execution_observer import ExecutionTimes, TraceContext
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.tensor import DataType, TensorSpec, encode_bytes
from nerite.observability.otlp import Exporter
from nerite.observability.trace import Trace, tensor_text
from nerite.observability.tracing import Tracing

COMPUTED = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END", "REQUEST_END"]
OUT = InferenceResponse(ResponseHeader("model", "1", [TensorSpec("OUT", dtypes.INT32, (1, 2))]), [b"\1\0\0\0\2\0\0\0"])


class HttpCaller(Caller):
    protocol = "HTTP"
    outer_span: TraceContext | None = None


class Bench:
    def __init__(self, folder: Path, *levels: str) -> None:
        self.file = folder / "t"
        options: Any = TraceOptions(levels=levels or ("TIMESTAMPS",), rate=1, file=str(self.file))  # type: ignore[arg-type]
        self.tracing = Tracing(options, lambda: None)
        self.caller = HttpCaller()

    def begin(self, **given: Any) -> tuple[InferenceRequest, Trace]:
        asked = request(sink=self.caller, **given)
        self.tracing.begin(asked, 3, self.tracing.settings.sampler(""))
        assert isinstance(asked.sink, Trace)
        return asked, asked.sink

    @property
    def written(self) -> list[dict[str, Any]]:
        self.tracing.close()
        records: list[dict[str, Any]] = json.loads(self.file.read_text()) if self.file.exists() else []
        return records

    @property
    def names(self) -> list[str]:
        return [record["timestamps"][0]["name"] for record in self.written if "timestamps" in record]


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def ran() -> ExecutionTimes:
    timings = ExecutionTimes()
    timings.inputs_ready()
    timings.computed()
    timings.end()
    return timings


def test_a_request_from_its_arrival_to_its_answer(bench: Bench) -> None:
    asked, trace = bench.begin(id="me")
    trace.ran(asked, ran())
    asked.respond(OUT)
    assert bench.caller.of(asked) == [OUT]
    assert bench.written[0] == {"id": 1, "model_name": "model", "model_version": 3, "request_id": "me"}
    assert bench.names == [
        "HTTP_RECV_START",
        "HTTP_RECV_END",
        "REQUEST_START",
        "QUEUE_START",
        *COMPUTED,
        "INFER_RESPONSE_COMPLETE",
        "HTTP_SEND_START",
        "HTTP_SEND_END",
    ]
    times = [record["timestamps"][0]["ns"] for record in bench.written[1:]]
    assert times == sorted(times)


def test_a_request_that_never_ran(bench: Bench) -> None:
    asked, _ = bench.begin()
    asked.respond(InferenceResponse.failed(Unavailable("too late")))
    assert "COMPUTE_START" not in bench.names
    assert bench.names[-3:] == ["INFER_RESPONSE_COMPLETE", "HTTP_SEND_START", "HTTP_SEND_END"]


def test_a_worker_that_died(bench: Bench) -> None:
    asked, trace = bench.begin()
    trace.ran(asked, None)
    asked.respond(InferenceResponse.failed(Unavailable("died")))
    assert "REQUEST_END" in bench.names and "COMPUTE_START" not in bench.names


def test_many_responses_before_the_execution_ends(bench: Bench) -> None:
    asked, trace = bench.begin()
    for response, final in ((OUT, False), (OUT, False), (EMPTY, True)):
        trace.parted(asked, None)
        asked.respond(response, final)
    assert bench.written == []
    trace.ran(asked, ran())
    assert bench.names.count("HTTP_SEND_END") == 2
    assert bench.names.count("INFER_RESPONSE_COMPLETE") == 1
    assert set(COMPUTED) < set(bench.names)


def test_many_responses_after_the_execution_ended(bench: Bench) -> None:
    asked, trace = bench.begin()
    trace.ran(asked, ran())
    trace.parted(asked, None)
    asked.respond(OUT, False)
    assert bench.written == []
    trace.parted(asked, None)
    asked.respond(OUT)
    assert bench.names.count("HTTP_SEND_END") == 2


def test_a_request_of_several_turns_ends_once(bench: Bench) -> None:
    asked, trace = bench.begin()
    for _ in range(2):
        trace.turned(asked, ran())
    trace.ran(asked, ran())
    asked.respond(OUT)
    counts = Counter(bench.names)
    assert (counts["QUEUE_START"], counts["COMPUTE_START"], counts["COMPUTE_END"]) == (3, 3, 3)
    assert (counts["REQUEST_END"], counts["HTTP_SEND_END"]) == (1, 1)


def test_turns_with_responses(bench: Bench) -> None:
    asked, trace = bench.begin()
    for final in (False, True):
        trace.parted(asked, None)
        asked.respond(OUT, final)
        if not final:
            trace.turned(asked, ran())
    assert bench.written == []
    trace.ran(asked, ran())
    counts = Counter(bench.names)
    assert (counts["COMPUTE_END"], counts["REQUEST_END"], counts["HTTP_SEND_END"]) == (2, 1, 2)


def test_who_gives_up_between_two_turns(bench: Bench) -> None:
    asked, trace = bench.begin()
    trace.parted(asked, None)
    asked.respond(OUT, False)
    trace.turned(asked, ran())
    asked.respond(InferenceResponse.failed(Unavailable("too late")))
    counts = Counter(bench.names)
    assert (counts["COMPUTE_END"], counts["REQUEST_END"]) == (1, 1)


def test_tensors(tmp_path: Path) -> None:
    bench = Bench(tmp_path, "TENSORS")
    asked, trace = bench.begin(value=0.1)
    trace.ran(asked, ran())
    asked.respond(OUT)
    assert bench.written == [
        {
            "id": 1,
            "activity": "TENSOR_QUEUE_INPUT",
            "tensor": {"name": "IN", "data": "0.1", "shape": "1,1", "dtype": "FP32"},
        },
        {
            "id": 1,
            "activity": "TENSOR_BACKEND_OUTPUT",
            "tensor": {"name": "OUT", "data": "1,2", "shape": "1,2", "dtype": "INT32"},
        },
    ]


@pytest.mark.parametrize(
    ("datatype", "data", "expected"),
    [
        (dtypes.BOOL, b"\1\0", "1,0"),
        (dtypes.INT8, b"\1\xff", "1,-1"),
        (dtypes.FP16, np.array([0.5, 2], "<f2").tobytes(), "0.5,2.0"),
        (dtypes.FP64, np.array([1 / 3, 1e300], "<f8").tobytes(), "0.3333333333333333,1e+300"),
        (dtypes.BF16, b"\xc0\x3f\x80\x40", "1.5,4.0"),
        (dtypes.BYTES, encode_bytes(np.array([b'a"', b"\xff"], object)), '"a"","\\xff"'),
        (dtypes.INT32, b"\1", "?"),
    ],
)
def test_elements(datatype: DataType, data: bytes, expected: str) -> None:
    assert tensor_text(TensorSpec("T", datatype, (2,)), data)["data"] == expected


def test_the_last_of_a_count_waits_for_those_that_are_under_way(bench: Bench) -> None:
    bench.tracing.settings.update("", {"count": 2})
    (first, slow), (second, quick) = bench.begin(), bench.begin()
    quick.ran(second, ran())
    second.respond(OUT)
    assert not bench.file.with_name("t.0").exists()
    slow.ran(first, ran())
    first.respond(OUT)
    written = json.loads(bench.file.with_name("t.0").read_text())
    assert [record["id"] for record in written if "model_name" in record] == [2, 1]


def test_other_settings_write_what_is_there(bench: Bench) -> None:
    asked, trace = bench.begin()
    trace.ran(asked, ran())
    asked.respond(OUT)
    assert not bench.file.exists()
    bench.tracing.settings.update("", {"levels": frozenset()})
    assert bench.file.exists()
    assert not bench.tracing.wants("model")


def test_what_would_be_dropped_is_not_traced_but_what_a_client_traces_is(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry = OpenTelemetryOptions(url="http://127.0.0.1:9/v1/traces")
    tracing = Tracing(TraceOptions(mode="opentelemetry", levels=("TIMESTAMPS",), rate=1, opentelemetry=telemetry), bool)
    room = [True, False]
    monkeypatch.setattr(Exporter, "has_room", lambda _: room.pop(0))
    under = HttpCaller()
    under.outer_span = TraceContext(1, 2)
    asked = [request(sink=sink) for sink in (HttpCaller(), HttpCaller(), under)]
    for each in asked:
        tracing.begin(each, 1, tracing.settings.sampler(""))
    assert [isinstance(each.sink, Trace) for each in asked] == [True, False, True]
    tracing.close()
