"""Results of measurements as JSON, as CSV, and as a self-contained HTML report."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any, Final, NamedTuple

from nerite.client import ClientError, ModelStatistics
from nerite.tools.bench.measurement import Part, Spread, Tokens, window_values
from nerite.tools.bench.noise import half_width
from nerite.tools.bench.provenance import Provenance
from nerite.tools.bench.session import LevelOutcome, Search


def render_json(
    model: str, provenance: Provenance, outcomes: Sequence[LevelOutcome], search: Search | None = None
) -> str:
    """Return all levels, and the result of a search, as JSON. Times are in milliseconds."""
    document: dict[str, Any] = {"model": model, "provenance": provenance.to_json()}
    if search is not None:
        best = search.best
        document["within"] = {
            "measure": search.limit.measure,
            "limit_ms": search.limit.milliseconds,
            "level": best.level.value if best else None,
            "requests_per_second": best.figures.rate if best else None,
        }
    document["levels"] = [level_json(outcome) for outcome in outcomes]
    return json.dumps(document, indent=2) + "\n"


def level_json(outcome: LevelOutcome) -> dict[str, Any]:
    """Return all figures of a level."""
    figures = outcome.figures
    document: dict[str, Any] = {
        outcome.level.kind: outcome.level.value,
        **({"arrivals": outcome.level.arrivals} if outcome.level.open else {}),
        **({"burstiness": outcome.level.burstiness} if outcome.level.arrivals == "gamma" else {}),
        "requests_per_second": figures.rate,
        "requests": figures.answered,
        "seconds": figures.seconds,
        "failed": figures.failed,
        "failures": dict(figures.failures),
        "cancelled": figures.cancelled,
        "totals": outcome.totals._asdict(),
        "stable": outcome.stable,
        "latency_ms": _spread(figures.latency),
        "client": {
            "busy": outcome.busy,
            "processor_us_per_request": outcome.spent * 1e6,
            "sent_late_ms": _spread(figures.lag),
            "is_the_limit": outcome.client_is_the_limit,
        },
        "windows": [
            {"seconds": window.seconds, **window_values(window, outcome.objectives)} for window in outcome.windows
        ],
        "counted_windows": outcome.counted,
    }
    if outcome.server_cancelled is not None:
        document["server_cancelled"] = outcome.server_cancelled
    if figures.texts is not None:
        document["texts_per_second"] = figures.texts
    if len(outcome.models) > 1:
        document["models"] = {
            outcome.models[place]: _part(part, figures.seconds) for place, part in figures.parts.items()
        }
    if figures.goodput is not None:
        document["good_requests_per_second"] = figures.goodput
    if figures.tokens is not None:
        document["tokens"] = _tokens(figures.tokens)
    if outcome.server is not None:
        document["server"] = _server(outcome.server)
    return document


def _part(part: Part, seconds: float) -> dict[str, Any]:
    first = {"time_to_first_ms": _spread(part.first)} if part.first is not None else {}
    rate = {"requests": part.answered, "requests_per_second": part.answered / seconds}
    return {**rate, "latency_ms": _spread(part.latency), **first}


def _spread(spread: Spread) -> dict[str, float]:
    ends = {"mean": spread.mean, "deviation": spread.deviation, "min": spread.least, "max": spread.most}
    return {**ends, **spread.quantiles}


def _tokens(tokens: Tokens) -> dict[str, Any]:
    return {
        "per_second": tokens.rate,
        "per_request": tokens.mean,
        "per_prompt": tokens.prompt,
        "cached_part": tokens.cached,
        "time_to_first_ms": _spread(tokens.first),
        "inter_token_ms": _spread(tokens.between) if tokens.between else None,
        "gaps_ms": _spread(tokens.gaps) if tokens.gaps else None,
    }


def _server(server: ModelStatistics) -> dict[str, Any]:
    return {
        "requests": server.requests,
        "failed": server.fail.count,
        "inferences": server.inference_count,
        "executions": server.execution_count,
        "mean_batch": server.mean_batch,
        "queue_ms": server.queue.mean_ms,
        "compute_input_ms": server.compute_input.mean_ms,
        "compute_infer_ms": server.compute_infer.mean_ms,
        "compute_output_ms": server.compute_output.mean_ms,
        "cache_hits": server.cache_hit.count,
    }


# CSV: a line for each level. Columns are named by the path of the value in the JSON, separated by dots.


def render_csv(outcomes: Sequence[LevelOutcome]) -> str:
    """Return all levels as CSV."""
    rows = [dict(_flat("", level_json(outcome))) for outcome in outcomes]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(prefix: str, document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, Mapping) and name != "failures":
            yield from _flat(f"{prefix}{name}.", value)
        elif isinstance(value, int | float | str):
            yield f"{prefix}{name}", value


# HTML reports: self-contained files, with plots drawn by the uPlot library of the console.

_GREY: Final = 7
"""Colour of series that are shown for comparison."""
_COLOURS: Final = 8


class Series(NamedTuple):
    """A named line in a plot, or points that no line joins."""

    name: str
    points: Sequence[tuple[float, float]]
    dotted: bool = True
    """Mark each point on the line."""
    others: bool = False
    """Points that are shown for comparison only: grey, and not joined."""
    errors: Sequence[float] = ()
    """Half the length of the error bar of each point; empty for none."""


class ErrorBar(NamedTuple):
    """A bar with its value, and half the length of its error bar."""

    label: str
    value: float
    error: float = 0.0
    colour: int = 0


def document(title: str, body: Iterable[str]) -> str:
    """Return a complete page that loads nothing from elsewhere."""
    own = files(__package__)
    uplot = files("nerite.transports.http").joinpath("pages", "console", "uplot")
    style = uplot.joinpath("uPlot.min.css").read_text() + own.joinpath("page.css").read_text()
    # In a block, so that its names do not clash with those of the library.
    script = f"{uplot.joinpath('uPlot.esm.js').read_text()}\n{{\n{own.joinpath('plots.js').read_text()}}}\n"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>\n{style}</style></head><body>\n"
        + "\n".join(body)
        + f'\n<script type="module">\n{script}</script></body></html>\n'
    )


def opening(title: str, about: Iterable[str], remarks: Iterable[str]) -> list[str]:
    """Return the title of a page, the line ``about`` below it, and remarks."""
    found = [f"<h1>{escape(title)}</h1>", f"<p>{escape(' · '.join(about))}</p>"]
    return found + [f'<p class="remark">{escape(remark)}</p>' for remark in remarks]


def key(numbers: Iterable[tuple[str, str]]) -> str:
    """Return the most important numbers, each with its meaning."""
    shown = (f"<div><b>{escape(value)}</b><span>{escape(meaning)}</span></div>" for value, meaning in numbers)
    return f'<div class="key">{"".join(shown)}</div>'


def plots(figures: Iterable[str]) -> str:
    """Return figures in a grid."""
    return f'<div class="plots">{"".join(figures)}</div>'


def html_figure(title: str, meaning: str, plot: str) -> str:
    """Return a plot with its title and an explanation."""
    return f"<figure><h2>{escape(title)}</h2><p>{escape(meaning)}</p>{plot}</figure>\n"


def lines(x_label: str, y_label: str, series: Sequence[Series], *, levels: Sequence[float] = ()) -> str:
    """Return a plot of lines. ``levels`` are the labels of the horizontal axis, if it shows levels of load."""
    colours = itertools.cycle(range(_COLOURS))
    plot = {
        "x": x_label,
        "y": y_label,
        "levels": [*levels],
        "series": [
            {
                "name": each.name,
                "points": each.points,
                "dotted": each.dotted,
                "joined": not each.others,
                "errors": each.errors,
                "colour": _GREY if each.others else next(colours),
            }
            for each in series
        ],
    }
    return f'<div class="plot" data-plot="{escape(json.dumps(plot))}"></div>'


def bars(unit: str, names: Sequence[str], rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Return a horizontal bar for each label, composed of parts in the order of ``names``."""
    longest = max((sum(values) for _, values in rows), default=0.0) or 1.0
    body = ""
    for label, values in rows:
        parts = "".join(
            f'<i class="s{part}" style="width:{value / longest:.2%}" title="{escape(name)}: {plot_figure(value)}"></i>'
            for part, (name, value) in enumerate(zip(names, values, strict=True))
        )
        total = f"{plot_figure(sum(values))} {unit}"
        body += f"<tr><th>{escape(label)}</th><td><div>{parts}</div></td><td>{escape(total)}</td></tr>"
    return f'<table class="bars">{body}</table>{_legend(names)}'


