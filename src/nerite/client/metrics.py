"""A page of metrics in Prometheus's text format, as a server shows it on its metrics port."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

Labels: TypeAlias = Mapping[str, str]

_SAMPLE: Final = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*?)\})? ([+-]?(?:\.?\d\S*|Inf|NaN))(?: .*)?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")


class MetricsPage:
    """The samples of a page, by their names."""

    def __init__(self, text: str) -> None:
        """Read a page. What is no sample is passed over."""
        self._samples: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for line in text.splitlines():
            found = None if line.startswith("#") else _SAMPLE.fullmatch(line)
            if found is not None:
                name, labels, value = found.groups()
                self._samples[name].append((_labels(labels or ""), float(value)))

    def samples(self, name: str) -> Iterator[tuple[Labels, float]]:
        """Yield labels and value of each sample with this name."""
        yield from self._samples.get(name, ())

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of those that have all of ``labels``; None if there are none."""
        found = [value for given, value in self.samples(name) if labels.items() <= given.items()]
        return sum(found) if found else None

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return of a histogram how many values do not exceed each bound, of all that have ``labels`` together."""
        found: dict[float, float] = defaultdict(float)
        for given, value in self.samples(f"{name}_bucket"):
            if labels.items() <= given.items():
                found[float(given["le"])] += value
        return dict(sorted(found.items()))


def _labels(text: str) -> Labels:
    return {name: _ESCAPE.sub(_unescaped, value) for name, value in _LABEL.findall(text)}


def _unescaped(match: re.Match[str]) -> str:
    return "\n" if match[1] == "n" else match[1]


def quantile(buckets: Mapping[float, float], part: float) -> float | None:
    """Return the value that ``part`` of those in a histogram do not exceed, as near as its bounds tell; None if empty.

    Within a bucket values count as spread evenly, as Prometheus has it. What lies above the last bound counts as that.
    """
    whole = max(buckets.values(), default=0.0)
    if not whole:
        return None
    wanted, lower, before = part * whole, 0.0, 0.0
    for bound, count in buckets.items():
        if count >= wanted and count > before:
            return lower if bound == float("inf") else lower + (bound - lower) * (wanted - before) / (count - before)
        lower, before = bound, count
    return lower
