"""The text of usual traces, put together from pieces, is the text of any trace."""

from __future__ import annotations

import json
import time

import pytest

from doubles import Caller, request
from nerite.core.errors import Cancelled
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.observability import tracing
from nerite.observability.trace import Sampler, Trace, TraceValues
from nerite.observability.tracing import trace_json

SAMPLER = Sampler(TraceValues(frozenset(("TIMESTAMPS",)), 1, -1, 0))
OK = InferenceResponse(ResponseHeader("model", "1", ()))


class HttpCaller(Caller):
    protocol = "HTTP"


class GrpcCaller(Caller):
    protocol = "GRPC"


def traced(sink: Caller, number: int, name: str) -> Trace:
    asked = request(sink=sink, id=name, arrived_ns=time.monotonic_ns())
    trace = Trace(asked, 3, number, SAMPLER, lambda _: None)
    asked.queued_ns = time.monotonic_ns()
    timings = ExecutionTimes()
    timings.end()
    trace.ran(asked, timings)
    trace.respond(asked, OK, True)
    return trace


@pytest.mark.parametrize("number", [1, 7, 2**40])
@pytest.mark.parametrize("name", ["", "me", 'a"b\\', "ü", "%d %s {}"])
@pytest.mark.parametrize("sink", [HttpCaller, GrpcCaller])
def test_any_of_them(sink: type[Caller], name: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traces = [traced(sink(), each, name) for each in (number, number + 1)]
    quick = [trace_json(trace) for trace in traces]
    monkeypatch.setattr(tracing, "usual_times", lambda _: None)
    assert quick == [trace_json(trace) for trace in traces]


def test_usual_traces_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traced(HttpCaller(), 1, "")
    monkeypatch.delattr(tracing, "trace_events")
    assert trace_json(trace)


def test_a_request_that_is_given_up_while_it_waits() -> None:
    asked = request(sink=HttpCaller(), arrived_ns=time.monotonic_ns())
    complete: list[Trace] = []
    trace = Trace(asked, 3, 1, SAMPLER, complete.append)
    asked.queued_ns = time.monotonic_ns()
    trace.respond(asked, InferenceResponse.failed(Cancelled("cancelled")), True)
    assert complete == [trace]
    names = [record["timestamps"][0]["name"] for record in json.loads(b"[%b]" % trace_json(trace))[1:]]
    assert names[2:5] == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert "COMPUTE_START" not in names


def test_times_that_are_not_in_the_usual_order() -> None:
    trace = traced(HttpCaller(), 1, "")
    trace.ended_ns = trace.sends[1] + 1
    times = [record["timestamps"][0] for record in json.loads(b"[%b]" % trace_json(trace))[1:]]
    assert times[-1] == {"name": "REQUEST_END", "ns": trace.ended_ns}
    assert [each["ns"] for each in times] == sorted(each["ns"] for each in times)
