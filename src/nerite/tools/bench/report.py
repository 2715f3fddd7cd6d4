"""Outcomes as JSON: every figure under its name, times in milliseconds."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final, NamedTuple

from nerite.client import ModelStatistics
from nerite.tools.bench.measurement import Spread, Tokens
from nerite.tools.bench.session import LevelOutcome, Search


def render_json(model: str, outcomes: Sequence[LevelOutcome], search: Search | None = None) -> str:
    """Return the document."""
    document: dict[str, Any] = {"model": model}
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
        "requests_per_second": figures.rate,
        "requests": figures.answered,
        "seconds": figures.seconds,
        "failed": figures.failed,
        "failures": dict(figures.failures),
        "stable": outcome.stable,
        "latency_ms": _spread(figures.latency),
        "client": {
            "busy": outcome.busy,
            "processor_us_per_request": outcome.spent * 1e6,
            "sent_late_ms": _spread(figures.lag),
            "is_the_limit": outcome.client_is_the_limit,
        },
        "windows": [
            {"seconds": window.seconds, "requests_per_second": window.rate, "mean_latency_ms": window.latency * 1e3}
            for window in outcome.windows
        ],
    }
    if figures.goodput is not None:
        document["good_requests_per_second"] = figures.goodput
    if figures.tokens is not None:
        document["tokens"] = _tokens(figures.tokens)
    if outcome.server is not None:
        document["server"] = _server(outcome.server)
    return document


def _spread(spread: Spread) -> dict[str, float]:
    ends = {"mean": spread.mean, "deviation": spread.deviation, "min": spread.least, "max": spread.most}
    return {**ends, **spread.quantiles}


def _tokens(tokens: Tokens) -> dict[str, Any]:
    return {
        "per_second": tokens.rate,
        "per_request": tokens.mean,
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


# Outcomes as CSV: a line for each level, the names of ``json_form`` with dots.


def render_csv(outcomes: Sequence[LevelOutcome]) -> str:
    """Return the document."""
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


# The parts that pages are put together from: one file, which needs nothing else and runs no program.


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page."""
    style = files(__package__).joinpath("page.css").read_text()
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>\n{style}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def opening(title: str, about: Iterable[str], remarks: Iterable[str]) -> list[str]:
    """Return what a page begins with; ``about`` is a line below the title."""
    found = [f"<h1>{escape(title)}</h1>", f"<p>{escape(' · '.join(about))}</p>"]
    return found + [f'<p class="remark">{escape(remark)}</p>' for remark in remarks]


def key(numbers: Iterable[tuple[str, str]]) -> str:
    """Return the numbers that matter most, each with its meaning."""
    shown = (f"<div><b>{escape(value)}</b><span>{escape(meaning)}</span></div>" for value, meaning in numbers)
    return f'<div class="key">{"".join(shown)}</div>'


def plots(figures: Iterable[str]) -> str:
    """Return figures side by side."""
    return f'<div class="plots">{"".join(figures)}</div>'


def html_figure(title: str, meaning: str, plot: str) -> str:
    """Return a plot with what it shows."""
    return f"<figure><h2>{escape(title)}</h2><p>{escape(meaning)}</p>{plot}</figure>\n"


def difference(text: str) -> str:
    """Return a unified diff, with what comes and what goes in colours."""
    kinds = {"+": "added", "-": "removed", "@": "place"}

    def line(text: str) -> str:
        kind = "place" if text.startswith(("+++", "---")) else kinds.get(text[:1], "")
        return f'<span class="{kind}">{escape(text)}</span>' if kind else escape(text)

    lines = "\n".join(map(line, text.splitlines()))
    return f"<pre>{lines}</pre>"


