"""Findings as a page for people: what is best, what it costs, and what it changes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from nerite.analyze.finding import Finding, named
from nerite.analyze.ranking import Goal
from nerite.bench.report import page
from nerite.bench.report.plot import Series, figure, lines, stacks

_MOST_CURVES: Final = 5
_GREY: Final = 7
"""The colour of what is there for comparison."""
_MEASURES: Final = {
    "throughput": ("requests/s", 1.0),
    "latency": ("p99 latency, ms", -1.0),
    "memory": ("MB", -1e-6),
}
"""By objective: how its plot is labelled, and what makes that of a score."""


class Heading(NamedTuple):
    """What the page says about the analysis."""

    models: str
    about: Sequence[str]
    """How it was measured, and where: a line below the title."""


def render(
    heading: Heading, found: Sequence[Finding], goal: Goal, table: Sequence[Sequence[str]], difference: str
) -> str:
    """Return the page. ``found`` begins with the present configuration, which has figures; ``table`` has them all."""
    best = goal.winners(found)
    remarks = () if goal.kept(best[0]) else ("None keeps to the limits.",)
    nothing = "<p>Nothing: the present configuration is the best, or as good.</p>"
    body = [
        *page.opening(heading.models, (*heading.about, _said(goal)), remarks),
        page.key(_key(found[0], best[0], goal)),
        page.plots(_plots(found, best, goal)),
        "<h2>What changes</h2>",
        page.difference(difference) if difference else nothing,
        "<h2>What was measured</h2>",
        page.table(table),
    ]
    return page.document(f"{heading.models}: the best configuration", body)


def _said(goal: Goal) -> str:
    said = [f"p99 of at most {goal.p99:g} ms"] if goal.p99 is not None else []
    said += [f"memory of at most {goal.memory / 1e6:g} MB"] if goal.memory is not None else []
    said += [f"at least {goal.rate:g} requests/s"] if goal.rate is not None else []
    wanted = {"throughput": "the most requests/s", "latency": "the least p99", "memory": "the least memory"}
    return ", ".join([f"wanted: {wanted[goal.objective]}", *said])


def _key(now: Finding, best: Finding, goal: Goal) -> Iterator[tuple[str, str]]:
    there, here = goal.best_figure(best), goal.best_figure(now)
    yield figure(there.rate), f"requests a second: {named(best.changes)}"
    for model, rate in there.each.items():
        yield figure(rate), f"of them to {model}"
    yield figure(here.rate), "with the present configuration"
    yield f"{figure(there.p99)} ms", f"99th percentile of the latency, at concurrency {there.concurrency}"
    yield f"{figure(best.memory / 1e6)} MB", "at work; the present configuration: " + figure(now.memory / 1e6)


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
    yield page.figure("Latency by throughput", meaning, lines("requests/s", "p99 latency, ms", [*curves, *cloud]))
    columns = [(str(place), (each.memory / 1e6,)) for place, each in enumerate(shown, 1)]
    meaning = "At work, of the configurations that have a number."
    yield page.figure("Memory", meaning, stacks("configuration", "MB", ("memory",), columns))
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
        yield page.figure("The search", meaning, lines("configuration", label, series))
