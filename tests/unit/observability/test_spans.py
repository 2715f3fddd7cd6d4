"""Spans as bytes, read back with OpenTelemetry's own messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collector import Span, message, read
from doubles import Caller, request
from nerite.core.errors import Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import Assignment, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.observability import otlp
from nerite.observability.otlp import SpanEncoder
from nerite.observability.trace import OtelTrace, Sampler, TraceValues

OK = InferenceResponse(ResponseHeader("model", "1", ()))


class HttpCaller(Caller):
    protocol = "HTTP"


def traced(**given: Any) -> OtelTrace:
    asked = request(sink=HttpCaller(), arrived_ns=1, **given)
    sampler = Sampler(TraceValues(frozenset(("TIMESTAMPS",)), 1, -1, 0))
    trace = asked.sink = OtelTrace(asked, 3, 7, sampler, lambda _: None)
    trace.begin_under(2**127 + 5, 9, "x=y")
    return trace


def ran() -> ExecutionTimes:
    timings = ExecutionTimes()
    timings.requests = 1
    timings.end()
    return timings


def told(trace: OtelTrace, epoch: int = 0) -> list[Span]:
    body = otlp.export_request(
        {"service.name": "me", "naïve": "ü"}, {"name": "scope", "version": "0"}, SpanEncoder().spans_of(trace, epoch)
    )
    return read(message(body, "application/x-protobuf"))


def test_a_request_that_ran() -> None:
    trace = traced(id="me")
    asked = request()
    trace.ran(asked, ran())
    trace.respond(asked, OK, True)
    spans = told(trace, 10**18)
    assert [span.name for span in spans] == ["InferRequest", "model", "compute"]
    assert {span.trace for span in spans} == {f"{2**127 + 5:032x}"}
    assert [span.parent for span in spans] == [
        f"{9:016x}",
        spans[0].id,
        spans[1].id,
    ]
    assert len({span.id for span in spans}) == 3
    assert [span.kind for span in spans] == [
        otlp.SERVER,
        otlp.INTERNAL,
        otlp.INTERNAL,
    ]
    assert {span.state for span in spans} == {"x=y"}
    assert spans[0].resource == {"service.name": "me", "naïve": "ü"}
    assert spans[1].attributes == {
        "triton.model_name": "model",
        "triton.model_version": 3,
        "triton.trace_id": 7,
        "triton.trace_parent_id": 0,
        "triton.request_id": "me",
    }
    assert spans[0].moments == [
        "HTTP_RECV_START",
        "HTTP_RECV_END",
        "INFER_RESPONSE_COMPLETE",
        "HTTP_SEND_START",
        "HTTP_SEND_END",
    ]
    assert spans[1].moments == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert spans[2].moments == ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
    for span in spans:
        assert 10**18 < span.start <= span.end
        assert [at for _, at in span.events] == sorted(at for _, at in span.events)
        assert all(span.start <= at <= span.end for _, at in span.events)


def test_a_request_that_was_refused() -> None:
    trace = traced()
    trace.respond(request(), InferenceResponse.failed(Unavailable("too late")), True)
    spans = told(trace)
    assert [(span.name, span.status) for span in spans] == [
        ("InferRequest", (2, "too late")),
        ("model", (2, "too late")),
    ]


def test_a_step_is_under_the_model_that_asked() -> None:
    trace = traced()
    trace.parent = 3
    asked = request()
    trace.ran(asked, ran())
    trace.respond(asked, OK, True)
    spans = told(trace)
    assert [span.name for span in spans] == ["model", "compute"]
    assert spans[0].parent == f"{9:016x}"
    assert spans[0].attributes["triton.trace_parent_id"] == 3


def test_turns_have_spans_of_their_own() -> None:
    trace = traced()
    asked = request()
    first = trace.context_of(asked)
    trace.turned(asked, ran())
    second = trace.context_of(asked)
    trace.ran(asked, ran())
    trace.respond(asked, OK, True)
    computes = [span for span in told(trace) if span.name == "compute"]
    assert first is not None and second is not None
    assert [span.id for span in computes] == [f"{first.span_id:016x}", f"{second.span_id:016x}"]


def test_requests_of_one_batch_are_linked_to_the_first_that_is_traced() -> None:
    timings = ran()
    timings.requests = 3
    traces = [traced(), traced()]
    traces[1].begin_under(2**40, 9, "")
    for trace in traces:
        asked = request()
        trace.ran(asked, timings)
        trace.respond(asked, OK, True)
    first, second = (told(trace)[-1] for trace in traces)
    assert first.attributes == second.attributes == {"nerite.batch.requests": 3}
    assert (first.links, second.links) == ([], [(first.trace, first.id)])


@pytest.mark.parametrize("responses", [1, 500])
def test_a_stream_has_an_end_and_so_have_its_events(responses: int) -> None:
    trace = traced()
    asked = request()
    trace.ran(asked, ran())
    for _ in range(responses):
        trace.parted(asked, ran())
        trace.respond(asked, OK, False)
    trace.parted(asked, last := ran())
    trace.respond(asked, EMPTY, True)
    spans = told(trace)
    assert len(spans[0].events) == 3 + min(2 * responses, 128)
    assert spans[-1].end == last.ended_ns
    assert spans[0].end >= spans[1].end >= spans[-1].end


@given(st.integers(1, 2**40), st.text(max_size=200), st.integers(1, 2**20))
def test_any_number_and_id(number: int, name: str, requests: int) -> None:
    trace = traced(id=name)
    trace.number = number
    timings = ran()
    timings.requests = requests
    asked = request()
    trace.ran(asked, timings)
    trace.respond(asked, OK, True)
    spans = told(trace)
    assert spans[1].attributes["triton.trace_id"] == number
    assert spans[1].attributes.get("triton.request_id", "") == name.encode(errors="replace").decode()
    assert spans[2].attributes == {"nerite.batch.requests": requests}


def test_one_encoder_keeps_models_and_batches_apart() -> None:
    encoder = SpanEncoder()
    bodies = []
    for model, requests in (("a", 1), ("b", 2), ("a", 2)):
        trace = traced()
        trace.header = RequestHeader(model, "", ())
        timings = ran()
        timings.requests = requests
        trace.ran(request(), timings)
        trace.respond(request(), OK, True)
        bodies.append(encoder.spans_of(trace, 0))
    spans = read(
        message(otlp.export_request({}, {"name": "", "version": ""}, b"".join(bodies)), "application/x-protobuf")
    )
    assert [span.name for span in spans if "triton.model_name" in span.attributes] == ["a", "b", "a"]
    assert [span.attributes for span in spans if span.name == "compute"] == [
        {"nerite.batch.requests": requests} for requests in (1, 2, 2)
    ]


def test_numbers_of_any_size() -> None:
    values = {"zero": 0, "large": 2**40, "negative": -1, "text": "é", "other": 1.5}
    (span,) = read(
        message(
            otlp.export_request(
                {}, {"name": "", "version": ""}, otlp.span(otlp.attributes(9, values), 1, 2, 0, 3, 4, ())
            ),
            "application/x-protobuf",
        )
    )
    assert span.attributes == {**values, "other": "1.5"}
    assert (span.parent, span.start, span.end) == ("", 3, 4)


def test_the_arm_of_a_route_is_an_attribute() -> None:
    asked = request(sink=HttpCaller(), arrived_ns=1)
    asked.header.assignment = Assignment("scorer", "scorer_v2", True, 0.1)
    sampler = Sampler(TraceValues(frozenset(("TIMESTAMPS",)), 1, -1, 0))
    trace = asked.sink = OtelTrace(asked, 3, 7, sampler, lambda _: None)
    trace.ran(asked, ran())
    trace.respond(asked, OK, True)
    found = [span.attributes for span in told(trace) if "nerite.arm" in span.attributes]
    assert [(each["nerite.route"], each["nerite.arm"]) for each in found] == [("scorer", "scorer_v2")]
