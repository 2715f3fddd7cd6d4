"""Which configuration is the best: the most answers within the limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nerite.analyze.finding import Figure, Finding
from nerite.analyze.search import Score

REFUSED: Score = (-1, 0.0)
"""Worse than whatever can be measured."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a configuration has to keep to. None: there is no limit."""

    p99: float | None = None
    """Milliseconds."""
    memory: float | None = None
    """Bytes."""

    def excess(self, figure: Figure, memory: float) -> float:
        """Return by what part of each limit it is exceeded, together; 0 if all are kept."""
        pairs = ((figure.p99, self.p99), (memory, self.memory))
        return sum(max(0.0, value / limit - 1) for value, limit in pairs if limit is not None)


def best_figure(finding: Finding, limits: Limits) -> Figure:
    """Return the level of load that speaks for a configuration that has figures."""
    return max(finding.figures, key=lambda figure: _score(figure, finding.memory, limits))


def score(finding: Finding, limits: Limits) -> Score:
    """Return how good it is: by answers a second within the limits; beyond them by how near it comes."""
    if not finding.figures:
        return REFUSED
    return _score(best_figure(finding, limits), finding.memory, limits)


def kept(finding: Finding, limits: Limits) -> bool:
    """Return whether it keeps to the limits at some level of load."""
    return score(finding, limits)[0] > 0


def ranked(findings: Iterable[Finding], limits: Limits) -> list[Finding]:
    """Return those that have figures, the best first; of equals the one with fewer changes."""
    measured = [finding for finding in findings if finding.figures]
    measured.sort(key=lambda finding: len(finding.changes))
    return sorted(measured, key=lambda finding: score(finding, limits), reverse=True)


def _score(figure: Figure, memory: float, limits: Limits) -> Score:
    excess = limits.excess(figure, memory)
    return (0, -excess) if excess else (1, figure.rate)
