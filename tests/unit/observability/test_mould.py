"""Spans that are cast in a mould are, byte for byte, those that are made one by one."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from doubles import Caller, request
from nerite.core.errors import Unavailable
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.observability.otlp_spans import SpanTemplates, spans_of
from nerite.observability.trace import OtelTrace, Sampler, TraceValues

SAMPLER = Sampler(TraceValues(frozenset(("TIMESTAMPS",)), 1, -1, 0))
OK = InferenceResponse(ResponseHeader("model", "1", ()))


class GrpcCaller(Caller):
    protocol = "GRPC"


def traced(number: int = 1, name: str = "", requests: int = 1, response: InferenceResponse = OK) -> OtelTrace:
    asked = request(sink=GrpcCaller(), id=name, arrived_ns=time.monotonic_ns())
    trace = OtelTrace(asked, 3, number, SAMPLER, lambda _: None)
    timings = ExecutionTimes()
    timings.requests = requests
    timings.end()
    trace.ran(asked, timings)
    trace.respond(asked, response, True)
    return trace


@given(
    st.lists(
        st.tuples(
            st.integers(1, 2**40),
            st.text(max_size=4),
            st.integers(1, 3),
            st.one_of(st.none(), st.tuples(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1))),
            st.sampled_from(["", "x=y"]),
        ),
        min_size=2,
        max_size=8,
    )
)
def test_any_of_them(asked: list[tuple[int, str, int, tuple[int, int] | None, str]]) -> None:
    templates = SpanTemplates()
    epoch = 1_700_000_000_000_000_000
    traces = []
    for number, name, requests, outer, state in asked:
        trace = traced(number, name, requests)
        if outer is not None:
            trace.begin_under(*outer, state)
        assert templates.spans_of([trace], epoch) == spans_of(trace, epoch)
        traces.append(trace)
    single = [spans_of(trace, epoch) for trace in traces]
    together = templates.spans_of(traces, epoch)
    assert len(together) == sum(map(len, single))
    assert all(spans in together for spans in single)


@pytest.mark.parametrize("number", [127, 128, 16383, 16384])
def test_numbers_that_take_one_byte_more(number: int) -> None:
    templates = SpanTemplates()
    for each in (number, number + 1, number - 1):
        trace = traced(each)
        assert templates.spans_of([trace], 0) == spans_of(trace, 0)


def test_a_batch() -> None:
    templates = SpanTemplates()
    first, second, third = (traced(number, requests=3) for number in (1, 2, 3))
    timings = first.executions[0][1]
    assert timings is not None and timings.leader is not None
    for trace in (first, second, third):
        trace.executions = [(trace.executions[0][0], timings)]
        timings.started_ns = max(timings.started_ns, trace.executions[0][0])
    for trace in (first, second, third):
        trace.ended_ns = trace.final_ns
        assert templates.spans_of([trace], 0) == spans_of(trace, 0)


def test_an_error_is_not_usual() -> None:
    templates = SpanTemplates()
    templates.spans_of([traced()], 0)
    trace = traced(response=InferenceResponse.failed(Unavailable("no")))
    assert templates.spans_of([trace], 0) == spans_of(trace, 0)
    assert b"no" in spans_of(trace, 0)
