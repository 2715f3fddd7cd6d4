"""Gates: what the candidate must not do worse than the baseline, and by how much it may.

| text | compared | default margin |
|---|---|---|
| ``errors`` | errors and timeouts | 50 % more often, or in less than 0.1 % of requests |
| ``refused`` | requests rejected by admission control or for want of KV cache | the same |
| ``cancelled`` | requests that the client gave up | the same |
| ``goodput`` | requests that failed or missed an objective, see below | 25 % more often, or in less than 0.1 % |
| ``p99``, ``p95``, ``p50``, ... | that quantile of the latency | 10 % longer |
| ``ttft_p95``, ``ttft`` (p95) | time to the first response | 10 % longer |
| ``itl_p95``, ``itl`` (p95) | mean time between tokens of a request | 10 % longer |
| ``kv_headroom>=10%``, ``memory<=16GiB``, ``memory<=+20%``, ``restarts<=0`` | gauges of the candidate | a hard limit |

``=+20%`` behind a name sets the margin; for a rate ``=+20%,0.5%`` also sets the rate below which it is always good
enough. The objectives of goodput are either the baseline's own p95 of latency, first response and token time, or given:
``goodput:ttft<=500ms:itl<=40ms:latency<=10s``.

A margin is a line: the candidate is rolled back if it is worse than that, and promoted if it is certainly not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from nerite.core.text import bounded

FORMS: Final = (
    "errors[=+50%[,0.1%]], refused, cancelled, goodput[:ttft<=500ms][:itl<=40ms][:latency<=10s][=+25%], "
    "p99[=+10%], ttft[_p95][=+10%], itl[_p95][=+10%], kv_headroom>=10%, memory<=16GiB, memory<=+20%, restarts<=0"
)
METRICS: Final = {"latency": "latency_us", "ttft": "first_us", "itl": "token_us"}
"""Names of latencies in gates, and the field of an ``Outcome`` for each."""
_RATES: Final = {"errors": 0.5, "refused": 0.5, "cancelled": 0.5, "goodput": 0.25}
_FLOOR: Final = 0.001
_TAIL_MARGIN: Final = 0.1
_GOODPUT_QUANTILE: Final = 0.95
_UNITS: Final = {"us": 1.0, "ms": 1e3, "s": 1e6}
_BYTES: Final = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_NUMBER: Final = r"(\d+(?:\.\d+)?)"
_MARGIN: Final = re.compile(rf"\+{_NUMBER}%(?:,{_NUMBER}%)?")
_TAIL: Final = re.compile(r"(?:(latency|ttft|itl)_)?p(\d{1,2}(?:\.\d{1,2})?)|(ttft|itl)")
_OBJECTIVE: Final = re.compile(rf"(latency|ttft|itl)<={_NUMBER}(us|ms|s)")
_LIMIT: Final = re.compile(rf"(kv_headroom|memory|restarts)(>=|<=)(\+?){_NUMBER}(%|[KMGT]?i?B)?", re.IGNORECASE)


class GateError(ValueError):
    """A text that is no gate."""

    def __init__(self, text: str, why: str) -> None:
        super().__init__(f"gate {bounded(text)!r}: {why}; gates are {FORMS}")


@dataclass(frozen=True, slots=True)
class RateGate:
    """Compares how often requests are bad."""

    text: str
    name: str
    """A key of ``_RATES``: which outcomes are bad."""
    margin: float
    """Relative risk that is accepted, less one."""
    floor: float
    """A rate that is certainly below this is good enough, whatever the baseline's is."""
    objectives: tuple[tuple[str, float], ...] = ()
    """Of goodput: fields of an ``Outcome`` with their limits in microseconds. Empty: quantiles of the baseline."""

    @property
    def tolerated(self) -> float:
        """Relative risk on the line between good enough and worse."""
        return 1.0 + self.margin

    @property
    def learned(self) -> tuple[tuple[str, float], ...]:
        """Quantiles of the baseline that are thresholds: pairs of a field and a quantile."""
        if self.name != "goodput" or self.objectives:
            return ()
        return tuple((field, _GOODPUT_QUANTILE) for field in METRICS.values())


