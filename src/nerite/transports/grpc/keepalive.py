"""Decides when to ping a silent client, when to drop it, and when a connection is too old. Has no clock."""

from __future__ import annotations

import enum
from typing import Final

from nerite.config.options import KeepaliveOptions

_MIN_INTERVAL: Final = 0.02
_MAX_INTERVAL: Final = 30.0


class KeepaliveVerdict(enum.Enum):
    """Action to take on a connection."""

    NOTHING = enum.auto()
    PING = enum.auto()
    SHUT_DOWN = enum.auto()
    ABORT = enum.auto()


class KeepaliveRules:
    """Settings of gRPC's keepalive and connection age, in seconds."""

    def __init__(self, options: KeepaliveOptions) -> None:
        self.time = options.time_ms / 1000
        self.timeout = options.timeout_ms / 1000
        self.permit_without_calls = options.permit_without_calls
        self.max_pings = options.max_pings_without_data
        self.max_age = options.max_connection_age_ms / 1000 or float("inf")
        self.grace = options.max_connection_age_grace_ms / 1000 or float("inf")

    @property
    def check_interval(self) -> float:
        """Interval at which each connection must be checked for the rules to hold closely."""
        return min(max(min(self.time, self.timeout, self.max_age, self.grace) / 4, _MIN_INTERVAL), _MAX_INTERVAL)


class Keepalive:
    """Keepalive state of one connection: notified of received bytes, polled at intervals."""

    __slots__ = ("_last_received", "_opened_at", "_pinged_at", "_pings", "_rules", "_shut_down", "answered")

    def __init__(self, rules: KeepaliveRules, now: float) -> None:
        self._rules = rules
        self._opened_at = now
        self._last_received = now
        self._pinged_at: float | None = None
        self._pings = 0
        self._shut_down = False
        self.answered = False
        """Set by the connection when it sends a reply or a part of one."""

    def heard(self, now: float) -> None:
        """Record that bytes were received."""
        self._last_received = now
        self._pinged_at = None

    def check(self, now: float, calls: int) -> KeepaliveVerdict:
        """Return the action to take, given the number of calls in progress."""
        rules = self._rules
        if now - self._opened_at >= rules.max_age:
            if not self._shut_down:
                self._shut_down = True
                return KeepaliveVerdict.SHUT_DOWN
            if now - self._opened_at >= rules.max_age + rules.grace:
                return KeepaliveVerdict.ABORT
        if self.answered:
            self.answered = False
            self._pings = 0
        if self._pinged_at is not None:
            return KeepaliveVerdict.ABORT if now - self._pinged_at >= rules.timeout else KeepaliveVerdict.NOTHING
        silent = now - self._last_received >= rules.time
        if silent and (calls or rules.permit_without_calls) and (not rules.max_pings or self._pings < rules.max_pings):
            self._pinged_at = now
            self._pings += 1
            return KeepaliveVerdict.PING
        return KeepaliveVerdict.NOTHING
