"""Outlier detection: members that fail more than the others get no requests for a while, each time for longer."""

from __future__ import annotations

from collections.abc import Iterable

from nerite.balancing.policy import EjectionPolicy


class _Record:
    """How the requests of a member ended."""

    __slots__ = ("answered", "ejections", "failed", "in_a_row", "out_until_ns")

    def __init__(self) -> None:
        self.in_a_row = 0
        self.answered = 0
        """In this interval."""
        self.failed = 0
        self.ejections = 0
        """Of late: one less after each good interval."""
        self.out_until_ns = 0
        """0: it is not ejected."""


class OutlierDetector:
    """Decides which members of a pool are ejected.

    A member that returns is on probation: its next failure ejects it again, its next answer ends the probation.
    """

    def __init__(self, policy: EjectionPolicy | None = None) -> None:
        self.policy = policy or EjectionPolicy()
        self.ejected: frozenset[str] = frozenset()
        """Names of those that are out now."""
        self.ejections = 0
        """How often one was ejected, in all."""
        self._records: dict[str, _Record] = {}
        self._interval_ns = 0

    def set_members(self, names: Iterable[str]) -> None:
        """Take who belongs to the pool. Others are forgotten."""
        self._records = {name: self._records.get(name) or _Record() for name in names}
        self._tell()

    def answered(self, name: str) -> None:
        """Note an answer for which the member is not to blame."""
        if record := self._records.get(name):
            record.in_a_row = 0
            record.answered += 1

    def failed(self, name: str, now_ns: int) -> bool:
        """Note a failure. Returns whether the member is ejected for it."""
        record = self._records.get(name)
        if record is None:
            return False
        record.in_a_row += 1
        record.failed += 1
        limit = self.policy.consecutive_failures
        return 0 < limit <= record.in_a_row and self._eject(record, now_ns)

    def advance(self, now_ns: int) -> bool:
        """Let members return whose time is over, and judge the interval when it ends. Returns whether any changed."""
        before = self.ejected
        for record in self._records.values():
            if 0 < record.out_until_ns <= now_ns:
                record.out_until_ns = 0
                record.in_a_row = max(0, self.policy.consecutive_failures - 1)
        if now_ns >= self._interval_ns:
            self._interval_ns = now_ns + round(self.policy.interval * 1e9)
            self._judge(now_ns)
        self._tell()
        return self.ejected != before

    def _judge(self, now_ns: int) -> None:
        failed = sum(each.failed for each in self._records.values())
        total = failed + sum(each.answered for each in self._records.values())
        worse: list[tuple[float, _Record]] = []
        for record in self._records.values():
            volume = record.answered + record.failed
            rest = total - volume
            if volume >= self.policy.request_volume and rest >= self.policy.request_volume:
                beyond = record.failed / volume - (failed - record.failed) / rest
                if 0 < self.policy.failure_ratio <= beyond:
                    worse.append((beyond, record))
                    continue
            if record.answered and not record.out_until_ns:
                record.ejections = max(0, record.ejections - 1)
        for _, record in sorted(worse, key=lambda each: -each[0]):
            self._eject(record, now_ns)
        for record in self._records.values():
            record.answered = record.failed = 0

    def _eject(self, record: _Record, now_ns: int) -> bool:
        members = len(self._records)
        share = self.policy.max_ejected
        most = min(max(1, int(share * members)), members - 1) if share else 0
        if record.out_until_ns or len(self.ejected) >= most:
            return False
        # Doubled at most 30 times: beyond, it is above any limit.
        seconds = min(self.policy.base_ejection * 2 ** min(record.ejections, 30), self.policy.max_ejection)
        record.ejections += 1
        record.out_until_ns = now_ns + round(seconds * 1e9)
        self.ejections += 1
        self._tell()
        return True

    def _tell(self) -> None:
        self.ejected = frozenset(name for name, each in self._records.items() if each.out_until_ns)
