"""How many tokens a request will probably generate, from those that finished before it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

_LATEST: Final = 1 / 32
"""How much the latest counts; among the first few all count alike."""
_MARGIN: Final = 1.0
"""Deviations above the mean that memory is promised for."""
_UNKNOWN: Final = 256
"""Tokens that memory is promised for as long as nothing is known: else the first that may have as many as there is room
for would have to run alone."""


class LengthHistory:
    """Mean and mean deviation of what was seen, the latest more than the earlier."""

    __slots__ = ("_count", "deviation", "mean")

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0
        self.deviation = 0.0

    def note(self, value: float) -> None:
        """Take in one value more."""
        self._count += 1
        part = max(_LATEST, 1 / self._count)
        if self._count > 1:
            self.deviation += part * (abs(value - self.mean) - self.deviation)
        self.mean += part * (value - self.mean)

    @property
    def enough(self) -> bool:
        """Whether so much was seen that it counts."""
        return self._count >= 8


class LengthForecast:
    """For one model; learns for each tenant, and for all together as long as little is known of one."""

    __slots__ = ("_all", "_tenants")

    def __init__(self) -> None:
        self._all = LengthHistory()
        self._tenants: dict[str, LengthHistory] = {}

    def note(self, tenant: str, generated: int) -> None:
        """Learn from a request that ended by itself."""
        self._all.note(generated)
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = LengthHistory()
        own.note(generated)

    def expected(self, tenant: str, most: int) -> int:
        """Return how many tokens a request will probably have that may have ``most``; ``most`` if nobody knows."""
        known = self._known(tenant)
        return most if known is None else max(1, min(most, round(known.mean)))

    def cautious(self, tenant: str, most: int, generated: int = 0) -> int:
        """Return how many tokens it will hardly exceed; for one that has ``generated`` some, more than those."""
        known = self._known(tenant)
        if known is None:
            return min(most, max(_UNKNOWN, 2 * generated))
        bound = known.mean + _MARGIN * known.deviation
        # One that is longer than most is as long again, for all anybody knows.
        return max(1, min(most, round(bound if generated < bound else generated + known.deviation + 1)))

    def _known(self, tenant: str) -> LengthHistory | None:
        own = self._tenants.get(tenant)
        if own is not None and own.enough:
            return own
        return self._all if self._all.enough else None


# How many tokens a model makes of a text or an image, before anybody has counted them: from those that were.

_OF_A_BYTE: Final = 0.5
"""Tokens, as long as nothing is known: more than European languages and less than bytes alone have."""
_SURELY: Final = 0.5
"""Of what is usual, as much is there in any case."""


class TokenRatio:
    """Of one model: tokens for each byte of a text, or for each image."""

    __slots__ = ("_seen", "_unknown")

    def __init__(self, unknown: float = _OF_A_BYTE) -> None:
        """``unknown``: tokens for each, as long as nothing is known."""
        self._unknown = unknown
        self._seen = LengthHistory()

    def note(self, size: int, tokens: int) -> None:
        """Learn from so many bytes, or images, that became so many tokens."""
        if size:
            self._seen.note(tokens / size)

    def expected(self, size: int) -> int:
        """Return how many tokens so many will hardly exceed."""
        each = self._seen.mean + self._seen.deviation if self._seen.enough else self._unknown
        return math.ceil(size * each)

    def least(self, size: int) -> int:
        """Return how many tokens they have in any case."""
        return int(size * self._seen.mean * _SURELY) if self._seen.enough else 0


# How fast an engine is, as measured: what decides whether a request can be in time.

_SPAN: Final = 250_000_000
"""Nanoseconds over which tokens are counted."""
_MEMORY: Final = 5e9
"""Nanoseconds after which a measurement counts for a third."""
_PACE_LATEST: Final = 64
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


class EngineSpeed:
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
        self._excesses: deque[float] = deque(maxlen=_PACE_LATEST)
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


# Whether the KV cache of an engine has room for one more request until that is done.
#
# The engine tells now and then how many blocks are free. Of those, what the requests that run will still grow by is
# promised already, and so is all of a request that has been let in and that the engine may not know yet. Only what is
# left after that is given away, and a fraction of the whole beyond it if the policy says so.


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What an engine tells of itself."""

    total_blocks: int
    free_blocks: int
    """Those that it can reuse are free."""
    block_size: int
    """Tokens that one holds."""


class KvReservation:
    """The blocks of one request."""

    __slots__ = ("held", "promised", "shared")

    def __init__(self, promised: int) -> None:
        self.promised = promised
        self.held = 0
        """Of those, as many as it has by now."""
        self.shared = 0
        """Of those, as many as others have, too: they are not free when it ends."""


class KvHeadroom:
    """Of one engine. It has no bounds until the engine has told its figures."""

    __slots__ = ("_held", "_left", "_overcommit", "_promised", "block_size", "free_blocks", "total_blocks")

    def __init__(self, overcommit: float = 0.0) -> None:
        self._overcommit = overcommit
        self._promised = 0
        self._held = 0
        self._left = 0
        self.block_size = 0
        """0: the engine has not told anything yet."""
        self.total_blocks = 0
        self.free_blocks = 0
        """As the engine told last."""

    def tell(self, statistics: EngineStatistics) -> None:
        """Take in what the engine says."""
        self.block_size = statistics.block_size
        self.total_blocks = statistics.total_blocks
        self.free_blocks = statistics.free_blocks
        self._left = statistics.free_blocks - (self._promised - self._held)

    def change(self, overcommit: float) -> None:
        """Go on by another policy."""
        self._overcommit = overcommit

    @property
    def promised(self) -> int:
        """Blocks that all that run have or may have."""
        return self._promised

    @property
    def left(self) -> int:
        """Blocks that are not promised to anybody; below 0: how much too much was."""
        return self._left

    @property
    def limit(self) -> int:
        """As many blocks may be promised, all together."""
        return self.total_blocks + int(self._overcommit * self.total_blocks)

    def blocks(self, tokens: int) -> int:
        """Return how many blocks hold ``tokens``."""
        return -(-tokens // self.block_size) if self.block_size else 0

    def fits(self, blocks: int) -> bool:
        """Return whether ``blocks`` more may be promised."""
        if not self.block_size:
            return True
        return blocks <= min(self._left + self.limit - self.total_blocks, self.limit - self._promised)

    def promise(self, blocks: int) -> KvReservation:
        """Promise blocks to a request."""
        self._promised += blocks
        self._left -= blocks
        return KvReservation(blocks)

    def grow(self, holding: KvReservation, promised: int) -> None:
        """Promise more to a request that needs more than was thought. It has been let in: it gets them."""
        more = promised - holding.promised
        holding.promised += more
        self._promised += more
        self._left -= more

    def hold(self, holding: KvReservation, held: int) -> None:
        """Note how many of the promised blocks a request has by now."""
        self._held += held - holding.held
        holding.held = held

    def release(self, holding: KvReservation) -> None:
        """Have back what was promised to a request."""
        self._promised -= holding.promised
        self._held -= holding.held
        self._left += holding.promised - holding.shared
