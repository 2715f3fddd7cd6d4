"""One request on its way through the router, whatever its protocol: chooses members, retries, counts, and ends it once.

The exchange stands between a *client side*, which can answer the client, and the *call* to a member, which it replaces
when the member fails before the first byte of its answer. Both report to the exchange, and only the exchange tells the
client of a failure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from time import monotonic_ns
from typing import Any, Final

from nerite.admission.policy import IDLE
from nerite.admission.ticket import TicketEnding
from nerite.balancing.member import AttemptEnd, LoadReport, RoutedRequest
from nerite.balancing.pool_balancer import MemberAttempt
from nerite.core.errors import Exhausted, NeriteError, Unavailable
from nerite.core.failures import report
from nerite.core.text import quoted_text
from nerite.ledger.row import Ending
from nerite.router.accounting import RoutedAccount, ending_of
from nerite.router.admission import Admission, AdmissionRequest, RouterAdmission
from nerite.router.held_requests import HeldRequest
from nerite.router.member_call import BadGateway, ExchangeClient, GatewayTimeout, MemberCall, SilentMember
from nerite.router.pools import PoolChoice, PoolTable, RouterPool

_BEHIND: Final = "batch"
"""Class that comes behind all others that wait, where no policy says what the order is."""
MOST_PREEMPTIONS: Final = 3
"""How often a request leaves a member for others. After that it is sent to members of its own pools only, and stays."""
_FIRST_WAIT: Final = 0.02
_LONGEST_WAIT: Final = 0.5
"""Seconds between attempts to find room again."""
_PATIENCE_NS: Final = 60_000_000_000
"""Time after which a request that finds no room again is refused."""
_STAY_NS: Final = 1_000_000_000
"""Time at a member after which much is lost by leaving it."""
_PREEMPTED: Final = "preempted"
_MAY_PASS: Final = (429, 503)
"""Statuses of errors that say that there may be room later."""


class RoutedExchange:
    """A request, and its attempts at members one after the other."""

    __slots__ = (
        "_admission", "_asks", "_attempt", "_began_ns", "_begun", "_borrower", "_call", "_client", "_counted", "_delay",
        "_first", "_first_ns", "_gate", "_held", "_left_ns", "_level", "_order", "_over", "_place", "_pool",
        "_preemptions", "_retry_timer", "_second", "_silent_ns", "_table", "_timeout", "_timer", "_tried", "_waits",
        "account", "attempts", "heard", "request",
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
        waits: bool = False,
    ) -> None:
        """``level`` is the client's class; ``attempts`` the most members to ask; ``timeout`` is in seconds, 0 for none.

        The time begins with ``begin``. With ``gate`` and ``asks``, the request has to be admitted before it is sent.
        ``waits``: it may wait for a member, or for a copy of its model, if the pool lets it.
        """
        self.account: RoutedAccount | None = None
        """What the ledger has of the request, if there is one; to be set before the time begins."""
        self._waits = waits
        self._place: HeldRequest | None = None
        """Where it waits for a member."""
        self._gate = gate
        self._asks = asks
        self._admission: Admission | None = None
        self._held = False
        """It had to wait to be admitted."""
        self._table = table
        self._client = client
        self.request = request
        self._level = level
        self._order = int(level == _BEHIND)
        """Of its class: the lowest goes first when requests wait."""
        self.attempts = attempts
        """Attempts that are left."""
        self._timeout = timeout
        self._timer: asyncio.TimerHandle | None = None
        self._tried: tuple[str, ...] = ()
        self._counted = False
        """Autoscaling has been told that it arrived."""
        self._pool: RouterPool | None = None
        self._attempt: MemberAttempt | None = None
        self._call: MemberCall | None = None
        self._borrower: RouterPool | None = None
        """The pool whose request it is, while it is at a member that another pool lends."""
        self._preemptions = 0
        """How often it had to leave a member for another request."""
        self._left_ns = 0
        """Since when it has looked for room after that, but for short stays."""
        self._delay = 0.0
        """Seconds until it looks again."""
        self._retry_timer: asyncio.TimerHandle | None = None
        """Runs while it waits for room after that."""
        self._first: RoutedExchange | None = None
        self._second: RoutedExchange | None = None
        """The other exchange of a hedged request."""
        self._begun = False
        self._over = False
        self._began_ns = 0
        self._first_ns = self._silent_ns = 0
        """When the first token came from the member that has the request, and since when it is silent."""
        self.heard = False
        """The member has sent something since ``end_if_silent`` was called last."""

    @property
    def over(self) -> bool:
        """Whether the request has ended."""
        return self._over

    @property
    def waiting(self) -> bool:
        """Whether the request waits for a member."""
        return self._place is not None

    @property
    def idle_class(self) -> bool:
        """Whether the member should stop it for others: it is lent there, and can be sent again until it ends."""
        request = self.request
        return self._borrower is not None and request.repeatable and not request.streams and self.attempts > 0

    def begin(self, arrived_ns: int = 0) -> None:
        """Choose a member and send the request. ``arrived_ns``: when its last byte came (``time.monotonic_ns``)."""
        now = monotonic_ns()
        self._began_ns = arrived_ns or now
        try:
            if self._timeout:
                self._timer = asyncio.get_running_loop().call_later(self._timeout, self._too_late)
            if self._gate is None or self._asks is None or not self._table.may_serve(self.request.model):
                self._start(now)
                return
            self._admission = admission = self._gate.submit(self._asks, self)
            if not admission.offer():
                self._held = True
                self._gate.hold(admission)
        except Exception as error:
            self.abandon(error)

    def _guarded(self, step: Callable[[Any], None], argument: object) -> None:
        """Do a step. Nothing that it raises reaches the caller, who has other requests."""
        try:
            step(argument)
        except Exception as error:
            self.abandon(error)

    def admitted(self, level: str, order: int) -> None:
        """Send the request: admission control has admitted it."""
        if not self._over:
            self._level, self._order = level, order
            self._guarded(self._start, monotonic_ns())

    def rejected(self, error: NeriteError) -> None:
        """Answer with an error: admission control has rejected the request."""
        self._admission = None
        if not self._over:
            self._guarded(self._refuse, error)

    def _start(self, now_ns: int) -> None:
        if self._waits and self._table.held.queue.wanted and self._wait(behind=True):
            return
        choice = self._choose(now_ns, self._tried)
        self._table.decisions.note((monotonic_ns() - (now_ns if self._held else self._began_ns)) / 1e9)
        if not isinstance(choice, NeriteError):
            self._send(choice, now_ns)
        elif not (isinstance(choice, Unavailable) and self._wait()):
            self._refuse(choice)

    # The wait for a member.

    def _wait(self, *, behind: bool = False, refuse: bool = True) -> bool:
        """Wait for a member; return False if the request cannot, and was not refused because too many do."""
        if not self._waits:
            return False
        found = self._table.hold(self, self.request, self._level, self._order, behind=behind)
        if isinstance(found, HeldRequest):
            self._place = found
            return True
        if found is not None and refuse:
            self._refuse(found)
        return found is not None and refuse

    def go_on(self) -> bool:
        """Send the request, which has waited, or refuse it; return False if it has to wait further."""
        now = monotonic_ns()
        choice = self._choose(now, self._tried)
        if isinstance(choice, Unavailable | Exhausted):
            return False
        if isinstance(choice, NeriteError):
            self._end_wait("refused")
            self._refuse(choice)
        else:
            self._end_wait("served")
            self._send(choice, now)
        return True

    def give_up(self, error: NeriteError) -> None:
        """Answer with an error: it is not worth to wait any longer."""
        self._place = None
        self._refuse(error)

    def _end_wait(self, how: str) -> None:
        if self._place is not None:
            place, self._place = self._place, None
            self._table.held.leave(place, how)

    def _choose(self, now_ns: int, tried: Collection[str]) -> PoolChoice | NeriteError:
        borrow = self._preemptions < MOST_PREEMPTIONS
        try:
            return self._table.choose(self.request, self._level, now_ns, tried, borrow=borrow)
        except Exception as error:
            return report("router", error, f"while a member for model '{quoted_text(self.request.model)}' was chosen")

    def _send(self, choice: PoolChoice, now_ns: int) -> None:
        pool, member = choice.pool, choice.member
        self._pool = pool
        borrower = self._borrower = choice.borrower
        self.attempts -= 1
        self._first_ns = 0
        yields = self._table.preempts and self._can_leave and not (borrower or pool).settings.preempts
        leaves = yields and pool.settings.preempts and not self.request.streams
        self._attempt = pool.balancer.begin(self.request, member, now_ns, yields=leaves)
        if pool.demand is not None and borrower is None and not self._counted:
            self._counted = True
            pool.demand.arrived += self._attempt.work
        pool.under_way += 1
        if pool.model_demand is not None:
            pool.model_demand.begin(self.request.model, now_ns)
        if borrower is not None:
            pool.lend(member.name)
        if yields:
            pool.yielding.setdefault(member.name, {})[self] = None
        if self._level == IDLE.name:
            pool.idle[member.name] += 1
        pool.exchanges[self] = None
        self.heard, self._silent_ns = False, now_ns
        try:
            if self.account is not None:
                self.account.sent(pool.name, member.name, metered=member.name in pool.metered, now_ns=now_ns)
            self._call = self._client.send_to(pool, member)
        except Exception as error:
            self.abandon(error)

    # What the call reports.

    def answer_begins(self, report: LoadReport | None = None) -> None:
        """Note the first byte of an answer for the client: from now on no other member is asked."""
        self._begun = self.heard = True
        if self._table.preempts:
            self._stay()
        if self.account is not None:
            self.account.first_ns = monotonic_ns()
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
        if self.account is not None:
            self.account.parts += int(tokens)
        if self._admission is not None:
            self._admission.progressed(int(tokens))

    def used(self, prompt: int, answer: int, cached: int = 0) -> None:
        """Take the numbers of tokens that the member has counted. ``cached``: part of the prompt."""
        account = self.account
        if account is not None:
            account.prompt_tokens, account.cached_tokens, account.answer_tokens = prompt, cached, answer
        if self._admission is not None:
            self._admission.used(prompt, answer)

    def done(self, how: AttemptEnd, code: str, report: LoadReport | None = None) -> None:
        """End the request: the client has got the whole answer."""
        if not self._over:
            self._tell_demand(how)
            self._end_attempt(how, code, report)
            answered = how is AttemptEnd.ANSWERED
            self._finish(TicketEnding.COMPLETE if answered else TicketEnding.FAILED, ending_of(how, code))

    def _tell_demand(self, how: AttemptEnd) -> None:
        """Tell autoscaling how the request ends: whether its promises were kept, and the work of an answer at once."""
        attempt, demand = self._attempt, None if self._pool is None else self._pool.demand
        if attempt is None or demand is None:
            return
        if how is AttemptEnd.ANSWERED and not attempt.tokens:
            demand.done += attempt.work
        if self._borrower is not None:  # The promises to requests of another pool are not those of this one.
            return
        if how is AttemptEnd.LOST:
            demand.promises.missed()
        elif how is AttemptEnd.REFUSED:
            demand.turned_away += 1
        elif how is AttemptEnd.ANSWERED:
            seconds = (monotonic_ns() - self._began_ns) / 1e9
            first = (self._first_ns - self._began_ns) / 1e9 if self._first_ns else seconds
            demand.promises.answered(seconds, first, attempt.tokens)

    def refused(self, code: str, report: LoadReport | None = None) -> bool:
        """Take an answer that says that the member is overloaded; return whether the request goes on elsewhere.

        If so, the call drops the rest of the answer, which is not for the client.
        """
        if self._over or self._begun or not self.request.repeatable:
            return False
        if self._borrower is not None and self._can_leave and self._has_patience:
            if self._has_stayed:
                self._preemptions += 1
            self._leave_member(AttemptEnd.REFUSED, code, report)
            return True
        return self._try_again(AttemptEnd.REFUSED, code, report)

    def not_found(self, code: str, report: LoadReport | None = None) -> bool:
        """Take an answer that says that the member does not have the model; return whether the request goes on.

        It goes on where models are placed: another router, or an operator, may have unloaded the model at this moment.
        """
        attempt, pool, request = self._attempt, self._pool, self.request
        if self._over or self._begun or not self._waits or request.version or not request.repeatable:
            return False
        if attempt is None or pool is None or pool.settings.placement is None:
            return False
        pool.doubt(attempt.member.name, request.model)
        return self._try_again(AttemptEnd.REFUSED, code, report, may_wait=True)

    def failed(self, how: AttemptEnd, cause: str, *, sent: bool = True) -> None:
        """Take the failure of a call: ask another member, wait for one, or tell the client.

        ``cause`` continues a sentence about the member, as in "closed the connection". ``sent`` False: the member
        cannot have begun, so the request may be sent again even if it must not be executed twice.
        """
        if self._over or self._attempt is None or self._pool is None:
            return
        error = BadGateway(f"member '{self._attempt.member.name}' of pool '{self._pool.name}' {cause}")
        if self._begun:
            self._end_attempt(how, str(how))
            self._finish(TicketEnding.FAILED, Ending.FAILED)
            self._client.break_off(error)
        elif not ((self.request.repeatable or not sent) and self._try_again(how, str(how), may_wait=True)):
            self._end_attempt(how, str(how))
            self._refuse(error)

    def _try_again(
        self, how: AttemptEnd, code: str, report: LoadReport | None = None, *, may_wait: bool = False
    ) -> bool:
        """Send the request to another member; if there is none and it may, let it wait. Returns False if neither is."""
        attempt, pool = self._attempt, self._pool
        if self.attempts <= 0 or attempt is None or pool is None:
            return False
        now = monotonic_ns()
        tried = (*self._tried, attempt.member.name)
        choice = self._choose(now, tried)
        refusal = isinstance(choice, NeriteError)
        if (refusal and not (may_wait and isinstance(choice, Unavailable))) or not pool.balancer.take_retry(now):
            return False
        if refusal and not self._wait(refuse=False):
            return False
        pool.retries[str(how)] += 1
        self._end_attempt(how, code, report)
        if isinstance(choice, PoolChoice):
            self._tried = tried
            self._send(choice, monotonic_ns())
        else:
            self._tried = ()
        return True

    # Making room for others.

    @property
    def _can_leave(self) -> bool:
        """Whether it may leave its member and be sent again, as often as that has happened."""
        return self.request.repeatable and self.attempts > 0 and self._preemptions < MOST_PREEMPTIONS

    def _stay(self) -> None:
        """Leave the member for nobody any more."""
        if self._pool is not None and self._attempt is not None:
            name = self._attempt.member.name
            there = self._pool.yielding.get(name)
            if there is not None and there.pop(self, self) is None and not there:
                del self._pool.yielding[name]

    def preempt(self) -> bool:
        """Leave the member for a request that comes first, and try again later; return False if it is too late."""
        call = self._call
        if self._over or self._begun or self._attempt is None or call is None or not self._can_leave:
            return False
        self._preemptions += 1
        self._leave_member(AttemptEnd.CANCELLED, _PREEMPTED, None)
        call.cancel()
        return True

    @property
    def _has_stayed(self) -> bool:
        """Whether it was at its member for long enough for much to be lost."""
        return self._attempt is not None and monotonic_ns() - self._attempt.began_ns > _STAY_NS

    @property
    def _has_patience(self) -> bool:
        """Whether it has not yet looked for a free member for too long."""
        return not self._left_ns or monotonic_ns() - self._left_ns < _PATIENCE_NS

    def _leave_member(self, how: AttemptEnd, code: str, report: LoadReport | None) -> None:
        """Leave the member, and look for room again after a while."""
        assert self._pool is not None
        if not self._left_ns or self._has_stayed:
            self._left_ns = monotonic_ns()
            self._delay = 0.0
        self._pool.retries[code if code == _PREEMPTED else str(how)] += 1
        self._end_attempt(how, code, report)
        self.attempts += 1
        self._look_again()

    def _look_again(self) -> None:
        self._retry_timer = asyncio.get_running_loop().call_later(self._delay, self._send_again)
        self._delay = min(max(2 * self._delay, _FIRST_WAIT), _LONGEST_WAIT)

    def _send_again(self) -> None:
        self._retry_timer = None
        now = monotonic_ns()
        choice = self._choose(now, self._tried)
        if not isinstance(choice, NeriteError):
            self._send(choice, now)
        elif self._has_patience and choice.http_status in _MAY_PASS:
            self._look_again()
        else:
            self._refuse(choice)

    # What the client's side reports.

    def cancel(self) -> None:
        """End the request: the client no longer waits."""
        if not self._over:
            self._end_wait("cancelled")
            self._cancel_call(AttemptEnd.CANCELLED)
            self._finish(TicketEnding.CANCELLED, Ending.CANCELLED)

    def _too_late(self) -> None:
        """End the request: its deadline has passed."""
        self._timer = None
        if self._over:
            return
        where = ""
        if self._attempt is not None and self._pool is not None:
            where = f" at member '{self._attempt.member.name}' of pool '{self._pool.name}'"
        elif self._place is not None:
            where = f", while it waited for a member of pool '{self._place.pool.name}'"
        error = GatewayTimeout(f"the timeout of the request, {self._timeout:g} s, has passed{where}")
        self._end_wait("deadline")
        self._tell_demand(AttemptEnd.LOST)
        self._end_with(error, TicketEnding.DEADLINE)

    def end_if_silent(self, now_ns: int) -> None:
        """End the request if its member has sent nothing for the idle timeout of the pool. To be called repeatedly."""
        attempt, pool, call = self._attempt, self._pool, self._call
        if attempt is None or pool is None or call is None:
            return
        if self.heard or not call.owed:
            self.heard, self._silent_ns = False, now_ns
        elif now_ns - self._silent_ns >= pool.settings.idle_timeout * 1e9:
            text = f"has sent nothing for {pool.settings.idle_timeout:g} s, the idle-timeout of the pool"
            error = SilentMember(f"member '{attempt.member.name}' of pool '{pool.name}' {text}")
            self._tell_demand(AttemptEnd.LOST)
            self._end_with(error, TicketEnding.FAILED)

    def abandon(self, error: Exception) -> None:
        """End the request because of an unexpected exception, and give back what it has. Never raises."""
        failure = report("router", error, f"in a request to model '{quoted_text(self.request.model)}'")
        if not self._over:
            try:
                self._end_wait("refused")
                self._end_with(failure, TicketEnding.FAILED, AttemptEnd.CANCELLED)
            except Exception as further:
                report("router", further, "while a request was given up")

    def _end_with(self, error: NeriteError, ending: TicketEnding, how: AttemptEnd = AttemptEnd.LOST) -> None:
        """End the request at its member, and tell the client why, whatever fails."""
        begun = self._begun
        try:
            self._cancel_call(how)
        finally:
            if begun:
                self._finish(ending, Ending.CANCELLED if ending is TicketEnding.DEADLINE else Ending.FAILED)
                self._client.break_off(error)
            else:
                self._refuse(error, ending)

    def _cancel_call(self, how: AttemptEnd) -> None:
        call = self._call
        if self._attempt is not None:
            self._end_attempt(how, str(how))
        if call is not None:
            call.cancel()

    def again(self, client: ExchangeClient) -> RoutedExchange | None:
        """Return a second exchange of the request, at another member, while this one waits for its answer (hedging).

        None if there is nothing to wait for, or the retry budget does not allow it. It has the same deadline and is
        not admitted again. Whoever owns both lets the second take over and cancels the first when the second answers,
        or cancels the second; a request is refused when both are.
        """
        if self._over or self._begun or self._attempt is None or self._pool is None:
            return None
        if not self._pool.balancer.take_retry(monotonic_ns()):
            return None
        self._pool.retries["hedged"] += 1
        left = self._timeout and max(self._timeout - (monotonic_ns() - self._began_ns) / 1e9, 0.001)
        second = RoutedExchange(self._table, client, self.request, level=self._level, timeout=left)
        second._tried = (*self._tried, self._attempt.member.name)
        second._counted = True
        second._first, self._second = self, second
        return second

    def take_over(self, first: RoutedExchange) -> None:
        """Take over the account and the admission of the first exchange, which ends before this one.

        Does nothing if that is over: it has passed them on, or closed them.
        """
        if first._over:
            return
        account, first.account = first.account, None
        self.account = account
        self._admission, first._admission = first._admission, None
        if account is not None and self._attempt is not None and self._pool is not None:
            name = self._attempt.member.name
            account.sent(self._pool.name, name, metered=name in self._pool.metered, now_ns=monotonic_ns())

    # The ends.

    def _end_attempt(self, how: AttemptEnd, code: str, report: LoadReport | None = None) -> None:
        attempt, pool = self._attempt, self._pool
        assert attempt is not None and pool is not None
        pool.balancer.end(attempt, how, report, monotonic_ns())
        pool.answers[attempt.member.name, code] += 1
        pool.under_way -= 1
        pool.exchanges.pop(self, None)
        if pool.model_demand is not None:
            pool.model_demand.end(self.request.model, monotonic_ns())
        if self._borrower is not None:
            pool.take_back(attempt.member.name)
        if self._level == IDLE.name:
            name = attempt.member.name
            pool.idle[name] -= 1
            if not pool.idle[name]:
                del pool.idle[name]
        if self._table.preempts:
            self._stay()
        self._attempt = self._call = self._borrower = None
        if pool.held or (pool.settings.lends and self._table.held.queue.wanted):
            self._table.held.offer_soon()

    def _refuse(self, error: NeriteError, ending: TicketEnding = TicketEnding.FAILED) -> None:
        first, second = self._first, self._second
        if second is not None and not second._over and ending is not TicketEnding.DEADLINE:
            second.take_over(self)
        elif first is None or first._over:  # Otherwise the first may still answer.
            self._table.refused[str(error.http_status)] += 1
        if ending is TicketEnding.DEADLINE:
            recorded = Ending.CANCELLED
        else:
            recorded = Ending.FAILED if isinstance(error, BadGateway) else Ending.REFUSED
        self._finish(ending, recorded)
        self._client.refuse(error)

    def _finish(self, ending: TicketEnding, recorded: Ending) -> None:
        self._over = True
        self._first = self._second = None
        account, admission = self.account, self._admission
        self.account = self._admission = None
        if self._timer is not None:
            self._timer.cancel()
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._timer = self._retry_timer = None
        if self._pool is not None:
            self._pool.seconds.note((monotonic_ns() - self._began_ns) / 1e9)
        try:
            if admission is not None:
                admission.ended(ending)
        finally:
            if account is not None:
                account.ended(self._level, recorded)
