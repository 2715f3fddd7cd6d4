"""Admission queues: carry out the decisions of an ``AdmissionController`` in front of the queue of a model version.

They hold the waiting requests, set the timers and report cancellations to the controller. The sink of an admitted
request is wrapped so that the controller sees its responses. ``EngineAdmissionQueue`` is the variant for LLMs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from time import monotonic_ns
from typing import TYPE_CHECKING, Final

from nerite.admission import refusals
from nerite.admission.estimates import EngineStatistics, TokenRatio
from nerite.admission.policy import IDLE
from nerite.admission.ticket import AdmissionTicket, Admit, AwaitLease, Refuse, RefusedTicket, TicketEnding, TicketState
from nerite.core.engine_report import EngineReport, RequestEnded, RequestProgress
from nerite.core.errors import (
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    NeriteError,
    NoIdleRoom,
    Overloaded,
    TooLarge,
)
from nerite.core.execution_observer import ForwardingSink
from nerite.core.failures import report
from nerite.core.model_calls import first_of
from nerite.core.queue_stage import FrontStage, QueueStage
from nerite.core.request import (
    EVERYBODY,
    MIXED,
    Caller,
    CancelReason,
    InferenceRequest,
    ReplySink,
    with_request_id,
)
from nerite.core.response import InferenceResponse
from nerite.dispatch.busy_poll import LoopTimer
from nerite.llm.demand import IMAGE_TOKENS, Demand, demand, limit
from nerite.llm.sampling_parameters import MAX_SEQUENCES
from nerite.observability.statistics import RequestOutcome, VersionStatistics

if TYPE_CHECKING:
    from nerite.admission.controller import AdmissionController
    from nerite.instances.instance import ModelInstance
    from nerite.scheduling.load_shedding import LoadShedder

_ANONYMOUS = Caller(EVERYBODY)


class AdmissionQueue(FrontStage):
    """Stage of requests that wait for admission to a model version. Used from the loop's thread only."""

    def __init__(
        self,
        controller: AdmissionController,
        following: QueueStage,
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(following)
        self.controller = controller
        self._statistics = statistics
        self._loop = loop
        self._requests: dict[AdmissionTicket, InferenceRequest] = {}
        """Requests that wait for admission, by ticket."""
        self._tickets: dict[InferenceRequest, AdmissionTicket] = {}
        """Tickets of the waiting requests: the inverse of ``_requests``."""
        self._idle: dict[AdmissionTicket, tuple[InferenceRequest, AdmittedSink]] = {}
        """Admitted requests of the idle class."""
        self._leasing: list[AdmissionTicket] = []
        """Tickets to offer again once Redis has been asked for quota."""
        self._check_scheduled = False
        self._timer = LoopTimer(loop, self._admit_due)
        """Fires when the controller has decisions that are due."""
        self.on_late: Callable[[InferenceRequest], None] = _ignored
        """Called with an admitted request that is aborted because its deadline has passed."""

    @property
    def held(self) -> Collection[InferenceRequest]:
        """Requests that wait for admission."""
        return self._tickets

    def submit(self, request: InferenceRequest) -> None:
        """Admit, queue or reject a request."""
        ticket = self._ticket(request)
        if ticket is None:
            self._following.submit(request)
        else:
            self._offer(ticket, request)

    def _offer(self, ticket: AdmissionTicket, request: InferenceRequest) -> None:
        try:
            decision = self.controller.offer(ticket, monotonic_ns())
            if isinstance(decision, Admit):
                self._admit(ticket, request)
            elif isinstance(decision, Refuse):
                self._refuse(request, decision.refusal.as_error())
            else:
                self._requests[ticket] = request
                self._tickets[request] = ticket
                request.on_cancel = self._cancelled
                if isinstance(decision, AwaitLease):
                    self._leasing.append(ticket)
                else:
                    self._refuse_all(decision.displaced)
                    self._preempt()
                    self._timer.set(self.controller.next_time())
        except Exception as error:
            self._failed(ticket, request, error)

    def offer_again(self) -> None:
        """Offer the requests again that wait for quota of Redis, because it has answered or is away."""
        if self._leasing:
            leasing, self._leasing = self._leasing, []
            for ticket in leasing:
                if ticket.state is TicketState.LEASING:
                    self._offer(ticket, self._remove(ticket))
            self._check_drained()

    def _failed(self, ticket: AdmissionTicket, request: InferenceRequest, error: Exception) -> None:
        """Fail a request after an exception during admission, and release what the controller reserved for it."""
        failure = report("admission", error, f"of model '{self.controller.model}'", request.id)
        if self._tickets.pop(request, None) is not None:
            del self._requests[ticket]
        admitted = isinstance(request.sink, AdmittedSink) and request.sink.ticket is ticket
        request.respond(InferenceResponse.failed(failure))
        if not admitted:  # else the response passed through the sink, and the controller knows
            self._end(ticket)

    def _end(self, ticket: AdmissionTicket) -> None:
        """Make the controller forget a ticket whose request is over."""
        now = monotonic_ns()
        try:
            if not self.controller.withdraw(ticket, now):
                self.controller.finished(ticket, TicketEnding.FAILED, now)
        except Exception as error:
            report("admission", error, f"of model '{self.controller.model}'")

    def _refuse_held(self, error: NeriteError) -> None:
        now = monotonic_ns()
        leasing = [ticket for ticket in self._leasing if self.controller.withdraw(ticket, now)]
        tickets = [*leasing, *(each.ticket for each in self.controller.drain(now))]
        for request in [self._remove(ticket) for ticket in tickets]:
            self._statistics.failed(RequestOutcome.OTHER, request.arrived_ns)
            request.respond(InferenceResponse.failed(error))

    def check_soon(self) -> None:
        """Schedule a check for the next loop turn whether requests can be admitted. Idempotent within a turn."""
        if not self._check_scheduled and self._requests:
            self._check_scheduled = True
            self._loop.call_soon(self._admit_due)

    def stop(
        self,
        request: InferenceRequest,
        sink: AdmittedSink,
        error: NeriteError,
        why: CancelReason = CancelReason.TOO_LATE,
    ) -> None:
        """Abort an admitted request and answer it with ``error``."""
        sink.instead = response = InferenceResponse.failed(error)
        request.cancel(why)  # may answer synchronously
        request.respond(response)

    def passed(
        self, ticket: AdmissionTicket, request: InferenceRequest, response: InferenceResponse, final: bool
    ) -> None:
        """Record a response to an admitted request that has been sent."""
        now = monotonic_ns()
        try:
            if response.error is None:
                self.controller.started(ticket, now)
            if final:
                self.controller.finished(ticket, _ending(request, response.error), now)
        except Exception as error:
            report("admission", error, f"of model '{self.controller.model}'", request.id)
        if final:
            self._idle.pop(ticket, None)
            self.check_soon()

    def _preempt(self) -> None:
        """Stop requests of the idle class, so that those that wait are admitted."""
        for ticket in self.controller.preempt():
            request, sink = self._idle.pop(ticket)
            error = NoIdleRoom("the request was preempted: requests of other classes come first")
            self.stop(request, sink, error, CancelReason.PREEMPTED)

    def _admit_due(self) -> None:
        self._check_scheduled = False
        try:
            due = self.controller.due(monotonic_ns())
        except Exception as error:
            for ticket, request in [*self._requests.items()]:
                self._failed(ticket, request, error)
            return
        # Remove all of them before answering the first: a client that is answered may cancel others.
        admitted = [(ticket, self._remove(ticket)) for ticket in due.admitted]
        self._refuse_all(due.refused)
        for ticket, request in admitted:
            try:
                self._admit(ticket, request)
            except Exception as error:
                self._failed(ticket, request, error)
        self._preempt()
        self._timer.set(self.controller.next_time())
        self._check_drained()

    def _ticket(self, request: InferenceRequest) -> AdmissionTicket | None:
        """Return the ticket of a request; None if it bypasses admission.

        An admitted request depends on it, or nobody waits for it.
        """
        if request.caused or request.background:
            return None
        caller = caller_of(request)
        return AdmissionTicket(
            caller.tenant,
            sum(map(len, request.data)),
            wanted_class=caller.wanted_class,
            deadline=deadline_of(request),
            retry=caller.retry,
            paid=caller.paid,
        )

    def _admit(self, ticket: AdmissionTicket, request: InferenceRequest) -> None:
        sink = request.sink = AdmittedSink(self, ticket, request.sink)
        if ticket.level is IDLE:
            self._idle[ticket] = request, sink
        if ticket.deadline is not None:
            left = max(0, ticket.deadline - monotonic_ns()) / 1e9
            sink.timer = self._loop.call_later(left, self._too_late, request, sink)
        self._following.submit(request)

    def _too_late(self, request: InferenceRequest, sink: AdmittedSink) -> None:
        self.on_late(request)
        ticket = sink.ticket
        offered, end = ticket.offered_at, ticket.deadline or 0
        self.stop(request, sink, refusals.late_refusal(end - offered, float(monotonic_ns() - offered)).as_error())

    def _remove(self, ticket: AdmissionTicket) -> InferenceRequest:
        request = self._requests.pop(ticket)
        del self._tickets[request]
        request.on_cancel = None
        return request

    def _refuse_all(self, refused: Iterable[RefusedTicket]) -> None:
        for request, refusal in [(self._remove(each.ticket), each.refusal) for each in refused]:
            self._refuse(request, refusal.as_error())

    def _refuse(self, request: InferenceRequest, error: NeriteError) -> None:
        # Errors of the caller are not counted, nor attempts to use idle room.
        if not isinstance(error, InvalidArgument | TooLarge | NoIdleRoom):
            self._statistics.failed(RequestOutcome.NOT_LET_IN, request.arrived_ns)
        request.respond(InferenceResponse.failed(error))

    def hand_back(self, take: Callable[[InferenceRequest], bool], error: NeriteError) -> None:
        """Answer with ``error`` the waiting requests that ``take`` returns True for."""
        for request in [each for each in self.held if take(each)]:
            self._withdraw(request, error, RequestOutcome.OTHER)
        super().hand_back(take, error)

    def _cancelled(self, request: InferenceRequest) -> None:
        self._withdraw(request, Cancelled(""), RequestOutcome.CANCELED)

    def _withdraw(self, request: InferenceRequest, error: NeriteError, outcome: RequestOutcome) -> None:
        ticket = self._tickets[request]
        self.controller.withdraw(ticket, monotonic_ns())
        self._remove(ticket)
        self._statistics.failed(outcome, request.arrived_ns)
        request.respond(InferenceResponse.failed(error))
        self.check_soon()  # it may have blocked others that fit (head-of-line blocking)
        self._check_drained()


class AdmittedSink(ForwardingSink):
    """Wraps the sink of an admitted request so that the admission queue sees its responses."""

    __slots__ = ("_admission_queue", "instead", "ticket", "timer")

    def __init__(self, admission_queue: AdmissionQueue, ticket: AdmissionTicket, sink: ReplySink) -> None:
        super().__init__(sink)
        self._admission_queue = admission_queue
        self.ticket = ticket
        self.instead: InferenceResponse | None = None
        """Replaces the final response, if set."""
        self.timer: asyncio.TimerHandle | None = None

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Forward a response and report it to the admission queue."""
        if final:
            if self.timer is not None:
                self.timer.cancel()
            response = self.instead or response
        self._sink.respond(request, response, final)
        self._admission_queue.passed(self.ticket, request, response, final)


def caller_of(request: InferenceRequest) -> Caller:
    """Return the caller of a request, or of the outermost request that caused it."""
    caller = first_of(request).header.caller
    return _ANONYMOUS if caller is None or caller is MIXED else caller


def deadline_of(request: InferenceRequest) -> int | None:
    """Return the deadline of a request, the earlier of the caller's patience and the timeout; None if it has none."""
    first = first_of(request)
    patience, timeout = caller_of(first).patience_ns, request.header.timeout_us * 1000
    ends = [first.arrived_ns + patience] if patience else []
    return min([*ends, request.arrived_ns + timeout] if timeout else ends, default=None)


def _ending(request: InferenceRequest, error: NeriteError | None) -> TicketEnding:
    if isinstance(error, DeadlineExceeded):
        return TicketEnding.DEADLINE
    if request.cancelled or isinstance(error, Cancelled):
        return TicketEnding.CANCELLED
    return TicketEnding.COMPLETE if error is None else TicketEnding.FAILED


def _ignored(_request: InferenceRequest) -> None:
    """Do nothing when a request is aborted."""


_ENDINGS: Final = {
    RequestEnded.STOP: TicketEnding.COMPLETE,
    RequestEnded.LENGTH: TicketEnding.COMPLETE,
    RequestEnded.CANCELLED: TicketEnding.CANCELLED,
    RequestEnded.TOO_LATE: TicketEnding.DEADLINE,
    RequestEnded.FAILED: TicketEnding.FAILED,
}


class EngineAdmissionQueue(AdmissionQueue):
    """Admission queue of a model whose engine generates tokens. Used from the loop's thread only.

    The engine counts the tokens of a prompt only after admission. Until then they are estimated from the bytes and
    images of the prompt by the ratios of earlier prompts; then the estimate is corrected, and a prompt that turns out
    to be too long is rejected after all. While no engine is up, waiting requests stay queued.
    """

    def __init__(
        self,
        controller: AdmissionController,
        following: QueueStage,
        statistics: VersionStatistics,
        loop: asyncio.AbstractEventLoop,
        load_shedder: LoadShedder | None,
    ) -> None:
        """``load_shedder`` bounds the queue if there is no policy."""
        super().__init__(controller, following, statistics, loop)
        self._load_shedder = load_shedder
        self._ratio = TokenRatio()
        self._image_ratio = TokenRatio(IMAGE_TOKENS)
        self._reports: dict[ModelInstance, EngineReport] = {}
        """Latest report of each live engine."""
        self._begun = 0
        """Number of requests admitted so far."""

    def submit(self, request: InferenceRequest) -> None:
        """Admit, queue or reject a request."""
        if request.background:
            if self.controller.waiting or self.controller.full:
                self._refuse(request, Overloaded("requests of other classes come first"))
            else:
                self._limit_output(request, self._demand(request))
                self._following.submit(request)
            return
        shedder = self._load_shedder
        if shedder is not None and not (
            shedder.grant(self.controller.waiting, self._begun, monotonic_ns()) or request.caused
        ):
            self._refuse(request, with_request_id(shedder.refusal(), request.id))
        else:
            super().submit(request)

    def reported(self, instance: ModelInstance, report: EngineReport | None) -> None:
        """Process a report of an engine; None if the engine has failed."""
        if report is None:
            self._reports.pop(instance, None)
            return
        self._reports[instance] = report
        reports = self._reports.values()
        total, free = sum(each.total_blocks for each in reports), sum(each.free_blocks for each in reports)
        most = [each.max_sequences for each in reports]
        self.controller.limit_running(sum(most) if all(most) else 0)
        now = monotonic_ns()
        for progress in report.progress:
            sink = progress.request.sink
            if isinstance(sink, AdmittedSink) and isinstance(sink.ticket, PromptTicket):
                self._progressed(sink, sink.ticket, progress, now)
        self.controller.tell(EngineStatistics(total, free, report.block_size))
        self.check_soon()

    def set_ready(self, ready: bool) -> None:
        """Admit no requests while no engine is up."""
        self.controller.set_ready(ready, monotonic_ns())
        self.check_soon()

    def _progressed(self, sink: AdmittedSink, ticket: PromptTicket, progress: RequestProgress, now: int) -> None:
        controller, request = self.controller, progress.request
        if request.cancelled:
            controller.gone(ticket)
        if progress.begun is not None:
            ticket.cached = progress.begun.cached_tokens
            tokens, of_images = progress.begun.prompt_tokens, progress.begun.image_tokens
            self._ratio.note(ticket.demand.prompt_bytes, tokens - of_images)
            self._image_ratio.note(ticket.demand.images, of_images)
            refusal = controller.correct(ticket, tokens, now)
            if refusal is not None:
                self.stop(request, sink, refusal.as_error())
                return
        if progress.tokens:
            controller.started(ticket, now, ticket.cached)
            controller.progressed(ticket, progress.tokens, now)
        if progress.ended is not None:
            controller.finished(ticket, _ENDINGS[progress.ended], now)

    def _ticket(self, request: InferenceRequest) -> PromptTicket:
        return PromptTicket(request, self._demand(request), self._ratio, self._image_ratio)

    def _demand(self, request: InferenceRequest) -> Demand:
        runs = max((report.max_sequences for report in self._reports.values()), default=0)
        return demand(request, self.controller.max_output, min(runs or MAX_SEQUENCES, MAX_SEQUENCES))

    def _limit_output(self, request: InferenceRequest, asked: Demand) -> None:
        """Give a request that sets no limit of its own the limit of the policy."""
        if self.controller.max_output and not asked.most:
            limit(request, max(self.controller.max_output // asked.sequences, 1))

    def _admit(self, ticket: AdmissionTicket, request: InferenceRequest) -> None:
        assert isinstance(ticket, PromptTicket)
        self._begun += 1
        self._limit_output(request, ticket.demand)
        super()._admit(ticket, request)


class PromptTicket(AdmissionTicket):
    """Ticket of a request whose prompt length is an estimate until the engine has counted its tokens."""

    __slots__ = ("cached", "demand")

    def __init__(self, request: InferenceRequest, asked: Demand, ratio: TokenRatio, image_ratio: TokenRatio) -> None:
        caller = caller_of(request)
        self.demand = asked
        self.cached = 0
        """Number of prompt tokens found in the KV cache of the engine."""
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
            paid=caller.paid,
        )
