"""Counters that tell an honest peer from a flood. They are given the time and read no clock."""

from __future__ import annotations

from typing import Final

from nerite.http2.limits import Limits

IDLE_FRAMES_EARNED: Final = 4
"""Idle frames that one reply, or one KiB sent, entitles the peer to: some peers answer each DATA frame with two
WINDOW_UPDATEs."""

_INTERVAL_WITHOUT_CALLS: Final = 7_200.0


class Budget:
    """A number of events that may happen at once, and how many a second come back."""

    __slots__ = ("_burst", "_left", "_rate", "_spent_at")

    def __init__(self, burst: float, rate: float, now: float) -> None:
        self._burst = burst
        self._left = burst
        self._rate = rate
        self._spent_at = now

    def spend(self, now: float, events: int = 1, earned: int = 0) -> bool:
        """Count ``events``, after adding ``earned`` more; False if there was not enough left for them."""
        self._left = min(self._burst, self._left + (now - self._spent_at) * self._rate + earned) - events
        self._spent_at = now
        return self._left >= 0


class PingStrikes:
    """gRPC's rule for keepalive pings: too soon is a strike, and too many strikes are the end."""

    __slots__ = ("_interval", "_interval_without_calls", "_last_at", "_last_progress", "_max_strikes", "_strikes")

    def __init__(self, limits: Limits) -> None:
        self._interval = limits.min_recv_ping_interval_without_data_ms / 1000
        self._interval_without_calls = self._interval if limits.permit_pings_without_calls else _INTERVAL_WITHOUT_CALLS
        self._max_strikes = limits.max_ping_strikes
        self._strikes = 0
        self._last_at = float("-inf")
        self._last_progress = 0

    def allows(self, now: float, progress: int, calls: int) -> bool:
        """Count a PING; False if it is one strike too many.

        ``progress`` is a number that grows with each reply: what was sent since the last PING wipes the slate clean.
        ``calls`` is the number of open streams.
        """
        if progress != self._last_progress:
            self._last_progress = progress
            self._strikes = 0
            self._last_at = now
            return True
        early = now < self._last_at + (self._interval if calls else self._interval_without_calls)
        self._last_at = now
        if not early:
            return True
        self._strikes += 1
        return self._max_strikes == 0 or self._strikes <= self._max_strikes


class Floods:
    """The budgets of one connection."""

    __slots__ = ("_earned_progress", "_idle_frames", "_resets", "_settings", "pings")

    def __init__(self, limits: Limits, now: float) -> None:
        self._resets = Budget(limits.resets, limits.resets_per_second, now)
        self._settings = Budget(limits.settings, limits.settings_per_second, now)
        self._idle_frames = Budget(limits.idle_frames, limits.idle_frames_per_second, now)
        self._earned_progress = 0
        self.pings = PingStrikes(limits)

    def allows_reset(self, now: float) -> bool:
        """Count a stream that ended without having been worth it."""
        return self._resets.spend(now)

    def allows_settings(self, now: float, entries: int) -> bool:
        """Count a SETTINGS frame."""
        return self._settings.spend(now, max(1, entries))

    def allows_idle_frame(self, now: float, progress: int) -> bool:
        """Count a frame that moves nothing forward. ``progress`` counts replies and KiB sent."""
        earned = (progress - self._earned_progress) * IDLE_FRAMES_EARNED
        self._earned_progress = progress
        return self._idle_frames.spend(now, 1, earned)
