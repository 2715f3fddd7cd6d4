"""Where requests wait: by priority, in order of arrival, for a limited time.

Theory of operation. A queue has a level for each priority in use, a level has two lanes: requests in time, and behind
them those whose time ran out under a policy that delays instead of refusing. ``request.queue`` names the lane that the
request waits in, and is None as soon as it waits no more. A request that leaves from the middle (expired, withdrawn) is
not searched for: its entry stays behind as a husk, recognised by ``request.queue`` and dropped when the front reaches
it, or with all others when half of a lane is husks. So every operation costs the same however long the queue is, and
what left is not kept.

``pull`` lends the front of the queue to a batcher that gathers a batch: a request that was pulled still waits, and
still counts, until ``leave`` says that it runs. ``put_back`` undoes ``pull``, and must be called before anything that
drops requests from the middle (``withdraw``, ``expire``, ``drain``).

Each request passes through ``offer``, ``pull`` and ``leave``, so these are written for speed.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from nerite.core.errors import NeriteError, Unavailable
from nerite.core.request import InferenceRequest, with_request_id
from nerite.scheduling.decider import BatchingRules, QueuePolicy


class QueueLane:
    """Requests of one rank, in order of arrival. Ranks compare: the smaller one goes first."""

    __slots__ = ("entries", "husks", "level", "rank")

    def __init__(self, level: PriorityLevel, rank: tuple[int, int]) -> None:
        self.level = level
        self.rank = rank
        self.entries: deque[InferenceRequest] = deque()
        self.husks = 0

    def add_husk(self) -> None:
        """Note that a request in the middle is no more of this lane."""
        self.husks += 1
        if self.husks > len(self.entries) // 2 + 32:
            self.entries = deque(request for request in self.entries if request.queue is self)
            self.husks = 0


class PriorityLevel:
    """The requests of one priority."""

    __slots__ = ("delayed", "in_time", "limited", "policy", "size")

    def __init__(self, number: int, policy: QueuePolicy) -> None:
        self.policy = policy
        self.limited = bool(policy.max_size or policy.timeout_us)
        self.in_time = QueueLane(self, (number, 0))
        self.delayed = QueueLane(self, (number, 1))
        self.size = 0


class RequestQueue:
    """Requests by priority and arrival."""

    __slots__ = ("_deadlines", "_lanes", "_levels", "_only", "_rules", "_sequence", "size")

    def __init__(self, rules: BatchingRules) -> None:
        self._rules = rules
        self._levels: dict[int, PriorityLevel] = {}
        self._lanes: list[QueueLane] = []
        self._deadlines: list[tuple[int, int, InferenceRequest]] = []
        self._sequence = 0
        self._only = None if rules.levels else self._open(rules.default_level)
        """The level of every request, where there are no priorities."""
        self.size = 0
        """Requests that wait."""

    @property
    def waiting(self) -> Mapping[int, int]:
        """How many requests wait, by priority: of those priorities that were asked for so far."""
        return {number: level.size for number, level in sorted(self._levels.items())}

    def offer(self, request: InferenceRequest, now: int) -> NeriteError | None:
        """Let ``request`` wait, or return why it may not."""
        level = self._only or self._level_of(request.header.priority)
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
        """Apply the policy of a level to a request that comes in; return why it may not wait."""
        policy = level.policy
        if policy.max_size and level.size >= policy.max_size:
            return with_request_id(Unavailable("Exceeds maximum queue size", retry_after=1), request.id)
        if policy.timeout_us:
            self._sequence += 1
            deadline = now + policy.timeout_for(request.header.timeout_us) * 1000
            heapq.heappush(self._deadlines, (deadline, self._sequence, request))
            # Requests that run leave their entry behind; it must not keep their tensors alive until the deadline.
            if len(self._deadlines) > 2 * self.size + 64:
                live = [entry for entry in self._deadlines if entry[2].queue is not None or entry[2] is request]
                heapq.heapify(live)
                self._deadlines = live
        return None

    def pull(self) -> Iterator[InferenceRequest]:
        """Take out requests, in the order in which they may run; each still waits, and still counts.

        Nothing else may be done to the queue until the iteration is over, or left.
        """
        for lane in self._lanes:
            entries = lane.entries
            while entries:
                request = entries.popleft()
                if request.queue is lane:
                    yield request
                else:
                    lane.husks -= 1

    def put_back(self, requests: Sequence[InferenceRequest]) -> None:
        """Return what was pulled to where it stood. ``requests`` is in the order of the pulling."""
        for request in reversed(requests):
            request.queue.entries.appendleft(request)

    def leave(self, requests: Sequence[InferenceRequest]) -> None:
        """Say that ``requests``, which were pulled, wait no more."""
        for request in requests:
            request.queue.level.size -= 1
            request.queue = None
        self.size -= len(requests)

    def withdraw(self, request: InferenceRequest) -> bool:
        """Drop a request from wherever it waits; False if it does not wait here any more."""
        lane = request.queue
        if lane is None:
            return False
        self.leave((request,))
        lane.add_husk()
        return True

    @property
    def has_priorities(self) -> bool:
        """Requests may matter more or less than others."""
        return self._only is None

    def give_way(self, request: InferenceRequest) -> InferenceRequest | None:
        """Drop and return the request that would run last, if its level is below that of ``request``."""
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
                lane.husks -= 1
        return None

    def expire(self, now: int) -> list[InferenceRequest]:
        """Drop and return the requests whose time is over; those of a delaying level move back instead."""
        refused: list[InferenceRequest] = []
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            request = heapq.heappop(deadlines)[2]
            lane = request.queue
            if lane is None:
                continue
            if lane.level.policy.delay_on_timeout:
                request.queue = lane.level.delayed
                request.queue.entries.append(request)
            else:
                self.leave((request,))
                refused.append(request)
            lane.add_husk()
        return refused

    def next_deadline(self) -> int | None:
        """Return when ``expire`` has something to do next."""
        deadlines = self._deadlines
        while deadlines and deadlines[0][2].queue is None:
            heapq.heappop(deadlines)
        return deadlines[0][0] if deadlines else None

    def drain(self) -> list[InferenceRequest]:
        """Drop and return everything that waits, in order."""
        waiting = [request for lane in self._lanes for request in lane.entries if request.queue is lane]
        self.leave(waiting)
        for lane in self._lanes:
            lane.entries.clear()
            lane.husks = 0
        self._deadlines.clear()
        return waiting


# Answers in the order of the questions (``preserve_ordering``), however the instances finish.

Answer = TypeVar("Answer")


class ResponseOrder(Generic[Answer]):
    """Keeps an answer back until everyone who began before has theirs."""

    __slots__ = ("_first", "_waiting")

    def __init__(self) -> None:
        self._waiting: deque[list[Answer]] = deque()
        self._first = 0

    def begin(self) -> int:
        """Take a place in the order; return its number."""
        self._waiting.append([])
        return self._first + len(self._waiting) - 1

    def finish(self, place: int, answer: Answer) -> list[Answer]:
        """Note the answer of ``place``; return the answers that may leave now, in order."""
        self._waiting[place - self._first].append(answer)
        released: list[Answer] = []
        while self._waiting and self._waiting[0]:
            released += self._waiting.popleft()
            self._first += 1
        return released
