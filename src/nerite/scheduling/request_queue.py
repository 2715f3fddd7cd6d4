"""Priority queue of requests with timeouts and size limits, and the reorder buffer for ``preserve_ordering``.

A queue has a level for each priority in use. A level has two lanes: requests that are in time, and behind them those
that timed out under a policy that delays instead of rejecting. ``request.queue`` is the lane in which a request waits,
and None once it no longer waits. A request that leaves from the middle (expired or withdrawn) is not searched for: its
entry becomes a tombstone, recognised by ``request.queue`` and dropped when it reaches the front, or with all
others once half of a lane is tombstones, or all of it. So every operation has amortised cost independent of the queue
length, and requests that left are not kept alive.

``pull`` lends the front of the queue to a batcher that gathers a batch: a pulled request still counts as waiting until
``leave`` removes it. ``put_back`` undoes ``pull``, and must be called before anything that drops requests from the
middle (``withdraw``, ``expire``, ``drain``).

``offer``, ``pull`` and ``leave`` run for every request, so they are written for speed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from nerite.core.errors import NeriteError, QueueFull
from nerite.core.request import InferenceRequest, with_request_id
from nerite.scheduling.decider import BatchingRules, QueuePolicy


class QueueLane:
    """Requests of one rank in order of arrival. Lanes with smaller ranks are served first."""

    __slots__ = ("entries", "level", "rank", "tombstones")

    def __init__(self, level: PriorityLevel, rank: tuple[int, int]) -> None:
        self.level = level
        self.rank = rank
        self.entries: deque[InferenceRequest] = deque()
        self.tombstones = 0

    def add_tombstone(self) -> None:
        """Count an entry that became a tombstone, and compact the lane if half or all of it is tombstones."""
        self.tombstones += 1
        if self.tombstones > len(self.entries) // 2 + 32 or self.tombstones == len(self.entries):
            self.entries = deque(request for request in self.entries if request.queue is self)
            self.tombstones = 0


def _lane_of(request: InferenceRequest) -> QueueLane:
    """Return the lane in which a request waits."""
    lane = request.queue
    assert isinstance(lane, QueueLane)
    return lane


class PriorityLevel:
    """Requests of one priority: a lane for those in time, and one for those that timed out and were delayed."""

    __slots__ = ("delayed", "in_time", "limited", "policy", "size")

    def __init__(self, number: int, policy: QueuePolicy) -> None:
        self.policy = policy
        self.limited = bool(policy.max_size or policy.timeout_us)
        self.in_time = QueueLane(self, (number, 0))
        self.delayed = QueueLane(self, (number, 1))
        self.size = 0


class RequestQueue:
    """Queue of requests ordered by priority, then by arrival."""

    __slots__ = ("_deadlines", "_lanes", "_levels", "_rules", "_sequence", "_single_level", "size")

    def __init__(self, rules: BatchingRules) -> None:
        self._rules = rules
        self._levels: dict[int, PriorityLevel] = {}
        self._lanes: list[QueueLane] = []
        self._deadlines: list[tuple[int, int, InferenceRequest]] = []
        self._sequence = 0
        self._single_level = None if rules.levels else self._open(rules.default_level)
        """The single level of a queue without priorities; else None."""
        self.size = 0
        """Number of waiting requests."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """Number of waiting requests by priority, for the priorities used so far."""
        return {number: level.size for number, level in sorted(self._levels.items())}

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Enqueue ``request``, or return the error with which it is rejected."""
        level = self._single_level or self._level_of(request.header.priority)
        if level.limited and (refusal := self._limit(request, level, now)) is not None:
            return refusal
        lane = level.in_time
        request.queue = lane
        request.queued_ns = now
        lane.entries.append(request)
        level.size += 1
        self.size += 1
        return None

    def _level_of(self, priority: int) -> PriorityLevel:
        number = self._rules.level_of(priority)
        return self._levels.get(number) or self._open(number)

    def _open(self, number: int) -> PriorityLevel:
        level = self._levels[number] = PriorityLevel(number, self._rules.policy_of(number))
        self._lanes = sorted((*self._lanes, level.in_time, level.delayed), key=lambda lane: lane.rank)
        return level

    def _limit(self, request: InferenceRequest, level: PriorityLevel, now: int) -> NeriteError | None:
        """Apply a level's policy to an incoming request; return an error if it must be rejected."""
        policy = level.policy
        if policy.max_size and level.size >= policy.max_size:
            return with_request_id(QueueFull("Exceeds maximum queue size", retry_after=1), request.id)
        if policy.timeout_us:
            self._sequence += 1
            deadline = now + policy.timeout_for(request.header.timeout_us) * 1000
            heapq.heappush(self._deadlines, (deadline, self._sequence, request))
            # Requests that started leave a stale entry, which must not keep their tensors alive until the deadline.
            if len(self._deadlines) > 2 * self.size + 64:
                live = [entry for entry in self._deadlines if entry[2].queue is not None or entry[2] is request]
                heapq.heapify(live)
                self._deadlines = live
        return None

    def pull(self) -> Iterator[InferenceRequest]:
        """Remove and yield requests in the order in which they may run; each still counts as waiting.

        The queue must not be changed in any other way until the iteration ends or is abandoned.
        """
        for lane in self._lanes:
            entries = lane.entries
            while entries:
                request = entries.popleft()
                if request.queue is lane:
                    yield request
                else:
                    lane.tombstones -= 1

    def put_back(self, requests: Sequence[InferenceRequest]) -> None:
        """Return pulled ``requests``, in the order in which they were pulled, to the front of their lanes."""
        for request in reversed(requests):
            _lane_of(request).entries.appendleft(request)

    def leave(self, requests: Sequence[InferenceRequest]) -> None:
        """Stop counting the pulled ``requests`` as waiting."""
        single = self._single_level
        for request in requests:
            (single or _lane_of(request).level).size -= 1
            request.queue = None
        self.size -= len(requests)

    def withdraw(self, request: InferenceRequest) -> bool:
        """Drop a request wherever it waits; return False if it no longer waits here."""
        if request.queue is None:
            return False
        lane = _lane_of(request)
        self.leave((request,))
        lane.add_tombstone()
        if not self.size:
            self._deadlines.clear()
        return True

    @property
    def has_priorities(self) -> bool:
        """Whether requests can have different priorities."""
        return self._single_level is None

    @property
    def in_order_of_arrival(self) -> bool:
        """Whether no request overtakes another: there are no priorities, and timeouts delay none."""
        return self._single_level is not None and not self._single_level.policy.delay_on_timeout

    def overtakes(self, request: InferenceRequest, other: InferenceRequest) -> bool:
        """Return whether a request runs before another one that arrived earlier."""
        return _lane_of(request).rank < _lane_of(other).rank

    def displace(self, request: InferenceRequest) -> InferenceRequest | None:
        """Drop and return the request that would run last if its level is below that of ``request``; else None."""
        own = self._rules.level_of(request.header.priority)
        for lane in reversed(self._lanes):
            if lane.rank[0] <= own:
                return None
            entries = lane.entries
            while entries:
                least = entries.pop()
                if least.queue is lane:
                    self.leave((least,))
                    return least
                lane.tombstones -= 1
        return None

    def expire(self, now: int) -> list[InferenceRequest]:
        """Drop and return the requests that timed out; those of a delaying level move to its second lane instead."""
        refused: list[InferenceRequest] = []
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            request = heapq.heappop(deadlines)[2]
            if request.queue is None:
                continue
            lane = _lane_of(request)
            if lane.level.policy.delay_on_timeout:
                request.queue = lane.level.delayed
                lane.level.delayed.entries.append(request)
            else:
                self.leave((request,))
                refused.append(request)
            lane.add_tombstone()
        return refused

    def next_deadline(self) -> int | None:
        """Return the earliest deadline of a waiting request; None if there is none."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].queue is None:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def drain(self) -> list[InferenceRequest]:
        """Drop and return all waiting requests, in order."""
        waiting = [request for lane in self._lanes for request in lane.entries if request.queue is lane]
        self.leave(waiting)
        for lane in self._lanes:
            lane.entries.clear()
            lane.tombstones = 0
        self._deadlines.clear()
        return waiting


Answer = TypeVar("Answer")


class ResponseOrder(Generic[Answer]):
    """Reorder buffer for ``preserve_ordering``: holds a response back until all earlier executions have theirs."""

    __slots__ = ("_first", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[list[Answer]] = deque()
        self._first = 0

    def begin(self) -> int:
        """Reserve the next place in the order and return its number."""
        self._waiting.append([])
        return self._first + len(self._waiting) - 1

    def finish(self, place: int, answer: Answer) -> list[Answer]:
        """Record the answer for ``place``; return the answers that can be sent now, in order."""
        self._waiting[place - self._first].append(answer)
        released: list[Answer] = []
        while self._waiting and self._waiting[0]:
            released += self._waiting.popleft()
            self._first += 1
        return released
