"""What measuring a configuration showed, and its form as JSON."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol

from nerite.cli.command import megabytes
from nerite.tools.analyze.search import Score, Search
from nerite.tools.analyze.space import Space, Subjects, Value
from nerite.tools.bench import report
from nerite.tools.bench.report import Series, lines, plot_figure, stacks


def named(changes: Mapping[str, Value]) -> str:
    """Return what people call the configuration with these changes."""
    return " ".join(f"{name}={value}" for name, value in changes.items()) or "as it is now"


@dataclass(frozen=True, slots=True)
class Figure:
    """What a level of load showed. Times are in milliseconds."""

    concurrency: int
    """Of each model that is asked."""
    rate: float
    """Answers a second. Of several models the geometric mean: a tenth more of any of them counts as much."""
    mean: float
    p99: float
    """Of several models the largest; so is the mean."""
    failed: int = 0
    each: Mapping[str, float] = field(default_factory=dict)
    """Answers a second by model, where several are asked at once."""

    @classmethod
    def of_several(cls, models: Mapping[str, Figure]) -> Figure:
        """Return what models that were asked at once showed together; of one, what it showed."""
        figures = list(models.values())
        if len(figures) == 1:
            return figures[0]
        return cls(
            figures[0].concurrency,
            statistics.geometric_mean(figure.rate for figure in figures),
            max(figure.mean for figure in figures),
            max(figure.p99 for figure in figures),
            sum(figure.failed for figure in figures),
            {model: figure.rate for model, figure in models.items()},
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """A configuration, as changes to the present one, and its figures."""

    changes: Mapping[str, Value]
    figures: tuple[Figure, ...] = ()
    memory: int = 0
    """Bytes that the models took at work; 0 where the system does not tell."""
    refused: str = ""
    """Why there are no figures: it cannot be loaded, or answers nothing."""
    turns: int = 1
    """How many times it was measured; figures of several times are medians."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Return what ``to_json`` made data of. Raises ``KeyError`` or ``TypeError`` for other data."""
        figures = tuple(Figure(**figure) for figure in data["figures"])
        return cls(data["changes"], figures, data["memory"], data["refused"], data["turns"])


def combined(turns: Sequence[Finding]) -> Finding:
    """Return what measuring a configuration several times showed. Once refused, it is refused."""
    first = turns[0]
    for turn in turns:
        if turn.refused:
            return dataclasses.replace(turn, turns=len(turns))
    figures = [figure for turn in turns for figure in turn.figures]
    levels = dict.fromkeys(figure.concurrency for figure in figures)
    return dataclasses.replace(
        first,
        figures=tuple(_median([each for each in figures if each.concurrency == level]) for level in levels),
        memory=round(statistics.median(turn.memory for turn in turns)),
        turns=len(turns),
    )


def _median(figures: Sequence[Figure]) -> Figure:
    return Figure(
        figures[0].concurrency,
        statistics.median(figure.rate for figure in figures),
        statistics.median(figure.mean for figure in figures),
        statistics.median(figure.p99 for figure in figures),
        sum(figure.failed for figure in figures),
        {model: statistics.median(figure.each[model] for figure in figures) for model in figures[0].each},
    )


# Which configuration is the best: the most answers within the limits, or the least latency or memory.

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


# From a space to findings: has measured what a search asks for, and then the best few again.

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


# Findings as a page for people: what is best, what it costs, and what it changes.

_MOST_CURVES: Final = 5
_GREY: Final = 7
"""The colour of what is there for comparison."""
_MEASURES: Final = {
    "throughput": ("requests/s", 1.0),
    "latency": ("p99 latency, ms", -1.0),
    "memory": ("MB", -1e-6),
}
"""By objective: how its plot is labelled, and what makes that of a score."""


class AnalyzeHeading(NamedTuple):
    """What the page says about the analysis."""

    models: str
    about: Sequence[str]
    """How it was measured, and where: a line below the title."""


def render(
    heading: AnalyzeHeading, found: Sequence[Finding], goal: Goal, table: Sequence[Sequence[str]], difference: str
) -> str:
    """Return the page. ``found`` begins with the present configuration, which has figures; ``table`` has them all."""
    best = goal.winners(found)
    remarks = () if goal.kept(best[0]) else ("None keeps to the limits.",)
    nothing = "<p>Nothing: the present configuration is the best, or as good.</p>"
    body = [
        *report.opening(heading.models, (*heading.about, _said(goal)), remarks),
        report.key(_key(found[0], best[0], goal)),
        report.plots(_plots(found, best, goal)),
        "<h2>What changes</h2>",
        report.difference(difference) if difference else nothing,
        "<h2>What was measured</h2>",
        report.html_table(table),
    ]
    return report.document(f"{heading.models}: the best configuration", body)


