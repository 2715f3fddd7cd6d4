"""One request on its way through the router, whatever its protocol: chooses members, retries, counts, and ends it once.

The exchange stands between a *client side*, which can answer the client, and the *call* to a member, which it replaces
when the member fails before the first byte of its answer. Both report to the exchange, and only the exchange tells the
client of a failure.
"""

from __future__ import annotations

import asyncio
from time import monotonic_ns
from typing import Protocol

from nerite.admission.ticket import TicketEnding
from nerite.balancing.member import AttemptEnd, LoadReport, Member, RoutedRequest
from nerite.balancing.pool_balancer import MemberAttempt
from nerite.core.errors import NeriteError
from nerite.router.admission import Admission, AdmissionRequest, RouterAdmission
from nerite.router.pools import PoolChoice, PoolTable, RouterPool


class BadGateway(NeriteError):
    """A member failed to answer, and no other member was asked."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 502
    grpc_status = 14


class GatewayTimeout(NeriteError):
    """The deadline of a request passed at a member."""

    plain = True
    code = "UNAVAILABLE"
    http_status = 504
    grpc_status = 4


class MemberCall(Protocol):
    """A request at a member."""

    def cancel(self) -> None:
        """Tell the member that its answer is no longer wanted. Nothing is reported afterwards."""


class ExchangeClient(Protocol):
    """The client's side of an exchange."""

    def send_to(self, pool: RouterPool, member: Member) -> MemberCall:
        """Send the request to a member; the call reports to the exchange, never before this returns."""

    def refuse(self, error: NeriteError) -> None:
        """Answer with an error. No part of an answer was sent."""

    def break_off(self, error: NeriteError) -> None:
        """End an answer that has begun and cannot be completed, so that the client notices."""


