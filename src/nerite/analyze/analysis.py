"""From a space to findings: has measured what a search asks for, until it asks no more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from nerite.analyze.finding import Finding
from nerite.analyze.search import Score, Search
from nerite.analyze.settings import Value
from nerite.analyze.space import Space


def findings(
    space: Space,
    search: Search,
    measure: Callable[[Mapping[str, Value]], Finding],
    score: Callable[[Finding], Score],
) -> Iterator[Finding]:
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
        answer = score(finding)
