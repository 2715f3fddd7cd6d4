"""What leaves after a step: the report before the responses that it tells of, all of it together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from doubles import Caller, request
from nerite.core.engine_report import AdapterUse, EngineReport, RequestEnded, RequestProgress
from nerite.core.errors import Internal, Unavailable
from nerite.core.request import InferenceRequest
from nerite.llm.engine import EngineStats, FinishReason, TokenDelta
from nerite.llm.request import LlmCall
from nerite.llm.sampling_parameters import SamplingParameters
from nerite.llm.streaming import RequestFollower, ResponseHeaders, StepReport, StreamedAnswer

STATS = EngineStats(2, 1, 64, 60, 32, 500, 16, 10, 20, 3, preemptions=5)


class Bench:
    """Requests on their way through an engine, and what leaves: reports, and who was answered."""

    def __init__(self) -> None:
        self.left: list[Any] = []
        self._together = False
        self.step = StepReport(self, 30)

    def report(self, report: EngineReport) -> None:
        assert self._together
        self.left.append(report)

    @contextmanager
    def together(self) -> Iterator[None]:
        self._together = True
        yield
        self._together = False

    def respond(self, request: InferenceRequest, _response: object, final: bool) -> None:
        assert self._together
        self.left.append((request, final))

    def follower(self, n: int = 1, adapter: str = "") -> tuple[InferenceRequest, RequestFollower]:
        asked = request(sink=self)
        call = LlmCall("once", SamplingParameters(n=n), True, "", frozenset())
        return asked, RequestFollower(
            asked, StreamedAnswer(asked, call, ResponseHeaders("m", "1", ["text_output"])), n, self.step, adapter
        )

    def progress(self) -> list[RequestProgress]:
        report = self.left.pop(0)
        assert isinstance(report, EngineReport)
        return list(report.progress)


def delta(tokens: int, reason: FinishReason | None = None, index: int = 0) -> TokenDelta:
    return TokenDelta(index, [7] * tokens, "x" * tokens, finish_reason=reason)


def test_nothing_leaves_before_the_step_is_over() -> None:
    bench = Bench()
    asked, follower = bench.follower()
    follower.admitted(4, 3, 2)
    follower.advanced([delta(1)])
    assert bench.left == []
    bench.step.over(STATS)
    report, answered = bench.left
    assert report[:14] == (2, 1, 64, 60, 32, 500, 16, 30, 3, None, None, 5, None, None)
    assert answered == (asked, False)
    begun, came = report.progress
    assert begun.request is came.request is asked
    assert begun.begun[1:] == (4, 3, 1, 2)
    assert (came.tokens, came.begun, came.ended) == (1, None, None)


def test_a_request_is_over_with_its_last_sequence() -> None:
    bench = Bench()
    asked, follower = bench.follower(2)
    follower.advanced([delta(1, FinishReason.STOP), delta(2, None, 1)])
    bench.step.over(STATS)
    assert bench.progress() == [RequestProgress(asked, 3)]
    follower.advanced([delta(1, FinishReason.LENGTH, 1)])
    bench.step.over(STATS)
    bench.left.pop(0)
    assert bench.progress() == [RequestProgress(asked, 1, None, RequestEnded.LENGTH)]
    assert bench.left == [(asked, True)]
    bench.left.clear()
    bench.step.over(STATS)
    assert bench.progress() == []


def test_what_fails() -> None:
    bench = Bench()
    asked, follower = bench.follower()
    follower.failed(Internal("broken"))
    bench.step.over(STATS)
    assert bench.progress() == [RequestProgress(asked, ended=RequestEnded.FAILED)]
    assert bench.left == [(asked, True)]


def test_what_is_cut() -> None:
    bench = Bench()
    caller = Caller()
    asked, follower = bench.follower()
    asked.sink = caller
    follower.advanced([delta(0, FinishReason.ABORT)])
    bench.step.over(STATS)
    assert bench.progress() == [RequestProgress(asked, ended=RequestEnded.CANCELLED)]
    ((_, response, final),) = caller.answers
    assert final
    assert response.error is not None


def test_adapters_are_reported_from_the_request_to_its_end() -> None:
    bench = Bench()
    bench.step.adapters = 3

    def use() -> AdapterUse:
        bench.step.over(STATS)
        report, bench.left = bench.left[0], []
        assert isinstance(report, EngineReport)
        return report.adapters

    assert use() == AdapterUse(3)
    _, follower = bench.follower(adapter="french")
    assert use() == AdapterUse(3, (), ("french",))
    follower.admitted(5)
    _, other = bench.follower(adapter="french")
    _, refused = bench.follower(adapter="german")
    assert use() == AdapterUse(3, ("french",), ("german",))
    refused.failed(Unavailable("no"))
    other.failed(Unavailable("no"))
    follower.advanced([delta(1, FinishReason.STOP)])
    assert use() == AdapterUse(3)


def test_an_engine_without_adapters_reports_none() -> None:
    bench = Bench()
    bench.step.over(STATS)
    assert bench.left[0].adapters == AdapterUse()
