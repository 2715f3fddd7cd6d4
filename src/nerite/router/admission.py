"""Tenants and quotas at a router: admits requests, holds those that wait, and settles what they have used.

The limits are those of the policy file, as in a server (``nerite.admission``). A router counts no tokens itself:
prompts are estimated from their bytes, answers by the parts of their streams, and both are corrected by the ``usage``
that servers of the OpenAI API report.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import Any, Final, NamedTuple, Protocol

from nerite.admission.controller import AdmissionController
from nerite.admission.policy import AdmissionPolicy
from nerite.admission.tenants import TenantAdmission
from nerite.admission.ticket import AdmissionTicket, Admit, AwaitLease, Refuse, TicketEnding, TicketState
from nerite.core.errors import NeriteError
from nerite.core.request import EVERYBODY, Caller
from nerite.observability.exposition import Page
from nerite.transports.access import Callers

_MOST_MODELS: Final = 1024
"""Models with controllers of their own. Clients may invent names where it is not known what members serve."""
ANYBODY: Final = Caller(EVERYBODY)
"""Who sends a request, if no policy is in force."""
_OTHERS: Final = "*"
"""Name for further models together."""


class AdmissionRequest(NamedTuple):
    """What a request asks of admission control."""

    caller: Caller
    model: str
    text: bool
    """It is to a language model: sizes are tokens. Otherwise they are bytes."""
    size: int
    most: int = 0
    """Tokens of the answer that it allows; 0: it does not say."""


class WaitingExchange(Protocol):
    """A request that asks to be admitted."""

    def admitted(self, level: str, order: int) -> None:
        """Go on. ``level`` is the class of the request by the policy, ``order`` that of the class."""

    def rejected(self, error: NeriteError) -> None:
        """Answer with an error."""


class Admission:
    """One request in admission control: the side of ``RouterAdmission`` that its exchange holds."""

    __slots__ = ("_controller", "_owner", "exchange", "ticket")

    def __init__(
        self,
        owner: RouterAdmission,
        controller: AdmissionController,
        ticket: AdmissionTicket,
        exchange: WaitingExchange,
    ) -> None:
        self._owner = owner
        self._controller = controller
        self.ticket = ticket
        self.exchange = exchange

    def offer(self) -> bool:
        """Ask to be admitted; return whether that is decided."""
        decision = self._controller.offer(self.ticket, monotonic_ns())
        if isinstance(decision, Admit):
            self.exchange.admitted(self.ticket.level.name, self.ticket.level.order)
        elif isinstance(decision, Refuse):
            self.exchange.rejected(decision.refusal.as_error())
        elif isinstance(decision, AwaitLease):
            return False
        else:
            self._owner.reject(decision.displaced)
            return False
        return True

    def began(self) -> None:
        """Note the first byte of the answer."""
        self._controller.started(self.ticket, monotonic_ns())

    def progressed(self, tokens: int) -> None:
        """Note tokens of the answer."""
        self._controller.progressed(self.ticket, tokens, monotonic_ns())

    def used(self, prompt: int, answer: int) -> None:
        """Correct the estimates by what the server has counted."""
        now = monotonic_ns()
        if prompt:
            self._controller.correct(self.ticket, prompt, now)
        if answer > self.ticket.generated:
            self._controller.progressed(self.ticket, answer - self.ticket.generated, now)

    def ended(self, how: TicketEnding) -> None:
        """Note the end of the request, whether it was admitted or still waits."""
        now = monotonic_ns()
        if self.ticket.state is TicketState.RUNNING:
            self._controller.finished(self.ticket, how, now)
        else:
            self._controller.withdraw(self.ticket, now)
        self._owner.ended(self)


class RouterAdmission:
    """Admission control of a router."""

    def __init__(self, policy: AdmissionPolicy, loop: asyncio.AbstractEventLoop) -> None:
        """Raises ``Unsupported`` if quotas are shared and the package for that is missing."""
        self.tenants = TenantAdmission(policy, loop)
        self.callers = Callers(lambda: self.tenants.policy)
        """Identifies callers by their headers."""
        self._loop = loop
        self._controllers: dict[tuple[str, bool], AdmissionController] = {}
        self._waiting: dict[AdmissionTicket, Admission] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._check_scheduled = False
        if self.tenants.shared is not None:
            self.tenants.shared.on_answer.append(self._offer_again)

    @property
    def waiting(self) -> int:
        """Requests that wait to be admitted."""
        return len(self._waiting)

    def submit(self, request: AdmissionRequest, exchange: WaitingExchange) -> Admission:
        """Return the admission of a request, to be offered."""
        caller = request.caller
        deadline = monotonic_ns() + caller.patience_ns if caller.patience_ns else None
        ticket = AdmissionTicket(
            caller.tenant,
            request.size,
            request.most,
            wanted_class=caller.wanted_class,
            deadline=deadline,
            retry=caller.retry,
            least=0,
            paid=caller.paid,
        )
        return Admission(self, self._controller(request.model, text=request.text), ticket, exchange)

    def hold(self, admission: Admission) -> None:
        """Keep a request that is not decided yet."""
        self._waiting[admission.ticket] = admission
        self._set_timer()

    def reject(self, refused: Any) -> None:
        """Answer waiting requests that had to make room for others, or waited too long."""
        for ticket, refusal in refused:
            if (admission := self._waiting.pop(ticket, None)) is not None:
                admission.exchange.rejected(refusal.as_error())

    def ended(self, admission: Admission) -> None:
        """Forget a request, and admit others soon."""
        self._waiting.pop(admission.ticket, None)
        if self._waiting and not self._check_scheduled:
            self._check_scheduled = True
            self._loop.call_soon(self._admit_due)

    def follow(self, policy: AdmissionPolicy) -> None:
        """Apply a new policy. Admitted requests stay admitted, and used quota stays used."""
        self.tenants.follow(policy)
        for controller in self._controllers.values():
            controller.follow()
        self._admit_due()

    def quota(self) -> dict[str, Any]:
        """Return the usage and remaining quota of all tenants as JSON."""
        return self.tenants.quota()

    def write_metrics(self, page: Page) -> None:
        """Write usage and remaining quota."""
        self.tenants.write_metrics(page)

    def _controller(self, model: str, *, text: bool) -> AdmissionController:
        found = self._controllers.get((model, text))
        if found is None:
            if len(self._controllers) >= _MOST_MODELS:
                model = _OTHERS
            found = self._controllers.setdefault((model, text), self.tenants.controller(model, tokens=text))
        return found

    def _admit_due(self) -> None:
        self._check_scheduled = False
        now = monotonic_ns()
        for controller in self._controllers.values():
            if not controller.waiting:
                continue
            due = controller.due(now)
            admitted = [self._waiting.pop(ticket) for ticket in due.admitted]
            self.reject(due.refused)
            for admission in admitted:
                admission.exchange.admitted(admission.ticket.level.name, admission.ticket.level.order)
        self._set_timer()

    def _offer_again(self) -> None:
        """Offer requests again that wait for quota of Redis, because it has answered or is away."""
        for admission in [each for each in self._waiting.values() if each.ticket.state is TicketState.LEASING]:
            if admission.ticket.state is TicketState.LEASING:
                del self._waiting[admission.ticket]
                if not admission.offer():
                    self.hold(admission)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [time for each in self._controllers.values() if (time := each.next_time()) is not None]
        if times:
            seconds = max(min(times) - monotonic_ns(), 0) / 1e9
            self._timer = self._loop.call_later(seconds, self._admit_due)
