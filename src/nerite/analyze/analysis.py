"""From a space to findings: has measured what a search asks for, and then the best few again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol

from nerite.analyze.finding import Finding, combined
from nerite.analyze.ranking import MOST_NEAR, Goal
from nerite.analyze.search import Score, Search
from nerite.analyze.settings import Value
from nerite.analyze.space import Space

TURNS: Final = 3
"""How many times those are measured that may be the best; the first time is that of the search."""
AGAIN: Final = (MOST_NEAR + 1) * (TURNS - 1)
"""How many measurements, at one level each, come after the search at most."""


class Measure(Protocol):
    """Measures a configuration for the first (``turn`` 0) or a later time; at all levels where none are given."""

    def __call__(self, changes: Mapping[str, Value], turn: int = 0, levels: Sequence[int] = ()) -> Finding:
        """Return what it shows."""


def findings(space: Space, search: Search, measure: Measure, goal: Goal) -> Iterator[Finding]:
    """Yield what ``measure`` finds of each point, as changes to the present configuration, which is the first."""
    answer: Score | None = None
    while True:
        try:
            # The first point is no answer to anything.
            point = next(search) if answer is None else search.send(answer)
        except StopIteration:
            return
        finding = measure(space.changes(point))
        yield finding
        answer = goal.score(finding)


def settled(found: Sequence[Finding], measure: Measure, goal: Goal) -> list[Finding]:
    """Return findings such that the best can be told: those near it, and the present one, are measured again.

    They take turns, so that none has a better moment of the machine than the others, and what counts are the medians.
    """
    near = goal.contenders(found)
    if len(near) == 1 and near[0] is found[0]:
        return list(found)
    if found[0] not in near:
        near.append(found[0])
    turns = [[each] for each in near]
    for turn in range(1, TURNS):
        for before in turns:
            level = goal.best_figure(before[0]).concurrency
            before.append(measure(before[0].changes, turn, (level,)))
    again = {id(each[0]): combined(each) for each in turns}
    return [again.get(id(each), each) for each in found]
