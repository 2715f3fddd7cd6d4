"""An ensemble: asks the models that it is put together from, in the place of instances of its own.

Each step is a request of its own that goes through the door, like a client's. Steps of several requests that are due in
one turn of the loop arrive at their model together, and are batched there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from nerite.core.byte_budget import ENSEMBLES, Memo
from nerite.core.errors import Cancelled, Internal, InvalidArgument, NeriteError
from nerite.core.execution_observer import ExecutionObserver, ExecutionTimes
from nerite.core.failures import report
from nerite.core.model_calls import ChildRequest
from nerite.core.request import InferenceRequest, RequestHeader, with_request_id
from nerite.core.response import EMPTY, InferenceResponse
from nerite.core.tensor import Buffer
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
)
from nerite.scheduling.fused_steps import explain_step_failure
from nerite.scheduling.load_shedding import LoadShedder

if TYPE_CHECKING:
    from collections.abc import Sequence

# One request to an ensemble, on its way through the steps.


_now = time.monotonic_ns


class StepWave:
    """Tensors that belong together: all there are, or what follows from one response of a decoupled step."""

    __slots__ = ("data", "situation")

    def __init__(self, data: Sequence[Buffer], situation: EnsembleProgress) -> None:
        self.data = [data]
        """By who brought it."""
        self.situation = situation


class StepRequest(ChildRequest):
    """What the model of a step is asked."""

    __slots__ = ("reached", "run", "start", "stretch", "wave")

    def __init__(self, run: EnsembleRun, wave: StepWave, start: StepStart) -> None:
        data = wave.data
        bytes_of = [data[whose][which] for whose, which in start.places]
        for which in start.shared:
            bytes_of[which] = memoryview(bytes_of[which]).toreadonly()
        # Not by way of the parent class: there is one of these for each step of each request.
        InferenceRequest.__init__(self, start.header, bytes_of, run, _now(), run.request.id)
        self.parent = run.request
        self.run = run
        self.start = start
        self.reached = start.step
        """The step whose answer comes: another one than was asked, if it could go on from there."""
        self.fused_segment = start.fused_segment if run.goes_on else None
        self.wave = wave


class EnsembleRun(ExecutionObserver):
    """Takes the answers of the steps, and begins the steps that they make possible."""

    __slots__ = (
        "_answered",
        "_ensemble",
        "_infer_ns",
        "_input_ns",
        "_open",
        "_output_ns",
        "_queue_ns",
        "goes_on",
        "over",
        "request",
        "waiting",
    )

    def __init__(self, ensemble: Ensemble, request: InferenceRequest) -> None:
        self.request = request
        self.over = False
        """Nothing more will be answered."""
        self.goes_on = ensemble.goes_on(request)
        """Steps may follow each other without coming by here."""
        self.waiting = 0
        """Steps that are held back for now."""
        self._ensemble = ensemble
        self._open: set[StepRequest] = set()
        self._answered = False
        self._queue_ns = self._input_ns = self._infer_ns = self._output_ns = 0

    @property
    def under_way(self) -> Sequence[InferenceRequest]:
        """The steps that have begun, and have not had their last answer."""
        return tuple(self._open)

    @property
    def stuck(self) -> bool:
        """Whether nothing more can come, and the request was not answered."""
        return not (self.over or self._open or self.waiting)

    def begin(self, beginning: EnsembleProgress) -> None:
        """Begin with the steps that need nothing but what the caller sent."""
        self.request.on_cancel = self._cancelled
        self._follow(StepWave(self.request.data, beginning), None)
        self._check_end()

    def ask(self, wave: StepWave, start: StepStart) -> None:
        """Ask the model of a step. The bytes are handed on as they are."""
        child = StepRequest(self, wave, start)
        self._open.add(child)
        self._ensemble.server.infer(child, "")

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take an answer of a step, and go on from there."""
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
        if response.header is not None:
            step = request.reached
            wave = request.wave
            situation = wave.situation.after(step, response.header)
            if step.decoupled:
                wave = StepWave(response.data, situation)
            else:
                wave.data.append(response.data)
                wave.situation = situation
            self._follow(wave, None if final else request)
        if final and not self.over:
            if not self._open:
                self._check_end()
            elif self.request.caused:
                # Now that it waits for these only, they may wait for it.
                break_deadlocks(self.under_way[0])

    def ran(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Add what a step took to what all of them took. Several responses are added one by one."""
        step = request.origin
        assert isinstance(step, StepRequest)
        if timings is not None and not step.start.step.decoupled:
            self._add(request, timings)

    def followed(self, timings: ExecutionTimes) -> None:
        """Add what a step took that followed another in its worker."""
        self._input_ns += timings.inputs_ready_ns - timings.started_ns
        self._infer_ns += timings.computed_ns - timings.inputs_ready_ns
        self._output_ns += timings.ended_ns - timings.computed_ns

    def turned(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Add what one of the turns of a step took."""
        self.ran(request, timings)

    def composed(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Add what a step took that is an ensemble itself."""
        if timings is not None:
            self._add(request, timings)

    def parted(self, request: InferenceRequest, timings: ExecutionTimes | None) -> None:
        """Add what one of several responses took."""
        if timings is not None:
            self._add(request, timings)

    def fail(self, error: NeriteError, outcome: RequestOutcome) -> None:
        """EnsembleAnswer with ``error``, and give up what runs."""
        self._stop()
        self._ensemble.failed(self, outcome)
        error.begun = True
        self.request.respond(InferenceResponse.failed(error))
        self._ensemble.over(self)

    def _add(self, request: InferenceRequest, timings: ExecutionTimes) -> None:
        self._queue_ns += timings.started_ns - request.queued_ns
        self._input_ns += timings.inputs_ready_ns - timings.started_ns
        self._infer_ns += timings.computed_ns - timings.inputs_ready_ns
        self._output_ns += timings.ended_ns - timings.computed_ns

    def _follow(self, wave: StepWave, cause: StepRequest | None) -> None:
        """Do what the situation of ``wave`` asks for. ``cause`` may bring more such situations."""
        situation = wave.situation
        ensemble = self._ensemble
        for start in situation.starts:
            if not ensemble.limited or ensemble.admits(self, wave, start, cause):
                self.ask(wave, start)
                if self.over:
                    return
        if situation.answer is not None:
            self._answer(wave, situation.answer)

    def _answer(self, wave: StepWave, answer: EnsembleAnswer) -> None:
        self._answered = True
        data = wave.data
        response = InferenceResponse(answer.header, [data[whose][which] for whose, which in answer.places])
        if not self._open and not self.waiting:
            self._end(response)
        else:
            self.request.on_pause = self._pause
            self.request.respond(response, False)

    def _check_end(self) -> None:
        """Find out whether anything can still come, and end if not."""
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
        if request.reached is request.start.step:  # of those that follow, the worker says what they were given
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
    """The scheduler of one version of an ensemble. For the loop's thread only."""

    def __init__(
        self,
        graph: EnsembleGraph,
        server: ServerEntry,
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
        admission: LoadShedder,
        *,
        decoupled: bool,
        most_inflight: int,
    ) -> None:
        """``most_inflight`` requests of each step may be under way at once; 0: any number.

        ``admission`` says how many may be under way in all.
        """
        self.server = server
        self.decoupled = decoupled
        self._graph = graph
        self._name = graph.signature.model_name
        self._statistics = statistics
        self._admission = admission
        self._done = 0
        """Requests that have had their last response."""
        self._beginnings: Memo[RequestHeader, EnsembleProgress] = Memo()
        self._runs: set[EnsembleRun] = set()
        self._limits = [InflightLimit[_Waiting](most_inflight) for _ in graph.steps] if most_inflight else []
        self.limited = bool(self._limits)
        """Each step has a limit: it is to be asked whether one may begin, and told when one is done."""
        self._paused: list[set[StepRequest]] = [set() for _ in self._limits]
        """By step, the requests whose next responses would have to wait for it."""
        self._alarm = LoopTimer(loop, self._give_way)
        self._tells = False
        self.sound = True
        """The last audit found nothing."""
        self._on_drained: list[Callable[[], None]] = []

    @property
    def pending(self) -> int:
        """Steps that are held back."""
        return sum(limit.waiting for limit in self._limits)

    @property
    def waiting(self) -> Mapping[int, int]:
        """Return nothing: requests wait for the models of the steps."""
        return {}

    @property
    def releases(self) -> Mapping[BatchReason, int]:
        """Return nothing: the models of the steps make batches."""
        return {}

    @property
    def in_flight(self) -> int:
        """Requests that have not had their last response."""
        return len(self._runs)

    def submit(self, request: InferenceRequest) -> None:
        """Take a request through the steps; its answer comes through ``request.respond``.

        The steps themselves are not refused for the length of a queue: what has begun is not given up.
        """
        if not request.caused and not self._admission.grant(len(self._runs), self._done, _now()):
            self._statistics.failed(RequestOutcome.REJECTED, request.arrived_ns)
            request.respond(InferenceResponse.failed(with_request_id(self._admission.refusal(), request.id)))
            return
        beginning = self._beginnings.get(request.header)
        if beginning is None:
            beginning = EnsembleProgressCache(self._graph, request.header).begin()
            ENSEMBLES.put(self._beginnings, request.header, beginning, beginning.footprint)
        run = EnsembleRun(self, request)
        self._runs.add(run)
        try:
            run.begin(beginning)
        except Exception as error:
            run.fail(report("ensemble", error, f"of model '{self._name}'", request.id), RequestOutcome.OTHER)

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once nothing is under way any more: at once, if so now."""
        if self._runs:
            self._on_drained.append(call)
        else:
            call()

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that is under way with ``error``: the models will not go on with it."""
        for run in tuple(self._runs):
            run.fail(error, RequestOutcome.OTHER)

    def audit(self) -> list[str]:
        """Fail each request of which no step runs and none is to begin; return how many there were, in words."""
        stuck = [run for run in self._runs if run.stuck]
        for run in stuck:
            run.fail(Internal("the request was lost in the server, see its log: send it again"), RequestOutcome.OTHER)
        self.sound = not stuck
        return [f"ensemble '{self._name}': {len(stuck)} requests had no step under way"] if stuck else []

    def tell_witnesses(self) -> None:
        """Tell sinks how their requests ran, from now on."""
        self._tells = True

    def server_stops(self) -> None:
        """Do nothing: its models are told."""

    def waits_for(self, request: InferenceRequest) -> Sequence[InferenceRequest]:
        """Return the steps of ``request`` that are under way."""
        return next((run.under_way for run in self._runs if run.request is request), ())

    def begun(self, request: InferenceRequest) -> bool:
        """Return False: no instance has it, and what the steps do can be given up."""
        return False

    # What the runs tell

    def goes_on(self, request: InferenceRequest) -> bool:
        """Return whether the steps of a request may follow each other in a worker, where they live together."""
        return not (self.limited or (self._tells and isinstance(request.sink, ExecutionObserver)))

    def admits(self, run: EnsembleRun, wave: StepWave, start: StepStart, cause: StepRequest | None) -> bool:
        """Return whether a step may begin now; else it begins when it may, and ``cause`` pauses until then."""
        number = start.step.number
        if self._limits[number].enter((run, wave, start), _now()):
            return True
        run.waiting += 1
        if cause is not None and cause not in self._paused[number]:
            self._paused[number].add(cause)
            cause.pause(True)
        self._set_alarm()
        return False

    def left(self, request: StepRequest) -> None:
        """Take note that a step is done with a request."""
        number = request.start.step.number
        limit = self._limits[number]
        self._begin(limit.leave())
        if not limit.waiting:
            resumed, self._paused[number] = self._paused[number], set()
            for cause in resumed:
                cause.pause(False)

    def ran(self, run: EnsembleRun, queue: int, before: int, during: int, after: int) -> None:
        """Count a request that was answered; the times are sums over its steps."""
        request = run.request
        self._statistics.composed(request, queue, before, during, after, _now())
        if self._tells and isinstance(request.sink, ExecutionObserver):
            timings = ExecutionTimes()
            timings.started_ns = request.queued_ns + queue
            timings.inputs_ready_ns = timings.started_ns + before
            timings.computed_ns = timings.inputs_ready_ns + during
            timings.ended_ns = timings.computed_ns + after
            request.sink.composed(request, timings)

    def failed(self, run: EnsembleRun, outcome: RequestOutcome) -> None:
        """Count a request that failed."""
        self._statistics.failed(outcome, run.request.arrived_ns)
        if self._tells and isinstance(run.request.sink, ExecutionObserver):
            run.request.sink.composed(run.request, None)

    def over(self, run: EnsembleRun) -> None:
        """Forget a request that has had its last response."""
        self._runs.discard(run)
        self._done += 1
        for limit in self._limits if run.waiting else ():
            limit.withdraw(lambda waiting: waiting[0] is run)
        if self._on_drained and not self._runs:
            drained, self._on_drained = self._on_drained, []
            for call in drained:
                call()

    # Errors

    def explained(self, request: StepRequest, error: NeriteError) -> NeriteError:
        """Return the error of a step as the caller is told: Triton's words, and then where it was."""
        step = request.start.step
        try:
            version = self.server.find(step.model, step.version, "", step.namespace).label
        except NeriteError:  # the very thing that went wrong, perhaps
            version = step.version or "latest"
        return explain_step_failure(error, self._name, step.number, step.model, version, request.header)

    def deadlock(self, request: InferenceRequest) -> NeriteError:
        """Return the error of a request some of whose outputs were never made."""
        return InvalidArgument(
            f"in ensemble '{self._name}', {request.label}unexpected deadlock, at least one output is not set while "
            "no more ensemble steps can be made\n    A model without several responses ended without one: let each of "
            "its requests have one."
        )

    # Waiting

    def _begin(self, waiting: _Waiting | None) -> None:
        if waiting is not None:
            run, wave, start = waiting
            run.waiting -= 1
            run.ask(wave, start)

    def _give_way(self) -> None:
        """Let those begin that waited too long."""
        for number, limit in enumerate(self._limits):
            for waiting in limit.overdue(_now()):
                _log.warning(
                    "ensemble '%s': a request waited 300 s for step %d (model '%s'), which has as many under way as "
                    "max_inflight_requests allows, and begins all the same",
                    self._name,
                    number + 1,
                    waiting[2].step.model,
                    extra={"request_id": waiting[0].request.id},
                )
                self._begin(waiting)
        self._set_alarm()

    def _set_alarm(self) -> None:
        times = [at for limit in self._limits if (at := limit.wake_at()) is not None]
        self._alarm.set(min(times, default=None))
