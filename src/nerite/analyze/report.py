"""Findings as a page for people: what is best, what it costs, and what it changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from typing import Final

from nerite.analyze.finding import Finding, named
from nerite.analyze.ranking import Limits, best_figure, kept, ranked
from nerite.bench.report import page
from nerite.bench.report.plot import Series, figure, lines, stacks

_MOST_CURVES: Final = 6


def render(
    model: str, told: str, found: Sequence[Finding], limits: Limits, table: Sequence[Sequence[str]], diff: str
) -> str:
    """Return the page. ``found`` begins with the present configuration, which has figures; ``table`` has them all."""
    best = ranked(found, limits)
    body = [
        *page.opening(model, (told, _said(limits)), () if kept(best[0], limits) else ("None keeps to the limits.",)),
        page.key(_key(found[0], best[0], limits)),
        page.plots(_plots(found, best, limits)),
        f"<h2>What changes</h2><pre>{escape(diff) or 'Nothing: the present configuration is the best.'}</pre>",
        page.table(table),
    ]
    return page.document(f"{model}: its best configuration", body)


def _said(limits: Limits) -> str:
    said = [f"p99 of at most {limits.p99:g} ms"] if limits.p99 is not None else []
    said += [f"memory of at most {limits.memory / 1e6:g} MB"] if limits.memory is not None else []
    return " and ".join(said) or "no limits"


def _key(now: Finding, best: Finding, limits: Limits) -> Iterator[tuple[str, str]]:
    there, here = best_figure(best, limits), best_figure(now, limits)
    yield figure(there.rate), f"requests a second: {named(best.changes)}"
    yield figure(here.rate), "with the present configuration"
    yield f"{figure(there.p99)} ms", f"99th percentile of the latency, at concurrency {there.concurrency}"
    yield f"{figure(best.memory / 1e6)} MB", "that the model takes at work"


def _plots(found: Sequence[Finding], best: Sequence[Finding], limits: Limits) -> Iterator[str]:
    shown = list(best[:_MOST_CURVES])
    if found[0] not in shown:
        shown.append(found[0])
    curves = [Series(named(each.changes), [(one.rate, one.p99) for one in each.figures]) for each in shown]
    meaning = "A point for each concurrency, of the best configurations and the present one."
    yield page.figure("Latency by throughput", meaning, lines("requests/s", "p99 latency, ms", curves))
    columns = [(str(place), (each.memory / 1e6,)) for place, each in enumerate(shown, 1)]
    meaning = "What the model takes at work, of the same configurations in the same order."
    yield page.figure("Memory", meaning, stacks("configuration", "MB", ("memory",), columns))
    rates = [(float(at), best_figure(each, limits).rate) for at, each in enumerate(found, 1) if each.figures]
    meaning = "Answers a second of each configuration, as they were measured."
    yield page.figure("The search", meaning, lines("configuration", "requests/s", [Series("measured", rates)]))
