"""An ensemble: asks the models that it is put together from, in the place of instances of its own.

Each step is a request of its own that goes through the door, like a client's. Steps of several requests that are due in
one turn of the loop arrive at their model together, and are batched there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from nerite.core.byte_budget import ENSEMBLES, Memo
from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.internal_errors import report
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest, RequestHeader, labelled
from nerite.core.response import InferenceResponse
from nerite.core.witness import Witness
from nerite.execution.alarm import Alarm
from nerite.execution.door import Door
from nerite.execution.ensemble_run import EnsembleRun, StepRequest, Wave
from nerite.observability.statistics import Outcome, VersionStatistics
from nerite.scheduling.admission import Admission
from nerite.scheduling.ensemble.graph import Graph
from nerite.scheduling.ensemble.inflight_limit import InflightLimit
from nerite.scheduling.ensemble.link import explained
from nerite.scheduling.ensemble.situation import Course, Situation, Start
from nerite.scheduling.release import Release

_log = logging.getLogger("nerite.execution")
_now = time.monotonic_ns

_Waiting: TypeAlias = tuple[EnsembleRun, Wave, Start]


class Ensemble:
    """The scheduler of one version of an ensemble. For the loop's thread only."""

    def __init__(
        self,
        graph: Graph,
        door: Door,
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
        admission: Admission,
        *,
        decoupled: bool,
        most_inflight: int,
    ) -> None:
        """``most_inflight`` requests of each step may be under way at once; 0: any number.

        ``admission`` says how many may be under way in all.
        """
        self.door = door
        self.decoupled = decoupled
        self._graph = graph
        self._name = graph.signature.model_name
        self._statistics = statistics
        self._admission = admission
        self._done = 0
        """Requests that have had their last response."""
        self._beginnings: Memo[RequestHeader, Situation] = Memo()
        self._runs: set[EnsembleRun] = set()
        self._limits = [InflightLimit[_Waiting](most_inflight) for _ in graph.steps] if most_inflight else []
        self.limited = bool(self._limits)
        """Each step has a limit: it is to be asked whether one may begin, and told when one is done."""
        self._paused: list[set[StepRequest]] = [set() for _ in self._limits]
        """By step, the requests whose next responses would have to wait for it."""
        self._alarm = Alarm(loop, self._give_way)
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
    def releases(self) -> Mapping[Release, int]:
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
            self._statistics.failed(Outcome.REJECTED, request.arrived_ns)
            request.respond(InferenceResponse.failed(labelled(self._admission.refusal(), request.id)))
            return
        beginning = self._beginnings.get(request.header)
        if beginning is None:
            beginning = Course(self._graph, request.header).begin()
            ENSEMBLES.put(self._beginnings, request.header, beginning, beginning.footprint)
        run = EnsembleRun(self, request)
        self._runs.add(run)
        try:
            run.begin(beginning)
        except Exception as error:
            run.fail(report("ensemble", error, f"of model '{self._name}'", request.id), Outcome.OTHER)

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once nothing is under way any more: at once, if so now."""
        if self._runs:
            self._on_drained.append(call)
        else:
            call()

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that is under way with ``error``: the models will not go on with it."""
        for run in tuple(self._runs):
            run.fail(error, Outcome.OTHER)

    def audit(self) -> list[str]:
        """Fail each request of which no step runs and none is to begin; return how many there were, in words."""
        stuck = [run for run in self._runs if run.stuck]
        for run in stuck:
            run.fail(Internal("the request was lost in the server, see its log: send it again"), Outcome.OTHER)
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
        return not (self.limited or (self._tells and isinstance(request.sink, Witness)))

    def admits(self, run: EnsembleRun, wave: Wave, start: Start, cause: StepRequest | None) -> bool:
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
        if self._tells and isinstance(request.sink, Witness):
            marks = Marks()
            marks.started_ns = request.queued_ns + queue
            marks.inputs_ready_ns = marks.started_ns + before
            marks.computed_ns = marks.inputs_ready_ns + during
            marks.ended_ns = marks.computed_ns + after
            request.sink.composed(request, marks)

    def failed(self, run: EnsembleRun, outcome: Outcome) -> None:
        """Count a request that failed."""
        self._statistics.failed(outcome, run.request.arrived_ns)
        if self._tells and isinstance(run.request.sink, Witness):
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
            version = self.door.find(step.model, step.version, "", step.namespace).label
        except NeriteError:  # the very thing that went wrong, perhaps
            version = step.version or "latest"
        return explained(error, self._name, step.number, step.model, version, request.header)

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
