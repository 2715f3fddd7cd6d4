"""Who is let in to a model, when, and who is not. One for each model; asks the deciders beside it.

Whoever owns it tells it of everything that happens to a request, and asks ``due`` at ``next_time`` and after everything
that may let somebody in: ``finished``, ``tell``, ``set_ready``, ``follow``.
"""

from __future__ import annotations

from nerite.admission import refusals
from nerite.admission.accounts import Account, Accounts, UsageTable
from nerite.admission.deadlines import CompletionEstimate, LatestStarts
from nerite.admission.estimates import EngineStatistics, KvHeadroom
from nerite.admission.fair_queue import FairQueue
from nerite.admission.policy import ModelLimits
from nerite.admission.refusals import AdmissionRefusal, QuotaLimit, RefusalCause
from nerite.admission.ticket import (
    AdmissionTicket,
    Admit,
    Decision,
    DueTicket,
    Refuse,
    RefusedTicket,
    TicketEnding,
    TicketState,
    Wait,
)

# What one request may ask of a model, however little else there is to do.


def size_refusal(
    ticket: AdmissionTicket, limits: ModelLimits, headroom: KvHeadroom, of: str
) -> AdmissionRefusal | None:
    """Return why a request is larger than it may be; if it may, say in it how many tokens it can have at the most."""
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
            text="more output tokens are asked for than there may be; ask for fewer",
        )
    window = limits.context_window
    if window and (size >= window or size + ticket.most > window):
        return AdmissionRefusal(
            limit=QuotaLimit.CONTEXT_WINDOW,
            fault=RefusalCause.SIZE if size >= window else RefusalCause.CLIENT,
            of=of,
            value=window,
            use=size + max(ticket.most, 1),
            text=f"a prompt of {size} tokens and {max(ticket.most, 1)} of output are longer than the context",
        )
    if headroom.block_size and headroom.blocks(size + 1) > headroom.total_blocks:
        return AdmissionRefusal(
            limit=QuotaLimit.KV_BLOCKS,
            fault=RefusalCause.SIZE,
            of=of,
            value=headroom.total_blocks,
            use=headroom.blocks(size + 1),
            text="the prompt is longer than all memory of the engine holds",
        )
    if not ticket.most:
        left = max(window - ticket.input_size, 1) if window else 0
        room = [bound for bound in (limits.max_output, left) if bound]
        ticket.most = min(room) if room else max(headroom.total_blocks * headroom.block_size - ticket.input_size, 0)
    return None


