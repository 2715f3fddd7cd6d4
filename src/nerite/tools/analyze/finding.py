"""Results of measuring configurations: figures, ranking by a goal, repeated measurements, tables and the HTML page."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal, NamedTuple, Protocol

from nerite.cli.command import megabytes
from nerite.tools.analyze.search import Score, Search, Space, Subjects, Value
from nerite.tools.bench import report
from nerite.tools.bench.noise import half_width
from nerite.tools.bench.provenance import Provenance
from nerite.tools.bench.report import ErrorBar, Series, bars, error_bars, lines, plot_figure


def named(changes: Mapping[str, Value]) -> str:
    """Return the human-readable name of the configuration with these changes."""
    return " ".join(f"{name}={value}" for name, value in changes.items()) or "current configuration"


@dataclass(frozen=True, slots=True)
class Figure:
    """Result of one level of load. Times are in milliseconds."""

    concurrency: int
    """Concurrent requests to each model under load."""
    rate: float
    """Responses per second; for several models the geometric mean, so that equal relative gains count equally."""
    mean: float
    p99: float
    """99th percentile; like the mean, the largest of several models."""
    failed: int = 0
    each: Mapping[str, float] = field(default_factory=dict)
    """Responses per second by model, if several are under load together."""
    error: float = 0.0
    """Half the width of the 95 % confidence interval of the rate; 0 if unknown."""

    @classmethod
    def of_several(cls, models: Mapping[str, Figure]) -> Figure:
        """Combine the figures of models that were under load together; return those of a single model unchanged."""
        figures = list(models.values())
        if len(figures) == 1:
            return figures[0]
        rate = statistics.geometric_mean(figure.rate for figure in figures)
        # Relative errors of the factors of a geometric mean add up as squares.
        relative = math.hypot(*(figure.error / figure.rate for figure in figures)) / len(figures)
        return cls(
            figures[0].concurrency,
            rate,
            max(figure.mean for figure in figures),
            max(figure.p99 for figure in figures),
            sum(figure.failed for figure in figures),
            {model: figure.rate for model, figure in models.items()},
            rate * relative,
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """A configuration, as changes to the current one, and its figures."""

    changes: Mapping[str, Value]
    figures: tuple[Figure, ...] = ()
    memory: int = 0
    """Memory of the models under load, in bytes; 0 if unknown."""
    refused: str = ""
    """Reason why there are no figures: the configuration cannot be loaded, or answers no requests."""
    turns: int = 1
    """Number of times it was measured; the figures are medians if there are several."""

    def to_json(self) -> dict[str, Any]:
        """Return the finding as a JSON-serialisable document."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Return the finding from which ``to_json`` made ``data``. Raises ``KeyError`` or ``TypeError`` otherwise."""
        figures = tuple(Figure(**figure) for figure in data["figures"])
        return cls(data["changes"], figures, data["memory"], data["refused"], data["turns"])


def combined(turns: Sequence[Finding]) -> Finding:
    """Combine several measurements of a configuration by medians. If one was refused, the result is refused."""
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
        # Turns differ more than the windows of one.
        half_width([figure.rate for figure in figures]) or figures[0].error,
    )


# Ranking: the highest throughput, lowest latency or lowest memory within the limits.

REFUSED: Final[Score] = (-1, 0.0)
"""Worse than any measured score."""
NEAR: Final = 0.1
"""Findings within this fraction of the best may be the best: a single measurement is not more accurate."""
TIE: Final = 0.02
"""Findings within this fraction of the best count as equal after the near ones were measured again."""
MAX_NEAR: Final = 3
"""Maximum number of near findings that are measured again."""

Objective = Literal["throughput", "latency", "memory"]


