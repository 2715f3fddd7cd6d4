"""What is known of a member: the work that is under way there, ours and that of others, and how fast it does it.

Work is counted in tokens of answers. Ours is known exactly: a request adds what is expected of it when it begins, each
part of the answer takes some away, and its end takes the rest. What others have under way at the same member is what
the member's report says beyond ours; it halves with every two seconds that the report ages.

A member that is slower than others keeps its work for longer, and so gets less. Beyond that it is noticed when it
advances answers more slowly than the median of the members (``compare_speeds``). It is never taken for faster than its
capacity says: whoever has little to compute for prompts seems fast.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from statistics import median
from typing import Final

from nerite.balancing.member import LoadReport, Member, ServerKind

_HALF_LIFE_NS: Final = 2e9
"""Age at which a report of others' work counts half."""
_REPORT_WEIGHT: Final = 0.3
"""Of the newest report in the average of them."""
_KNOWN_NS: Final = 10_000_000_000
"""Age up to which the load of a server that is not ours counts as known."""
_SLOW: Final = 0.6
"""Ratio of speeds below which a member is slow: load alone makes some difference."""
_SLOWEST: Final = 1 / 16
"""Smallest ratio that is believed."""
_RATIO_WEIGHT: Final = 0.3
"""Of the newest window in the average of ratios."""
_FORGET: Final = 0.9
"""Exponent of a ratio for each window without evidence."""
_ENOUGH_NS: Final = 100_000_000
"""Time of answers of a model that a member must have had in a window for its speed to be seen."""
_RATE_WEIGHT: Final = 0.2
_KEPT: Final = 0.98
"""Share of the computed tokens that still count after a window: a member that is new does not get all new prompts."""


