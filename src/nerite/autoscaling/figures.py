"""Inputs of the autoscaler for a pool, and counts of the answers that kept its promises on latency."""

from __future__ import annotations

import math
from typing import NamedTuple

from nerite.autoscaling.policy import ScalingPolicy


class PoolFigures(NamedTuple):
    """A pool in one interval, of about a second."""

    seconds: float
    arrived: float = 0.0
    """Work that arrived, in tokens; a tensor request counts as one."""
    done: float = 0.0
    """Work that members have done."""
    answers: int = 0
    """Answers that have ended."""
    late: int = 0
    """Answers that broke a promise."""
    under_way: int = 0
    """Requests at members, at the end of the interval."""
    held: int = 0
    """Requests that wait for a member."""
    turned_away: int = 0
    """Requests that were refused in the interval because no member could take them."""
    ready: int = 0
    """Members that can take requests."""

    @property
    def idle(self) -> bool:
        """Whether no request arrived, ran or waited in the interval, and none was refused."""
        return not (self.arrived or self.under_way or self.held or self.turned_away)


class PromiseCount:
    """Counts answers by how they kept the promises."""

    __slots__ = ("_itl", "_latency", "_ttft", "answers", "late")

    def __init__(self, policy: ScalingPolicy) -> None:
        self._ttft = policy.ttft or math.inf
        self._itl = policy.itl or math.inf
        self._latency = policy.latency or math.inf
        self.answers = self.late = 0

    def missed(self) -> None:
        """Count a request whose time was up before its answer."""
        self.answers += 1
        self.late += 1

    def answered(self, seconds: float, first_seconds: float, tokens: float) -> None:
        """Count an answer: its time, the part of it before its first token, and its tokens (0: it has none)."""
        self.answers += 1
        self.late += (
            seconds > self._latency
            or (tokens > 0 and first_seconds > self._ttft)
            or (tokens > 1 and (seconds - first_seconds) / (tokens - 1) > self._itl)
        )


class PoolDemand:
    """Counts what happens in a pool from one interval to the next."""

    __slots__ = ("_policy", "arrived", "done", "promises", "turned_away")

    def __init__(self, policy: ScalingPolicy) -> None:
        self._policy = policy
        self._begin()

    def _begin(self) -> None:
        self.arrived = self.done = 0.0
        self.turned_away = 0
        self.promises = PromiseCount(self._policy)

    def take(self, seconds: float, *, under_way: int, held: int, ready: int) -> PoolFigures:
        """Return the figures of the interval that ends now, and begin the next."""
        kept = self.promises
        figures = PoolFigures(
            seconds,
            self.arrived,
            self.done,
            kept.answers,
            kept.late,
            under_way,
            held,
            self.turned_away,
            ready,
        )
        self._begin()
        return figures