@dataclass(frozen=True, slots=True)
class Goal:
    """Objective and limits of the analysis. None: no limit."""

    objective: Objective = "throughput"
    p99: float | None = None
    """Maximum 99th percentile of the latency in milliseconds."""
    memory: float | None = None
    """Maximum memory in bytes."""
    rate: float | None = None
    """Minimum responses per second, for each model."""

    def score(self, finding: Finding) -> Score:
        """Return the value of the objective if the limits are met, or else by how much they are exceeded."""
        return max((self._score(figure, finding.memory) for figure in finding.figures), default=REFUSED)

    def best_figure(self, finding: Finding) -> Figure:
        """Return the figure with the best score of a finding that has figures."""
        return max(finding.figures, key=lambda figure: self._score(figure, finding.memory))

    def kept(self, finding: Finding) -> bool:
        """Return whether a configuration meets the limits at some level of load."""
        return self.score(finding)[0] > 0

    def ranked(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings with figures, best first; among equals, fewer changes come first."""
        measured = [finding for finding in findings if finding.figures]
        measured.sort(key=lambda finding: len(finding.changes))
        return sorted(measured, key=self.score, reverse=True)

    def contenders(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings near the best, whose order may change if they are measured again; best first."""
        ranked = self.ranked(findings)
        return [each for each in ranked if self._near(each, ranked[0], NEAR)][:MAX_NEAR]

    def winners(self, findings: Iterable[Finding]) -> list[Finding]:
        """Return the findings ranked, with the winner first.

        The winner has the fewest changes among those as good as the best. If some were measured again, only these can
        win, because the best of many single measurements is likely to be an outlier.
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
        """Yield the relative excess over each limit, or 0 if the limit is met."""
        for value, limit in ((figure.p99, self.p99), (memory, self.memory)):
            if limit is not None:
                yield max(0.0, value / limit - 1)
        if self.rate is not None:
            yield max(0.0, 1 - min(figure.each.values(), default=figure.rate) / self.rate)


# Measurement of the points of a search, and repeated measurement of the best.

TURNS: Final = 3
"""Number of times that candidates for the best are measured, including the measurement during the search."""
AGAIN: Final = (MAX_NEAR + 1) * (TURNS - 1)
"""Maximum number of measurements after the search, at one level each."""


class Measure(Protocol):
    """Measures a configuration for the first (``turn`` 0) or a later time, by default at all levels."""

    def __call__(self, changes: Mapping[str, Value], turn: int = 0, levels: Sequence[int] = ()) -> Finding:
        """Return the result."""


def findings(space: Space, search: Search, measure: Measure, goal: Goal) -> Iterator[Finding]:
    """Measure the points of a search, and yield the findings; the current configuration comes first."""
    answer: Score | None = None
    while True:
        try:
            # The generator must be started before it can be sent a score.
            point = next(search) if answer is None else search.send(answer)
        except StopIteration:
            return
        finding = measure(space.changes(point))
        yield finding
        answer = goal.score(finding)


def settled(found: Sequence[Finding], measure: Measure, goal: Goal) -> list[Finding]:
    """Measure the findings near the best and the current configuration again, and return all findings with the medians.

    The measurements are interleaved, so that changes in the load of the machine affect all configurations equally.
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


# The HTML page: the best configuration, its figures, and its changes.

_MAX_CURVES: Final = 5
_MEASURES: Final = {
    "throughput": ("requests/s", 1.0),
    "latency": ("p99 latency, ms", -1.0),
    "memory": ("MB", -1e-6),
}
"""Label of the plot for each objective, and the factor that converts a score to its unit."""


class AnalyzeHeading(NamedTuple):
    """Title and description of the analysis on the page."""

    models: str
    about: Sequence[str]
    """Conditions of the measurement, shown below the title."""
    provenance: Provenance | None = None


def render(
    heading: AnalyzeHeading, found: Sequence[Finding], goal: Goal, table: Sequence[Sequence[str]], difference: str
) -> str:
    """Return the page. ``found`` begins with the current configuration, which has figures; ``table`` shows all."""
    best = goal.winners(found)
    remarks = [verdict(found, goal)] if not (goal.kept(best[0]) and best[0].changes) else []
    nothing = "<p>None: the current configuration is the best.</p>"
    body = [
        *report.opening(heading.models, (*heading.about, _goal_text(goal)), remarks),
        report.key(_key(found[0], best[0], goal)),
        report.plots(_plots(found, best, goal)),
        "<h2>Changes</h2>",
        report.difference(difference) if difference else nothing,
        "<h2>Measurements</h2>",
        report.html_table(table),
        *([report.origin([("", heading.provenance)])] if heading.provenance is not None else []),
    ]
    return report.document(f"{heading.models}: the best configuration", body)


def verdict(found: Sequence[Finding], goal: Goal) -> str:
    """Return the result in a sentence. ``found`` begins with the current configuration."""
    best = goal.winners(found)[0]
    if not goal.kept(best):
        return "No configuration meets the limits."
    if best.changes:
        return comparison(found[0], best, goal)
    measured = sum(1 for each in found if each.figures)
    return f"The current configuration is the best of {measured}: no other is better by more than {TIE:.0%}."


def _goal_text(goal: Goal) -> str:
    limits = [f"p99 of at most {goal.p99:g} ms"] if goal.p99 is not None else []
    limits += [f"memory of at most {goal.memory / 1e6:g} MB"] if goal.memory is not None else []
    limits += [f"at least {goal.rate:g} requests/s"] if goal.rate is not None else []
    objective = {"throughput": "highest throughput", "latency": "lowest p99", "memory": "lowest memory"}
    return ", ".join([f"goal: {objective[goal.objective]}", *limits])


def _key(now: Finding, best: Finding, goal: Goal) -> Iterator[tuple[str, str]]:
    best_figure, current = goal.best_figure(best), goal.best_figure(now)
    yield plot_figure(best_figure.rate), f"requests per second: {named(best.changes)}"
    for model, rate in best_figure.each.items():
        yield plot_figure(rate), f"of these to {model}"
    if best.changes:
        yield plot_figure(current.rate), "with the current configuration"
    yield (
        f"{plot_figure(best_figure.p99)} ms",
        f"99th percentile of the latency, at concurrency {best_figure.concurrency}",
    )
    compared = f"; with the current configuration: {plot_figure(now.memory / 1e6)}" if best.changes else ""
    yield f"{plot_figure(best.memory / 1e6)} MB", f"under load{compared}"


def _plots(found: Sequence[Finding], best: Sequence[Finding], goal: Goal) -> Iterator[str]:
    shown = list(best[:_MAX_CURVES])
    if found[0] not in shown:
        shown.append(found[0])
    others = [(one.rate, one.p99) for each in best if each not in shown for one in each.figures]
    cloud = [Series("others", others, others=True)] if others else []
    curves = [
        Series(f"{place}: {named(each.changes)}", [(one.rate, one.p99) for one in each.figures])
        for place, each in enumerate(shown, 1)
    ]
    meaning = "One point per concurrency level. Further to the right is more throughput, lower is less latency."
    yield report.html_figure(
        "Latency by throughput", meaning, lines("requests/s", "p99 latency, ms", [*curves, *cloud])
    )
    label, sign = _MEASURES[goal.objective]
    kept = [(float(at), sign * goal.score(each)[1]) for at, each in enumerate(found, 1) if goal.kept(each)]
    if kept:
        leading = itertools.accumulate((value for _, value in kept), max if sign > 0 else min)
        progress = [(at, value) for (at, _), value in zip(kept, leading, strict=True)]
        series = [
            Series("best so far", progress, dotted=False),
            Series("measured", kept, others=True),
        ]
        meaning = "Configurations that meet the limits, in the order of their measurement."
        yield report.html_figure("Search", meaning, lines("configuration", label, series))
    best_figures = [(str(place), goal.best_figure(each)) for place, each in enumerate(shown, 1)]
    yield report.html_figure(
        "Throughput",
        "At the best level of each numbered configuration, with 95 % confidence intervals.",
        error_bars("requests/s", [ErrorBar(place, one.rate, one.error) for place, one in best_figures]),
    )
    rows = [(str(place), (each.memory / 1e6,)) for place, each in enumerate(shown, 1)]
    yield report.html_figure("Memory", "Under load, for the numbered configurations.", bars("MB", ("memory",), rows))


# Text output: lines, rows of tables, and the changes of the best configuration.

HEADINGS: Final = ("Settings", "Requests/s", "p99 ms", "at", "Memory", "Measured", "Limits")


def line(finding: Finding, goal: Goal) -> str:
    """Return a finding as a line of text."""
    if finding.refused:
        return f"{named(finding.changes)}: refused, {finding.refused.splitlines()[0]}"
    figure = goal.best_figure(finding)
    return (
        f"{named(finding.changes)}: {_rates(figure, '{:,.0f}/s')}, p99 {figure.p99:,.2f} ms at concurrency "
        f"{figure.concurrency}, {megabytes(finding.memory)}"
    )


def row(finding: Finding, goal: Goal) -> list[str]:
    """Return a finding that has figures as a table row."""
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
    """Return a sentence that compares the best configuration with the current one."""
    if not goal.kept(now):
        return "The current configuration does not meet the limits."
    current, better = goal.best_figure(now), goal.best_figure(best)
    match goal.objective:
        case "latency":
            return f"Its p99 is {better.p99:,.2f} ms, compared to {current.p99:,.2f} ms with the current configuration."
        case "memory":
            return (
                f"It uses {megabytes(best.memory)} of memory, compared to {megabytes(now.memory)} with the current "
                "configuration."
            )
    answers = _rates(current, "{:,.0f}/s")
    return f"That is {better.rate / current.rate:.2f} times the throughput of the current configuration ({answers})."


def difference(subjects: Subjects, best: Mapping[str, Value]) -> str:
    """Return the changes to the models' config.pbtxt files as a unified diff."""
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
