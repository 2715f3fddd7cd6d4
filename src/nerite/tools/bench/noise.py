"""How much figures vary by chance: confidence intervals of means, and whether two measurements differ by more."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final, NamedTuple

_CRITICAL: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Critical values of Student's t distribution, two-sided, 95 %, for 1 to 30 degrees of freedom."""


def critical(freedom: float) -> float:
    """Return the critical value for 1 or more degrees of freedom, two-sided, 95 %; never less than the exact one."""
    whole = max(1, math.floor(freedom))
    return _CRITICAL[whole - 1] if whole <= len(_CRITICAL) else 1.96 + 2.5 / whole


def half_width(values: Sequence[float]) -> float:
    """Return half the width of the 95 % confidence interval of a mean; 0 if there are not several values."""
    if len(values) < 2:
        return 0.0
    return critical(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))


class Change(NamedTuple):
    """Change of a figure between two measurements."""

    before: float
    after: float
    margin: float
    """Half the width of the 95 % confidence interval of the difference; infinite if it is unknown."""

    @property
    def percent(self) -> float:
        """Change in percent; infinite from 0."""
        if self.before:
            return (self.after / self.before - 1) * 100
        return math.inf if self.after else 0.0

    @property
    def beyond_noise(self) -> bool:
        """True if the difference is greater than what chance explains, with 95 % confidence."""
        return abs(self.after - self.before) > self.margin


def change(before: Sequence[float], after: Sequence[float]) -> Change:
    """Compare the means of non-empty samples by Welch's t-test, which allows for unequal variances."""
    means = statistics.fmean(before), statistics.fmean(after)
    if len(before) < 2 or len(after) < 2:
        return Change(*means, math.inf)
    parts = [statistics.variance(sample) / len(sample) for sample in (before, after)]
    total = sum(parts)
    if not total:
        return Change(*means, 0.0)
    divisor = sum(part**2 / (len(sample) - 1) for part, sample in zip(parts, (before, after), strict=True))
    return Change(*means, critical(total**2 / divisor) * math.sqrt(total))