@dataclass(frozen=True, slots=True)
class TailGate:
    """Compares a quantile of a latency.

    A request of the baseline is bad above the baseline's own earlier quantile, one of the candidate above
    ``1 + margin`` times that. A candidate that is slower by exactly the margin is then bad as often as the baseline.
    """

    text: str
    field: str
    """Of an ``Outcome``."""
    quantile: float
    margin: float

    @property
    def tolerated(self) -> float:
        """Relative risk on the line between good enough and worse."""
        return 1.0

    @property
    def floor(self) -> float:
        """A quarter of what the quantile leaves above it: for latencies that hardly vary, and exceed nothing."""
        return (1.0 - self.quantile) / 4

    @property
    def learned(self) -> tuple[tuple[str, float], ...]:
        """Quantiles of the baseline that are thresholds: pairs of a field and a quantile."""
        return ((self.field, self.quantile),)


@dataclass(frozen=True, slots=True)
class LimitGate:
    """Bounds a gauge of the candidate."""

    text: str
    name: str
    at_least: bool
    limit: float
    relative: bool = False
    """The limit is a share of the baseline's value, above it."""

    def violated(self, candidate: float, baseline: float) -> bool:
        """Return whether the candidate is beyond the limit, and the baseline is not as far beyond it.

        Where the baseline is as bad, the cause is common to both, and a rollback would not help.
        """
        if self.relative:
            return candidate > baseline * (1 + self.limit)
        if self.at_least:
            return candidate < self.limit and not baseline <= candidate
        return candidate > self.limit and not baseline >= candidate


Gate = RateGate | TailGate | LimitGate


def parse_gate(text: str) -> Gate:
    """Read one gate, as the module describes; raise ``GateError`` for what is none."""
    text = "".join(text.split())
    if limit := _LIMIT.fullmatch(text):
        return _limit_gate(text, *limit.groups(default=""))
    # The last '=' that no '<' or '>' precedes: those belong to objectives.
    head, margin_text = [*re.split(r"(?<![<>])=", text, maxsplit=1), ""][:2]
    margin = floor = None
    if margin_text or text.endswith("="):
        if not (found := _MARGIN.fullmatch(margin_text)):
            raise GateError(text, f"{bounded(margin_text)!r} is no margin such as +10%")
        margin = float(found[1]) / 100
        floor = float(found[2]) / 100 if found[2] else None
        if not 0 < margin <= 10:
            raise GateError(text, "a margin is more than 0 %, for versions that are equal, and at most 1000 %")
        if floor is not None and not 0 < floor < 1:
            raise GateError(text, "the rate that is always good enough is between 0 % and 100 %")
    name, *objectives = head.split(":")
    if name in _RATES:
        if objectives and name != "goodput":
            raise GateError(text, f"{name} has no objectives")
        limits = tuple(_objective(text, each) for each in objectives)
        return RateGate(text, name, margin or _RATES[name], floor or _FLOOR, limits)
    tail = _TAIL.fullmatch(head)
    if not tail:
        raise GateError(text, "unknown")
    if floor is not None:
        raise GateError(text, "only rates have a second percentage")
    quantile = float(tail[2] or 95) / 100
    if not 0.5 <= quantile < 1:
        raise GateError(text, "the quantile is at least p50 and less than p100")
    return TailGate(text, METRICS[tail[3] or tail[1] or "latency"], quantile, margin or _TAIL_MARGIN)


def _objective(text: str, objective: str) -> tuple[str, float]:
    found = _OBJECTIVE.fullmatch(objective)
    if not found:
        raise GateError(text, f"{bounded(objective)!r} is no objective such as ttft<=500ms")
    return METRICS[found[1]], float(found[2]) * _UNITS[found[3]]


def _limit_gate(text: str, name: str, operator: str, plus: str, number: str, unit: str) -> LimitGate:
    name, value = name.lower(), float(number)
    if (operator == ">=") != (name == "kv_headroom"):
        raise GateError(text, f"{name} is bounded from {'below' if name == 'kv_headroom' else 'above'}")
    if name == "memory":
        if plus and unit == "%":
            return LimitGate(text, name, False, value / 100, relative=True)
        if plus or unit.upper() not in _BYTES:
            raise GateError(text, "memory is bounded in bytes, or relative to the baseline's")
        return LimitGate(text, name, False, value * _BYTES[unit.upper()])
    if plus or (unit != "%" if name == "kv_headroom" else unit):
        raise GateError(text, "kv_headroom is a percentage" if name == "kv_headroom" else "restarts is a number")
    return LimitGate(text, name, name == "kv_headroom", value / 100 if unit else value)
