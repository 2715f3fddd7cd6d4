"""An ensemble between its caller and the models of its steps, which a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest

from doubles import Caller, FakeLoop
from nerite.config.model_config import ModelEnsembling
from nerite.config.options import QueueOptions
from nerite.core import tensor as dtypes
from nerite.core.errors import Cancelled, Internal, NotFound, Unavailable
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import TensorSpec
from nerite.ensembles import ensemble as module
from nerite.ensembles.ensemble import Ensemble, StepRequest
from nerite.models.running_version import RunningVersion
from nerite.observability.statistics import RequestOutcome, VersionStatistics
from nerite.scheduling.ensemble import GIVES_WAY_NS, EnsembleGraph, StepModel
from nerite.scheduling.load_shedding import LoadShedder
from nerite.scheduling.sequence import SequenceRequest

SPEC = TensorSpec("T", dtypes.INT32, (1,))
SIGNATURE = Signature("m", 0, [SignatureInput("T", dtypes.INT32, (1,))], [SignatureOutput("T", dtypes.INT32, (1,))])
CHAIN = (("IN", "one"), ("one", "OUT"))
FORK = (("IN", "left"), ("IN", "right"), ("left", "L"), ("right", "R"))


class Models:
    """The door: holds what the steps ask until the test answers."""

    def __init__(self) -> None:
        self.asked: list[StepRequest] = []
        self.cancelled: list[StepRequest] = []
        self.paused: list[tuple[str, bool]] = []

    def infer(self, request: InferenceRequest, decoupled: str) -> None:
        assert isinstance(request, StepRequest)
        request.on_cancel = cast(Callable[[InferenceRequest], None], self.cancelled.append)
        request.on_pause = lambda each, paused: self.paused.append((each.header.model_name, paused))
        self.asked.append(request)

    def find(self, model: str, version: str, decoupled: str, namespace: str = "") -> RunningVersion:
        raise NotFound(f"no {model}")

    def ask_model_ready(self, model: str, version: str, answered: Callable[[bool], None]) -> None:
        raise NotImplementedError

    async def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        raise NotImplementedError

    async def unload(self, model: str, parameters: Mapping[str, Any]) -> None:
        raise NotImplementedError

    @property
    def names(self) -> list[str]:
        return [request.header.model_name for request in self.asked]

    def answer(self, model: str, data: bytes = b"data", *, final: bool = True) -> None:
        request = next(each for each in self.asked if each.header.model_name == model)
        if final:
            self.asked.remove(request)
        request.respond(InferenceResponse(ResponseHeader(model, "1", [SPEC]), [data]), final)

    def end(self, model: str, response: InferenceResponse = EMPTY) -> None:
        request = next(each for each in self.asked if each.header.model_name == model)
        self.asked.remove(request)
        request.respond(response)


class Bench:
    """An ensemble of models ``m0``, ``m1``, …: each step takes one tensor and gives one."""

    def __init__(
        self,
        *steps: tuple[str, str],
        decoupled: int = -1,
        limit: int = 0,
        bounds: QueueOptions = QueueOptions(max_requests=0, max_seconds=0),  # noqa: B008  it never changes
    ) -> None:
        self.loop = FakeLoop()
        self.models = Models()
        self.caller = Caller()
        self.statistics = VersionStatistics()
        outputs = sorted({given for _, given in steps} - {taken for taken, _ in steps})
        signature = Signature(
            "e",
            0,
            [SignatureInput("IN", dtypes.INT32, (1,))],
            [SignatureOutput(name, dtypes.INT32, (1,)) for name in outputs],
        )
        graph = EnsembleGraph(
            signature,
            "1",
            [
                ModelEnsembling.Step(
                    model_name=f"m{at}", model_version=-1, input_map={"T": taken}, output_map={"T": given}
                )
                for at, (taken, given) in enumerate(steps)
            ],
            [StepModel(SIGNATURE, at == decoupled) for at in range(len(steps))],
        )
        self.ensemble = Ensemble(
            graph,
            self.models,
            self.statistics,
            cast(asyncio.AbstractEventLoop, self.loop),
            LoadShedder(bounds, "e"),
            decoupled=decoupled >= 0,
            max_inflight=limit,
        )
        self.header = RequestHeader("e", "", [TensorSpec("IN", dtypes.INT32, (1,))])

    def ask(self, **given: Any) -> InferenceRequest:
        request = InferenceRequest(self.header, [b"sent"], self.caller, 0, **given)
        self.ensemble.submit(request)
        return request

    def told(self, request: InferenceRequest) -> list[Any]:
        return [each.data if each.error is None else each.error.message for each in self.caller.of(request)]


def test_bytes_are_handed_on_as_they_are() -> None:
    bench = Bench(*CHAIN)
    request = bench.ask(id="mine")
    (first,) = bench.models.asked
    assert first.data[0] is request.data[0]
    assert (first.id, first.parent) == ("mine", request)
    made = bytes(4)
    bench.models.answer("m0", made)
    (second,) = bench.models.asked
    assert second.data[0] is made
    bench.models.answer("m1", b"done")
    assert bench.told(request) == [[b"done"]]
    assert bench.ensemble.in_flight == 0


def test_the_second_request_asks_with_the_same_headers() -> None:
    bench = Bench(*CHAIN)
    headers = []
    answer = ResponseHeader("m0", "1", [SPEC])
    for _ in range(2):
        bench.ask()
        request = bench.models.asked.pop()
        headers.append(request.header)
        request.respond(InferenceResponse(answer, [b"data"]))
        headers.append(bench.models.asked[-1].header)
        bench.models.end("m1", InferenceResponse(answer, [b"data"]))
    assert headers[0] is headers[2] and headers[1] is headers[3]


def test_steps_that_do_not_need_each_other_run_at_a_time() -> None:
    bench = Bench(*FORK)
    request = bench.ask()
    assert bench.models.names == ["m0", "m1"]
    bench.models.answer("m1", b"r")
    assert bench.models.names == ["m0", "m3"]
    bench.models.answer("m3", b"rr")
    bench.models.answer("m0")
    bench.models.answer("m2", b"ll")
    assert bench.told(request) == [[b"rr", b"ll"]]


def test_the_first_error_is_the_answer_and_the_others_are_given_up() -> None:
    bench = Bench(*FORK)
    request = bench.ask()
    bench.models.end("m0", InferenceResponse.failed(Internal("broken")))
    assert bench.told(request) == [
        "in ensemble 'e', broken\n    at step 1 of 'e': model 'm0', version latest, given T INT32 [1]"
    ]
    (other,) = bench.models.cancelled
    assert other.header.model_name == "m1"
    bench.models.answer("m1")  # it did not notice
    assert len(bench.caller.of(request)) == 1
    assert (bench.statistics.failures[RequestOutcome.OTHER], bench.statistics.success.count) == (1, 0)
    assert bench.ensemble.in_flight == 0


def test_the_error_is_of_the_kind_that_the_step_had() -> None:
    bench = Bench(*CHAIN)
    request = bench.ask()
    bench.models.end("m0", InferenceResponse.failed(Unavailable("full", retry_after=3)))
    (response,) = bench.caller.of(request)
    assert isinstance(response.error, Unavailable) and response.error.retry_after == 3


def test_a_caller_that_gives_up_takes_the_running_step_along() -> None:
    bench = Bench(*CHAIN)
    request = bench.ask()
    request.cancel()
    assert [each.header.model_name for each in bench.models.cancelled] == ["m0"]
    bench.models.answer("m0")
    assert bench.models.asked == [], "nothing begins any more"
    (response,) = bench.caller.of(request)
    assert isinstance(response.error, Cancelled)
    assert bench.statistics.failures[RequestOutcome.CANCELED] == 1


def test_a_model_that_ends_without_a_response() -> None:
    bench = Bench(*CHAIN)
    request = bench.ask()
    bench.models.end("m0")
    (message,) = bench.told(request)
    assert message.startswith("in ensemble 'e', [request id: <id_unknown>] unexpected deadlock, at least one output")


def test_each_response_of_a_stream_goes_on_by_itself_and_in_order() -> None:
    bench = Bench(*CHAIN, decoupled=0)
    request = bench.ask()
    for number in range(3):
        bench.models.answer("m0", b"%d" % number, final=False)
    assert [each.data for each in bench.models.asked[1:]] == [[b"0"], [b"1"], [b"2"]]
    bench.models.answer("m1", b"a")
    bench.models.end("m0")
    bench.models.answer("m1", b"b")
    assert [final for _, _, final in bench.caller.answers] == [False, False]
    bench.models.answer("m1", b"c")
    assert bench.told(request) == [[b"a"], [b"b"], [b"c"]]
    assert [final for _, _, final in bench.caller.answers] == [False, False, True]


def test_the_end_of_a_stream_that_comes_last_says_only_that() -> None:
    bench = Bench(*CHAIN, decoupled=0)
    bench.ask()
    bench.models.answer("m0", final=False)
    bench.models.answer("m1")
    bench.models.end("m0")
    assert [(response.empty, final) for _, response, final in bench.caller.answers] == [(False, False), (True, True)]


def test_a_caller_that_reads_slowly_has_the_stream_pause() -> None:
    bench = Bench(("IN", "OUT"), decoupled=0)
    request = bench.ask()
    bench.models.answer("m0", final=False)
    request.pause(True)
    request.pause(False)
    assert bench.models.paused == [("m0", True), ("m0", False)]


def test_no_more_than_may_be_are_under_way_over_all_requests() -> None:
    bench = Bench(*CHAIN, limit=1)
    one, other = bench.ask(), bench.ask()
    assert bench.models.names == ["m0"]
    assert (bench.ensemble.pending, bench.ensemble.in_flight) == (1, 2)
    bench.models.answer("m0")
    assert bench.models.names == ["m0", "m1"]
    bench.models.answer("m0")
    assert bench.models.names == ["m1"], "the next step is full as well"
    bench.models.answer("m1", b"1")
    bench.models.answer("m1", b"2")
    assert (bench.told(one), bench.told(other)) == ([[b"1"]], [[b"2"]])


def test_a_stream_pauses_while_the_next_step_is_full() -> None:
    bench = Bench(*CHAIN, decoupled=0, limit=1)
    bench.ask()
    bench.models.answer("m0", final=False)
    assert bench.models.paused == []
    bench.models.answer("m0", final=False)
    assert bench.models.paused == [("m0", True)]
    bench.models.answer("m1")
    assert bench.models.paused == [("m0", True), ("m0", False)]
    bench.models.answer("m1")
    bench.models.end("m0")
    assert len(bench.caller.answers) == 3


def test_who_waits_and_gives_up_is_forgotten() -> None:
    bench = Bench(*CHAIN, limit=1)
    first, second = bench.ask(), bench.ask()
    second.cancel()
    assert (bench.ensemble.pending, bench.ensemble.in_flight) == (0, 1)
    first.cancel()
    bench.models.answer("m0")
    third = bench.ask()
    assert bench.models.names == ["m0"] and bench.told(third) == []


def test_a_full_step_gives_way_in_the_end(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(*CHAIN, limit=1)
    bench.loop.rule(monkeypatch, module)
    bench.ask(), bench.ask()
    bench.loop.advance(GIVES_WAY_NS - 1_000_000)
    assert bench.models.names == ["m0"]
    bench.loop.advance(2_000_000)
    assert bench.models.names == ["m0", "m0"]
    assert "is started anyway" in caplog.text


def test_drained_when_the_last_is_answered() -> None:
    bench = Bench(*CHAIN)
    drained: list[int] = []
    bench.ensemble.when_drained(lambda: drained.append(0))
    bench.ask()
    bench.ensemble.when_drained(lambda: drained.append(1))
    bench.models.answer("m0")
    assert drained == [0]
    bench.models.answer("m1")
    assert drained == [0, 1]


def test_abandoned() -> None:
    bench = Bench(*CHAIN)
    request = bench.ask()
    bench.ensemble.abandon(Unavailable("over"))
    assert bench.told(request) == ["over"]
    assert len(bench.models.cancelled) == 1


class Watcher(Caller, ExecutionObserver):
    """A caller that wants to know what the steps took."""

    sums: ExecutionTimes | None = None

    def composed(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        self.sums = timings


def test_what_the_steps_took_is_added_up() -> None:
    bench = Bench(*CHAIN)
    bench.caller = watcher = Watcher()
    bench.ensemble.notify_observers()
    request = bench.ask()
    for model in ("m0", "m1"):
        (step,) = bench.models.asked
        timings = ExecutionTimes()
        timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns = (
            step.queued_ns + offset for offset in (1, 11, 111, 1111)
        )
        cast(ExecutionObserver, step.sink).ran(step, timings)
        bench.models.answer(model)
    counts = bench.statistics
    assert (counts.compute_input.ns, counts.compute_infer.ns, counts.compute_output.ns) == (20, 200, 2000)
    assert (counts.queue.ns, counts.success.count, counts.execution_count, counts.inference_count) == (2, 1, 1, 1)
    assert watcher.sums is not None and watcher.sums.started_ns == request.queued_ns + 2


@pytest.mark.parametrize("decoupled", [-1, 0])
def test_turns_of_a_step_are_added_up_as_the_model_of_sequences_tells_them(decoupled: int) -> None:
    bench = Bench(("IN", "OUT"), decoupled=decoupled)
    bench.ask()
    (step,) = bench.models.asked
    inner, sink = SequenceRequest(step), cast(ExecutionObserver, step.sink)
    timings = ExecutionTimes()
    timings.started_ns = timings.inputs_ready_ns = inner.queued_ns
    timings.computed_ns = timings.ended_ns = inner.queued_ns + 100
    if decoupled == 0:
        sink.parted(inner, timings)
    sink.turned(inner, timings)
    sink.ran(inner, timings)
    bench.models.answer("m0")
    assert bench.statistics.compute_infer.ns == (100 if decoupled == 0 else 200), "each execution once"


def test_more_than_may_be_under_way_are_refused_before_they_begin() -> None:
    bench = Bench(*CHAIN, bounds=QueueOptions(max_requests=2, max_seconds=0))
    first, second, third = (bench.ask() for _ in range(3))
    assert bench.told(first) == bench.told(second) == []
    (refusal,) = bench.caller.of(third)
    assert isinstance(refusal.error, Unavailable)
    assert "Exceeds maximum queue size" in refusal.error.message
    assert refusal.error.retry_after
    assert bench.statistics.failures[RequestOutcome.REJECTED] == 1
    bench.models.answer("m0")
    bench.models.answer("m1")
    fourth = bench.ask()
    assert bench.told(fourth) == []


@pytest.mark.parametrize("limit", [0, 5])
@pytest.mark.parametrize("order", [(2, 1, 0), (1, 2, 0), (0, 2, 1), (0, 1, 2), (2, 0, 1)])
def test_responses_of_a_stream_keep_their_order(order: tuple[int, ...], limit: int) -> None:
    bench = Bench(*CHAIN, decoupled=0, limit=limit)
    request = bench.ask()
    (stream,) = bench.models.asked
    answer = ResponseHeader("m0", "1", [SPEC])
    for number in range(3):
        stream.respond(InferenceResponse(answer, [b"%d" % number]), number == 2)
    later = bench.models.asked[1:]
    assert [each.data for each in later] == [[b"0"], [b"1"], [b"2"]]
    for count, number in enumerate(order, 1):
        later[number].respond(InferenceResponse(answer, [b"%d" % number]))
        whole = next(length for length in range(4) if length not in order[:count])
        assert bench.told(request) == [[b"%d" % each] for each in range(whole)]
    assert bench.ensemble.in_flight == 0
    assert [final for asked, _, final in bench.caller.answers if asked is request] == [False, False, True]


def test_a_response_that_is_dropped_holds_up_none_behind_it() -> None:
    bench = Bench(*CHAIN, decoupled=0)
    request = bench.ask()
    (stream,) = bench.models.asked
    answer = ResponseHeader("m0", "1", [SPEC])
    for number in range(3):
        stream.respond(InferenceResponse(answer, [b"%d" % number]), False)
    first, second, third = bench.models.asked[1:]
    third.respond(InferenceResponse(answer, [b"2"]))
    second.respond(EMPTY)
    assert bench.told(request) == []
    first.respond(InferenceResponse(answer, [b"0"]))
    assert bench.told(request) == [[b"0"], [b"2"]]
    stream.respond(EMPTY)
    assert bench.ensemble.in_flight == 0
