"""Admission control of one model: a pure decider that admits, queues or rejects requests.

It combines size limits, tenant quotas (``accounts``), a fair queue, the KV headroom of the engine and completion
estimates. The owner reports every event of a request, and calls ``due`` at ``next_time`` and after every event that may
admit a request: ``finished``, ``tell``, ``set_ready``, ``follow``.
"""

from __future__ import annotations

from typing import Final

from nerite.admission import refusals
from nerite.admission.accounts import Account, Accounts, UsageTable
from nerite.admission.deadlines import CompletionEstimate, LatestStarts
from nerite.admission.estimates import EngineStatistics, KvHeadroom
from nerite.admission.fair_queue import FairQueue
from nerite.admission.policy import IDLE, ModelLimits
from nerite.admission.refusals import AdmissionRefusal, QuotaLimit, RefusalCause
from nerite.admission.ticket import (
    AdmissionTicket,
    Admit,
    AwaitLease,
    Decision,
    DueTicket,
    Refuse,
    RefusedTicket,
    TicketEnding,
    TicketState,
    Wait,
)

_RESERVE: Final = 8
"""One of so many sequences that may run at once is not for the idle class."""


def size_refusal(
    ticket: AdmissionTicket, limits: ModelLimits, headroom: KvHeadroom, of: str
) -> AdmissionRefusal | None:
    """Return a refusal if a request exceeds the model's size limits, whatever the load.

    Otherwise return None, and set the ticket's maximum number of output tokens if it has none.
    """
    size = ticket.least
    if limits.max_input and size > limits.max_input:
        limit = QuotaLimit.MAX_INPUT_TOKENS if limits.tokens else QuotaLimit.MAX_BYTES
        return AdmissionRefusal(
            limit=limit,
            fault=RefusalCause.SIZE,
            of=of,
            value=limits.max_input,
            use=size,
            text="the prompt is too long" if limits.tokens else "the request is too large",
        )
    if not limits.tokens:
        return None
    if limits.max_output and ticket.most > limits.max_output:
        return AdmissionRefusal(
            limit=QuotaLimit.MAX_OUTPUT_TOKENS,
            fault=RefusalCause.CLIENT,
            of=of,
            value=limits.max_output,
            use=ticket.most,
            text="too many output tokens requested; request fewer",
        )
    window = limits.context_window
    if window and (size >= window or size + ticket.most > window):
        return AdmissionRefusal(
            limit=QuotaLimit.CONTEXT_WINDOW,
            fault=RefusalCause.SIZE if size >= window else RefusalCause.CLIENT,
            of=of,
            value=window,
            use=size + max(ticket.most, 1),
            text=f"a prompt of {size} tokens plus {max(ticket.most, 1)} output tokens exceeds the context window",
        )
    if headroom.block_size and headroom.blocks(size + 1) > headroom.total_blocks:
        return AdmissionRefusal(
            limit=QuotaLimit.KV_BLOCKS,
            fault=RefusalCause.SIZE,
            of=of,
            value=headroom.total_blocks,
            use=headroom.blocks(size + 1),
            text="the prompt does not fit in the KV cache of the engine",
        )
    if not ticket.most:
        left = max(window - ticket.input_size, 1) if window else 0
        room = [bound for bound in (limits.max_output, left) if bound]
        ticket.most = min(room) if room else max(headroom.total_blocks * headroom.block_size - ticket.input_size, 0)
    return None


