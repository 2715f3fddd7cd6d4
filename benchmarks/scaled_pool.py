"""A pool whose number of members changes, simulated second by second, and the rules that change it.

Members have slots for requests, in front of which one queue stands (M/M/c). What is left at the end of a second waits
into the next. A member that is wanted is ready after its start time; one that is not wanted goes at once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

import numpy as np

from nerite.autoscaling.figures import PoolFigures
from nerite.autoscaling.policy import ScalingPolicy
from nerite.autoscaling.scaler import PoolScaler

PROMISE: Final = 0.5
"""Seconds in which an answer is promised."""
SERVICE: Final = 0.1
"""Seconds of a request in a slot, on average."""
SLOTS: Final = 2
"""Of a member, which so does 20 requests a second."""
RATE: Final = SLOTS / SERVICE


class ScalingRule(Protocol):
    """Decides how many members are wanted."""

    def observe(self, figures: PoolFigures, now: float) -> int:
        """Take the figures of a second; return the number of members."""


class NeriteRule:
    """Nerite's autoscaler."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self.scaler = PoolScaler(policy)

    def observe(self, figures: PoolFigures, now: float) -> int:
        """Ask the autoscaler."""
        return self.scaler.observe(figures, now).wanted


class RatioRule:
    """The rule of Kubernetes' HorizontalPodAutoscaler with its defaults.

    Every 15 s the members times the ratio of their use to the target, if that differs by more than a tenth; up by a
    factor of two or four members in 15 s at most, down to the largest number of the last 300 s.
    """

    def __init__(self, target: float, least: int, most: int) -> None:
        self._target = target
        self._least = least
        self._most = most
        self._rates: deque[float] = deque(maxlen=30)
        self._wishes: deque[tuple[float, int]] = deque()
        self._wanted = 0
        self._next = 0.0

    def observe(self, figures: PoolFigures, now: float) -> int:
        """Apply the rule."""
        self._rates.append(min(figures.done / figures.seconds, figures.ready * RATE))
        self._wanted = self._wanted or max(figures.ready, self._least)
        if now < self._next:
            return self._wanted
        self._next = now + 15
        ready = max(figures.ready, 1)
        ratio = sum(self._rates) / len(self._rates) / (ready * RATE) / self._target
        wish = ready if abs(ratio - 1) <= 0.1 else math.ceil(ready * ratio)
        wish = min(max(wish, self._least), self._most, max(2 * self._wanted, self._wanted + 4))
        self._wishes.append((now, wish))
        while self._wishes[0][0] < now - 300:
            self._wishes.popleft()
        self._wanted = wish if wish > self._wanted else min(self._wanted, max(each for _, each in self._wishes))
        return self._wanted


class FixedRule:
    """Always the same number."""

    def __init__(self, members: int) -> None:
        self._members = members

    def observe(self, figures: PoolFigures, now: float) -> int:
        """Return the number."""
        return self._members


class ScalingOutcome(NamedTuple):
    """What became of a simulation."""

    member_hours: float
    """Time of members, from when they are wanted."""
    late: float
    """Share of the requests that broke the promise."""
    changes: int
    """How often another number was wanted than before."""
    wanted: tuple[int, ...]
    """In each second."""


class ScaledPool:
    """The members, and what waits for them."""

    def __init__(self, start_seconds: float, seed: int, ready: int = 1) -> None:
        self._start = start_seconds
        self._random = np.random.default_rng(seed)
        self.ready = ready
        self._starting: list[float] = []
        self._waiting = 0.0
        self._requests = 0
        self._late = 0

    def run(self, rate: Callable[[float], float], seconds: int, rule: ScalingRule) -> ScalingOutcome:
        """Simulate. ``rate`` returns the requests a second that arrive on average."""
        wanted: list[int] = []
        time_of_members = 0
        for now in range(seconds):
            self._let_start(now)
            figures = self._second(int(self._random.poisson(rate(now))))
            wanted.append(rule.observe(figures, float(now)))
            self._want(wanted[-1], now)
            time_of_members += self.ready + len(self._starting)
        changes = sum(one != other for one, other in pairwise(wanted))
        return ScalingOutcome(time_of_members / 3600, self._late / max(self._requests, 1), changes, tuple(wanted))

    def _let_start(self, now: float) -> None:
        self.ready += sum(at <= now for at in self._starting)
        self._starting = [at for at in self._starting if at > now]

    def _want(self, members: int, now: float) -> None:
        for _ in range(members - self.ready - len(self._starting)):
            self._starting.append(now + self._start)
        while self._starting and self.ready + len(self._starting) > members:
            self._starting.pop()
        self.ready = min(self.ready, members)

    def _second(self, arrived: int) -> PoolFigures:
        capacity = self.ready * RATE
        before = self._waiting
        done = min(before + arrived, capacity)
        self._waiting = before + arrived - done
        answers = round(done)
        late = 0
        inside = 0.0
        if answers:
            times = self._random.exponential(SERVICE, answers)
            if before or self._waiting:
                times += (before + self._waiting) / 2 / capacity
            busy = min(arrived / capacity, 0.99)
            slots = self.ready * SLOTS
            queued = self._random.random(answers) < busy ** math.sqrt(2 * (slots + 1))
            times += queued * self._random.exponential(1 / (capacity * (1 - busy)), answers)
            late = int((times > PROMISE).sum())
            inside = float(times.sum()) - (before + self._waiting) / 2 / capacity * answers
        self._requests += answers
        self._late += late
        held = round(self._waiting) if not self.ready else 0
        under_way = round(inside + (self._waiting if self.ready else 0))
        return PoolFigures(1.0, arrived, done, answers, late, under_way, held, 0, self.ready)
