"""What a terminal shows: a row for each level of load, and what is to be said about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nerite.bench.measurement import AGREEING
from nerite.bench.search import KEPT_UP, Search
from nerite.bench.session import Outcome


def headings(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the headings; columns that would be empty are not there."""
    found = ["Rate wanted" if outcomes[0].level.open else "Concurrency", "Requests/s", "Mean ms"]
    found += ["p50 ms", "p90 ms", "p99 ms"]
    if outcomes[0].figures.tokens is not None:
        found += ["First ms", "First p99", "Between ms", "Tokens/s"]
    if outcomes[0].figures.goodput is not None:
        found.append("Good/s")
    if outcomes[0].server is not None:
        found += ["Queue ms", "Compute ms", "Batch"]
    return [*found, "Client", "Failed"]


def row(outcome: Outcome) -> list[str]:
    """Return a row under the headings."""
    figures = outcome.figures
    latency = figures.latency
    cells = [f"{outcome.level}{'' if outcome.stable else ' ~'}", f"{figures.rate:,.1f}"]
    cells += [f"{value:,.3f}" for value in (latency.mean, latency["p50"], latency["p90"], latency["p99"])]
    if figures.tokens is not None:
        tokens = figures.tokens
        cells += [f"{tokens.first['p50']:,.1f}", f"{tokens.first['p99']:,.1f}"]
        cells += [f"{tokens.between.mean:,.2f}" if tokens.between else "", f"{tokens.rate:,.1f}"]
    if figures.goodput is not None:
        cells.append(f"{figures.goodput:,.1f}")
    if outcome.server is not None:
        server = outcome.server
        cells += [f"{server.queue.mean_ms:,.3f}", f"{server.mean_compute_ms:,.3f}", f"{server.mean_batch:,.1f}"]
    return [*cells, f"{outcome.busy:.0%}{' !' if outcome.client_is_the_limit else ''}", str(figures.failed or "")]


def remarks(outcomes: Sequence[Outcome], percentage: float) -> Iterator[str]:
    """Yield what has to be said below the table."""
    if any(not outcome.stable for outcome in outcomes):
        yield (
            f"~ not stable: the last {AGREEING} windows differ by more than {percentage:g} % from their mean. "
            "A longer --window may help."
        )
    if any(outcome.client_is_the_limit for outcome in outcomes):
        yield (
            "! the client was the limit: a process of it was busy all the time, or sent late. "
            "Give it more --processes, or a machine of its own."
        )
    for outcome in outcomes:
        if outcome.level.open and outcome.figures.rate < KEPT_UP * outcome.level.rate:
            yield f"The server did not keep up with {outcome.level}: latencies grow for as long as it goes on."
        for reason, count in outcome.figures.failures.items():
            yield f"{count} failed at {outcome.level}: {reason}"


def found(search: Search) -> str:
    """Return what a search for the highest load within a limit has found."""
    best = search.best
    if best is None:
        return f"No load was within a {search.limit}: begin lower, or allow more."
    level = f"{best.level.kind} {best.level}"
    return f"Within a {search.limit}: {best.figures.rate:,.1f} requests/s, at {level}."
