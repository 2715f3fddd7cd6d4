"""Before the queue of a model version: requests are let in, wait, or are refused, as a gate decides.

What it decides is done here: requests are kept, timers are set, clients that go are told of. Once a request is let in,
its answer passes by on its way back, so that the gate hears how it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Final

from nerite.admission import refusals
from nerite.admission.controller import AdmissionController
from nerite.admission.estimates import EngineStatistics, TokenRatio
from nerite.admission.policy import EVERYBODY
from nerite.admission.ticket import AdmissionTicket, Admit, Refuse, RefusedTicket, TicketEnding
from nerite.cache.frontend import RequestQueueInterface
from nerite.core.engine_report import EngineReport, RequestEnded, RequestProgress
from nerite.core.errors import Cancelled, InvalidArgument, NeriteError, TooLarge, TooLate
from nerite.core.execution_observer import ForwardingSink
from nerite.core.failures import report
from nerite.core.model_calls import first_of
from nerite.core.request import MIXED, Caller, CancelReason, InferenceRequest, ReplySink, with_request_id
from nerite.core.response import InferenceResponse
from nerite.dispatch.busy_poll import LoopTimer
from nerite.instances.instance import ModelInstance
from nerite.llm.demand import IMAGE_TOKENS, Demand, demand, limit
from nerite.llm.request import MOST_SEQUENCES
from nerite.observability.statistics import RequestOutcome, VersionStatistics
from nerite.scheduling.load_shedding import LoadShedder

_now = time.monotonic_ns
_NOBODY = Caller(EVERYBODY)


class AdmissionQueue:
    """A queue with a gate before it. For the loop's thread only."""

    def __init__(
        self,
        gate: AdmissionController,
        queue: RequestQueueInterface,
        enter: Callable[[InferenceRequest], None],
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        """``enter`` takes a request that is let in, and brings it into the ``queue``."""
        self.gate = gate
        self._queue = queue
        self._enter = enter
        self._statistics = statistics
        self._loop = loop
        self._requests: dict[AdmissionTicket, InferenceRequest] = {}
        """Those that wait here."""
        self._tickets: dict[InferenceRequest, AdmissionTicket] = {}
        """The same, the other way."""
        self._looking = False
        self._alarm = LoopTimer(loop, self._look)
        """Rings when the gate wants to be asked again."""
        self._on_drained: list[Callable[[], None]] = []
        self.on_late: Callable[[InferenceRequest], None] = _ignored
        """Called with a request that was let in and is cut now, because its deadline has passed."""

    @property
    def pending(self) -> int:
        """Requests that wait, here or for an instance."""
        return self._queue.pending + len(self._requests)

    @property
    def in_flight(self) -> int:
        """Requests that wait, run, or have not had their last response."""
        return self._queue.in_flight + len(self._requests)

    def submit(self, request: InferenceRequest) -> None:
        """Let a request in, now or later, or refuse it."""
        ticket = self._ticket(request)
        if ticket is None:
            self._enter(request)
            return
        try:
            decision = self.gate.offer(ticket, _now())
            if isinstance(decision, Admit):
                self._let_in(ticket, request)
            elif isinstance(decision, Refuse):
                self._refuse(request, decision.refusal.as_error())
            else:
                self._requests[ticket] = request
                self._tickets[request] = ticket
                request.on_cancel = self._cancelled
                self._refuse_all(decision.displaced)
                self._alarm.set(self.gate.next_time())
        except Exception as error:
            self._failed(ticket, request, error)

    def _failed(self, ticket: AdmissionTicket, request: InferenceRequest, error: Exception) -> None:
        """End a request after an exception on its way in, and free what the gate holds for it."""
        failure = report("admission", error, f"of model '{self.gate.model}'", request.id)
        if self._tickets.pop(request, None) is not None:
            del self._requests[ticket]
        admitted = isinstance(request.sink, AdmittedSink) and request.sink.ticket is ticket
        request.respond(InferenceResponse.failed(failure))
        if not admitted:  # else the answer has passed, and the gate knows
            self._end(ticket)

    def _end(self, ticket: AdmissionTicket) -> None:
        """Have the gate forget a ticket whose request is over."""
        now = _now()
        try:
            if not self.gate.withdraw(ticket, now):
                self.gate.finished(ticket, TicketEnding.FAILED, now)
        except Exception as error:
            report("admission", error, f"of model '{self.gate.model}'")

    def when_drained(self, call: Callable[[], None]) -> None:
        """Call once nothing waits or runs any more: at once, if so now. No more requests come."""
        if self._requests:
            self._on_drained.append(call)
        else:
            self._queue.when_drained(call)

    def abandon(self, error: NeriteError) -> None:
        """Answer everything that waits with ``error``. What runs, runs on."""
        for request in [self._forget(each.ticket) for each in self.gate.drain(_now())]:
            self._statistics.failed(RequestOutcome.OTHER, request.arrived_ns)
            request.respond(InferenceResponse.failed(error))
        self._queue.abandon(error)
        self._check_drained()

    def look_soon(self) -> None:
        """Look in the next turn of the loop whether somebody may be let in."""
        if not self._looking and self._requests:
            self._looking = True
            self._loop.call_soon(self._look)

    def stop(self, request: InferenceRequest, passage: AdmittedSink, error: NeriteError) -> None:
        """End a request that was let in, and answer it with ``error``."""
        passage.instead = response = InferenceResponse.failed(error)
        request.cancel(CancelReason.TOO_LATE)  # whoever has it may answer at once
        request.respond(response)

    def passed(
        self, ticket: AdmissionTicket, request: InferenceRequest, response: InferenceResponse, final: bool
    ) -> None:
        """Take note of an answer to a request that was let in, which has left."""
        now = _now()
        try:
            if response.error is None:
                self.gate.started(ticket, now)
            if final:
                self.gate.finished(ticket, _ending(request, response.error), now)
        except Exception as error:
            report("admission", error, f"of model '{self.gate.model}'", request.id)
        if final:
            self.look_soon()

    def _look(self) -> None:
        self._looking = False
        try:
            due = self.gate.due(_now())
        except Exception as error:
            for ticket, request in [*self._requests.items()]:
                self._failed(ticket, request, error)
            return
        # All of them, before the first hears of it: a client that is answered may cancel others.
        admitted = [(ticket, self._forget(ticket)) for ticket in due.admitted]
        self._refuse_all(due.refused)
        for ticket, request in admitted:
            try:
                self._let_in(ticket, request)
            except Exception as error:
                self._failed(ticket, request, error)
        self._alarm.set(self.gate.next_time())
        self._check_drained()

    def _ticket(self, request: InferenceRequest) -> AdmissionTicket | None:
        """Return the ticket of a request; None for one that goes in anyway, as another needs it to go on."""
        if request.caused:
            return None
        caller = caller_of(request)
        return AdmissionTicket(
            caller.tenant,
            sum(map(len, request.data)),
            wanted_class=caller.wanted_class,
            deadline=deadline_of(request),
            retry=caller.retry,
        )

    def _let_in(self, ticket: AdmissionTicket, request: InferenceRequest) -> None:
        passage = request.sink = AdmittedSink(self, ticket, request.sink)
        if ticket.deadline is not None:
            left = max(0, ticket.deadline - _now()) / 1e9
            passage.timer = self._loop.call_later(left, self._too_late, request, passage)
        self._enter(request)

    def _too_late(self, request: InferenceRequest, passage: AdmittedSink) -> None:
        self.on_late(request)
        ticket = passage.ticket
        offered, end = ticket.offered_at, ticket.deadline or 0
        self.stop(request, passage, refusals.late_refusal(end - offered, float(_now() - offered)).as_error())

    def _forget(self, ticket: AdmissionTicket) -> InferenceRequest:
        request = self._requests.pop(ticket)
        del self._tickets[request]
        request.on_cancel = None
        return request

    def _refuse_all(self, refused: Iterable[RefusedTicket]) -> None:
        for request, refusal in [(self._forget(each.ticket), each.refusal) for each in refused]:
            self._refuse(request, refusal.as_error())

    def _refuse(self, request: InferenceRequest, error: NeriteError) -> None:
        if not isinstance(error, InvalidArgument | TooLarge):  # what is the caller's own mistake counts nowhere
            self._statistics.failed(RequestOutcome.NOT_LET_IN, request.arrived_ns)
        request.respond(InferenceResponse.failed(error))

    def _cancelled(self, request: InferenceRequest) -> None:
        ticket = self._tickets[request]
        self.gate.withdraw(ticket, _now())
        self._forget(ticket)
        self._statistics.failed(RequestOutcome.CANCELED, request.arrived_ns)
        request.respond(InferenceResponse.failed(Cancelled("")))
        self.look_soon()  # it may have stood before others that fit
        self._check_drained()

    def _check_drained(self) -> None:
        if self._on_drained and not self._requests:
            waiting, self._on_drained = self._on_drained, []
            for call in waiting:
                self._queue.when_drained(call)


class AdmittedSink(ForwardingSink):
    """Takes the place of a request's sink, so that the turnstile sees the answers."""

    __slots__ = ("_admission_queue", "instead", "ticket", "timer")

    def __init__(self, admission_queue: AdmissionQueue, ticket: AdmissionTicket, sink: ReplySink) -> None:
        super().__init__(sink)
        self._admission_queue = admission_queue
        self.ticket = ticket
        self.instead: InferenceResponse | None = None
        """The last response, whatever comes as the last."""
        self.timer: asyncio.TimerHandle | None = None

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Pass a response on, and tell of it."""
        if final:
            if self.timer is not None:
                self.timer.cancel()
            response = self.instead or response
        self._sink.respond(request, response, final)
        self._admission_queue.passed(self.ticket, request, response, final)


def caller_of(request: InferenceRequest) -> Caller:
    """Return who asks; where another request causes one, whoever asks that."""
    caller = first_of(request).header.caller
    return _NOBODY if caller is None or caller is MIXED else caller


def deadline_of(request: InferenceRequest) -> int | None:
    """Return when nobody waits for the answer any more; None for never."""
    first = first_of(request)
    patience, timeout = caller_of(first).patience_ns, request.header.timeout_us * 1000
    ends = [first.arrived_ns + patience] if patience else []
    return min([*ends, request.arrived_ns + timeout] if timeout else ends, default=None)


def _ending(request: InferenceRequest, error: NeriteError | None) -> TicketEnding:
    if isinstance(error, TooLate):
        return TicketEnding.DEADLINE
    if request.cancelled or isinstance(error, Cancelled):
        return TicketEnding.CANCELLED
    return TicketEnding.COMPLETE if error is None else TicketEnding.FAILED


def _ignored(_request: InferenceRequest) -> None:
    """Take no note of a request that is cut."""


# The turnstile of a model whose engine generates tokens: it hears from the engine what was guessed before.
#
# A prompt is counted by the engine, when the request is in. Until then its tokens are estimated from its bytes and
# the number of its images, by what those before it had; then the estimate is put right, and who turns out to be too
# long is refused after all. As long as there is no engine those that wait go on waiting.

_ENDINGS: Final = {
    RequestEnded.STOP: TicketEnding.COMPLETE,
    RequestEnded.LENGTH: TicketEnding.COMPLETE,
    RequestEnded.CANCELLED: TicketEnding.CANCELLED,
    RequestEnded.TOO_LATE: TicketEnding.DEADLINE,
    RequestEnded.FAILED: TicketEnding.FAILED,
}


class EngineAdmissionQueue(AdmissionQueue):
    """Before the queue of such a model. For the loop's thread only."""

    def __init__(
        self,
        gate: AdmissionController,
        queue: RequestQueueInterface,
        enter: Callable[[InferenceRequest], None],
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
        admission: LoadShedder | None,
    ) -> None:
        """``admission`` bounds the queue, if no policy does."""
        super().__init__(gate, queue, enter, statistics, loop)
        self._admission = admission
        self._ratio = TokenRatio()
        self._image_ratio = TokenRatio(IMAGE_TOKENS)
        self._reports: dict[ModelInstance, EngineReport] = {}
        """The last of each engine that there is."""
        self._begun = 0
        """Requests that have been let in."""

    def submit(self, request: InferenceRequest) -> None:
        """Let a request in, now or later, or refuse it."""
        admission = self._admission
        if admission is not None and not (admission.grant(self.gate.waiting, self._begun, _now()) or request.caused):
            self._refuse(request, with_request_id(admission.refusal(), request.id))
        else:
            super().submit(request)

    def reported(self, instance: ModelInstance, report: EngineReport | None) -> None:
        """Take in what an engine says of itself; None: it has died."""
        if report is None:
            self._reports.pop(instance, None)
            return
        self._reports[instance] = report
        reports = self._reports.values()
        total, free = sum(each.total_blocks for each in reports), sum(each.free_blocks for each in reports)
        most = [each.most_sequences for each in reports]
        self.gate.limit_running(sum(most) if all(most) else 0)
        now = _now()
        for progress in report.progress:
            passage = progress.request.sink
            if isinstance(passage, AdmittedSink) and isinstance(passage.ticket, PromptTicket):
                self._progressed(passage, passage.ticket, progress, now)
        self.gate.tell(EngineStatistics(total, free, report.block_size))
        self.look_soon()

    def set_ready(self, ready: bool) -> None:
        """Let nobody in as long as there is no engine that could take them up."""
        self.gate.set_ready(ready, _now())
        self.look_soon()

    def _progressed(self, passage: AdmittedSink, ticket: PromptTicket, progress: RequestProgress, now: int) -> None:
        gate, request = self.gate, progress.request
        if request.cancelled:
            gate.gone(ticket)
        if progress.begun is not None:
            ticket.cached = progress.begun.cached_tokens
            tokens, of_images = progress.begun.prompt_tokens, progress.begun.image_tokens
            self._ratio.note(ticket.demand.prompt_bytes, tokens - of_images)
            self._image_ratio.note(ticket.demand.images, of_images)
            refusal = gate.correct(ticket, tokens, now)
            if refusal is not None:
                self.stop(request, passage, refusal.as_error())
                return
        if progress.tokens:
            gate.started(ticket, now, ticket.cached)
            gate.progressed(ticket, progress.tokens, now)
        if progress.ended is not None:
            gate.finished(ticket, _ENDINGS[progress.ended], now)

    def _ticket(self, request: InferenceRequest) -> PromptTicket:
        runs = max((report.most_sequences for report in self._reports.values()), default=0)
        asked = demand(request, self.gate.most_output, min(runs or MOST_SEQUENCES, MOST_SEQUENCES))
        return PromptTicket(request, asked, self._ratio, self._image_ratio)

    def _let_in(self, ticket: AdmissionTicket, request: InferenceRequest) -> None:
        assert isinstance(ticket, PromptTicket)
        self._begun += 1
        if self.gate.most_output and not ticket.demand.most:
            limit(request, max(self.gate.most_output // ticket.sequences, 1))
        super()._let_in(ticket, request)


class PromptTicket(AdmissionTicket):
    """That of a request whose prompt nobody has counted."""

    __slots__ = ("cached", "demand")

    def __init__(self, request: InferenceRequest, asked: Demand, ratio: TokenRatio, image_ratio: TokenRatio) -> None:
        caller = caller_of(request)
        self.demand = asked
        self.cached = 0
        """Tokens of the prompt that the engine had computed before."""
        super().__init__(
            caller.tenant,
            ratio.expected(asked.prompt_bytes) + image_ratio.expected(asked.images),
            asked.most,
            wanted_class=caller.wanted_class,
            deadline=deadline_of(request),
            retry=caller.retry and not request.caused,
            caused=request.caused,
            least=ratio.least(asked.prompt_bytes) + image_ratio.least(asked.images),
            sequences=asked.sequences,
            priority=asked.priority,
            repeats=request.repeats,
        )
