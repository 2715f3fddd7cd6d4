"""Decides how many members a pool should have. No I/O, no clock: it is given figures once a second.

More members are wanted as soon as half of the headroom is used up, by a bounded step; fewer only when fewer would have
had the whole headroom for the stabilization time.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final, NamedTuple

from nerite.autoscaling.demand import DemandForecast
from nerite.autoscaling.figures import PoolFigures
from nerite.autoscaling.member_rate import MemberRate
from nerite.autoscaling.policy import ScalingPolicy
from nerite.autoscaling.start_times import StartTimes

_STEP_SECONDS: Final = 15.0
"""Time in which the number of members grows by one step at most."""
_STEP_LEAST: Final = 4
"""Members by which it may grow in any case."""
_SPARE: Final = 1.05
"""What a member is supposed to do beyond what it needs to, where it is found out whether one less is enough."""
_MORE: Final = 0.25
"""Share of the members that is added when there are too few, and it is not known how many are missing."""


class ScalingDecision(NamedTuple):
    """What a pool should have."""

    wanted: int
    """Members."""
    reason: str
    """Why so many, as a sentence for people."""


class _Need(NamedTuple):
    members: float
    reason: str


class PoolScaler:
    """The autoscaler of one pool. Times are seconds of a monotonic clock."""

    def __init__(self, policy: ScalingPolicy) -> None:
        self.policy = policy
        self.demand = DemandForecast()
        """Of work."""
        self.requests = DemandForecast()
        """Of requests at the same time."""
        self.member_rate = MemberRate(policy.share)
        self.start_times = StartTimes()
        self.decision = ScalingDecision(policy.least, "no figures yet")
        self._needs: deque[tuple[float, int]] = deque()
        """What was needed when, over the stabilization time; later larger needs have replaced smaller ones."""
        self._began = math.inf
        self._busy = 0.0
        """When anybody last wanted something of the pool."""
        self._lessened = 0.0
        self._steps: deque[tuple[float, int]] = deque()
        """When how many members were wanted, within the last step."""

    @property
    def rate(self) -> float:
        """Work that a member does in a second: the target, or what was learned; 0 if it is not known."""
        return self.policy.rate or self.member_rate.rate

    def observe(self, figures: PoolFigures, now: float) -> ScalingDecision:
        """Take the figures of an interval; return what is wanted now."""
        if self._began == math.inf:
            # After a restart of the router, keep the current number of members.
            self._began = self._busy = self._lessened = now
            self.decision = ScalingDecision(self.policy.bounded(figures.ready), "as many as there were at the start")
        if not figures.idle:
            self._busy = now
        self.demand.add(figures.arrived, figures.seconds)
        self.requests.add((figures.under_way + figures.held) * figures.seconds, figures.seconds)
        if self.policy.promises:
            self.member_rate.observe(figures, now)
        self.start_times.observe(figures.ready, now)
        before = self.decision.wanted
        self.decision = self._decide(figures, before, now)
        self.start_times.wanted(self.decision.wanted - before, now)
        return self.decision

    def _decide(self, figures: PoolFigures, before: int, now: float) -> ScalingDecision:
        policy = self.policy
        idle = now - self._busy
        if not policy.least and idle >= policy.idle:
            self._needs.clear()
            return ScalingDecision(0, f"no request for {policy.idle:g} s")
        need = self._need(figures, before, now)
        needed = max(math.ceil(need.members - 1e-9), 0 if figures.idle and not before else 1)
        steady = self._steady(needed, now)
        pressing = need.members * (1 + policy.headroom / 2) / (1 + policy.headroom)
        if needed > before and (not before or pressing > before):
            wanted = min(needed, self._step_limit(before, now))
            reason = need.reason if wanted == needed else f"{need.reason}, in steps: {needed} in the end"
        elif steady < before and now - self._began >= policy.stabilization:
            wanted, reason = steady, f"{need.reason}; not more for {policy.stabilization:g} s"
        elif self._has_spare(figures, before, now):
            wanted, reason = before - 1, f"hardly an answer was late for {policy.stabilization:g} s: one member less"
            self.member_rate.suppose(_SPARE * self.demand.rate * (1 + policy.headroom) / wanted)
        else:
            wanted, reason = before, need.reason
        if (bounded := policy.bounded(wanted)) != wanted:
            name = "min" if bounded > wanted else "max"
            reason = f"{reason}, bounded by {name}"
        if bounded < before:
            self._lessened = now
        return ScalingDecision(bounded, reason)

    def _need(self, figures: PoolFigures, before: int, now: float) -> _Need:
        """Return how many members are needed now, a fraction of one included, and why."""
        policy = self.policy
        needs = [_Need(0.0, "there is nothing to do")]
        if figures.held or figures.turned_away:
            waiting = figures.held + figures.turned_away
            full = before > 0 and figures.ready >= before and not self.start_times.starting
            more = max(1.0, _MORE * before) if full or not before else 0.0
            needs.append(_Need(before + more, f"{waiting} requests found no member"))
        if policy.concurrency:
            at_once = self.requests.ahead(self.start_times.seconds)
            needs.append(_Need(
                at_once * (1 + policy.headroom) / policy.concurrency,
                f"{at_once:.3g} requests at the same time, {policy.concurrency:g} for each member",
            ))  # fmt: skip
        if self.rate:
            arriving = self.demand.ahead(self.start_times.seconds)
            how = "a member does" if policy.rate else "a member keeps the promises at"
            needs.append(_Need(
                arriving * (1 + policy.headroom) / self.rate,
                f"work arrives at {arriving:.3g}/s, {how} {self.rate:.3g}/s",
            ))  # fmt: skip
        elif policy.promises and not policy.concurrency:
            needs.append(_Need(float(before), "how much a member can do is not known yet"))
        need = max(needs)
        if self.member_rate.broken and need.members <= before and not self.start_times.starting:
            late = f"{self.member_rate.late_share:.0%} of the answers break the promise"
            return _Need(before + max(1.0, _MORE * before), late)
        if self.member_rate.unreachable:
            late = f"{self.member_rate.late_share:.0%} of the answers break the promise without load: more do not help"
            return _Need(need.members, f"{need.reason}; {late}")
        return need

    def _steady(self, needed: int, now: float) -> int:
        """Return the largest number that was needed within the stabilization time."""
        needs = self._needs
        while needs and needs[-1][1] <= needed:
            needs.pop()
        needs.append((now, needed))
        while needs[0][0] < now - self.policy.stabilization:
            needs.popleft()
        return needs[0][1]

    def _step_limit(self, before: int, now: float) -> int:
        """Return the largest number that may be wanted now."""
        steps = self._steps
        while steps and steps[0][0] <= now - _STEP_SECONDS:
            steps.popleft()
        base = min((wanted for _, wanted in steps), default=before)
        steps.append((now, before))
        return max(math.ceil(base * self.policy.step), base + _STEP_LEAST)

    def _has_spare(self, figures: PoolFigures, before: int, now: float) -> bool:
        """Whether to find out if one member less keeps the promises, too: the learned rate may be too low."""
        long_ago = now - self.policy.stabilization
        return (
            self.policy.promises
            and not (self.policy.rate or self.policy.concurrency)
            and before > max(self.policy.least, 1)
            and figures.ready >= before
            and self.member_rate.spare_since <= long_ago
            and self._lessened <= long_ago
            and self.member_rate.is_doubtful(self.demand.rate / (before - 1), now)
        )