class AdmissionController:
    """Admission control of one model: decides for each request whether it is admitted, queued or rejected."""

    def __init__(
        self, model: str, accounts: Accounts, now: int, *, tokens: bool = True, usage: UsageTable | None = None
    ) -> None:
        """``tokens``: the model is an LLM. ``usage``: existing counters to continue."""
        self.model = model
        self.tokens = tokens
        self._accounts = accounts
        self._engine_limit = 0
        """Maximum number of sequences that the engine itself runs at once, whatever the policy says; 0 for no limit."""
        self._limits = accounts.policy.limits_of(model, tokens)
        self._queue = FairQueue()
        self._latest_starts = LatestStarts()
        self._headroom = KvHeadroom(self._limits.overcommit)
        self._estimate = CompletionEstimate(now, tokens=tokens)
        self._idle: dict[AdmissionTicket, None] = {}
        """Running requests of the idle class that are not being preempted, the newest last."""
        self._preempted = 0
        """Number of requests that were preempted since ``due``, which admits others in their place."""
        self._draining = False
        self.usage = usage or UsageTable()

    @property
    def running(self) -> int:
        """Number of sequences in the engine; number of requests for models other than LLMs."""
        return self._estimate.running

    @property
    def full(self) -> bool:
        """Whether as many sequences run as may run at once."""
        return any(0 < most <= self.running for most in (self._limits.max_running, self._engine_limit))

    @property
    def waiting(self) -> int:
        """Number of waiting requests."""
        return self._queue.count

    @property
    def max_output(self) -> int:
        """Maximum number of output tokens of a request; 0 for no limit."""
        return self._limits.max_output

    @property
    def headroom(self) -> KvHeadroom:
        """KV cache headroom of the engine. Read-only."""
        return self._headroom

    def offer(self, ticket: AdmissionTicket, now: int) -> Decision:
        """Decide whether a new request is admitted, queued or rejected."""
        account = self._accounts.of(ticket.tenant, now)
        ticket.account = account
        ticket.tenant = account.tenant.name
        refusal = self._model_refusal(ticket, account)
        use = self.usage.of(ticket.tenant, ticket.level.name)
        if ticket.state is TicketState.NEW:
            ticket.offered_at = now
            use.offered += 1
            use.retries += ticket.retry
        if refusal is None:
            if account.pending(ticket.charged, now):
                ticket.state = TicketState.LEASING
                return AwaitLease()
            refusal = self._quota_refusal(ticket, account, now)
        at_once = refusal is None and self._estimate.ready and not self._queue.count and self._fits(ticket)
        if refusal is None:
            refusal = self._estimate.too_late(ticket, None if at_once else self._ahead(ticket, account), now)
        if refusal is None and not at_once and ticket.level is IDLE:
            refusal = refusals.no_room_refusal(self._model_label, self.running)
        displaced: tuple[RefusedTicket, ...] = ()
        if refusal is None and not at_once:
            found = self._displace(ticket, account, now)
            if isinstance(found, AdmissionRefusal):
                refusal = found
            else:
                displaced = found
        if refusal is not None:
            ticket.state = TicketState.OVER
            use.refuse(refusal.limit)
            return Refuse(refusal)
        account.charge(ticket.charged, now)
        if at_once:
            self._admit(ticket, now)
            return Admit()
        self._queue.push(ticket, account.tenant.weight)
        self._latest_starts.add(ticket, self._estimate.last_moments(ticket, now), self._queue.count)
        self._estimate.note_waiting(True, now)
        return Wait(displaced)

    def joined(self, tenant: str, wanted_class: str) -> None:
        """Count a request that shares the answer of another one. It is not charged."""
        policy = self._accounts.policy
        known = policy.tenant(tenant)
        level = policy.class_of(known, wanted_class) or policy.classes[known.level]
        self.usage.of(known.name, level.name).joined += 1

    def due(self, now: int) -> DueTicket:
        """Return the requests that are admitted now, and those that have waited too long."""
        refused = self._expire(now)
        admitted: list[AdmissionTicket] = []
        while self._estimate.ready and (ticket := self._queue.first()) is not None and self._fits(ticket):
            refusal = self._estimate.belated(ticket, now)
            if refusal is not None:
                self._drop(ticket, now)
                refused.append(self._record_refusal(ticket, refusal))
                continue
            self._queue.pop()
            self._admit(ticket, now)
            admitted.append(ticket)
        self._preempted = 0
        self._estimate.note_waiting(self._queue.count > 0, now)
        return DueTicket(admitted, refused)

    def preempt(self) -> list[AdmissionTicket]:
        """Return running requests of the idle class to stop now, the newest first: one for each that waits."""
        found: list[AdmissionTicket] = []
        if not self.tokens or not self._estimate.ready:
            return found
        while self._idle and self._preempted < self._queue.count:
            ticket, _ = self._idle.popitem()
            ticket.preempted = ticket.gone = True
            self.usage.of(ticket.tenant, ticket.level.name).wasted_tokens += ticket.generated
            self._preempted += 1
            found.append(ticket)
        return found

    def next_time(self) -> int | None:
        """Return when to call ``due`` unless another event comes first; None for never."""
        return self._latest_starts.next()

    def started(self, ticket: AdmissionTicket, now: int, cached: int = 0) -> None:
        """Record the first token of a request. ``cached`` tokens of its prompt were in the KV cache already."""
        if ticket.started_at is not None or ticket.state is not TicketState.RUNNING:
            return
        ticket.started_at = now
        self.usage.of(ticket.tenant, ticket.level.name).input_tokens += ticket.paid_input
        self._estimate.started(ticket, now)
        if self.tokens:
            self._headroom.hold(ticket.holding, self._headroom.blocks(ticket.input_size))
            ticket.holding.shared = cached // self._headroom.block_size if self._headroom.block_size else 0

    def correct(self, ticket: AdmissionTicket, input_size: int, now: int) -> AdmissionRefusal | None:
        """Replace the estimated prompt length with the actual one; return a refusal if the prompt is too long."""
        if ticket.state is not TicketState.RUNNING:
            return None
        more = input_size - ticket.input_size
        before = ticket.paid_input
        ticket.input_size = ticket.least = input_size
        use = self.usage.of(ticket.tenant, ticket.level.name)
        if ticket.started_at is not None:
            use.input_tokens += ticket.paid_input - before
        self._estimate.corrected(more)
        if not ticket.paid:
            charged = ticket.charged.get(QuotaLimit.INPUT_RATE, 0)
            ticket.account.settle(QuotaLimit.INPUT_RATE, charged - ticket.paid_input, now)
            ticket.charged[QuotaLimit.INPUT_RATE] = ticket.paid_input
            self._settle_money(ticket, ticket.charged.get(QuotaLimit.OUTPUT_RATE, 0), now)
        refusal = size_refusal(ticket, self._limits, self._headroom, self._model_label)
        if refusal is not None:
            use.refuse(refusal.limit)
            self.finished(ticket, TicketEnding.REFUSED, now)
        else:
            self._headroom.grow(ticket.holding, self._headroom.blocks(input_size + ticket.bound))
        return refusal

    def progressed(self, ticket: AdmissionTicket, tokens: int, now: int) -> None:
        """Record ``tokens`` generated for a request since the last call."""
        if ticket.state is not TicketState.RUNNING:
            return
        ticket.generated += tokens
        use = self.usage.of(ticket.tenant, ticket.level.name)
        use.output_tokens += tokens
        if ticket.gone:
            use.wasted_tokens += tokens
        self._estimate.progressed(tokens, now)
        headroom = self._headroom
        if ticket.generated > ticket.bound:
            ticket.bound = max(self._estimate.cautious(ticket), ticket.generated)
            headroom.grow(ticket.holding, headroom.blocks(ticket.input_size + ticket.bound))
        headroom.hold(ticket.holding, headroom.blocks(ticket.input_size + ticket.generated))

    def gone(self, ticket: AdmissionTicket) -> None:
        """Record that the client of an admitted request has gone: tokens generated from now on are wasted."""
        ticket.gone = True

    def finished(self, ticket: AdmissionTicket, ending: TicketEnding, now: int) -> None:
        """Record that an admitted request is over; release its KV blocks and settle its charges."""
        if ticket.state is not TicketState.RUNNING:
            return
        ticket.state = TicketState.OVER
        self._idle.pop(ticket, None)
        self._estimate.finished(ticket, ending, now)
        self._headroom.release(ticket.holding)
        use = self.usage.of(ticket.tenant, ticket.level.name)
        use.finish(ending.value, ticket.generated)
        if self.tokens:
            done = ticket.generated + (ticket.input_size if ticket.started_at is not None else 0)
            self._queue.settle(ticket, done - ticket.cost)
        if ticket.preempted:
            ticket.account.leave(ticket.charged, now)
            for limit, amount in ticket.charged.items():
                ticket.account.settle(limit, amount, now)
        elif ticket.started_at is not None:
            self._settle(ticket, now)
        elif ending in (TicketEnding.FAILED, TicketEnding.REFUSED):
            self._refund(ticket, now)
        else:
            use.input_tokens += ticket.paid_input
            self._settle(ticket, now)

    def withdraw(self, ticket: AdmissionTicket, now: int) -> bool:
        """Drop a request whose client gave up; return False if it does not wait."""
        if ticket.state is TicketState.LEASING:
            ticket.state = TicketState.OVER
        elif ticket.state is TicketState.WAITING:
            self._drop(ticket, now)
        else:
            return False
        self.usage.of(ticket.tenant, ticket.level.name).withdrawn += 1
        return True

    def tell(self, statistics: EngineStatistics) -> None:
        """Update the KV headroom from the statistics of the engine."""
        self._headroom.tell(statistics)

    def limit_running(self, most: int) -> None:
        """Set the maximum number of sequences that the engine runs at once; 0 for no limit."""
        self._engine_limit = most

    def set_ready(self, ready: bool, now: int) -> None:
        """Admit no requests while the engine is down. Waiting requests stay queued, without latency guarantees."""
        self._estimate.set_ready(ready, now)

    def follow(self) -> None:
        """Apply the current policy of the accounts. Admitted requests are not affected."""
        policy = self._accounts.policy
        self._limits = policy.limits_of(self.model, self.tokens)
        self._headroom.change(self._limits.overcommit)
        self._queue.follow(policy)

    def close(self) -> None:
        """Reject all new requests from now on. Waiting requests are still admitted."""
        self._draining = True

    def drain(self, now: int) -> list[RefusedTicket]:
        """Reject all new and all waiting requests; return the latter."""
        self.close()
        refused = []
        for ticket in self._queue.drain():
            self._refund(ticket, now)
            refused.append(self._record_refusal(ticket, refusals.closed_refusal(self._model_label, self.running)))
        return refused

    # Checks for a new request, in this order.

    def _model_refusal(self, ticket: AdmissionTicket, account: Account) -> AdmissionRefusal | None:
        """Return a refusal if the model never takes such a request; else set the ticket's charges and cost."""
        tenant = account.tenant
        level = self._accounts.policy.class_of(tenant, ticket.wanted_class)
        ticket.level = level or self._accounts.policy.classes[tenant.level]
        if self._draining:
            return refusals.closed_refusal(self._model_label, self.running)
        if level is None:
            return refusals.unknown_class_refusal(tenant, ticket.wanted_class)
        refusal = size_refusal(ticket, self._limits, self._headroom, self._model_label)
        if refusal is not None:
            return refusal
        if self.tokens:
            ticket.expected = self._estimate.expected(ticket)
        if not ticket.paid:
            self._set_charges(ticket, account)
        if not ticket.caused:
            ticket.charged |= {QuotaLimit.CONCURRENCY: 1}
        ticket.cost = float(max(ticket.input_size + ticket.expected, 1))
        return None

    def _set_charges(self, ticket: AdmissionTicket, account: Account) -> None:
        """Set what a request is charged for in advance, but for a place of its tenant's concurrency."""
        if self.tokens:
            # An estimate may be far off, so it must not exceed the burst: such a request could never be admitted.
            burst = account.burst(QuotaLimit.OUTPUT_RATE)
            ahead = ticket.expected if burst is None else min(ticket.expected, burst)
            burst = account.burst(QuotaLimit.INPUT_RATE)
            prompt = ticket.input_size if burst is None else max(min(ticket.input_size, burst), ticket.least)
            prompt = 0 if ticket.repeats else prompt
            ticket.charged = {QuotaLimit.INPUT_RATE: prompt, QuotaLimit.OUTPUT_RATE: ahead}
            if account.burst(QuotaLimit.MONEY) is not None:
                ticket.charged[QuotaLimit.MONEY] = self._accounts.cost(self.model, prompt, ahead)
        else:
            ticket.charged = {QuotaLimit.BYTE_RATE: ticket.input_size}
        if not ticket.caused:
            ticket.charged |= {QuotaLimit.REQUEST_RATE: 1}

    @staticmethod
    def _quota_refusal(ticket: AdmissionTicket, account: Account, now: int) -> AdmissionRefusal | None:
        """Return a refusal if a quota of the tenant is exceeded."""
        if not account.retries.allows(ticket.retry):
            return account.retry_refusal()
        return account.refusal(ticket.charged, now)

    def _ahead(self, ticket: AdmissionTicket, account: Account) -> float:
        """Return the work that would be started before a request that has to wait."""
        return self._queue.ahead(ticket.level, ticket.tenant, account.tenant.weight, ticket.priority)

    def _displace(
        self, ticket: AdmissionTicket, account: Account, now: int
    ) -> tuple[RefusedTicket, ...] | AdmissionRefusal:
        """Shed less important requests to make room in the queue, or return a refusal if that is not possible."""
        limits, queue = self._limits, self._queue
        count = queue.count + 1 - limits.queue_length if limits.queue_length else 0
        cost = queue.cost + ticket.cost - limits.queue_size if limits.queue_size else 0.0
        if count <= 0 and cost <= 0:
            return ()
        refusal = self._full_refusal(by_size=count <= 0, now=now)
        victims = queue.displaced_by(ticket, account.tenant.weight, count, cost)
        if victims is None:
            return refusal
        for each in victims:
            self._drop(each, now)
        return tuple(self._record_refusal(each, refusal) for each in victims)

    # Admission and the end of a request.

    def _fits(self, ticket: AdmissionTicket) -> bool:
        if not self.running:
            return True
        running = self.running + ticket.sequences
        for most in (self._limits.max_running, self._engine_limit):
            # What arrives next need not preempt a request of the idle class.
            reserve = -(-most // _RESERVE) if ticket.level is IDLE else 0
            if 0 < most < running + reserve:
                return False
        return not self.tokens or self._headroom.fits(self._blocks(ticket))

    def _blocks(self, ticket: AdmissionTicket) -> int:
        """Return a conservative estimate of the KV blocks that a request needs, capped at the total number."""
        ticket.bound = self._estimate.cautious(ticket)
        return min(self._headroom.blocks(ticket.input_size + ticket.bound), self._headroom.total_blocks)

    def _admit(self, ticket: AdmissionTicket, now: int) -> None:
        ticket.state = TicketState.RUNNING
        ticket.admitted_at = now
        self._estimate.admitted(ticket)
        if ticket.level is IDLE:
            self._idle[ticket] = None
        if self.tokens:
            ticket.holding = self._headroom.promise(self._blocks(ticket))
        self.usage.of(ticket.tenant, ticket.level.name).admitted += 1

    def _expire(self, now: int) -> list[RefusedTicket]:
        refused = []
        for ticket, limit in self._latest_starts.over(now):
            waited = float(now - ticket.offered_at)
            if limit is QuotaLimit.DEADLINE:
                refusal = refusals.late_refusal((ticket.deadline or 0) - ticket.offered_at, waited)
            elif self._estimate.promises(ticket):
                refusal = refusals.slow_refusal(ticket.level, waited, None)
            else:
                continue
            self._drop(ticket, now)
            refused.append(self._record_refusal(ticket, refusal))
        return refused

    def _drop(self, ticket: AdmissionTicket, now: int) -> None:
        """Remove a waiting request and refund everything but the charge for the request itself."""
        self._queue.remove(ticket)
        self._refund(ticket, now)

    def _settle(self, ticket: AdmissionTicket, now: int) -> None:
        """Correct the tenant's charge to the tokens actually generated."""
        ticket.account.leave(ticket.charged, now)
        if ticket.paid:
            return
        ticket.account.settle(
            QuotaLimit.OUTPUT_RATE, ticket.charged.get(QuotaLimit.OUTPUT_RATE, 0) - ticket.generated, now
        )
        self._settle_money(ticket, ticket.generated, now)

    def _settle_money(self, ticket: AdmissionTicket, answer: int, now: int) -> None:
        """Correct the charge in money to the price of the prompt and of ``answer`` tokens."""
        charged = ticket.charged.get(QuotaLimit.MONEY)
        if charged is not None:
            cost = self._accounts.cost(self.model, ticket.charged.get(QuotaLimit.INPUT_RATE, 0), answer)
            ticket.account.settle(QuotaLimit.MONEY, charged - cost, now)
            ticket.charged[QuotaLimit.MONEY] = cost

    def _refund(self, ticket: AdmissionTicket, now: int) -> None:
        """Refund everything but the charge for the request itself."""
        self._settle(ticket, now)
        for limit in (QuotaLimit.INPUT_RATE, QuotaLimit.BYTE_RATE, QuotaLimit.MONEY):
            ticket.account.settle(limit, ticket.charged.get(limit, 0), now)

    def _record_refusal(self, ticket: AdmissionTicket, refusal: AdmissionRefusal) -> RefusedTicket:
        self.usage.of(ticket.tenant, ticket.level.name).refuse(refusal.limit)
        return RefusedTicket(ticket, refusal)

    @property
    def _model_label(self) -> str:
        return f"model '{self.model}'"

    def _full_refusal(self, *, by_size: bool, now: int) -> AdmissionRefusal:
        queue, limits = self._queue, self._limits
        work = self._estimate.work(queue.cost, now)
        if not by_size:
            return refusals.full_refusal(
                QuotaLimit.QUEUE_LENGTH, self._model_label, limits.queue_length, queue.count, work
            )
        limit = QuotaLimit.QUEUE_TOKENS if self.tokens else QuotaLimit.QUEUE_BYTES
        return refusals.full_refusal(limit, self._model_label, limits.queue_size, int(queue.cost), work)
