"""Plots as inline SVG: lines and stacked bars. Colours are those of the page's style sheet, so that they follow it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Final, NamedTuple

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
            told = escape(f"{name}\n{x_label}: {figure(x)}\n{y_label}: {figure(y)}")
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
            told = escape(f"{names[part]}: {figure(value)}")
            parts.append(
                f'<rect class="bar s{part}" x="{middle - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" '
                f'height="{max(0.0, bottom - top):.1f}"><title>{told}</title></rect>'
            )
            base += value
    return _svg(parts, f"{y_label} by {x_label}") + _legend(names, range(len(names)))


def figure(value: float) -> str:
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
        yield _text(_x(horizontal.place(tick)), _HEIGHT - _BOTTOM + 18, figure(tick), "middle")
    yield _x_title(horizontal.label)


def _grid(vertical: Axis) -> Iterator[str]:
    for tick in vertical.ticks:
        at = _y(vertical.place(tick))
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        yield _text(_LEFT - 8, at + 4, figure(tick), "end")
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