def error_bars(unit: str, rows: Sequence[ErrorBar], names: Sequence[str] = ()) -> str:
    """Return a horizontal bar for each row, with its error bar. ``names`` are those of the colours, for a legend."""
    longest = max((row.value + row.error for row in rows), default=0.0) or 1.0
    body = ""
    for row in rows:
        low = max(0.0, row.value - row.error)
        mark = (
            f'<u style="left:{low / longest:.2%};width:{(row.value + row.error - low) / longest:.2%}"></u>'
            if row.error
            else ""
        )
        text = f"{plot_figure(row.value)}{f' ± {plot_figure(row.error)}' if row.error else ''} {unit}"
        bar = f'<i class="s{row.colour}" style="width:{row.value / longest:.2%}"></i>{mark}'
        body += f"<tr><th>{escape(row.label)}</th><td><div>{bar}</div></td><td>{escape(text)}</td></tr>"
    return f'<table class="bars">{body}</table>{_legend(names)}'


def _legend(names: Sequence[str]) -> str:
    items = "".join(f'<li><i class="s{part}"></i>{escape(name)}</li>' for part, name in enumerate(names))
    return f'<ul class="legend">{items}</ul>' if len(names) > 1 else ""


def origin(reports: Sequence[tuple[str, Provenance]]) -> str:
    """Return where each of the named reports comes from: command, machine and versions."""
    body = "".join(
        f"<tr><th>{escape(' '.join(filter(None, (title, name))))}</th><td>{escape(fact)}</td></tr>"
        for title, provenance in reports
        for name, fact in provenance.facts()
        if fact
    )
    return f'<h2>Origin</h2><div class="wide"><table class="origin">{body}</table></div>'


