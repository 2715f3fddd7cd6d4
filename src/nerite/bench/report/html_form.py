"""Outcomes as a page for people: one file, which needs nothing else and runs no program."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nerite.bench.report import page
from nerite.bench.report.plot import Series, figure, lines, stacks
from nerite.bench.session import Outcome

_MOST_CURVES = 8
"""As many colours as there are."""


class Heading(NamedTuple):
    """What the page says about the measurement."""

    model: str
    server: str
    settings: str
    """How it was measured, in a line."""
    when: str


def render(
    heading: Heading, outcomes: Sequence[Outcome], table: Sequence[Sequence[str]], remarks: Sequence[str]
) -> str:
    """Return the page; ``table`` is headings and rows as a terminal shows them."""
    about = (heading.server, heading.settings, heading.when)
    body = [
        *page.opening(heading.model, about, remarks),
        page.key(_key(outcomes)),
        page.plots(_plots(outcomes)),
        page.table(table),
    ]
    return page.document(f"{heading.model}: {_span(outcomes)}", body)


def _span(outcomes: Sequence[Outcome]) -> str:
    kind = outcomes[0].level.kind
    ends = dict.fromkeys((str(outcomes[0].level), str(outcomes[-1].level)))
    return f"{kind} {' to '.join(ends)}"


def _key(outcomes: Sequence[Outcome]) -> Iterator[tuple[str, str]]:
    best = max(outcomes, key=lambda outcome: outcome.figures.rate)
    swiftest = min(outcomes, key=lambda outcome: outcome.figures.latency["p50"])
    yield (figure(best.figures.rate), f"requests a second at most, at {best.level.kind} {best.level}")
    yield (f"{figure(best.figures.latency['p99'])} ms", "99th percentile of the latency there")
    yield (f"{figure(swiftest.figures.latency['p50'])} ms", f"median at {swiftest.level.kind} {swiftest.level}")
    if best.figures.tokens is not None:
        yield (figure(best.figures.tokens.rate), "tokens a second there")
    if best.figures.goodput is not None:
        good = max(outcomes, key=lambda outcome: outcome.figures.goodput or 0.0)
        yield (figure(good.figures.goodput or 0.0), f"good requests a second, at {good.level.kind} {good.level}")


def _plots(outcomes: Sequence[Outcome]) -> Iterator[str]:
    kind = "requests a second that were asked" if outcomes[0].level.open else "requests under way"
    if len({outcome.level for outcome in outcomes}) > 1:
        yield from _curves(kind, outcomes)
    shown = [outcomes[round(at * (len(outcomes) - 1) / max(1, _count(outcomes) - 1))] for at in range(_count(outcomes))]
    distribution = [
        Series(
            f"{outcome.level}",
            [(at / 2, value) for at, value in enumerate(outcome.figures.latencies[:200].tolist())],
            dotted=False,
        )
        for outcome in shown
    ]
    plot = lines("percentile", "latency, ms", distribution)
    yield page.figure("Distribution of the latency", f"How many per cent took no longer than that, by {kind}.", plot)
    if all(outcome.server is not None for outcome in outcomes):
        yield page.figure(
            "Where the time goes",
            "Mean latency: in the server's queue, computed, and the rest, which is the network and both ends of it.",
            stacks(kind, "ms", ("queue", "compute", "rest"), [_shares(outcome) for outcome in outcomes]),
        )


def _count(outcomes: Sequence[Outcome]) -> int:
    return min(len(outcomes), _MOST_CURVES)


def _curves(kind: str, outcomes: Sequence[Outcome]) -> Iterator[str]:
    levels = sorted({outcome.level.value for outcome in outcomes})

    def by_level(y_label: str, **series: Sequence[float]) -> str:
        given = [
            Series(name, sorted(zip((outcome.level.value for outcome in outcomes), values, strict=True)))
            for name, values in series.items()
        ]
        return lines(kind, y_label, given, marked=levels)

    rates = {"answered": [outcome.figures.rate for outcome in outcomes]}
    if outcomes[0].figures.goodput is not None:
        rates["good"] = [outcome.figures.goodput or 0.0 for outcome in outcomes]
    yield page.figure("Throughput", "Requests a second that were answered.", by_level("requests/s", **rates))
    quantiles = {name: [outcome.figures.latency[name] for outcome in outcomes] for name in ("p50", "p90", "p99")}
    yield page.figure("Latency", "From when a request was due to the end of its answer.", by_level("ms", **quantiles))
    trade = Series("p99", [(outcome.figures.rate, outcome.figures.latency["p99"]) for outcome in outcomes])
    plot = lines("requests/s", "p99 latency, ms", [trade])
    yield page.figure("Latency by throughput", "Where the curve bends is as much as the server does well.", plot)
    tokens = [outcome.figures.tokens for outcome in outcomes if outcome.figures.tokens is not None]
    if len(tokens) == len(outcomes):
        first = {name: [each.first[name] for each in tokens] for name in ("p50", "p99")}
        yield page.figure("Time to the first token", "From when a request was due.", by_level("ms", **first))
        between = [each.between.mean if each.between else 0.0 for each in tokens]
        yield page.figure("Time between tokens", "On average over an answer.", by_level("ms", mean=between))
        speed = by_level("tokens/s", tokens=[each.rate for each in tokens])
        yield page.figure("Tokens", "Of all answers together.", speed)


def _shares(outcome: Outcome) -> tuple[str, tuple[float, float, float]]:
    assert outcome.server is not None
    queue, compute = outcome.server.queue.mean_ms, outcome.server.mean_compute_ms
    return figure(outcome.level.value), (queue, compute, max(0.0, outcome.figures.latency.mean - queue - compute))
