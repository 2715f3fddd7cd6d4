"""Member-hours and broken promises by the rule that decides how many members a pool has: simulated.

    python benchmarks/autoscaling.py [--seconds N] [--only WORD] [--print]

A promise of 500 ms, members that do 20 requests a second of 100 ms and start in 30 s (``scaled_pool.py``). All rules
see the same load, and begin with members for it. ``--seconds`` is the length of the daily curve; the others take an
hour of simulated time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import numpy as np
from page import command_line, publish
from scaled_pool import PROMISE, RATE, FixedRule, NeriteRule, RatioRule, ScaledPool, ScalingOutcome, ScalingRule

from nerite.autoscaling.policy import ScalingPolicy

HOUR: Final = 3600
START_SECONDS: Final = 30.0
MOST: Final = 20
SEED: Final = 1


class LoadCurve(NamedTuple):
    """Requests a second over the time."""

    name: str
    about: str
    rate: Callable[[float], float]
    seconds: int = HOUR


def step(now: float) -> float:
    """Return 20 requests a second, and 160 from ten minutes to thirty."""
    return 160.0 if 600 <= now < 1800 else 20.0


def ramp(now: float) -> float:
    """Rise from 20 to 200 requests a second within 40 minutes."""
    return 20 + 180 * min(now / 2400, 1.0)


def flapping(now: float) -> float:
    """Change between 20 and 120 requests a second every 90 s."""
    return 120.0 if now % 180 >= 90 else 20.0


_NOISE: Final = np.random.default_rng(SEED).gamma(2.0, 0.5, 7 * HOUR)


def noisy(now: float) -> float:
    """Return 80 requests a second on average, with another rate in each ten seconds."""
    return float(80 * _NOISE[int(now / 10)])


def even(now: float) -> float:
    """Return 80 requests a second."""
    return 80.0


def daily(seconds: int) -> LoadCurve:
    """Return a day, or as much time as that, from night to night."""

    def rate(now: float) -> float:
        return 5 + 195 * (0.5 - 0.5 * math.cos(2 * math.pi * now / seconds)) ** 2

    return LoadCurve("daily curve", "5 to 200 requests/s and back", rate, seconds)


def curves(day: int) -> tuple[LoadCurve, ...]:
    """Return the loads."""
    return (
        LoadCurve("even", "80 requests/s", even),
        LoadCurve("step", "20 requests/s, and 160 for 20 minutes", step),
        LoadCurve("ramp", "from 20 to 200 requests/s in 40 minutes", ramp),
        LoadCurve("flapping", "20 and 120 requests/s in turns, 90 s each", flapping),
        LoadCurve("noisy", "80 requests/s on average, another rate every 10 s", noisy),
        daily(day),
    )


RULES: Final[Mapping[str, Callable[[], ScalingRule]]] = {
    "Nerite, by the promise": lambda: NeriteRule(ScalingPolicy(least=1, most=MOST, latency=PROMISE)),
    "Nerite, by the rate of a member": lambda: NeriteRule(ScalingPolicy(least=1, most=MOST, rate=RATE)),
    "HPA, 50 % of the rate": lambda: RatioRule(0.5, 1, MOST),
    "HPA, 70 % of the rate": lambda: RatioRule(0.7, 1, MOST),
    "HPA, 85 % of the rate": lambda: RatioRule(0.85, 1, MOST),
    "always 12": lambda: FixedRule(12),
}


def simulated(curve: LoadCurve, make: Callable[[], ScalingRule]) -> ScalingOutcome:
    """Simulate a rule."""
    ready = math.ceil(curve.rate(0) / RATE / 0.7)
    return ScaledPool(START_SECONDS, SEED, ready).run(curve.rate, curve.seconds, make())


def table(curve: LoadCurve) -> str:
    """Return the table of a load."""
    lines = [
        f"**{curve.name.capitalize()}**: {curve.about}; {curve.seconds / HOUR:.3g} h.\n",
        "| rule | member-hours | promises broken | changes |",
        "|---|---|---|---|",
    ]
    for name, make in RULES.items():
        outcome = simulated(curve, make)
        lines.append(f"| {name} | {outcome.member_hours:.1f} | {outcome.late:.2%} | {outcome.changes} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    flags = command_line(__doc__, 24 * HOUR, 1)
    flags.add_argument("--only", default="", help="loads whose name has this in it")
    given = flags.parse_args()
    publish("autoscaling", "\n".join(table(each) for each in curves(given.seconds) if given.only in each.name), given)
