"""Predicts when a request would start and finish, from the work of the engine and its recently measured speed.

Requests are rejected as too late only on the basis of measurements; without any, none is rejected.
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
    """Predicts completion times for one model. The owner reports every event of admitted requests."""

    def __init__(self, now: int, *, tokens: bool) -> None:
        """``tokens``: the model is an LLM."""
        self._tokens = tokens
        self._forecast = LengthForecast()
        self._pace = EngineSpeed(now)
        self._prefill_tokens = 0
        """Tokens of the prompts in prefill: admitted, without a first output token yet."""
        self._generating = 0
        self._ready_since = now
        self.ready = True
        """The engine is up; if not, nothing is predicted."""
        self.running = 0
        """Number of running sequences; of requests for models other than LLMs."""

    # Events

    def set_ready(self, ready: bool, now: int) -> None:
        """Record that the engine went down or came up. A new engine is measured from scratch."""
        if ready and not self.ready:
            self._ready_since = now
            self._pace = EngineSpeed(now)
        self.ready = ready

    def note_waiting(self, waiting: bool, now: int) -> None:
        """Record whether requests are waiting from now on."""
        self._pace.note_waiting(waiting and self.ready, now)

    def admitted(self, ticket: AdmissionTicket) -> None:
        """Record that a request was passed to the engine."""
        self.running += ticket.sequences
        self._prefill_tokens += ticket.input_size
        ticket.read_with = self._prefill_tokens

    def corrected(self, more: int) -> None:
        """Record that a prompt in prefill has ``more`` tokens than estimated."""
        self._prefill_tokens += more

    def started(self, ticket: AdmissionTicket, now: int) -> None:
        """Record the first token of a request."""
        self._prefill_tokens -= ticket.input_size
        self._generating += ticket.sequences
        self._pace.note_prefill(ticket.read_with, now - ticket.admitted_at, now)
        self._pace.note_running(self._generating, now)
        if self._tokens:
            self._pace.note_work(ticket.input_size, now)

    def progressed(self, tokens: int, now: int) -> None:
        """Record generated tokens."""
        self._pace.note_generated(tokens, now)

    def finished(self, ticket: AdmissionTicket, ending: TicketEnding, now: int) -> None:
        """Record that an admitted request is over."""
        self.running -= ticket.sequences
        if ticket.started_at is None:
            self._prefill_tokens -= ticket.input_size
        else:
            self._generating -= ticket.sequences
            self._pace.note_running(self._generating, now)
        if not self._tokens:
            self._pace.note_work(ticket.cost, now)
        elif ending is TicketEnding.COMPLETE:
            self._forecast.note(ticket.tenant, ticket.generated)

    # Predictions

    def expected(self, ticket: AdmissionTicket) -> int:
        """Return the expected number of output tokens of a request."""
        return self._forecast.expected(ticket.tenant, ticket.most)

    def cautious(self, ticket: AdmissionTicket) -> int:
        """Return a conservative estimate of a request's output tokens; more than it has generated already."""
        return self._forecast.cautious(ticket.tenant, ticket.most, ticket.generated)

    def work(self, cost: float, now: int) -> float | None:
        """Return the nanoseconds that the engine needs for queued work of ``cost``; None if unknown."""
        return self._pace.work(cost, now)

    def too_late(self, ticket: AdmissionTicket, ahead: float | None, now: int) -> AdmissionRefusal | None:
        """Return a refusal if a new request would be late. ``ahead``: work queued before it; None if it starts now."""
        if ticket.deadline is not None and ticket.deadline <= now:
            return refusals.late_refusal(0.0, 0.0)
        wait = 0.0 if ahead is None else self._pace.work(ahead + ticket.cost, now)
        if wait is None or not self.ready:
            return None
        first = wait + self._prefill(ticket, now)
        promise = ticket.level.ttft_seconds * 1e9
        # On an idle engine, admit it regardless: otherwise a speed-up of the engine would never be measured.
        if promise and first > promise and (self.running or ahead is not None):
            return refusals.slow_refusal(ticket.level, first, first - promise)
        if ticket.deadline is not None:
            likely = self._pace.decode(ticket.expected, self.running + 1, now) or 0.0
            end = first + (likely if ahead is None else self._decode(ticket, now))
            if now + end > ticket.deadline:
                return refusals.late_refusal(ticket.deadline - now, end)
        return None

    def belated(self, ticket: AdmissionTicket, now: int) -> AdmissionRefusal | None:
        """Return a refusal if a waiting request that fits now would be late, given those admitted just before it."""
        if not self.running or not self.promises(ticket):
            return None
        waited = now - ticket.offered_at
        first = waited + self._prefill(ticket, now)
        if 0 < ticket.level.ttft_seconds * 1e9 < first:
            return refusals.slow_refusal(ticket.level, first, None)
        if ticket.deadline is not None:
            end = first + self._decode(ticket, now)
            if ticket.offered_at + end > ticket.deadline:
                return refusals.late_refusal(ticket.deadline - ticket.offered_at, end)
        return None

    def promises(self, ticket: AdmissionTicket) -> bool:
        """Return whether the class's guarantee applies to a waiting request: it was offered to the current engine."""
        return self.ready and ticket.offered_at >= self._ready_since

    def last_moments(self, ticket: AdmissionTicket, now: int) -> list[tuple[int, QuotaLimit]]:
        """Return the latest times at which a request can start and still meet each of its limits."""
        prefill = int(self._prefill(ticket, now))
        moments = []
        if ticket.level.ttft_seconds:
            moments.append((now + int(ticket.level.ttft_seconds * 1e9) - prefill, QuotaLimit.FIRST_TOKEN))
        if ticket.deadline is not None:
            moments.append((ticket.deadline - prefill - int(self._decode(ticket, now)), QuotaLimit.DEADLINE))
        return moments

    def _prefill(self, ticket: AdmissionTicket, now: int) -> float:
        """Return the predicted nanoseconds to the first token of a request that starts now; 0 if unknown."""
        return self._pace.prefill(self._prefill_tokens + ticket.input_size, now) or 0.0

    def _decode(self, ticket: AdmissionTicket, now: int) -> float:
        """Return the predicted decode time of a request that has waited, in nanoseconds, for a conservative length.

        Under overload, admitted requests have waited almost as long as their deadline allows. With the expected length,
        every second one of them would be cut off.
        """
        tokens = max(ticket.expected, self.cautious(ticket))
        return self._pace.decode(tokens, self.running + 1, now) or 0.0


