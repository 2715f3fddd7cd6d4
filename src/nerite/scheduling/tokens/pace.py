"""How fast an engine is, as measured: what decides whether a request can be in time."""

from __future__ import annotations

import math
from collections import deque
from typing import Final

_SPAN: Final = 250_000_000
"""Nanoseconds over which tokens are counted."""
_MEMORY: Final = 5e9
"""Nanoseconds after which a measurement counts for a third."""
_LATEST: Final = 64
"""Prompts by which it is said how much longer than expected one may take."""
_SELDOM: Final = 20
"""One in so many takes longer than that."""
_STALE: Final = 10_000_000_000
"""Nanoseconds after which one that was not renewed does not count: else one bad moment could shut the door for good."""


class _Line:
    """A time that grows with a number: some of it anyway, and some for each. The latest values count more."""

    __slots__ = ("_at", "_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._at = 0

    def note(self, x: float, y: float, now: int) -> None:
        """Note that ``x`` took ``y``."""
        fade = math.exp((self._at - now) / _MEMORY) if self._n else 0.0
        self._n = self._n * fade + 1
        self._x = self._x * fade + x
        self._y = self._y * fade + y
        self._xx = self._xx * fade + x * x
        self._xy = self._xy * fade + x * y
        self._at = now

    def at(self, x: float, now: int) -> float | None:
        """Return how long ``x`` takes; None if nothing is known."""
        if not self._n or now - self._at > _STALE:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread <= mean_x * mean_x / 100:
            # All were alike. Whatever is smaller takes as long, for all anybody knows; what is larger, as much longer.
            return mean_y * max(1.0, x / mean_x) if mean_x else mean_y
        slope = min(max((self._xy / self._n - mean_x * mean_y) / spread, 0.0), mean_y / mean_x)
        return mean_y + slope * (x - mean_x)


class _Mean:
    """The mean of a figure, the latest values more than the earlier."""

    __slots__ = ("_at", "_value", "_weight")

    def __init__(self) -> None:
        self._value = 0.0
        self._weight = 0.0
        self._at = 0

    def note(self, amount: float, weight: float, now: int) -> None:
        """Note ``amount`` for ``weight``: seconds for tokens, or tokens for seconds."""
        fade = math.exp((self._at - now) / _MEMORY) if self._weight else 0.0
        self._value = self._value * fade + amount
        self._weight = self._weight * fade + weight
        self._at = now

    def at(self, now: int) -> float | None:
        """Return the amount for each weight; None if nothing is known."""
        return self._value / self._weight if self._weight and now - self._at <= _STALE else None


class Pace:
    """Of one engine, or of a model that is none."""

    __slots__ = (
        "_begun",
        "_decode",
        "_excess",
        "_excesses",
        "_generated",
        "_prefill",
        "_running",
        "_running_time",
        "_seen",
        "_throughput",
        "_waiting",
        "_work",
    )

    def __init__(self, now: int) -> None:
        self._prefill = _Line()
        self._excesses: deque[float] = deque(maxlen=_LATEST)
        """How many times as long as expected the latest prompts took."""
        self._excess = 1.0
        """That hardly any exceeds."""
        self._decode: dict[int, _Mean] = {}
        """Nanoseconds that one sequence takes for a token, by the number of bits of how many run."""
        self._throughput = _Mean()
        self._begun = self._seen = now
        self._running = 0
        self._running_time = 0
        self._generated = 0
        self._work = 0.0
        self._waiting = False
        """Somebody has waited since ``_begun``: what was done since is what the engine can do."""

    def note_prefill(self, tokens: int, took: int, now: int) -> None:
        """Note that ``tokens`` of prompts, of one request and of those read beside it, took nanoseconds."""
        expected = self._prefill.at(tokens, now)
        if expected:
            self._excesses.append(took / expected)
            self._excess = max(1.0, sorted(self._excesses)[-1 - len(self._excesses) // _SELDOM])
        self._prefill.note(tokens, took, now)

    def note_generated(self, tokens: int, now: int) -> None:
        """Note tokens of output."""
        self._generated += tokens
        self.note_work(tokens, now)

    def note_work(self, cost: float, now: int) -> None:
        """Note work that is no output: a prompt that was read, a request that was executed."""
        self._work += cost
        if now - self._begun >= _SPAN:
            self._close(now)

    def note_running(self, running: int, now: int) -> None:
        """Note how many sequences generate from now on."""
        self._running_time += self._running * (now - self._seen)
        self._seen = now
        self._running = running

    def note_waiting(self, somebody: bool, now: int) -> None:
        """Note whether somebody waits from now on."""
        if somebody != self._waiting:
            self._close(now)
            self._waiting = somebody

    def work(self, cost: float, now: int) -> float | None:
        """Return the nanoseconds that the engine needs for so much work of those that wait; None if nobody knows."""
        each = self._throughput.at(now)
        return None if each is None else cost * each

    def prefill(self, tokens: int, now: int) -> float | None:
        """Return the nanoseconds in which prompts of ``tokens`` are read, but for one in twenty; None if nobody knows.

        Where more comes than can be done, whoever is let in has waited nearly as long as is promised. Were no more than
        the usual time left, every second one of those would be late.
        """
        expected = self._prefill.at(tokens, now)
        return None if expected is None else expected * self._excess

    def decode(self, tokens: int, running: int, now: int) -> float | None:
        """Return the nanoseconds in which one of ``running`` sequences generates ``tokens``; None if nobody knows."""
        wanted = running.bit_length()
        known = [(abs(bits - wanted), -bits, each) for bits, mean in self._decode.items() if (each := mean.at(now))]
        return tokens * min(known)[2] if known else None

    def _close(self, now: int) -> None:
        """Take in what was counted, and begin anew."""
        self.note_running(self._running, now)
        passed = now - self._begun
        if self._generated and self._running_time:
            bits = round(self._running_time / passed).bit_length()
            self._decode.setdefault(bits, _Mean()).note(self._running_time, self._generated, now)
        if self._waiting and self._work and passed >= _SPAN:
            self._throughput.note(passed, self._work, now)
        self._begun = now
        self._running_time = self._generated = 0
        self._work = 0.0
