"""One request to an ensemble, on its way through the steps."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from nerite.core.child_request import ChildRequest
from nerite.core.errors import Cancelled, NeriteError
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest
from nerite.core.response import EMPTY, InferenceResponse
from nerite.core.tensor import Buffer
from nerite.core.witness import Witness
from nerite.execution.waits import relieve
from nerite.observability.statistics import Outcome
from nerite.scheduling.ensemble.situation import Answer, Situation, Start

if TYPE_CHECKING:
    from collections.abc import Sequence

    from nerite.execution.ensemble import Ensemble

_now = time.monotonic_ns


class Wave:
    """Tensors that belong together: all there are, or what follows from one response of a decoupled step."""

    __slots__ = ("data", "situation")

    def __init__(self, data: Sequence[Buffer], situation: Situation) -> None:
        self.data = [data]
        """By who brought it."""
        self.situation = situation


class StepRequest(ChildRequest):
    """What the model of a step is asked."""

    __slots__ = ("reached", "run", "start", "stretch", "wave")

    def __init__(self, run: EnsembleRun, wave: Wave, start: Start) -> None:
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
        self.stretch = start.stretch if run.goes_on else None
        self.wave = wave


class EnsembleRun(Witness):
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

    def begin(self, beginning: Situation) -> None:
        """Begin with the steps that need nothing but what the caller sent."""
        self.request.on_cancel = self._cancelled
        self._follow(Wave(self.request.data, beginning), None)
        self._check_end()

    def ask(self, wave: Wave, start: Start) -> None:
        """Ask the model of a step. The bytes are handed on as they are."""
        child = StepRequest(self, wave, start)
        self._open.add(child)
        self._ensemble.door.infer(child, "")

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
                wave = Wave(response.data, situation)
            else:
                wave.data.append(response.data)
                wave.situation = situation
            self._follow(wave, None if final else request)
        if final and not self.over:
            if not self._open:
                self._check_end()
            elif self.request.caused:
                # Now that it waits for these only, they may wait for it.
                relieve(self.under_way[0])

    def ran(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Add what a step took to what all of them took. Several responses are added one by one."""
        step = request.origin
        assert isinstance(step, StepRequest)
        if marks is not None and not step.start.step.decoupled:
            self._add(request, marks)

    def followed(self, marks: Marks) -> None:
        """Add what a step took that followed another in its worker."""
        self._input_ns += marks.inputs_ready_ns - marks.started_ns
        self._infer_ns += marks.computed_ns - marks.inputs_ready_ns
        self._output_ns += marks.ended_ns - marks.computed_ns

    def turned(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Add what one of the turns of a step took."""
        self.ran(request, marks)

    def composed(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Add what a step took that is an ensemble itself."""
        if marks is not None:
            self._add(request, marks)

    def parted(self, request: InferenceRequest, marks: Marks | None) -> None:
        """Add what one of several responses took."""
        if marks is not None:
            self._add(request, marks)

    def fail(self, error: NeriteError, outcome: Outcome) -> None:
        """Answer with ``error``, and give up what runs."""
        self._stop()
        self._ensemble.failed(self, outcome)
        error.begun = True
        self.request.respond(InferenceResponse.failed(error))
        self._ensemble.over(self)

    def _add(self, request: InferenceRequest, marks: Marks) -> None:
        self._queue_ns += marks.started_ns - request.queued_ns
        self._input_ns += marks.inputs_ready_ns - marks.started_ns
        self._infer_ns += marks.computed_ns - marks.inputs_ready_ns
        self._output_ns += marks.ended_ns - marks.computed_ns

    def _follow(self, wave: Wave, cause: StepRequest | None) -> None:
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

    def _answer(self, wave: Wave, answer: Answer) -> None:
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
            self.fail(self._ensemble.deadlock(self.request), Outcome.OTHER)

    def _end(self, response: InferenceResponse) -> None:
        self.over = True
        self._ensemble.ran(self, self._queue_ns, self._input_ns, self._infer_ns, self._output_ns)
        self.request.respond(response)
        self._ensemble.over(self)

    def _fail(self, request: StepRequest, error: NeriteError) -> None:
        if request.reached is request.start.step:  # of those that follow, the worker says what they were given
            error = self._ensemble.explained(request, error)
        self.fail(error, Outcome.OTHER)

    def _cancelled(self, request: InferenceRequest) -> None:
        self.fail(Cancelled(""), Outcome.CANCELED)

    def _pause(self, request: InferenceRequest, paused: bool) -> None:
        for child in tuple(self._open):
            child.pause(paused)

    def _stop(self) -> None:
        self.over = True
        for child in tuple(self._open):
            child.cancel()
