"""How findings are told: a line, a row of a table, and what the best one changes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Final

from nerite.analyze.finding import Figure, Finding, named
from nerite.analyze.ranking import Goal
from nerite.analyze.settings import Value
from nerite.analyze.subject import Subjects
from nerite.cli.progress import megabytes

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
