"""Estimators of admission control: output lengths, tokens per byte, engine speed, and KV cache headroom.

All of them learn from earlier requests, weighting recent measurements more than old ones.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

_LATEST: Final = 1 / 32
"""Weight of the latest value in the moving average; the first values are weighted equally."""
_MARGIN: Final = 1.0
"""Number of mean deviations above the mean for which memory is reserved."""
_UNKNOWN: Final = 256
"""Tokens for which memory is reserved while no length is known: otherwise the first request without a limit would have
to run alone."""


class LengthHistory:
    """Exponentially weighted moving averages (EWMA) of a value and of its absolute deviation."""

    __slots__ = ("_count", "deviation", "mean")

    def __init__(self) -> None:
        self._count = 0
        self.mean = 0.0
        self.deviation = 0.0

    def note(self, value: float) -> None:
        """Add a value."""
        self._count += 1
        part = max(_LATEST, 1 / self._count)
        if self._count > 1:
            self.deviation += part * (abs(value - self.mean) - self.deviation)
        self.mean += part * (value - self.mean)

    @property
    def enough(self) -> bool:
        """Whether there are enough values for a meaningful mean."""
        return self._count >= 8


class LengthForecast:
    """Predicts output lengths for one model: by tenant, or over all tenants while too little is known of one."""

    __slots__ = ("_all", "_tenants")

    def __init__(self) -> None:
        self._all = LengthHistory()
        self._tenants: dict[str, LengthHistory] = {}

    def note(self, tenant: str, generated: int) -> None:
        """Add the length of a request that completed normally."""
        self._all.note(generated)
        own = self._tenants.get(tenant)
        if own is None:
            own = self._tenants[tenant] = LengthHistory()
        own.note(generated)

    def expected(self, tenant: str, most: int) -> int:
        """Return the expected output length of a request, at most ``most``; ``most`` if unknown."""
        known = self._known(tenant)
        return most if known is None else max(1, min(most, round(known.mean)))

    def cautious(self, tenant: str, most: int, generated: int = 0) -> int:
        """Return a conservative output length, greater than ``generated`` and at most ``most``."""
        known = self._known(tenant)
        if known is None:
            return min(most, max(_UNKNOWN, 2 * generated))
        bound = known.mean + _MARGIN * known.deviation
        # One that has exceeded the bound is assumed to continue for another mean deviation.
        return max(1, min(most, round(bound if generated < bound else generated + known.deviation + 1)))

    def _known(self, tenant: str) -> LengthHistory | None:
        own = self._tenants.get(tenant)
        if own is not None and own.enough:
            return own
        return self._all if self._all.enough else None


_TOKENS_PER_BYTE: Final = 0.5
"""Initial estimate: more than for European languages, less than for byte-level tokens."""
_SURE_FRACTION: Final = 0.5
"""Fraction of the mean ratio that is used as a lower bound."""


class TokenRatio:
    """Estimates the tokens of a prompt before the engine has counted them: per byte of text, or per image."""

    __slots__ = ("_seen", "_unknown")

    def __init__(self, unknown: float = _TOKENS_PER_BYTE) -> None:
        """``unknown``: initial ratio, used until enough prompts were counted."""
        self._unknown = unknown
        self._seen = LengthHistory()

    def note(self, size: int, tokens: int) -> None:
        """Record that ``size`` bytes or images became ``tokens`` tokens."""
        if size:
            self._seen.note(tokens / size)

    def expected(self, size: int) -> int:
        """Return a conservative estimate of the tokens of ``size`` bytes or images."""
        each = self._seen.mean + self._seen.deviation if self._seen.enough else self._unknown
        return math.ceil(size * each)

    def least(self, size: int) -> int:
        """Return a lower bound of the tokens of ``size`` bytes or images; 0 if unknown."""
        return int(size * self._seen.mean * _SURE_FRACTION) if self._seen.enough else 0


_SPAN: Final = 250_000_000
"""Length of a throughput measurement in nanoseconds."""
_MEMORY: Final = 5e9
"""Time constant of the exponential decay in nanoseconds: after it, a measurement has about a third of its weight."""
_PREFILL_SAMPLES: Final = 64
"""Number of recent prompts from which the tail of prefill times is estimated."""
_TAIL: Final = 20
"""One in this many prompts exceeds the estimated tail (the 95th percentile)."""
_STALE: Final = 10_000_000_000
"""Nanoseconds after which an unrenewed measurement is ignored: else one slow phase could block admission forever."""


class _LinearFit:
    """Exponentially weighted least-squares fit of a duration as a linear function of a size."""

    __slots__ = ("_at", "_n", "_x", "_xx", "_xy", "_y")

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self._at = 0

    def note(self, x: float, y: float, now: int) -> None:
        """Add a measurement: size ``x`` took ``y``."""
        fade = math.exp((self._at - now) / _MEMORY) if self._n else 0.0
        self._n = self._n * fade + 1
        self._x = self._x * fade + x
        self._y = self._y * fade + y
        self._xx = self._xx * fade + x * x
        self._xy = self._xy * fade + x * y
        self._at = now

    def at(self, x: float, now: int) -> float | None:
        """Return the predicted duration for size ``x``; None if unknown."""
        if not self._n or now - self._at > _STALE:
            return None
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = self._xx / self._n - mean_x * mean_x
        if spread <= mean_x * mean_x / 100:
            # All sizes were alike, so there is no slope: assume the mean for smaller sizes, proportional growth above.
            return mean_y * max(1.0, x / mean_x) if mean_x else mean_y
        slope = min(max((self._xy / self._n - mean_x * mean_y) / spread, 0.0), mean_y / mean_x)
        return mean_y + slope * (x - mean_x)


class _Mean:
    """Exponentially decaying weighted mean."""

    __slots__ = ("_at", "_value", "_weight")

    def __init__(self) -> None:
        self._value = 0.0
        self._weight = 0.0
        self._at = 0

    def note(self, amount: float, weight: float, now: int) -> None:
        """Add ``amount`` per ``weight``: time per tokens, or tokens per time."""
        fade = math.exp((self._at - now) / _MEMORY) if self._weight else 0.0
        self._value = self._value * fade + amount
        self._weight = self._weight * fade + weight
        self._at = now

    def at(self, now: int) -> float | None:
        """Return the amount per unit of weight; None if unknown."""
        return self._value / self._weight if self._weight and now - self._at <= _STALE else None


class EngineSpeed:
    """Measured speed of one engine, or of a model that is not an LLM: prefill, decode and throughput."""

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
        self._prefill = _LinearFit()
        self._excesses: deque[float] = deque(maxlen=_PREFILL_SAMPLES)
        """Ratios of actual to expected prefill time of the latest prompts."""
        self._excess = 1.0
        """95th percentile of these ratios, at least 1."""
        self._decode: dict[int, _Mean] = {}
        """Nanoseconds per token of one sequence, by the bit length of the number of running sequences."""
        self._throughput = _Mean()
        self._begun = self._seen = now
        self._running = 0
        self._running_time = 0
        self._generated = 0
        self._work = 0.0
        self._waiting = False
        """Requests have been waiting since ``_begun``, so the work done since shows the engine's capacity."""

    def note_prefill(self, tokens: int, took: int, now: int) -> None:
        """Record the prefill time of a request: ``tokens`` of its prompt and of those before it took ``took`` ns."""
        expected = self._prefill.at(tokens, now)
        if expected:
            self._excesses.append(took / expected)
            self._excess = max(1.0, sorted(self._excesses)[-1 - len(self._excesses) // _TAIL])
        self._prefill.note(tokens, took, now)

    def note_generated(self, tokens: int, now: int) -> None:
        """Record generated tokens."""
        self._generated += tokens
        self.note_work(tokens, now)

    def note_work(self, cost: float, now: int) -> None:
        """Record finished work: generated tokens, a prompt after prefill, or an executed request."""
        self._work += cost
        if now - self._begun >= _SPAN:
            self._close(now)

    def note_running(self, running: int, now: int) -> None:
        """Record how many sequences generate from now on."""
        self._running_time += self._running * (now - self._seen)
        self._seen = now
        self._running = running

    def note_waiting(self, waiting: bool, now: int) -> None:
        """Record whether requests are waiting from now on."""
        if waiting != self._waiting:
            self._close(now)
            self._waiting = waiting

    def work(self, cost: float, now: int) -> float | None:
        """Return the nanoseconds that the engine needs for queued work of ``cost``; None if unknown."""
        each = self._throughput.at(now)
        return None if each is None else cost * each

    def prefill(self, tokens: int, now: int) -> float | None:
        """Return the 95th percentile of the prefill time of ``tokens`` in nanoseconds; None if unknown.

        Under overload, admitted requests have waited almost as long as their guarantee allows. With the mean time,
        every second one of them would be late.
        """
        expected = self._prefill.at(tokens, now)
        return None if expected is None else expected * self._excess

    def decode(self, tokens: int, running: int, now: int) -> float | None:
        """Return the nanoseconds in which one of ``running`` sequences generates ``tokens``; None if unknown."""
        wanted = running.bit_length()
        known = [(abs(bits - wanted), -bits, each) for bits, mean in self._decode.items() if (each := mean.at(now))]
        return tokens * min(known)[2] if known else None

    def _close(self, now: int) -> None:
        """Add the current counts to the measurements and start a new period."""
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


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """State of an engine's KV cache as reported by the engine."""

    total_blocks: int
    free_blocks: int
    """Includes cached blocks that can be reused."""
    block_size: int
    """Tokens per block."""


class KvReservation:
    """KV blocks reserved for one request."""

    __slots__ = ("held", "promised", "shared")

    def __init__(self, promised: int) -> None:
        self.promised = promised
        self.held = 0
        """Number of promised blocks that it occupies now."""
        self.shared = 0
        """Number of promised blocks shared with other requests: they are not freed when it ends."""


class KvHeadroom:
    """Decides whether the KV cache of an engine has room for a request until that finishes.

    The engine reports its free blocks from time to time. From these, the growth still promised to running requests is
    subtracted, and all blocks of admitted requests that the engine may not know yet. Only the rest is available, plus a
    configurable fraction of the total (overcommit). Unlimited until the first report.
    """

    __slots__ = ("_held", "_left", "_overcommit", "_promised", "block_size", "free_blocks", "total_blocks")

    def __init__(self, overcommit: float = 0.0) -> None:
        self._overcommit = overcommit
        self._promised = 0
        self._held = 0
        self._left = 0
        self.block_size = 0
        """0 until the first report of the engine."""
        self.total_blocks = 0
        self.free_blocks = 0
        """As of the last report."""

    def tell(self, statistics: EngineStatistics) -> None:
        """Process a report of the engine."""
        self.block_size = statistics.block_size
        self.total_blocks = statistics.total_blocks
        self.free_blocks = statistics.free_blocks
        self._left = statistics.free_blocks - (self._promised - self._held)

    def change(self, overcommit: float) -> None:
        """Change the overcommit fraction."""
        self._overcommit = overcommit

    @property
    def promised(self) -> int:
        """Number of blocks promised to all running requests, occupied ones included."""
        return self._promised

    @property
    def left(self) -> int:
        """Number of blocks not promised to any request; negative if overcommitted."""
        return self._left

    @property
    def limit(self) -> int:
        """Maximum number of promised blocks."""
        return self.total_blocks + int(self._overcommit * self.total_blocks)

    def blocks(self, tokens: int) -> int:
        """Return the number of blocks needed for ``tokens``; 0 until the first report."""
        return -(-tokens // self.block_size) if self.block_size else 0

    def fits(self, blocks: int) -> bool:
        """Return whether ``blocks`` more may be promised."""
        if not self.block_size:
            return True
        return blocks <= min(self._left + self.limit - self.total_blocks, self.limit - self._promised)

    def promise(self, blocks: int) -> KvReservation:
        """Reserve blocks for a request."""
        self._promised += blocks
        self._left -= blocks
        return KvReservation(blocks)

    def grow(self, holding: KvReservation, promised: int) -> None:
        """Enlarge the reservation of an admitted request that needs more than estimated, even beyond the limit."""
        more = promised - holding.promised
        holding.promised += more
        self._promised += more
        self._left -= more

    def hold(self, holding: KvReservation, held: int) -> None:
        """Record how many of its promised blocks a request occupies now."""
        self._held += held - holding.held
        holding.held = held

    def release(self, holding: KvReservation) -> None:
        """Release the reservation of a request."""
        self._promised -= holding.promised
        self._held -= holding.held
        self._left += holding.promised - holding.shared