class MemberLoad:
    """A member with its load. ``PoolBalancer`` changes it; others read it."""

    __slots__ = (
        "_changed_ns",
        "_done",
        "_faded_ns",
        "_ratio",
        "_reported_ns",
        "_request_ns",
        "computed",
        "ejected",
        "factor",
        "heard_ns",
        "member",
        "models",
        "others",
        "rate",
        "ready",
        "report",
        "requests",
        "score",
        "speed",
        "stalled",
        "ticket",
        "timings",
        "work",
    )  # fmt: skip

    def __init__(self, member: Member, ticket: int) -> None:
        self.member = member
        self.ticket = ticket
        """Number of its process: another one after a restart."""
        self.ready = False
        self.ejected = False
        """Gets no requests for a while, because it failed more than others."""
        self.stalled = False
        """Gets no requests for a while, because it has some and sends nothing."""
        self.heard_ns = 0
        """When it last sent a part of an answer, or had no requests."""
        self.models: Collection[str] | None = None
        """What it serves; None: not known, so anything."""
        self.work = 0.0
        """Tokens under way from this router."""
        self.others = 0.0
        """Tokens under way from elsewhere, estimated."""
        self.requests = 0
        """Requests under way from this router."""
        self.computed = 0.0
        """Tokens of prompts that it did not hold when they came from this router. They fade with time."""
        self.report = LoadReport()
        self.factor = 1.0
        """Its speed in relation to what its capacity promises, at most 1."""
        self.speed = member.capacity
        self.rate = 0.0
        """Tokens a second while it has work; 0: not known yet."""
        self.score = 0.0
        """Expected work by speed: how long a new request would have to wait, in relation to other members."""
        self._reported_ns = 0
        self._faded_ns = 0
        """Up to when the work of others has faded."""
        self._changed_ns = 0
        self._request_ns = 0
        self._done = 0.0
        self._ratio = 1.0
        self.timings: dict[str, list[float]] = {}
        """For each model, the tokens of this window and the nanoseconds that they took."""

    @property
    def draining(self) -> bool:
        """Whether it gets new requests only while there is no other, but for those of sequences that it has."""
        return self.member.drain

    @property
    def available(self) -> bool:
        """Whether it may get requests that are not bound to it."""
        return self.ready and not self.draining and not self.ejected and not self.stalled

    def set_member(self, member: Member) -> None:
        """Take a changed description."""
        self.member = member
        self.speed = member.capacity * self.factor
        self._rate_work()

    def is_known(self, now_ns: int) -> bool:
        """Whether the work that others have there is known, too."""
        return self.member.kind is ServerKind.NERITE or (
            self._reported_ns > 0 and now_ns - self._reported_ns < _KNOWN_NS
        )

    def begin(self, work: float, now_ns: int) -> None:
        """Add a request."""
        self._pass_time(now_ns)
        if not self.requests:
            self.heard_ns = now_ns
        self.requests += 1
        self.work += work
        self._rate_work()

    def time_tokens(self, model: str, tokens: float, spent_ns: int) -> None:
        """Note how long tokens of an answer took, for the speed."""
        timing = self.timings.get(model)
        if timing is None:
            self.timings[model] = [tokens, spent_ns]
        else:
            timing[0] += tokens
            timing[1] += spent_ns

    def advance(self, done: float, less: float) -> None:
        """Note that work was done, and how much less there is to do."""
        self._done += done
        self.work = max(0.0, self.work - less)
        self._rate_work()

    def end(self, left: float, now_ns: int) -> None:
        """Remove a request, with what was left to do for it."""
        self._pass_time(now_ns)
        self.requests -= 1
        self.work = max(0.0, self.work - left) if self.requests else 0.0
        self._rate_work()

    def take_report(self, report: LoadReport, typical: float, now_ns: int) -> None:
        """Learn from a report what others have under way. Call it while the answered request is still counted.

        ``typical`` is the work of a request of theirs, in the middle of its time, where we have none to compare.
        """
        self.report = report
        there = [each for each in (report.waiting, report.running) if not math.isnan(each)]
        if there:
            each = self.work / self.requests if self.requests else typical
            found = max(0.0, sum(there) - self.requests) * each
            self.refresh(now_ns)
            self.others += _REPORT_WEIGHT * (found - self.others)
            self._reported_ns = self._faded_ns = now_ns
            self._rate_work()

    def refresh(self, now_ns: int) -> None:
        """Let what others have there fade."""
        if self.others and now_ns > self._faded_ns:
            self.others *= 0.5 ** ((now_ns - self._faded_ns) / _HALF_LIFE_NS)
            self._faded_ns = now_ns
            self._rate_work()

    def _pass_time(self, now_ns: int) -> None:
        self._request_ns += self.requests * max(0, now_ns - self._changed_ns)
        self._changed_ns = now_ns

    def _rate_work(self) -> None:
        self.score = (self.work + self.others) / self.speed

    def close_window(self, window_ns: int, ratio: float | None, now_ns: int) -> None:
        """Learn from a window how fast the member is in relation to others; None: there was too little to see."""
        self._pass_time(now_ns)
        if self._request_ns > window_ns // 2:
            rate = self._done * 1e9 / window_ns
            self.rate += (_RATE_WEIGHT if self.rate else 1.0) * (rate - self.rate)
        self._done, self._request_ns = 0.0, 0
        self.timings.clear()
        self.computed *= _KEPT
        if ratio is None:
            self._ratio **= _FORGET
        else:
            self._ratio += _RATIO_WEIGHT * (min(max(ratio, _SLOWEST), 1.0) - self._ratio)
        self.factor = self._ratio if self._ratio < _SLOW else 1.0
        self.speed = self.member.capacity * self.factor
        self._rate_work()


def compare_speeds(loads: Collection[MemberLoad], window_ns: int, now_ns: int) -> None:
    """Compare how fast the members of a pool advance answers, and begin the next window.

    Each model is compared with itself. Only answers that have begun count, as the time before depends on the prompt and
    on what was cached of it; and tensors, whose requests are alike.
    """
    speeds: dict[str, list[float]] = {}
    for load in loads:
        for model, (tokens, spent_ns) in load.timings.items():
            if spent_ns >= _ENOUGH_NS:
                speeds.setdefault(model, []).append(tokens / spent_ns)
    usual = {model: median(found) for model, found in speeds.items() if len(found) > 1}
    for load in loads:
        done = spent = 0.0
        for model, (tokens, spent_ns) in load.timings.items():
            if spent_ns >= _ENOUGH_NS and usual.get(model):
                # Weighted by time: what it did, in the time that the usual member would have taken for it.
                done += tokens / usual[model]
                spent += spent_ns
        load.close_window(window_ns, done / spent if spent else None, now_ns)
