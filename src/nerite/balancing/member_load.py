"""What is known of a member: the work that is under way there, ours and that of others, and how fast it does it.

Work is counted in tokens of answers. Ours is known exactly: a request adds what is expected of it when it begins, each
part of the answer takes some away, and its end takes the rest. What others have under way at the same member is what
the member's report says beyond ours; it halves with every two seconds that the report ages.

Speed is learned from the work that a request gets done in a second of being under way. A member where requests advance
more slowly than in the pool as a whole is given less, until they advance alike; this cannot run away, as a member with
less work advances it faster. The configured capacity is what is believed before, and again when nothing is known.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from typing import Final

from nerite.balancing.member import LoadReport, Member, ServerKind

_HALF_LIFE_NS: Final = 2e9
"""Age at which a report of others' work counts half."""
_REPORT_WEIGHT: Final = 0.3
"""Of the newest report in the average of them."""
_KNOWN_NS: Final = 10_000_000_000
"""Age up to which the load of a server that is not ours counts as known."""
_LEAST_SHARE: Final = 0.25
"""Requests that a member must have had under way on average for its speed to be learned."""
_UNCLEAR: Final = (0.8, 1.25)
"""Ratios of speeds that are taken for equal."""
_CHANGE: Final = (0.25, 4.0)
"""Smallest and largest ratio that a window can show."""
_SPEEDS: Final = (1 / 16, 8.0)
"""Smallest and largest speed in relation to the capacity."""
_FORGET: Final = 0.9
"""Exponent of a speed for each window without evidence."""
_RATE_WEIGHT: Final = 0.2


class MemberLoad:
    """A member with its load. ``PoolBalancer`` changes it; others read it."""

    __slots__ = (
        "_changed_ns",
        "_done",
        "_reported_ns",
        "_request_ns",
        "_typical",
        "draining",
        "ejected",
        "factor",
        "member",
        "models",
        "others",
        "rate",
        "ready",
        "report",
        "requests",
        "score",
        "speed",
        "ticket",
        "work",
    )  # fmt: skip

    def __init__(self, member: Member, ticket: int) -> None:
        self.member = member
        self.ticket = ticket
        """Number of its process: another one after a restart."""
        self.ready = False
        self.draining = False
        """Gets no new requests."""
        self.ejected = False
        """Gets no requests for a while, because it failed more than others."""
        self.models: Collection[str] | None = None
        """What it serves; None: not known, so anything."""
        self.work = 0.0
        """Tokens under way from this router."""
        self.others = 0.0
        """Tokens under way from elsewhere, estimated."""
        self.requests = 0
        """Requests under way from this router."""
        self.report = LoadReport()
        self.factor = 1.0
        """Its speed in relation to what its capacity promises."""
        self.speed = member.capacity
        self.rate = 0.0
        """Tokens a second while it has work; 0: not known yet."""
        self.score = 0.0
        """Expected work by speed: how long a new request would have to wait, in relation to other members."""
        self._typical = 1.0
        self._reported_ns = 0
        self._changed_ns = 0
        self._request_ns = 0
        self._done = 0.0

    @property
    def available(self) -> bool:
        """Whether it may get requests that are not bound to it."""
        return self.ready and not self.draining and not self.ejected

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
        self._typical += 0.05 * (work - self._typical)
        self.requests += 1
        self.work += work
        self._rate_work()

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

    def take_report(self, report: LoadReport, now_ns: int) -> None:
        """Learn from a report what others have under way. Call it while the answered request is still counted."""
        self.report = report
        there = [each for each in (report.waiting, report.running) if not math.isnan(each)]
        if there:
            each = self.work / self.requests if self.requests else self._typical / 2
            found = max(0.0, sum(there) - self.requests) * each
            self.refresh(now_ns)
            self.others += _REPORT_WEIGHT * (found - self.others)
            self._reported_ns = now_ns
            self._rate_work()

    def refresh(self, now_ns: int) -> None:
        """Let what others have there fade."""
        if self.others and now_ns > self._reported_ns:
            self.others *= 0.5 ** ((now_ns - self._reported_ns) / _HALF_LIFE_NS)
            self._reported_ns = now_ns
            self._rate_work()

    def _pass_time(self, now_ns: int) -> None:
        self._request_ns += self.requests * max(0, now_ns - self._changed_ns)
        self._changed_ns = now_ns

    def _rate_work(self) -> None:
        self.score = (self.work + self.others) / self.speed

    def close_window(self, window_ns: int, now_ns: int) -> tuple[float, int]:
        """Return the work that was done in a window, and the nanoseconds of all requests in it. Begin the next one."""
        self._pass_time(now_ns)
        found = self._done, self._request_ns
        if self._request_ns > window_ns // 2:
            rate = self._done * 1e9 / window_ns
            self.rate += (_RATE_WEIGHT if self.rate else 1.0) * (rate - self.rate)
        self._done, self._request_ns = 0.0, 0
        return found

    def learn_speed(self, ratio: float | None) -> None:
        """Take how fast requests advanced in relation to the pool; None: there were too few."""
        if ratio is None:
            self.factor **= _FORGET
        elif not _UNCLEAR[0] <= ratio <= _UNCLEAR[1]:
            self.factor *= min(max(ratio, _CHANGE[0]), _CHANGE[1]) ** 0.5
            self.factor = min(max(self.factor, _SPEEDS[0]), _SPEEDS[1])
        self.speed = self.member.capacity * self.factor
        self._rate_work()


def learn_speeds(loads: Iterable[MemberLoad], window_ns: int, now_ns: int) -> None:
    """Close a window of all members of a pool, and compare how fast requests advanced in it."""
    windows = [(load, *load.close_window(window_ns, now_ns)) for load in loads]
    done = sum(each[1] for each in windows)
    spent = sum(each[2] for each in windows)
    for load, work, request_ns in windows:
        enough = done > 0 and request_ns > _LEAST_SHARE * window_ns
        load.learn_speed((work / request_ns) / (done / spent) if enough else None)