def plot_figure(value: float) -> str:
    """Return a number with three significant digits, or without decimals from 1000 on."""
    return f"{value:,.0f}" if value == 0 or value >= 1000 else f"{value:.3g}"


def difference(text: str) -> str:
    """Return a unified diff, with additions and removals in colour."""
    kinds = {"+": "added", "-": "removed", "@": "place"}

    def line(text: str) -> str:
        kind = "place" if text.startswith(("+++", "---")) else kinds.get(text[:1], "")
        return f'<span class="{kind}">{escape(text)}</span>' if kind else escape(text)

    lines = "\n".join(map(line, text.splitlines()))
    return f"<pre>{lines}</pre>"


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first row has the headings."""
    head, *others = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in others)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>\n{body}</tbody></table></div>'


# The report of ``nerite bench``.


class BenchHeading(NamedTuple):
    """Title and description of the measurement."""

    model: str
    server: str
    settings: str
    """Conditions of the measurement, in one line."""
    provenance: Provenance


def render_html(
    heading: BenchHeading, outcomes: Sequence[LevelOutcome], table: Sequence[Sequence[str]], remarks: Sequence[str]
) -> str:
    """Return the page; ``table`` has the headings and rows that the terminal shows."""
    about = (heading.server, heading.settings, heading.provenance.when)
    body = [
        *opening(heading.model, about, remarks),
        key(_key(outcomes)),
        plots(_plots(outcomes)),
        html_table(table),
        origin([("", heading.provenance)]),
    ]
    return document(f"{heading.model}: {_span(outcomes)}", body)


def _span(outcomes: Sequence[LevelOutcome]) -> str:
    kind = outcomes[0].level.kind
    ends = dict.fromkeys((str(outcomes[0].level), str(outcomes[-1].level)))
    return f"{kind} {' to '.join(ends)}"


def _key(outcomes: Sequence[LevelOutcome]) -> Iterator[tuple[str, str]]:
    best = max(outcomes, key=lambda outcome: outcome.figures.rate)
    swiftest = min(outcomes, key=lambda outcome: outcome.figures.latency["p50"])
    yield (plot_figure(best.figures.rate), f"requests per second at most, at {best.level.kind} {best.level}")
    yield (f"{plot_figure(best.figures.latency['p99'])} ms", "99th percentile of the latency at that load")
    yield (f"{plot_figure(swiftest.figures.latency['p50'])} ms", f"median at {swiftest.level.kind} {swiftest.level}")
    if best.figures.tokens is not None:
        yield (plot_figure(best.figures.tokens.rate), "tokens per second at that load")
    if best.figures.goodput is not None:
        good = max(outcomes, key=lambda outcome: outcome.figures.goodput or 0.0)
        yield (plot_figure(good.figures.goodput or 0.0), f"good requests per second, at {good.level.kind} {good.level}")


def _plots(outcomes: Sequence[LevelOutcome]) -> Iterator[str]:
    kind = "requests per second, as scheduled" if outcomes[0].level.open else "concurrent requests"
    levels = {outcome.level for outcome in outcomes}
    if len(levels) > 1:
        yield from _curves(kind, outcomes, joined=len(levels) > _MOST_BARS)
    count = min(len(outcomes), _COLOURS)
    shown = [outcomes[round(at * (len(outcomes) - 1) / max(1, count - 1))] for at in range(count)]
    distribution = [
        Series(
            f"{outcome.level}",
            [(at / 2, value) for at, value in enumerate(outcome.figures.latencies[:200].tolist())],
            dotted=False,
        )
        for outcome in shown
    ]
    plot = lines("percentile", "latency, ms", distribution)
    yield html_figure("Distribution of the latency", f"Percentiles of the latency, by {kind}.", plot)
    if all(outcome.server is not None for outcome in outcomes):
        yield html_figure(
            "Where the time goes",
            f"Mean latency by {kind}: in the queue, computing, and the rest, which is the network and both ends of it.",
            bars("ms", ("queue", "compute", "rest"), [_shares(outcome) for outcome in outcomes]),
        )


_MOST_BARS: Final = 2
"""Maximum number of levels that are shown as bars: a line would suggest that something is known in between."""
_MEASURES: Final = {
    "Throughput": (
        "requests/s",
        "Responses per second.",
        {"answered": "requests_per_second", "good": "good_requests_per_second"},
    ),
    "Latency": (
        "ms",
        "From the scheduled time of a request to the end of its response.",
        {name: f"{name}_latency_ms" for name in ("p50", "p90", "p99")},
    ),
    "Text throughput": ("texts/s", "Sum over all responses.", {"texts": "texts_per_second"}),
    "Time to first token": (
        "ms",
        "From the scheduled time of a request.",
        {name: f"{name}_time_to_first_ms" for name in ("p50", "p99")},
    ),
    "Inter-token latency": ("ms", "Mean over a response.", {"mean": "mean_inter_token_ms"}),
    "Token throughput": ("tokens/s", "Sum over all responses.", {"tokens": "tokens_per_second"}),
}
"""Plots by title: unit, explanation, and the figures of windows by the name of the series."""


def _curves(kind: str, outcomes: Sequence[LevelOutcome], *, joined: bool) -> Iterator[str]:
    samples = [level_samples(level_json(outcome)) for outcome in outcomes]
    overall = [level_values(level_json(outcome)) for outcome in outcomes]
    for title, (unit, meaning, measures) in _MEASURES.items():
        known = {name: key for name, key in measures.items() if all(key in values for values in overall)}
        if known:
            points = {
                name: [
                    (outcome.level.value, values[key], half_width(sample.get(key, ())))
                    for outcome, values, sample in zip(outcomes, overall, samples, strict=True)
                ]
                for name, key in known.items()
            }
            plot = _by_level(kind, unit, points) if joined else _level_bars(unit, points)
            yield html_figure(title, f"{meaning} With 95 % confidence intervals.", plot)
        if title == "Latency" and joined:
            trade = Series("p99", [(outcome.figures.rate, outcome.figures.latency["p99"]) for outcome in outcomes])
            plot = lines("requests/s", "p99 latency, ms", [trade])
            meaning = "The bend of the curve is the load that the server can sustain."
            yield html_figure("Latency by throughput", meaning, plot)


Points = Mapping[str, Sequence[tuple[float, float, float]]]
"""Level, value and half of the error bar of each point, by the name of the series."""


def _by_level(kind: str, unit: str, points: Points) -> str:
    levels = sorted({level for series in points.values() for level, _, _ in series})
    shown = []
    for name, series in points.items():
        ordered = sorted(series)
        values = [(level, value) for level, value, _ in ordered]
        shown.append(Series(name, values, errors=[error for _, _, error in ordered]))
    return lines(kind, unit, shown, levels=levels)


def _level_bars(unit: str, points: Points) -> str:
    levels = sorted({level for series in points.values() for level, _, _ in series})
    rows = [
        ErrorBar(plot_figure(level), value, error, colour)
        for wanted in levels
        for colour, series in enumerate(points.values())
        for level, value, error in series
        if level == wanted
    ]
    return error_bars(unit, rows, list(points))


# Figures of a level in the JSON: over all of the measurement, and in each window.

LEVEL_VALUES: Final = {
    "requests_per_second": ("requests_per_second",),
    "mean_latency_ms": ("latency_ms", "mean"),
    "p50_latency_ms": ("latency_ms", "p50"),
    "p90_latency_ms": ("latency_ms", "p90"),
    "p99_latency_ms": ("latency_ms", "p99"),
    "p50_time_to_first_ms": ("tokens", "time_to_first_ms", "p50"),
    "p99_time_to_first_ms": ("tokens", "time_to_first_ms", "p99"),
    "mean_inter_token_ms": ("tokens", "inter_token_ms", "mean"),
    "tokens_per_second": ("tokens", "per_second"),
    "texts_per_second": ("texts_per_second",),
    "good_requests_per_second": ("good_requests_per_second",),
}
"""Where the JSON of a level has the figures that its windows have by these names."""


def level_values(level: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a level in the JSON of a report."""
    found = {}
    for name, path in LEVEL_VALUES.items():
        value: Any = level
        for key in path:
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, int | float):
            found[name] = float(value)
    return found


def level_samples(level: Mapping[str, Any]) -> dict[str, list[float]]:
    """Return the figures of each window of a level that counts."""
    windows = level.get("windows") or []
    counted = windows[-int(level.get("counted_windows", len(windows))) :]
    return {
        name: [float(window[name]) for window in counted]
        for name in LEVEL_VALUES
        if counted and all(name in window for window in counted)
    }


def _shares(outcome: LevelOutcome) -> tuple[str, tuple[float, float, float]]:
    assert outcome.server is not None
    queue, compute = outcome.server.queue.mean_ms, outcome.server.mean_compute_ms
    return plot_figure(outcome.level.value), (queue, compute, max(0.0, outcome.figures.latency.mean - queue - compute))


def write_file(path: Path, text: str) -> None:
    """Write a file, which may be a device such as /dev/stdout. Raises ``ClientError``."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ClientError(f"cannot write {path}: {error.strerror}") from None
