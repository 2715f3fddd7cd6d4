"""Which configuration is the best: the most answers within the limits, or the least latency or memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from nerite.analyze.finding import Figure, Finding
from nerite.analyze.search import Score

REFUSED: Final[Score] = (-1, 0.0)
"""Worse than whatever can be measured."""
NEAR: Final = 0.1
"""What is within this part of the best may be the best: a measurement is not more exact."""
TIE: Final = 0.02
"""What is within this part of the best, once all that are near were measured again, is as good."""
MOST_NEAR: Final = 3
"""So many of these are measured again."""

Objective = Literal["throughput", "latency", "memory"]


@dataclass(frozen=True, slots=True)
class Goal:
    """What is wanted of a configuration. None: there is no limit."""

    objective: Objective = "throughput"
    p99: float | None = None
    """Milliseconds at most."""
    memory: float | None = None
    """Bytes at most."""
    rate: float | None = None
    """Answers a second at least; of several models, of each."""

    def score(self, finding: Finding) -> Score:
        """Return how good it is within the limits; beyond them, how near it comes."""
        return max((self._score(figure, finding.memory) for figure in finding.figures), default=REFUSED)

    def best_figure(self, finding: Finding) -> Figure:
        """Return the level of load that speaks for a configuration that has figures."""
        return max(finding.figures, key=lambda figure: self._score(figure, finding.memory))

    def kept(self, finding: Finding) -> bool:
        """Return whether it keeps to the limits at some level of load."""
        return self.score(finding)[0] > 0

    def ranked(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return those that have figures, the best first; of equals the one with fewer changes."""
        measured = [finding for finding in findings if finding.figures]
        measured.sort(key=lambda finding: len(finding.changes))
        return sorted(measured, key=self.score, reverse=True)

    def contenders(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return those that are near the best, which another measurement may put in another order; the best first."""
        ranked = self.ranked(findings)
        return [each for each in ranked if self._near(each, ranked[0], NEAR)][:MOST_NEAR]

    def winners(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return them ranked, the one to take first.

        That is of those as good as the best the one with the fewest changes; and one that was measured again, where
        some were: the best of those that were not owes that to luck.
        """
        ranked = self.ranked(findings)
        sure = [each for each in ranked if each.turns > 1 and self.kept(each)] or ranked
        ties = [each for each in sure if self._near(each, sure[0], TIE)]
        winner = min(ties, key=lambda each: len(each.changes))
        return [winner, *(each for each in ranked if each is not winner)]

    def _near(self, finding: Finding, best: Finding, part: float) -> bool:
        (kept, value), (best_kept, best_value) = self.score(finding), self.score(best)
        return kept == best_kept and best_value - value <= part * abs(best_value)

    def _score(self, figure: Figure, memory: float) -> Score:
        excess = sum(self._excesses(figure, memory))
        if excess:
            return (0, -excess)
        values = {"throughput": figure.rate, "latency": -figure.p99, "memory": -memory}
        return (1, values[self.objective])

    def _excesses(self, figure: Figure, memory: float) -> Iterator[float]:
        """Yield by what part of each limit it is exceeded; 0 if it is kept."""
        for value, limit in ((figure.p99, self.p99), (memory, self.memory)):
            if limit is not None:
                yield max(0.0, value / limit - 1)
        if self.rate is not None:
            yield max(0.0, 1 - min(figure.each.values(), default=figure.rate) / self.rate)
