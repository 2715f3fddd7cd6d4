"""Scheduler of an ensemble version: executes its steps as requests to other models instead of having instances.

Each step is a separate request that passes through ``InferenceServer.infer`` like a client's. Steps of different
requests that start in the same loop turn reach their model together and are batched there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import TypeAlias

from nerite.core.byte_budget import ENSEMBLES, Memo
from nerite.core.errors import Cancelled, Internal, InvalidArgument, NeriteError
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes
from nerite.core.failures import report
from nerite.core.model_calls import ChildRequest
from nerite.core.request import InferenceRequest, RequestHeader, with_request_id
from nerite.core.response import EMPTY, InferenceResponse
from nerite.core.tensor import TensorData, read_only
from nerite.dispatch.busy_poll import LoopTimer
from nerite.dispatch.deadlocks import break_deadlocks
from nerite.dispatch.interface import ServerEntry
from nerite.observability.statistics import RequestOutcome, VersionStatistics
from nerite.scheduling.decider import BatchReason
from nerite.scheduling.ensemble import (
    EnsembleAnswer,
    EnsembleGraph,
    EnsembleProgress,
    EnsembleProgressCache,
    InflightLimit,
    StepStart,
    explain_step_failure,
)
from nerite.scheduling.load_shedding import LoadShedder
from nerite.scheduling.stream_order import StreamOrder, StreamPlace


class StepWave:
    """Tensors that belong together: all of a request, or those derived from one response of a decoupled step."""

    __slots__ = ("data", "place", "situation")

    def __init__(
        self,
        data: Sequence[TensorData],
        situation: EnsembleProgress,
        place: StreamPlace[InferenceResponse] | None = None,
    ) -> None:
        self.place = place
        """Where its answer stands among those of the request; None if the ensemble has one response."""
        self.data = [data]
        """Tensor data by message: the caller's request first, then the responses of steps."""
        self.situation = situation


class StepRequest(ChildRequest):
    """Request to the model of a step."""

    __slots__ = ("place", "reached", "run", "start", "wave")

    def __init__(self, run: EnsembleRun, wave: StepWave, start: StepStart) -> None:
        data = wave.data
        inputs = [data[whose][which] for whose, which in start.places]
        for which in start.shared:
            inputs[which] = read_only(inputs[which])
        # Skip the constructor of the parent class for speed: this runs for each step of each request.
        InferenceRequest.__init__(self, start.header, inputs, run, monotonic_ns(), run.request.id)
        self.parent = run.request
        self.run = run
        self.start = start
        self.reached = start.step
        """Step that the response belongs to: a later one if the worker has run fused steps."""
        self.wave = wave
        self.place: StreamPlace[InferenceResponse] | None = None
        """The end of the stream that it receives; None if its response belongs to the wave."""