class AdmissionController:
    """In front of one model."""

    def __init__(
        self, model: str, accounts: Accounts, now: int, *, tokens: bool = True, usage: UsageTable | None = None
    ) -> None:
        """``tokens``: the model is an LLM. ``usage``: the counts to go on with."""
        self.model = model
        self.tokens = tokens
        self._accounts = accounts
        self._most_running = 0
        """As many the engine runs at once itself, whatever the policy says. 0: any number."""
        self._limits = accounts.policy.limits_of(model, tokens)
        self._queue = FairQueue()
        self._last_moments = LatestStarts()
        self._headroom = KvHeadroom(self._limits.overcommit)
        self._outlook = CompletionEstimate(now, tokens=tokens)
        self._draining = False
        self.usage = usage or UsageTable()

    @property
    def running(self) -> int:
        """Sequences that the engine has; requests, of a model that is no LLM."""
        return self._outlook.running

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._queue.count

    @property
    def most_output(self) -> int:
        """Output tokens that a request may have at the most; 0: any number."""
        return self._limits.max_output

    @property
    def headroom(self) -> KvHeadroom:
        """The KV blocks. For reading."""
        return self._headroom

    def offer(self, ticket: AdmissionTicket, now: int) -> Decision:
        """Say what happens to a request that has just come."""
        account = self._accounts.of(ticket.tenant, now)
        ticket.account = account
        ticket.tenant = account.tenant.name
        ticket.offered_at = now
        refusal = self._limit(ticket, account, now)
        use = self.usage.of(ticket.tenant, ticket.level.name)
        use.offered += 1
        use.retries += ticket.retry
        at_once = refusal is None and self._outlook.ready and not self._queue.count and self._fits(ticket)
        if refusal is None:
            refusal = self._outlook.too_late(ticket, None if at_once else self._ahead(ticket, account), now)
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
        self._last_moments.add(ticket, self._outlook.last_moments(ticket, now), self._queue.count)
        self._outlook.note_waiting(True, now)
        return Wait(displaced)

    def joined(self, tenant: str, wanted_class: str) -> None:
        """Count a request that gets what another one is answered. It costs nothing."""
        policy = self._accounts.policy
        known = policy.tenant(tenant)
        level = policy.class_of(known, wanted_class) or policy.classes[known.level]
        self.usage.of(known.name, level.name).joined += 1

    def due(self, now: int) -> DueTicket:
        """Return who is let in now, and who has waited too long."""
        refused = self._expire(now)
        admitted: list[AdmissionTicket] = []
        while self._outlook.ready and (ticket := self._queue.first()) is not None and self._fits(ticket):
            refusal = self._outlook.belated(ticket, now)
            if refusal is not None:
                self._drop(ticket, now)
                refused.append(self._refused(ticket, refusal))
                continue
            self._queue.pop()
            self._admit(ticket, now)
            admitted.append(ticket)
        self._outlook.note_waiting(self._queue.count > 0, now)
        return DueTicket(admitted, refused)

    def next_time(self) -> int | None:
        """Return when to ask ``due`` if nothing happens before; None for never."""
        return self._last_moments.next()

    def started(self, ticket: AdmissionTicket, now: int, cached: int = 0) -> None:
        """Note that a request has its first token. ``cached`` tokens of its prompt were there already."""
        if ticket.started_at is not None or ticket.state is not TicketState.RUNNING:
            return
        ticket.started_at = now
        self.usage.of(ticket.tenant, ticket.level.name).input_tokens += ticket.paid_input
        self._outlook.started(ticket, now)
        if self.tokens:
            self._headroom.hold(ticket.holding, self._headroom.blocks(ticket.input_size))
            ticket.holding.shared = cached // self._headroom.block_size if self._headroom.block_size else 0

    def correct(self, ticket: AdmissionTicket, input_size: int, now: int) -> AdmissionRefusal | None:
        """Take in how long a prompt is that was estimated; return why the request is over then, if it is too long."""
        if ticket.state is not TicketState.RUNNING:
            return None
        more = input_size - ticket.input_size
        before = ticket.paid_input
        ticket.input_size = ticket.least = input_size
        use = self.usage.of(ticket.tenant, ticket.level.name)
        if ticket.started_at is not None:
            use.input_tokens += ticket.paid_input - before
        self._outlook.corrected(more)
        charged = ticket.charged.get(QuotaLimit.INPUT_RATE, 0)
        ticket.account.settle(QuotaLimit.INPUT_RATE, charged - ticket.paid_input, now)
        ticket.charged[QuotaLimit.INPUT_RATE] = ticket.paid_input
        refusal = size_refusal(ticket, self._limits, self._headroom, self._of)
        if refusal is not None:
            use.refuse(refusal.limit)
            self.finished(ticket, TicketEnding.REFUSED, now)
        else:
            self._headroom.grow(ticket.holding, self._headroom.blocks(input_size + ticket.bound))
        return refusal

    def progressed(self, ticket: AdmissionTicket, tokens: int, now: int) -> None:
        """Note that a request has so many tokens more."""
        if ticket.state is not TicketState.RUNNING:
            return
        ticket.generated += tokens
        use = self.usage.of(ticket.tenant, ticket.level.name)
        use.output_tokens += tokens
        if ticket.gone:
            use.wasted_tokens += tokens
        self._outlook.progressed(tokens, now)
        headroom = self._headroom
        if ticket.generated > ticket.bound:
            ticket.bound = max(self._outlook.cautious(ticket), ticket.generated)
            headroom.grow(ticket.holding, headroom.blocks(ticket.input_size + ticket.bound))
        headroom.hold(ticket.holding, headroom.blocks(ticket.input_size + ticket.generated))

    def gone(self, ticket: AdmissionTicket) -> None:
        """Note that nobody reads the answer of a request that was let in: what it still generates is wasted."""
        ticket.gone = True

    def finished(self, ticket: AdmissionTicket, ending: TicketEnding, now: int) -> None:
        """Note that a request that was let in is over."""
        if ticket.state is not TicketState.RUNNING:
            return
        ticket.state = TicketState.OVER
        self._outlook.finished(ticket, ending, now)
        self._headroom.release(ticket.holding)
        use = self.usage.of(ticket.tenant, ticket.level.name)
        use.finish(ending.value, ticket.generated)
        if self.tokens:
            done = ticket.generated + (ticket.input_size if ticket.started_at is not None else 0)
            self._queue.settle(ticket, done - ticket.cost)
        if ticket.started_at is not None:
            self._settle(ticket, now)
        elif ending in (TicketEnding.FAILED, TicketEnding.REFUSED):
            self._give_back(ticket, now)
        else:
            use.input_tokens += ticket.paid_input
            self._settle(ticket, now)

    def withdraw(self, ticket: AdmissionTicket, now: int) -> bool:
        """Drop a request whose client gave up; False if it does not wait."""
        if ticket.state is not TicketState.WAITING:
            return False
        self._drop(ticket, now)
        self.usage.of(ticket.tenant, ticket.level.name).withdrawn += 1
        return True

    def tell(self, statistics: EngineStatistics) -> None:
        """Take in what the engine says of its memory."""
        self._headroom.tell(statistics)

    def limit_running(self, most: int) -> None:
        """Take in how many sequences the engine runs at once; 0: any number."""
        self._most_running = most

    def set_ready(self, ready: bool, now: int) -> None:
        """Let nobody in while the engine is not there. Those that wait go on waiting, without a promise."""
        self._outlook.set_ready(ready, now)

    def follow(self) -> None:
        """Go on by the policy that the accounts have now. Who was let in stays."""
        policy = self._accounts.policy
        self._limits = policy.limits_of(self.model, self.tokens)
        self._headroom.change(self._limits.overcommit)
        self._queue.follow(policy)

    def close(self) -> None:
        """Refuse everybody that comes from now on. Those that wait are still let in."""
        self._draining = True

    def drain(self, now: int) -> list[RefusedTicket]:
        """Close, and refuse everybody that waits."""
        self.close()
        refused = []
        for ticket in self._queue.drain():
            self._give_back(ticket, now)
            refused.append(self._refused(ticket, refusals.closed_refusal(self._of, self.running)))
        return refused

    # What a request that comes has to pass, in this order.

    def _limit(self, ticket: AdmissionTicket, account: Account, now: int) -> AdmissionRefusal | None:
        """Return why a request may not come, whatever else is to do; else say in it what it will take."""
        tenant = account.tenant
        level = self._accounts.policy.class_of(tenant, ticket.wanted_class)
        ticket.level = level or self._accounts.policy.classes[tenant.level]
        if self._draining:
            return refusals.closed_refusal(self._of, self.running)
        if level is None:
            return refusals.unknown_class_refusal(tenant, ticket.wanted_class)
        refusal = size_refusal(ticket, self._limits, self._headroom, self._of)
        if refusal is not None:
            return refusal
        if not account.retries.allows(ticket.retry):
            return account.retry_refusal()
        if self.tokens:
            ticket.expected = self._outlook.expected(ticket)
            # An estimate may be far off. It is no reason to never let somebody in.
            burst = account.burst(QuotaLimit.OUTPUT_RATE)
            ahead = ticket.expected if burst is None else min(ticket.expected, burst)
            burst = account.burst(QuotaLimit.INPUT_RATE)
            prompt = ticket.input_size if burst is None else max(min(ticket.input_size, burst), ticket.least)
            ticket.charged = {QuotaLimit.INPUT_RATE: 0 if ticket.repeats else prompt, QuotaLimit.OUTPUT_RATE: ahead}
        else:
            ticket.charged = {QuotaLimit.BYTE_RATE: ticket.input_size}
        if not ticket.caused:
            ticket.charged |= {QuotaLimit.REQUEST_RATE: 1, QuotaLimit.CONCURRENCY: 1}
        ticket.cost = float(max(ticket.input_size + ticket.expected, 1))
        return account.refusal(ticket.charged, now)

    def _ahead(self, ticket: AdmissionTicket, account: Account) -> float:
        """Return the work of those that would begin before a request that has to wait."""
        return self._queue.ahead(ticket.level, ticket.tenant, account.tenant.weight, ticket.priority)

    def _displace(
        self, ticket: AdmissionTicket, account: Account, now: int
    ) -> tuple[RefusedTicket, ...] | AdmissionRefusal:
        """Make room in the queue for a request, or return why there is none."""
        limits, queue = self._limits, self._queue
        count = queue.count + 1 - limits.queue_length if limits.queue_length else 0
        cost = queue.cost + ticket.cost - limits.queue_size if limits.queue_size else 0.0
        if count <= 0 and cost <= 0:
            return ()
        refusal = self._full(by_size=count <= 0, now=now)
        going = queue.displaced_by(ticket, account.tenant.weight, count, cost)
        if going is None:
            return refusal
        for each in going:
            self._drop(each, now)
        return tuple(self._refused(each, refusal) for each in going)

    # What happens to a request that has passed.

    def _fits(self, ticket: AdmissionTicket) -> bool:
        if not self.running:
            return True
        running = self.running + ticket.sequences
        if any(0 < most < running for most in (self._limits.max_running, self._most_running)):
            return False
        return not self.tokens or self._headroom.fits(self._blocks(ticket))

    def _blocks(self, ticket: AdmissionTicket) -> int:
        """Return how many blocks a request will hardly exceed; at the most all that there are."""
        ticket.bound = self._outlook.cautious(ticket)
        return min(self._headroom.blocks(ticket.input_size + ticket.bound), self._headroom.total_blocks)

    def _admit(self, ticket: AdmissionTicket, now: int) -> None:
        ticket.state = TicketState.RUNNING
        ticket.admitted_at = now
        self._outlook.admitted(ticket)
        if self.tokens:
            ticket.holding = self._headroom.promise(self._blocks(ticket))
        self.usage.of(ticket.tenant, ticket.level.name).admitted += 1

    def _expire(self, now: int) -> list[RefusedTicket]:
        refused = []
        for ticket, limit in self._last_moments.over(now):
            waited = float(now - ticket.offered_at)
            if limit is QuotaLimit.DEADLINE:
                refusal = refusals.late_refusal((ticket.deadline or 0) - ticket.offered_at, waited)
            elif self._outlook.promises(ticket):
                refusal = refusals.slow_refusal(ticket.level, waited, None)
            else:
                continue
            self._drop(ticket, now)
            refused.append(self._refused(ticket, refusal))
        return refused

    def _drop(self, ticket: AdmissionTicket, now: int) -> None:
        """Take out one that waits, and have it pay for nothing else than having asked."""
        self._queue.remove(ticket)
        self._give_back(ticket, now)

    def _settle(self, ticket: AdmissionTicket, now: int) -> None:
        """Have the tenant pay for what was used, no more and no less."""
        ticket.account.leave(ticket.charged)
        ticket.account.settle(
            QuotaLimit.OUTPUT_RATE, ticket.charged.get(QuotaLimit.OUTPUT_RATE, 0) - ticket.generated, now
        )

    def _give_back(self, ticket: AdmissionTicket, now: int) -> None:
        """Have the tenant pay for having asked, and for nothing else."""
        self._settle(ticket, now)
        for limit in (QuotaLimit.INPUT_RATE, QuotaLimit.BYTE_RATE):
            ticket.account.settle(limit, ticket.charged.get(limit, 0), now)

    def _refused(self, ticket: AdmissionTicket, refusal: AdmissionRefusal) -> RefusedTicket:
        self.usage.of(ticket.tenant, ticket.level.name).refuse(refusal.limit)
        return RefusedTicket(ticket, refusal)

    @property
    def _of(self) -> str:
        return f"model '{self.model}'"

    def _full(self, *, by_size: bool, now: int) -> AdmissionRefusal:
        queue, limits = self._queue, self._limits
        work = self._outlook.work(queue.cost, now)
        if not by_size:
            return refusals.full_refusal(QuotaLimit.QUEUE_LENGTH, self._of, limits.queue_length, queue.count, work)
        limit = QuotaLimit.QUEUE_TOKENS if self.tokens else QuotaLimit.QUEUE_BYTES
        return refusals.full_refusal(limit, self._of, limits.queue_size, int(queue.cost), work)