_STALE_ENTRIES: Final = 64
"""Number of stale entries always tolerated, in addition to a few per waiting request."""


class LatestStarts:
    """Heap of the latest start times of the waiting requests of one queue; stale entries are dropped lazily."""

    __slots__ = ("_entries", "_numbers")

    def __init__(self) -> None:
        self._entries: list[tuple[int, int, QuotaLimit, AdmissionTicket]] = []
        self._numbers = itertools.count()

    def add(self, ticket: AdmissionTicket, moments: Iterable[tuple[int, QuotaLimit]], waiting: int) -> None:
        """Add the latest start times of a request. ``waiting``: number of waiting requests."""
        if len(self._entries) > 4 * waiting + _STALE_ENTRIES:
            self._entries = [entry for entry in self._entries if entry[3].state is TicketState.WAITING]
            heapq.heapify(self._entries)
        for at, limit in moments:
            heapq.heappush(self._entries, (at, next(self._numbers), limit, ticket))

    def next(self) -> int | None:
        """Return the earliest latest start of a waiting request; None if there is none."""
        entries = self._entries
        while entries and entries[0][3].state is not TicketState.WAITING:
            heapq.heappop(entries)
        return entries[0][0] if entries else None

    def over(self, now: int) -> Iterator[tuple[AdmissionTicket, QuotaLimit]]:
        """Remove and yield the waiting requests that can no longer be in time, each with the limit it misses."""
        while self._entries and self._entries[0][0] <= now:
            _, _, limit, ticket = heapq.heappop(self._entries)
            if ticket.state is TicketState.WAITING:
                yield ticket, limit
