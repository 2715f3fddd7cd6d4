"""Stall detection: a member that has requests and sends nothing for much longer than usual gets no others meanwhile.

Health checks find a server that hangs only after several seconds, and until then affinity would send it whatever begins
like what it has. What is usual is learned for each pool: tokens of a stream come all the time, whole answers of a
language model take as long as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from nerite.balancing.member_load import MemberLoad

_LEAST_NS: Final = 750_000_000
"""Silence that is never a stall."""
_FACTOR: Final = 3.0
"""A stall is longer than this multiple of the longest usual silence."""
_HALF_LIFE_NS: Final = 60e9
"""Time after which a long silence counts half."""
_ENOUGH: Final = 64
"""Parts of answers before anything is usual."""


class MemberStallDetector:
    """Decides which members of a pool are stalled. A member ceases to be when it sends anything."""

    def __init__(self) -> None:
        self._usual_ns = 0.0
        """The longest silence of late of a member with requests."""
        self._heard = 0
        self._advanced_ns = 0

    def heard(self, load: MemberLoad, now_ns: int) -> bool:
        """Note that a member has sent a part of an answer. Returns whether it was stalled until now."""
        silence = now_ns - load.heard_ns
        load.heard_ns = now_ns
        self._heard += 1
        was_stalled, load.stalled = load.stalled, False
        if silence > self._usual_ns:
            # One stall says little about what is usual; several in a row do.
            self._usual_ns = min(silence, 2 * self._usual_ns) if was_stalled else silence
        return was_stalled

    def advance(self, loads: Iterable[MemberLoad], now_ns: int) -> bool:
        """Look at all members. Returns whether one is stalled that was not, or the other way round."""
        self._usual_ns *= 0.5 ** ((now_ns - self._advanced_ns) / _HALF_LIFE_NS)
        self._advanced_ns = now_ns
        limit = max(_LEAST_NS, _FACTOR * self._usual_ns)
        changed = False
        for load in loads:
            stalled = self._heard >= _ENOUGH and load.requests > 0 and now_ns - load.heard_ns > limit
            changed |= stalled is not load.stalled
            load.stalled = stalled
        return changed
