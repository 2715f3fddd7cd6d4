"""When to ping a silent client, when to give it up, and when a connection is old enough: a decider without a clock."""

from __future__ import annotations

import enum
from typing import Final

from nerite.config.options import KeepaliveOptions

_SHORTEST_LOOK: Final = 0.02
_LONGEST_LOOK: Final = 30.0


class KeepaliveVerdict(enum.Enum):
    """What to do with a connection now."""

    NOTHING = enum.auto()
    PING = enum.auto()
    SHUT_DOWN = enum.auto()
    ABORT = enum.auto()


class KeepaliveRules:
    """gRPC's keepalive and connection age, in seconds."""

    def __init__(self, options: KeepaliveOptions) -> None:
        self.time = options.time_ms / 1000
        self.timeout = options.timeout_ms / 1000
        self.permit_without_calls = options.permit_without_calls
        self.max_pings = options.max_pings_without_data
        self.max_age = options.max_connection_age_ms / 1000 or float("inf")
        self.grace = options.max_connection_age_grace_ms / 1000 or float("inf")

    @property
    def look_every(self) -> float:
        """How often each connection must be looked at for the rules to hold closely."""
        return min(max(min(self.time, self.timeout, self.max_age, self.grace) / 4, _SHORTEST_LOOK), _LONGEST_LOOK)


class Keepalive:
    """One connection's record. Told of what arrives, asked now and then."""

    __slots__ = ("_born", "_heard", "_pinged", "_pings", "_rules", "_shut_down", "answered")

    def __init__(self, rules: KeepaliveRules, now: float) -> None:
        self._rules = rules
        self._born = now
        self._heard = now
        self._pinged: float | None = None
        self._pings = 0
        self._shut_down = False
        self.answered = False
        """Set by the connection when an answer, or a part of one, leaves."""

    def heard(self, now: float) -> None:
        """Note that bytes came."""
        self._heard = now
        self._pinged = None

    def look(self, now: float, calls: int) -> KeepaliveVerdict:
        """Return what to do, given how many calls are under way."""
        rules = self._rules
        if now - self._born >= rules.max_age:
            if not self._shut_down:
                self._shut_down = True
                return KeepaliveVerdict.SHUT_DOWN
            if now - self._born >= rules.max_age + rules.grace:
                return KeepaliveVerdict.ABORT
        if self.answered:
            self.answered = False
            self._pings = 0
        if self._pinged is not None:
            return KeepaliveVerdict.ABORT if now - self._pinged >= rules.timeout else KeepaliveVerdict.NOTHING
        silent = now - self._heard >= rules.time
        if silent and (calls or rules.permit_without_calls) and (not rules.max_pings or self._pings < rules.max_pings):
            self._pinged = now
            self._pings += 1
            return KeepaliveVerdict.PING
        return KeepaliveVerdict.NOTHING
