"""Before the queue of a model version: requests are let in, wait, or are refused, as a gate decides.

What it decides is done here: requests are kept, timers are set, clients that go are told of. Once a request is let in,
its answer passes by on its way back, so that the gate hears how it ends.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable

from nerite.cache.gate import Queue
from nerite.core.caller import MIXED, Caller
from nerite.core.child_request import first_of
from nerite.core.errors import Cancelled, InvalidArgument, NeriteError, TooLarge, TooLate
from nerite.core.internal_errors import report
from nerite.core.request import GaveUp, InferenceRequest, ReplySink
from nerite.core.response import InferenceResponse
from nerite.core.witness import Relay
from nerite.execution.alarm import Alarm
from nerite.observability.statistics import Outcome, VersionStatistics
from nerite.scheduling.tokens import reasons
from nerite.scheduling.tokens.decision import Admit, Ending, Refuse, Refused
from nerite.scheduling.tokens.gate import Gate
from nerite.scheduling.tokens.policy import EVERYBODY
from nerite.scheduling.tokens.ticket import Ticket

_now = time.monotonic_ns
_NOBODY = Caller(EVERYBODY)


class Turnstile:
    """A queue with a gate before it. For the loop's thread only."""

    def __init__(
        self,
        gate: Gate,
        queue: Queue,
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
        self._requests: dict[Ticket, InferenceRequest] = {}
        """Those that wait here."""
        self._tickets: dict[InferenceRequest, Ticket] = {}
        """The same, the other way."""
        self._looking = False
        self._alarm = Alarm(loop, self._look)
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

    def _failed(self, ticket: Ticket, request: InferenceRequest, error: Exception) -> None:
        """End a request after an exception on its way in, and free what the gate holds for it."""
        failure = report("admission", error, f"of model '{self.gate.model}'", request.id)
        if self._tickets.pop(request, None) is not None:
            del self._requests[ticket]
        admitted = isinstance(request.sink, Passage) and request.sink.ticket is ticket
        request.respond(InferenceResponse.failed(failure))
        if not admitted:  # else the answer has passed, and the gate knows
            self._end(ticket)

    def _end(self, ticket: Ticket) -> None:
        """Have the gate forget a ticket whose request is over."""
        now = _now()
        try:
            if not self.gate.withdraw(ticket, now):
                self.gate.finished(ticket, Ending.FAILED, now)
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
            self._statistics.failed(Outcome.OTHER, request.arrived_ns)
            request.respond(InferenceResponse.failed(error))
        self._queue.abandon(error)
        self._check_drained()

    def look_soon(self) -> None:
        """Look in the next turn of the loop whether somebody may be let in."""
        if not self._looking and self._requests:
            self._looking = True
            self._loop.call_soon(self._look)

    def stop(self, request: InferenceRequest, passage: Passage, error: NeriteError) -> None:
        """End a request that was let in, and answer it with ``error``."""
        passage.instead = response = InferenceResponse.failed(error)
        request.cancel(GaveUp.TOO_LATE)  # whoever has it may answer at once
        request.respond(response)

    def passed(self, ticket: Ticket, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
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

    def _ticket(self, request: InferenceRequest) -> Ticket | None:
        """Return the ticket of a request; None for one that goes in anyway, as another needs it to go on."""
        if request.caused:
            return None
        caller = caller_of(request)
        return Ticket(
            caller.tenant,
            sum(map(len, request.data)),
            wanted_class=caller.wanted_class,
            deadline=deadline_of(request),
            retry=caller.retry,
        )

    def _let_in(self, ticket: Ticket, request: InferenceRequest) -> None:
        passage = request.sink = Passage(self, ticket, request.sink)
        if ticket.deadline is not None:
            left = max(0, ticket.deadline - _now()) / 1e9
            passage.timer = self._loop.call_later(left, self._too_late, request, passage)
        self._enter(request)

    def _too_late(self, request: InferenceRequest, passage: Passage) -> None:
        self.on_late(request)
        ticket = passage.ticket
        offered, end = ticket.offered_at, ticket.deadline or 0
        self.stop(request, passage, reasons.late(end - offered, float(_now() - offered)).as_error())

    def _forget(self, ticket: Ticket) -> InferenceRequest:
        request = self._requests.pop(ticket)
        del self._tickets[request]
        request.on_cancel = None
        return request

    def _refuse_all(self, refused: Iterable[Refused]) -> None:
        for request, refusal in [(self._forget(each.ticket), each.refusal) for each in refused]:
            self._refuse(request, refusal.as_error())

    def _refuse(self, request: InferenceRequest, error: NeriteError) -> None:
        if not isinstance(error, InvalidArgument | TooLarge):  # what is the caller's own mistake counts nowhere
            self._statistics.failed(Outcome.NOT_LET_IN, request.arrived_ns)
        request.respond(InferenceResponse.failed(error))

    def _cancelled(self, request: InferenceRequest) -> None:
        ticket = self._tickets[request]
        self.gate.withdraw(ticket, _now())
        self._forget(ticket)
        self._statistics.failed(Outcome.CANCELED, request.arrived_ns)
        request.respond(InferenceResponse.failed(Cancelled("")))
        self.look_soon()  # it may have stood before others that fit
        self._check_drained()

    def _check_drained(self) -> None:
        if self._on_drained and not self._requests:
            waiting, self._on_drained = self._on_drained, []
            for call in waiting:
                self._queue.when_drained(call)


class Passage(Relay):
    """Takes the place of a request's sink, so that the turnstile sees the answers."""

    __slots__ = ("_turnstile", "instead", "ticket", "timer")

    def __init__(self, turnstile: Turnstile, ticket: Ticket, sink: ReplySink) -> None:
        super().__init__(sink)
        self._turnstile = turnstile
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
        self._turnstile.passed(self.ticket, request, response, final)


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


def _ending(request: InferenceRequest, error: NeriteError | None) -> Ending:
    if isinstance(error, TooLate):
        return Ending.DEADLINE
    if request.cancelled or isinstance(error, Cancelled):
        return Ending.CANCELLED
    return Ending.COMPLETE if error is None else Ending.FAILED


def _ignored(_request: InferenceRequest) -> None:
    """Take no note of a request that is cut."""