class EnsembleRun(ExecutionObserver):
    """One request to an ensemble: receives the responses of steps and starts the steps that become possible."""

    __slots__ = (
        "_answered",
        "_ensemble",
        "_infer_ns",
        "_input_ns",
        "_open",
        "_order",
        "_output_ns",
        "_queue_ns",
        "fusible",
        "over",
        "request",
        "waiting",
    )

    def __init__(self, ensemble: Ensemble, request: InferenceRequest) -> None:
        self.request = request
        self.over = False
        """The request has had its final response."""
        self.fusible = ensemble.fuses(request)
        """Steps may run one after the other in a worker, without returning here in between."""
        self.waiting = 0
        """Number of steps that wait for an in-flight limit."""
        self._ensemble = ensemble
        self._open: set[StepRequest] = set()
        self._answered = False
        self._order: StreamOrder[InferenceResponse] | None = StreamOrder() if ensemble.decoupled else None
        """The order in which responses leave; None if there is one."""
        self._queue_ns = self._input_ns = self._infer_ns = self._output_ns = 0

    @property
    def under_way(self) -> Sequence[InferenceRequest]:
        """Steps that have started and have not had their final response."""
        return tuple(self._open)

    @property
    def stuck(self) -> bool:
        """Whether the request is unanswered although no step runs or waits."""
        return not (self.over or self._open or self.waiting)

    def begin(self, beginning: EnsembleProgress) -> None:
        """Start the steps that need only the caller's inputs."""
        self.request.on_cancel = self._cancelled
        place = None if self._order is None else self._order.root
        self._follow(StepWave(self.request.data, beginning, place), None)
        self._check_end()

    def ask(self, wave: StepWave, start: StepStart) -> None:
        """Send a step's request to its model. Tensor data is passed on without a copy."""
        child = StepRequest(self, wave, start)
        self._open.add(child)
        if start.step.decoupled and self._order is not None and wave.place is not None:
            child.place = self._order.begin_stream(wave.place)
            wave.place.open -= 1
        self._ensemble.server.infer(child, "")

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Process a response of a step and continue from there."""
        assert isinstance(request, StepRequest)
        if final:
            self._open.discard(request)
            if self._ensemble.limited:
                self._ensemble.left(request)
        if self.over:
            return
        if response.error is not None:
            self._fail(request, response.error)
            return
        if final and self._order is not None:
            ended = request.place or request.wave.place
            assert ended is not None
            ended.open -= 1
        if response.header is not None:
            step = request.reached
            wave = request.wave
            situation = wave.situation.after(step, response.header)
            if step.decoupled:
                place = None
                if self._order is not None and request.place is not None:
                    place = self._order.add_response(request.place)
                wave = StepWave(response.data, situation, place)
            else:
                wave.data.append(response.data)
                wave.situation = situation
            self._follow(wave, None if final else request)
        if final and not self.over and self._order is not None:
            self._release(self._order)
        if final and not self.over:
            if not self._open:
                self._check_end()
            elif self.request.caused:
                # It now depends only on the open steps, which may in turn wait for it.
                break_deadlocks(self.under_way[0])

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Add the times of a step to the totals. Decoupled steps are added by response, in ``parted``."""
        step = request.origin
        assert isinstance(step, StepRequest)
        if timings is not None and not step.start.step.decoupled:
            self._add(request, timings)

    def add(self, timings: ExecutionTimes) -> None:
        """Add the times of an execution to the totals."""
        self._input_ns += timings.inputs_ready_ns - timings.started_ns
        self._infer_ns += timings.computed_ns - timings.inputs_ready_ns
        self._output_ns += timings.ended_ns - timings.computed_ns

    def turned(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Add the times of one turn of an iterative step."""
        self.ran(request, timings)

    def composed(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Add the times of a step that is itself an ensemble."""
        if timings is not None:
            self._add(request, timings)

    def parted(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Add the times of one of several responses."""
        if timings is not None:
            self._add(request, timings)

    def fail(self, error: NeriteError, outcome: RequestOutcome) -> None:
        """Answer the request with ``error`` and cancel its running steps."""
        self._stop()
        self._ensemble.failed(self, outcome)
        error.begun = True
        self.request.respond(InferenceResponse.failed(error))
        self._ensemble.over(self)

    def _add(self, request: InferenceRequest, timings: ExecutionTimes) -> None:
        self._queue_ns += timings.started_ns - request.queued_ns
        self.add(timings)

    def _follow(self, wave: StepWave, cause: StepRequest | None) -> None:
        """Start the steps, and send the response, of the state of ``wave``. ``cause`` may produce further states."""
        situation = wave.situation
        ensemble = self._ensemble
        place = wave.place
        if place is not None:
            place.open += len(situation.starts) + 1  # so that it stays, although steps may end at once
        for start in situation.starts:
            if not ensemble.limited or ensemble.admits(self, wave, start, cause):
                self.ask(wave, start)
                if self.over:
                    return
        if place is not None:
            place.open -= 1
        if situation.answer is not None:
            self._answer(wave, situation.answer)

    def _answer(self, wave: StepWave, answer: EnsembleAnswer) -> None:
        self._answered = True
        data = wave.data
        response = InferenceResponse(answer.header, [data[whose][which] for whose, which in answer.places])
        if self._order is None or wave.place is None:
            self._send(response, last=True)
        else:
            wave.place.answer = response
            self._release(self._order)

    def _release(self, order: StreamOrder[InferenceResponse]) -> None:
        """Send the responses whose turn it is."""
        responses = order.release()
        for count, response in enumerate(responses, 1):
            if self.over:  # the client has left meanwhile
                return
            self._send(response, last=order.complete and count == len(responses))

    def _send(self, response: InferenceResponse, *, last: bool) -> None:
        if last and not self._open and not self.waiting:
            self._end(response)
        else:
            self.request.on_pause = self._pause
            self.request.respond(response, False)

    def _check_end(self) -> None:
        """End the request if no step runs or waits."""
        if self._open or self.waiting or self.over:
            return
        if self._answered or self._ensemble.decoupled:
            self._end(EMPTY)
        else:
            self.fail(self._ensemble.deadlock(self.request), RequestOutcome.OTHER)

    def _end(self, response: InferenceResponse) -> None:
        self.over = True
        self._ensemble.ran(self, self._queue_ns, self._input_ns, self._infer_ns, self._output_ns)
        self.request.respond(response)
        self._ensemble.over(self)

    def _fail(self, request: StepRequest, error: NeriteError) -> None:
        if request.reached is request.start.step:  # errors of later fused steps are explained by the worker
            error = self._ensemble.explained(request, error)
        self.fail(error, RequestOutcome.OTHER)

    def _cancelled(self, request: InferenceRequest) -> None:
        self.fail(Cancelled(""), RequestOutcome.CANCELED)

    def _pause(self, request: InferenceRequest, paused: bool) -> None:
        for child in tuple(self._open):
            child.pause(paused)

    def _stop(self) -> None:
        self.over = True
        for child in tuple(self._open):
            child.cancel()


_log = logging.getLogger("nerite.execution")

_Waiting: TypeAlias = tuple[EnsembleRun, StepWave, StepStart]


class Ensemble:
    """Scheduler of one version of an ensemble. Used from the loop's thread only."""

    def __init__(
        self,
        graph: EnsembleGraph,
        server: ServerEntry,
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
        admission: LoadShedder,
        *,
        decoupled: bool,
        max_inflight: int,
    ) -> None:
        """``max_inflight``: maximum number of concurrent requests of each step; 0 for no limit.

        ``admission`` bounds the number of concurrent requests to the ensemble.
        """
        self.server = server
        self.decoupled = decoupled
        self._graph = graph
        self._name = graph.signature.model_name
        self._statistics = statistics
        self._load_shedder = admission
        self._done = 0
        """Number of requests that have had their final response."""
        self._beginnings: Memo[RequestHeader, EnsembleProgress] = Memo()
        self._runs: set[EnsembleRun] = set()
        self._inflight_limits = [InflightLimit[_Waiting](max_inflight) for _ in graph.steps] if max_inflight else []
        self.limited = bool(self._inflight_limits)
        """Steps have an in-flight limit: call ``admits`` before a step starts, and ``left`` when it is done."""
        self._paused: list[set[StepRequest]] = [set() for _ in self._inflight_limits]
        """By step: decoupled requests paused because their next responses would have to wait for it."""
        self._timer = LoopTimer(loop, self._start_overdue)
        self._notify_observers = False
        self.sound = True
        """The last audit had no findings."""
        self._on_drained: list[Callable[[], None]] = []

    @property
    def pending(self) -> int:
        """Number of steps that wait for an in-flight limit."""
        return sum(limit.waiting for limit in self._inflight_limits)

    @property
    def waiting(self) -> Mapping[int, int]:
        """Always empty: requests wait in the queues of the steps' models."""
        return {}

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Always empty: batches are formed by the steps' models."""
        return {}

    @property
    def in_flight(self) -> int:
        """Number of requests that have not had their final response."""
        return len(self._runs)

    def submit(self, request: InferenceRequest) -> None:
        """Execute the steps for a request; its answer comes through ``request.respond``.

        Load shedding applies only here, not to the steps: a request that has started is not rejected halfway.
        """
        if not request.caused and not self._load_shedder.grant(len(self._runs), self._done, monotonic_ns()):
            self._statistics.failed(RequestOutcome.REJECTED, request.arrived_ns)
            request.respond(InferenceResponse.failed(with_request_id(self._load_shedder.refusal(), request.id)))
            return
        beginning = self._beginnings.get(request.header)
        if beginning is None:
            beginning = EnsembleProgressCache(self._graph.plan(request.header.wanted), request.header).begin()
            ENSEMBLES.put(self._beginnings, request.header, beginning, beginning.footprint)
        run = EnsembleRun(self, request)
        self._runs.add(run)
        try:
            run.begin(beginning)
        except Exception as error:
            run.fail(report("ensemble", error, f"of model '{self._name}'", request.id), RequestOutcome.OTHER)

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call ``call`` once no request is in flight, possibly at once."""
        if self._runs:
            self._on_drained.append(call)
        else:
            call()

    def abandon(self, error: NeriteError) -> None:
        """Answer all requests in flight with ``error``, because the models will not complete them."""
        for run in tuple(self._runs):
            run.fail(error, RequestOutcome.OTHER)

    def hand_back(self, take: Callable[[InferenceRequest], bool], error: NeriteError) -> None:
        """Do nothing: requests wait in the queues of the steps' models."""

    def audit(self) -> list[str]:
        """Fail each unanswered request of which no step runs or waits; return a description of the findings."""
        stuck = [run for run in self._runs if run.stuck]
        for run in stuck:
            run.fail(Internal("the request was lost in the server, see its log: send it again"), RequestOutcome.OTHER)
        self.sound = not stuck
        return [f"ensemble '{self._name}': {len(stuck)} requests had no step under way"] if stuck else []

    def notify_observers(self) -> None:
        """Notify sinks that observe executions how their requests ran, from now on."""
        self._notify_observers = True

    def server_stops(self) -> None:
        """Do nothing: the steps' models are notified."""

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return the steps of ``request`` that are in flight."""
        return next((run.under_way for run in self._runs if run.request is request), ())

    def begun(self, request: InferenceRequest) -> bool:
        """Return False: no instance executes it, and its steps can be cancelled."""
        return False

    # Events of the runs

    def fuses(self, request: InferenceRequest) -> bool:
        """Return whether steps of a request may run one after the other in a worker."""
        return not (self.limited or (self._notify_observers and isinstance(request.sink, ExecutionObserver)))

    def admits(self, run: EnsembleRun, wave: StepWave, start: StepStart, cause: StepRequest | None) -> bool:
        """Return whether a step may start now; if not, queue it and pause ``cause`` until it starts."""
        number = start.step.number
        if self._inflight_limits[number].enter((run, wave, start), monotonic_ns()):
            return True
        run.waiting += 1
        if cause is not None and cause not in self._paused[number]:
            self._paused[number].add(cause)
            cause.pause(True)
        self._set_timer()
        return False

    def left(self, request: StepRequest) -> None:
        """Record that a step is done, and start the next waiting one."""
        number = request.start.step.number
        limit = self._inflight_limits[number]
        self._begin(limit.leave())
        if not limit.waiting:
            resumed, self._paused[number] = self._paused[number], set()
            for cause in resumed:
                cause.pause(False)

    def ran(self, run: EnsembleRun, queue: int, before: int, during: int, after: int) -> None:
        """Count an answered request; the times are sums over its steps."""
        request = run.request
        self._statistics.composed(request, queue, before, during, after, monotonic_ns())
        if self._notify_observers and isinstance(request.sink, ExecutionObserver):
            timings = ExecutionTimes()
            timings.started_ns = request.queued_ns + queue
            timings.inputs_ready_ns = timings.started_ns + before
            timings.computed_ns = timings.inputs_ready_ns + during
            timings.ended_ns = timings.computed_ns + after
            request.sink.composed(request, timings)

    def failed(self, run: EnsembleRun, outcome: RequestOutcome) -> None:
        """Count a request that failed."""
        self._statistics.failed(outcome, run.request.arrived_ns)
        if self._notify_observers and isinstance(run.request.sink, ExecutionObserver):
            run.request.sink.composed(run.request, None)

    def over(self, run: EnsembleRun) -> None:
        """Remove a request that has had its final response."""
        self._runs.discard(run)
        self._done += 1
        for limit in self._inflight_limits if run.waiting else ():
            limit.withdraw(lambda waiting: waiting[0] is run)
        if self._on_drained and not self._runs:
            drained, self._on_drained = self._on_drained, []
            for call in drained:
                call()

    # Errors

    def explained(self, request: StepRequest, error: NeriteError) -> NeriteError:
        """Return the error of a step for the caller: Triton's text, followed by the location of the step."""
        step = request.start.step
        try:
            version = self.server.find(step.model, step.version, "", step.namespace).label
        except NeriteError:  # possibly the reason for the error
            version = step.version or "latest"
        return explain_step_failure(error, self._name, step.number, step.model, version, request.header)

    def deadlock(self, request: InferenceRequest) -> NeriteError:
        """Return the error of a request of which some outputs were never produced."""
        return InvalidArgument(
            f"in ensemble '{self._name}', {request.label}unexpected deadlock, at least one output is not set while "
            "no more ensemble steps can be made\n    A model that is not decoupled ended a request without a response: "
            "it must send one for each request."
        )

    # Waiting

    def _begin(self, waiting: _Waiting | None) -> None:
        if waiting is not None:
            run, wave, start = waiting
            run.waiting -= 1
            run.ask(wave, start)

    def _start_overdue(self) -> None:
        """Start the steps that waited too long for their in-flight limit."""
        for number, limit in enumerate(self._inflight_limits):
            for waiting in limit.overdue(monotonic_ns()):
                _log.warning(
                    "ensemble '%s': a request waited 300 s for step %d (model '%s'), which has reached "
                    "max_inflight_requests, and is started anyway",
                    self._name,
                    number + 1,
                    waiting[2].step.model,
                    extra={"request_id": waiting[0].request.id},
                )
                self._begin(waiting)
        self._set_timer()

    def _set_timer(self) -> None:
        times = [at for limit in self._inflight_limits if (at := limit.wake_at()) is not None]
        self._timer.set(min(times, default=None))
