"""Whether to wait asleep or awake: a decider without a clock.

To fall asleep and to be woken again costs tens of microseconds, more than a small model needs, and leaves cold caches.
So where the last wait was short, the next one is spent awake, up to a limit, by looking again and again and giving way
to everybody else in between. Where things are further apart one sleeps as ever: each of the loop and the workers spends
one core awake at most, and only while it is busy thousands of times a second.
"""

from __future__ import annotations

from nerite.backends import cores

_DEFAULT_MICROSECONDS = 400


class Vigil:
    """One that waits. Waits of two kinds are told apart, because the one says little about the other.

    Told when a wait begins (``rest``) and when it is over (``stir``), asked in between (``awake``). Times in seconds.
    """

    __slots__ = ("_began", "_kind", "_limit", "_short")

    def __init__(self, limit: float) -> None:
        """``limit``: how long to stay awake; 0 is never."""
        self._limit = limit
        self._began = 0.0
        self._kind = False
        self._short = {False: False, True: False}

    def rest(self, now: float, kind: bool = False) -> None:
        """Note that a wait begins."""
        self._began = now
        self._kind = kind

    def stir(self, now: float) -> None:
        """Note that what was waited for is here."""
        self._short[self._kind] = now - self._began < self._limit

    def awake(self, now: float) -> bool:
        """Return whether to look again, instead of going to sleep."""
        return self._short[self._kind] and now - self._began < self._limit


def limit_of(microseconds: int) -> float:
    """Return the limit in seconds that an option means; below 0 the machine decides.

    Then it is never where it would take from somebody: on one core, and under a quota of processor time, which it would
    use up.
    """
    if microseconds < 0:
        microseconds = _DEFAULT_MICROSECONDS if cores.usable_cores() > 1 and not cores.quota() else 0
    return microseconds / 1e6
