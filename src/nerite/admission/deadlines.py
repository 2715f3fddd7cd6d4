"""When a request would begin and end: by what the engine has to do, and how fast it has done such things lately.

A promise is refused only by what was measured: as long as nothing was, nobody is too late.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Final

from nerite.admission import refusals
from nerite.admission.estimates import EngineSpeed, LengthForecast
from nerite.admission.refusals import AdmissionRefusal, QuotaLimit
from nerite.admission.ticket import AdmissionTicket, TicketEnding, TicketState


class CompletionEstimate:
    """For one model. Whoever owns it tells it what happens to the requests that were let in."""

    def __init__(self, now: int, *, tokens: bool) -> None:
        """``tokens``: the model is an LLM."""
        self._tokens = tokens
        self._forecast = LengthForecast()
        self._pace = EngineSpeed(now)
        self._reading = 0
        """Tokens of the prompts that the engine has and that had no first token yet."""
        self._generating = 0
        self._ready_since = now
        self.ready = True
        """The engine is there: else nothing is foreseen."""
        self.running = 0
        """Sequences; requests, of a model that is no LLM."""

    # What happens

    def set_ready(self, ready: bool, now: int) -> None:
        """Note that the engine has gone, or that another is there, which may be as slow or fast as it likes."""
        if ready and not self.ready:
            self._ready_since = now
            self._pace = EngineSpeed(now)
        self.ready = ready

    def note_waiting(self, somebody: bool, now: int) -> None:
        """Note whether somebody waits from now on."""
        self._pace.note_waiting(somebody and self.ready, now)

    def admitted(self, ticket: AdmissionTicket) -> None:
        """Note that the engine has a request."""
        self.running += ticket.sequences
        self._reading += ticket.input_size
        ticket.read_with = self._reading

    def corrected(self, more: int) -> None:
        """Note that a prompt that is to be read is longer than was said."""
        self._reading += more

    def started(self, ticket: AdmissionTicket, now: int) -> None:
        """Note that a request has its first token."""
        self._reading -= ticket.input_size
        self._generating += ticket.sequences
        self._pace.note_prefill(ticket.read_with, now - ticket.admitted_at, now)
        self._pace.note_running(self._generating, now)
        if self._tokens:
            self._pace.note_work(ticket.input_size, now)

    def progressed(self, tokens: int, now: int) -> None:
        """Note tokens of output."""
        self._pace.note_generated(tokens, now)

    def finished(self, ticket: AdmissionTicket, ending: TicketEnding, now: int) -> None:
        """Note that a request that was let in is over."""
        self.running -= ticket.sequences
        if ticket.started_at is None:
            self._reading -= ticket.input_size
        else:
            self._generating -= ticket.sequences
            self._pace.note_running(self._generating, now)
        if not self._tokens:
            self._pace.note_work(ticket.cost, now)
        elif ending is TicketEnding.COMPLETE:
            self._forecast.note(ticket.tenant, ticket.generated)

    # What is to be expected

    def expected(self, ticket: AdmissionTicket) -> int:
        """Return how many tokens a request will probably have."""
        return self._forecast.expected(ticket.tenant, ticket.most)

    def cautious(self, ticket: AdmissionTicket) -> int:
        """Return how many tokens a request will hardly exceed; more than it has."""
        return self._forecast.cautious(ticket.tenant, ticket.most, ticket.generated)

    def work(self, cost: float, now: int) -> float | None:
        """Return the nanoseconds that the engine needs for so much work of those that wait; None if nobody knows."""
        return self._pace.work(cost, now)

    def too_late(self, ticket: AdmissionTicket, ahead: float | None, now: int) -> AdmissionRefusal | None:
        """Return why a request that comes now would be too late. ``ahead``: the work before it; None: it begins now."""
        if ticket.deadline is not None and ticket.deadline <= now:
            return refusals.late_refusal(0.0, 0.0)
        wait = 0.0 if ahead is None else self._pace.work(ahead + ticket.cost, now)
        if wait is None or not self.ready:
            return None
        first = wait + self._prefill(ticket, now)
        promise = ticket.level.ttft_seconds * 1e9
        # Whoever finds nobody there is let in: how else would anybody learn that the engine has become faster?
        if promise and first > promise and (self.running or ahead is not None):
            return refusals.slow_refusal(ticket.level, first, first - promise)
        if ticket.deadline is not None:
            likely = self._pace.decode(ticket.expected, self.running + 1, now) or 0.0
            end = first + (likely if ahead is None else self._writing(ticket, now))
            if now + end > ticket.deadline:
                return refusals.late_refusal(ticket.deadline - now, end)
        return None

    def belated(self, ticket: AdmissionTicket, now: int) -> AdmissionRefusal | None:
        """Return why a request that may begin now would be too late, with all that was let in just before it."""
        if not self.running or not self.promises(ticket):
            return None
        waited = now - ticket.offered_at
        first = waited + self._prefill(ticket, now)
        if 0 < ticket.level.ttft_seconds * 1e9 < first:
            return refusals.slow_refusal(ticket.level, first, None)
        if ticket.deadline is not None:
            end = first + self._writing(ticket, now)
            if ticket.offered_at + end > ticket.deadline:
                return refusals.late_refusal(ticket.deadline - ticket.offered_at, end)
        return None

    def promises(self, ticket: AdmissionTicket) -> bool:
        """Return whether what its class promises is owed to one that waits: it came to the engine that is there."""
        return self.ready and ticket.offered_at >= self._ready_since

    def last_moments(self, ticket: AdmissionTicket, now: int) -> list[tuple[int, QuotaLimit]]:
        """Return until when a request can wait and still be in time, and by which limit."""
        prefill = int(self._prefill(ticket, now))
        moments = []
        if ticket.level.ttft_seconds:
            moments.append((now + int(ticket.level.ttft_seconds * 1e9) - prefill, QuotaLimit.FIRST_TOKEN))
        if ticket.deadline is not None:
            moments.append((ticket.deadline - prefill - int(self._writing(ticket, now)), QuotaLimit.DEADLINE))
        return moments

    def _prefill(self, ticket: AdmissionTicket, now: int) -> float:
        """Return the nanoseconds to the first token of a request that begins now."""
        return self._pace.prefill(self._reading + ticket.input_size, now) or 0.0

    def _writing(self, ticket: AdmissionTicket, now: int) -> float:
        """Return the nanoseconds in which the answer of a request that has waited is written, unless it is very long.

        Where more comes than can be done, whoever is let in has waited for nearly as long as the deadline leaves. Were
        no more than the usual length allowed for, every second one of those would be cut.
        """
        tokens = max(ticket.expected, self.cautious(ticket))
        return self._pace.decode(tokens, self.running + 1, now) or 0.0


# Until when those that wait can still be in time.

_HUSKS: Final = 64
"""Entries of those that wait no more that are kept in any case; beyond, no more than a few for each one that waits."""


class LatestStarts:
    """Of the requests in one queue. Whoever waits no more is forgotten by itself."""

    __slots__ = ("_entries", "_numbers")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, QuotaLimit, AdmissionTicket]] = []
        self._numbers = itertools.count()

    def add(self, ticket: AdmissionTicket, moments: Iterable[tuple[int, QuotaLimit]], waiting: int) -> None:
        """Note until when a request can wait, one of ``waiting``."""
        if len(self._entries) > 4 * waiting + _HUSKS:
            self._entries = [entry for entry in self._entries if entry[3].state is TicketState.WAITING]
            heapq.heapify(self._entries)
        for at, limit in moments:
            heapq.heappush(self._entries, (at, next(self._numbers), limit, ticket))

    def next(self) -> int | None:
        """Return when the next one is over; None if nobody's is."""
        entries = self._entries
        while entries and entries[0][3].state is not TicketState.WAITING:
            heapq.heappop(entries)
        return entries[0][0] if entries else None

    def over(self, now: int) -> Iterator[tuple[AdmissionTicket, QuotaLimit]]:
        """Take out whoever waits and cannot be in time any more, and by which limit."""
        while self._entries and self._entries[0][0] <= now:
            _, _, limit, ticket = heapq.heappop(self._entries)
            if ticket.state is TicketState.WAITING:
                yield ticket, limit