class RoutedExchange:
    """A request, and its attempts at members one after the other."""

    __slots__ = (
        "_admission", "_asks", "_attempt", "_began_ns", "_begun", "_call", "_client", "_first_ns", "_gate", "_held",
        "_level",
        "_over", "_pool", "_table", "_timeout", "_timer", "_tried", "attempts", "request",
    )  # fmt: skip

    def __init__(
        self,
        table: PoolTable,
        client: ExchangeClient,
        request: RoutedRequest,
        *,
        level: str = "",
        attempts: int = 1,
        timeout: float = 0.0,
        gate: RouterAdmission | None = None,
        asks: AdmissionRequest | None = None,
    ) -> None:
        """``level`` is the client's class; ``attempts`` the most members to ask; ``timeout`` is in seconds, 0 for none.

        The time begins with ``begin``. With ``gate`` and ``asks``, the request has to be admitted before it is sent.
        """
        self._gate = gate
        self._asks = asks
        self._admission: Admission | None = None
        self._held = False
        """It had to wait to be admitted."""
        self._table = table
        self._client = client
        self.request = request
        self._level = level
        self.attempts = attempts
        """Attempts that are left."""
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._tried: tuple[str, ...] = ()
        self._pool: RouterPool | None = None
        self._attempt: MemberAttempt | None = None
        self._call: MemberCall | None = None
        self._begun = False
        self._over = False
        self._began_ns = 0
        self._first_ns = 0
        """When the first token came from the member that has the request."""

    @property
    def over(self) -> bool:
        """Whether the request has ended."""
        return self._over

    def begin(self, arrived_ns: int = 0) -> None:
        """Choose a member and send the request. ``arrived_ns``: when its last byte came (``time.monotonic_ns``)."""
        now = monotonic_ns()
        self._began_ns = arrived_ns or now
        if self._timeout:
            self._timer = asyncio.get_running_loop().call_later(self._timeout, self._too_late)
        if self._gate is None or self._asks is None or not self._table.may_serve(self.request.model):
            self._start(now)
            return
        self._admission = admission = self._gate.submit(self._asks, self)
        if not admission.offer():
            self._held = True
            self._gate.hold(admission)

    def admitted(self, level: str) -> None:
        """Send the request: admission control has admitted it."""
        if not self._over:
            self._level = level
            self._start(monotonic_ns())

    def rejected(self, error: NeriteError) -> None:
        """Answer with an error: admission control has rejected the request."""
        self._admission = None
        if not self._over:
            self._refuse(error)

    def _start(self, now_ns: int) -> None:
        choice = self._table.choose(self.request, self._level, now_ns, self._tried)
        self._table.decisions.note((monotonic_ns() - (now_ns if self._held else self._began_ns)) / 1e9)
        if isinstance(choice, NeriteError):
            self._refuse(choice)
        else:
            self._send(choice, now_ns)

    def _send(self, choice: PoolChoice, now_ns: int) -> None:
        pool, member = choice.pool, choice.member
        self._pool = pool
        self._attempt = pool.balancer.begin(self.request, member, now_ns)
        self.attempts -= 1
        self._first_ns = 0
        if pool.demand is not None and not self._tried:
            pool.demand.arrived += self._attempt.work
        pool.under_way += 1
        self._call = self._client.send_to(pool, member)

    # What the call reports.

    def answer_begins(self, report: LoadReport | None = None) -> None:
        """Note the first byte of an answer for the client: from now on no other member is asked."""
        self._begun = True
        if self._admission is not None:
            self._admission.began()
        if report is not None and self._attempt is not None and self._pool is not None:
            self._pool.balancer.report(self._attempt.member.name, report, monotonic_ns())

    def progress(self, tokens: float) -> None:
        """Note that a part of the answer has come, of about so many tokens."""
        if self._attempt is not None and self._pool is not None:
            now = monotonic_ns()
            self._first_ns = self._first_ns or now
            if self._pool.demand is not None:
                self._pool.demand.done += tokens + self._attempt.prefill
            self._pool.balancer.progress(self._attempt, tokens, now)
        if self._admission is not None:
            self._admission.progressed(int(tokens))

    def used(self, prompt: int, answer: int) -> None:
        """Take the numbers of tokens that the member has counted."""
        if self._admission is not None:
            self._admission.used(prompt, answer)

    def done(self, how: AttemptEnd, code: str, report: LoadReport | None = None) -> None:
        """End the request: the client has got the whole answer."""
        if not self._over:
            self._tell_demand(how)
            self._end_attempt(how, code, report)
            self._finish(TicketEnding.COMPLETE if how is AttemptEnd.ANSWERED else TicketEnding.FAILED)

    def _tell_demand(self, how: AttemptEnd) -> None:
        """Tell autoscaling how the request ends: whether its promises were kept, and the work of an answer at once."""
        attempt, demand = self._attempt, None if self._pool is None else self._pool.demand
        if attempt is None or demand is None:
            return
        if how is AttemptEnd.LOST:
            demand.promises.missed()
        elif how is AttemptEnd.REFUSED:
            demand.turned_away += 1
        elif how is AttemptEnd.ANSWERED:
            seconds = (monotonic_ns() - self._began_ns) / 1e9
            first = (self._first_ns - self._began_ns) / 1e9 if self._first_ns else seconds
            demand.promises.answered(seconds, first, attempt.tokens)
            if not attempt.tokens:
                demand.done += attempt.work

    def refused(self, code: str, report: LoadReport | None = None) -> bool:
        """Take an answer that says that the member is overloaded; return whether another member is asked instead.

        If so, the call drops the rest of the answer, which is not for the client.
        """
        if self._over or self._begun or not self.request.repeatable:
            return False
        choice = self._other()
        if choice is None:
            return False
        self._go_on(choice, AttemptEnd.REFUSED, code, report)
        return True

    def failed(self, how: AttemptEnd, cause: str, *, sent: bool = True) -> None:
        """Take the failure of a call: ask another member, or tell the client.

        ``cause`` continues a sentence about the member, as in "closed the connection". ``sent`` False: the member
        cannot have begun, so the request may be sent again even if it must not be executed twice.
        """
        if self._over or self._attempt is None or self._pool is None:
            return
        error = BadGateway(f"member '{self._attempt.member.name}' of pool '{self._pool.name}' {cause}")
        if self._begun:
            self._end_attempt(how, str(how))
            self._finish()
            self._client.break_off(error)
            return
        choice = self._other() if self.request.repeatable or not sent else None
        if choice is not None:
            self._go_on(choice, how, str(how), None)
            return
        self._end_attempt(how, str(how))
        self._refuse(error)

    def _other(self) -> PoolChoice | None:
        """Return another member for the request, if it may be sent again."""
        attempt, pool = self._attempt, self._pool
        if self.attempts <= 0 or attempt is None or pool is None:
            return None
        now = monotonic_ns()
        choice = self._table.choose(self.request, self._level, now, (*self._tried, attempt.member.name))
        if isinstance(choice, NeriteError) or not pool.balancer.take_retry(now):
            return None
        return choice

    def _go_on(self, choice: PoolChoice, how: AttemptEnd, code: str, report: LoadReport | None) -> None:
        assert self._attempt is not None and self._pool is not None
        self._tried = (*self._tried, self._attempt.member.name)
        self._pool.retries[str(how)] += 1
        self._end_attempt(how, code, report)
        self._send(choice, monotonic_ns())

    # What the client's side reports.

    def cancel(self) -> None:
        """End the request: the client no longer waits."""
        if not self._over:
            self._cancel_call(AttemptEnd.CANCELLED)
            self._finish(TicketEnding.CANCELLED)

    def _too_late(self) -> None:
        """End the request: its deadline has passed."""
        self._timer = None
        if self._over:
            return
        where = ""
        if self._attempt is not None and self._pool is not None:
            where = f" at member '{self._attempt.member.name}' of pool '{self._pool.name}'"
        error = GatewayTimeout(f"the timeout of the request, {self._timeout:g} s, has passed{where}")
        begun = self._begun
        self._tell_demand(AttemptEnd.LOST)
        self._cancel_call(AttemptEnd.LOST)
        if begun:
            self._finish(TicketEnding.DEADLINE)
            self._client.break_off(error)
        else:
            self._refuse(error, TicketEnding.DEADLINE)

    def _cancel_call(self, how: AttemptEnd) -> None:
        call = self._call
        if self._attempt is not None:
            self._end_attempt(how, str(how))
        if call is not None:
            call.cancel()

    def again(self, client: ExchangeClient) -> RoutedExchange | None:
        """Return a second exchange of the request, at another member, while this one waits for its answer (hedging).

        None if there is nothing to wait for, or the retry budget does not allow it. It has the same deadline and is
        not admitted again. Whoever owns both cancels one when the other has an answer.
        """
        if self._over or self._begun or self._attempt is None or self._pool is None:
            return None
        if not self._pool.balancer.take_retry(monotonic_ns()):
            return None
        self._pool.retries["hedged"] += 1
        left = self._timeout and max(self._timeout - (monotonic_ns() - self._began_ns) / 1e9, 0.001)
        second = RoutedExchange(self._table, client, self.request, level=self._level, timeout=left)
        second._tried = (*self._tried, self._attempt.member.name)
        return second

    # The ends.

    def _end_attempt(self, how: AttemptEnd, code: str, report: LoadReport | None = None) -> None:
        attempt, pool = self._attempt, self._pool
        assert attempt is not None and pool is not None
        pool.balancer.end(attempt, how, report, monotonic_ns())
        pool.answers[attempt.member.name, code] += 1
        pool.under_way -= 1
        self._attempt = self._call = None

    def _refuse(self, error: NeriteError, ending: TicketEnding = TicketEnding.FAILED) -> None:
        self._table.refused[str(error.http_status)] += 1
        self._finish(ending)
        self._client.refuse(error)

    def _finish(self, ending: TicketEnding = TicketEnding.FAILED) -> None:
        self._over = True
        if self._admission is not None:
            self._admission.ended(ending)
            self._admission = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pool is not None:
            self._pool.seconds.note((monotonic_ns() - self._began_ns) / 1e9)