def _said(goal: Goal) -> str:
    said = [f"p99 of at most {goal.p99:g} ms"] if goal.p99 is not None else []
    said += [f"memory of at most {goal.memory / 1e6:g} MB"] if goal.memory is not None else []
    said += [f"at least {goal.rate:g} requests/s"] if goal.rate is not None else []
    wanted = {"throughput": "the most requests/s", "latency": "the least p99", "memory": "the least memory"}
    return ", ".join([f"wanted: {wanted[goal.objective]}", *said])


def _key(now: Finding, best: Finding, goal: Goal) -> Iterator[tuple[str, str]]:
    there, here = goal.best_figure(best), goal.best_figure(now)
    yield plot_figure(there.rate), f"requests a second: {named(best.changes)}"
    for model, rate in there.each.items():
        yield plot_figure(rate), f"of them to {model}"
    yield plot_figure(here.rate), "with the present configuration"
    yield f"{plot_figure(there.p99)} ms", f"99th percentile of the latency, at concurrency {there.concurrency}"
    yield f"{plot_figure(best.memory / 1e6)} MB", "at work; the present configuration: " + plot_figure(now.memory / 1e6)


def _plots(found: Sequence[Finding], best: Sequence[Finding], goal: Goal) -> Iterator[str]:
    shown = list(best[:_MOST_CURVES])
    if found[0] not in shown:
        shown.append(found[0])
    others = [(one.rate, one.p99) for each in best if each not in shown for one in each.figures]
    cloud = [Series("others", others, joined=False, colour=_GREY)] if others else []
    curves = [
        Series(f"{place}: {named(each.changes)}", [(one.rate, one.p99) for one in each.figures])
        for place, each in enumerate(shown, 1)
    ]
    meaning = "A point for each concurrency. Further right is more, lower is sooner."
    yield report.html_figure(
        "Latency by throughput", meaning, lines("requests/s", "p99 latency, ms", [*curves, *cloud])
    )
    columns = [(str(place), (each.memory / 1e6,)) for place, each in enumerate(shown, 1)]
    meaning = "At work, of the configurations that have a number."
    yield report.html_figure("Memory", meaning, stacks("configuration", "MB", ("memory",), columns))
    label, sign = _MEASURES[goal.objective]
    kept = [(float(at), sign * goal.score(each)[1]) for at, each in enumerate(found, 1) if goal.kept(each)]
    if kept:
        leading = itertools.accumulate((value for _, value in kept), max if sign > 0 else min)
        progress = [(at, value) for (at, _), value in zip(kept, leading, strict=True)]
        series = [
            Series("the best so far", progress, dotted=False),
            Series("measured", kept, joined=False, colour=_GREY),
        ]
        meaning = "Each configuration that keeps to the limits, as they were measured."
        yield report.html_figure("The search", meaning, lines("configuration", label, series))


# How findings are told: a line, a row of a table, and what the best one changes.

HEADINGS: Final = ("Settings", "Requests/s", "p99 ms", "at", "Memory", "Measured", "Limits")


def line(finding: Finding, goal: Goal) -> str:
    """Return a finding in a line."""
    if finding.refused:
        return f"{named(finding.changes)}: refused, {finding.refused.splitlines()[0]}"
    figure = goal.best_figure(finding)
    return (
        f"{named(finding.changes)}: {_rates(figure, '{:,.0f}/s')}, p99 {figure.p99:,.2f} ms at concurrency "
        f"{figure.concurrency}, {megabytes(finding.memory)}"
    )


def row(finding: Finding, goal: Goal) -> list[str]:
    """Return a finding that has figures as a row of a table."""
    figure = goal.best_figure(finding)
    return [
        named(finding.changes),
        _rates(figure, "{:,.1f}"),
        f"{figure.p99:,.3f}",
        str(figure.concurrency),
        megabytes(finding.memory),
        "once" if finding.turns == 1 else f"{finding.turns} times",
        "kept" if goal.kept(finding) else "exceeded",
    ]


def comparison(now: Finding, best: Finding, goal: Goal) -> str:
    """Return how the best compares with the present configuration."""
    if not goal.kept(now):
        return "The present configuration does not keep to the limits."
    here, there = goal.best_figure(now), goal.best_figure(best)
    match goal.objective:
        case "latency":
            return f"That is a p99 of {there.p99:,.2f} ms; that of the present configuration is {here.p99:,.2f} ms."
        case "memory":
            return f"That is {megabytes(best.memory)}; the present configuration takes {megabytes(now.memory)}."
    answers = _rates(here, "{:,.0f}/s")
    return f"That is {there.rate / here.rate:.2f} times what the present configuration answers, {answers}."


def difference(subjects: Subjects, best: Mapping[str, Value]) -> str:
    """Return what changes of the files of the models."""
    lines: list[str] = []
    for subject, values in subjects.values(best):
        path = str(subject.path)
        before, after = subject.text.splitlines(), subject.rewritten(values).splitlines()
        lines += difflib.unified_diff(before, after, path, path, lineterm="")
    return "\n".join(lines)


def _rates(figure: Figure, form: str) -> str:
    if not figure.each:
        return form.format(figure.rate)
    return " + ".join(f"{model} {form.format(rate)}" for model, rate in figure.each.items())