def html_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table; the first row is its headings."""
    head, *others = rows
    cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>\n" for row in others)
    return f'<div class="wide"><table><thead><tr>{cells}</tr></thead><tbody>\n{body}</tbody></table></div>'


# Plots as inline SVG: lines and stacked bars. Colours are those of the page's style sheet, so that they follow it.

_WIDTH, _HEIGHT = 560, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 28, 12, 44
_TICKS: Final = 5
_LEAST_APART: Final = 0.09
"""Of an axis, so that the numbers at two ticks have room."""
_LOG_SPAN: Final = 50
"""From this ratio of the largest to the smallest value on, an axis is logarithmic."""


class Series(NamedTuple):
    """A line: what it is called, and its points."""

    name: str
    points: Sequence[tuple[float, float]]
    joined: bool = True
    """Whether there is a line at all, or points alone."""
    dotted: bool = True
    """Whether points are seen on the line."""
    colour: int | None = None
    """Of the style sheet; without one, that of its place."""


class Axis(NamedTuple):
    """What stands at an axis, and where a value lies on it, from 0 to 1."""

    label: str
    ticks: Sequence[float]
    place: Callable[[float], float]


def lines(x_label: str, y_label: str, series: Sequence[Series], *, marked: Sequence[float] = ()) -> str:
    """Draw lines, with a legend where there are several. Axes begin at 0, or are logarithmic for a wide range.

    ``marked``: the horizontal axis has these values, and no others.
    """
    horizontal = _marked(x_label, marked) if marked else _axis(x_label, [x for each in series for x, _ in each.points])
    vertical = _axis(y_label, [y for each in series for _, y in each.points])
    parts = [*_frame(horizontal, vertical)]
    colours = [number if each.colour is None else each.colour for number, each in enumerate(series)]
    for number, (name, points, joined, dotted, _) in zip(colours, series, strict=True):
        placed = [(_x(horizontal.place(x)), _y(vertical.place(y))) for x, y in points]
        if joined:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
            parts.append(f'<polyline class="line s{number}" points="{path}"/>')
        for (x, y), (at_x, at_y) in zip(points, placed, strict=True) if dotted else ():
            told = escape(f"{name}\n{x_label}: {plot_figure(x)}\n{y_label}: {plot_figure(y)}")
            parts.append(
                f'<circle class="dot s{number}" cx="{at_x:.1f}" cy="{at_y:.1f}" r="4"><title>{told}</title></circle>'
            )
    return _svg(parts, f"{y_label} by {x_label}") + _legend([each.name for each in series], colours)


def stacks(x_label: str, y_label: str, names: Sequence[str], columns: Sequence[tuple[str, Sequence[float]]]) -> str:
    """Draw a column for each label, of parts in the order of ``names``."""
    highest = max((sum(values) for _, values in columns), default=0.0)
    vertical = _linear(y_label, 0.0, highest)
    slot = (_WIDTH - _LEFT - _RIGHT) / max(1, len(columns))
    width = min(48.0, slot * 0.6)
    parts = [*_grid(vertical), _x_title(x_label)]
    for number, (label, values) in enumerate(columns):
        middle = _LEFT + slot * (number + 0.5)
        parts.append(_text(middle, _HEIGHT - _BOTTOM + 18, label, "middle"))
        base = 0.0
        for part, value in enumerate(values):
            top, bottom = _y(vertical.place(base + value)), _y(vertical.place(base))
            told = escape(f"{names[part]}: {plot_figure(value)}")
            parts.append(
                f'<rect class="bar s{part}" x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{max(0.0, bottom - top):.1f}"><title>{told}</title></rect>'
            )
            base += value
    return _svg(parts, f"{y_label} by {x_label}") + _legend(names, range(len(names)))


def plot_figure(value: float) -> str:
    """Print a number with as many digits as say something."""
    if value == 0 or value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def _axis(label: str, values: Sequence[float]) -> Axis:
    least, most = min(values), max(values)
    if least > 0 and most / least >= _LOG_SPAN:
        return _logarithmic(label, least, most)
    return _linear(label, 0.0, most)


def _marked(label: str, values: Sequence[float]) -> Axis:
    """Return an axis for levels: logarithmic if they grow by a factor rather than by steps."""
    least, most = min(values), max(values)
    factors = len(values) > 2 and most - values[-2] > 2 * (values[1] - least)

    def place(value: float) -> float:
        return math.log(value / least) / math.log(most / least) if factors else (value - least) / (most - least)

    ticks: list[float] = []
    for value in values:
        if not ticks or place(value) - place(ticks[-1]) >= _LEAST_APART:
            ticks.append(value)
    return Axis(label, ticks, place)


def _linear(label: str, least: float, most: float) -> Axis:
    most = most if most > least else least + 1.0
    rough = (most - least) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    top = math.ceil((most - least) / step - 1e-9) * step
    ticks = [least + number * step for number in range(round(top / step) + 1)]
    return Axis(label, ticks, lambda value: (value - least) / top)


def _logarithmic(label: str, least: float, most: float) -> Axis:
    low, high = math.floor(math.log10(least)), math.ceil(math.log10(most))
    ticks = [10.0**power for power in range(low, high + 1)]
    return Axis(label, ticks, lambda value: (math.log10(value) - low) / (high - low))


def _x(part: float) -> float:
    return _LEFT + part * (_WIDTH - _LEFT - _RIGHT)


def _y(part: float) -> float:
    return _HEIGHT - _BOTTOM - part * (_HEIGHT - _TOP - _BOTTOM)


def _frame(horizontal: Axis, vertical: Axis) -> Iterator[str]:
    yield from _grid(vertical)
    for tick in horizontal.ticks:
        yield _text(_x(horizontal.place(tick)), _HEIGHT - _BOTTOM + 18, plot_figure(tick), "middle")
    yield _x_title(horizontal.label)


def _grid(vertical: Axis) -> Iterator[str]:
    for tick in vertical.ticks:
        at = _y(vertical.place(tick))
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield _text(_LEFT - 8, at + 4, plot_figure(tick), "end")
    place = f'transform="rotate(-90)" x="{-_y(0.5):.1f}" y="14"'
    yield f'<text class="title" {place} text-anchor="middle">{escape(vertical.label)}</text>'


def _x_title(label: str) -> str:
    return f'<text class="title" x="{_x(0.5):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _svg(parts: Sequence[str], description: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(description)}">'
        + "".join(parts)
        + "</svg>"
    )


def _legend(names: Sequence[str], colours: Sequence[int]) -> str:
    if len(names) < 2:
        return ""
    known = zip(colours, names, strict=True)
    entries = "".join(f'<li><i class="s{number}"></i>{escape(name)}</li>' for number, name in known)
    return f'<ul class="legend">{entries}</ul>'


# Outcomes as a page for people: one file, which needs nothing else and runs no program.

_MAX_CURVES = 8
"""As many colours as there are."""


class BenchHeading(NamedTuple):
    """What the page says about the measurement."""

    model: str
    server: str
    settings: str
    """How it was measured, in a line."""
    when: str


def render_html(
    heading: BenchHeading, outcomes: Sequence[LevelOutcome], table: Sequence[Sequence[str]], remarks: Sequence[str]
) -> str:
    """Return the page; ``table`` is headings and rows as a terminal shows them."""
    about = (heading.server, heading.settings, heading.when)
    body = [
        *opening(heading.model, about, remarks),
        key(_key(outcomes)),
        plots(_plots(outcomes)),
        html_table(table),
    ]
    return document(f"{heading.model}: {_span(outcomes)}", body)


def _span(outcomes: Sequence[LevelOutcome]) -> str:
    kind = outcomes[0].level.kind
    ends = dict.fromkeys((str(outcomes[0].level), str(outcomes[-1].level)))
    return f"{kind} {' to '.join(ends)}"


def _key(outcomes: Sequence[LevelOutcome]) -> Iterator[tuple[str, str]]:
    best = max(outcomes, key=lambda outcome: outcome.figures.rate)
    swiftest = min(outcomes, key=lambda outcome: outcome.figures.latency["p50"])
    yield (plot_figure(best.figures.rate), f"requests a second at most, at {best.level.kind} {best.level}")
    yield (f"{plot_figure(best.figures.latency['p99'])} ms", "99th percentile of the latency there")
    yield (f"{plot_figure(swiftest.figures.latency['p50'])} ms", f"median at {swiftest.level.kind} {swiftest.level}")
    if best.figures.tokens is not None:
        yield (plot_figure(best.figures.tokens.rate), "tokens a second there")
    if best.figures.goodput is not None:
        good = max(outcomes, key=lambda outcome: outcome.figures.goodput or 0.0)
        yield (plot_figure(good.figures.goodput or 0.0), f"good requests a second, at {good.level.kind} {good.level}")


def _plots(outcomes: Sequence[LevelOutcome]) -> Iterator[str]:
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
    yield html_figure("Distribution of the latency", f"How many per cent took no longer than that, by {kind}.", plot)
    if all(outcome.server is not None for outcome in outcomes):
        yield html_figure(
            "Where the time goes",
            "Mean latency: in the server's queue, computed, and the rest, which is the network and both ends of it.",
            stacks(kind, "ms", ("queue", "compute", "rest"), [_shares(outcome) for outcome in outcomes]),
        )


def _count(outcomes: Sequence[LevelOutcome]) -> int:
    return min(len(outcomes), _MAX_CURVES)


def _curves(kind: str, outcomes: Sequence[LevelOutcome]) -> Iterator[str]:
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
    yield html_figure("Throughput", "Requests a second that were answered.", by_level("requests/s", **rates))
    quantiles = {name: [outcome.figures.latency[name] for outcome in outcomes] for name in ("p50", "p90", "p99")}
    yield html_figure("Latency", "From when a request was due to the end of its answer.", by_level("ms", **quantiles))
    trade = Series("p99", [(outcome.figures.rate, outcome.figures.latency["p99"]) for outcome in outcomes])
    plot = lines("requests/s", "p99 latency, ms", [trade])
    yield html_figure("Latency by throughput", "Where the curve bends is as much as the server does well.", plot)
    tokens = [outcome.figures.tokens for outcome in outcomes if outcome.figures.tokens is not None]
    if len(tokens) == len(outcomes):
        first = {name: [each.first[name] for each in tokens] for name in ("p50", "p99")}
        yield html_figure("Time to the first token", "From when a request was due.", by_level("ms", **first))
        between = [each.between.mean if each.between else 0.0 for each in tokens]
        yield html_figure("Time between tokens", "On average over an answer.", by_level("ms", mean=between))
        speed = by_level("tokens/s", tokens=[each.rate for each in tokens])
        yield html_figure("Tokens", "Of all answers together.", speed)


def _shares(outcome: LevelOutcome) -> tuple[str, tuple[float, float, float]]:
    assert outcome.server is not None
    queue, compute = outcome.server.queue.mean_ms, outcome.server.mean_compute_ms
    return plot_figure(outcome.level.value), (queue, compute, max(0.0, outcome.figures.latency.mean - queue - compute))
