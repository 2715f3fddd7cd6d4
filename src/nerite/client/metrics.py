"""A page of metrics in Prometheus's text format, as a server shows it on its metrics port."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, TypeAlias

Labels: TypeAlias = Mapping[str, str]
Sample: TypeAlias = tuple[Labels, float]

_NAME: Final = re.compile(r"[A-Za-z_:][\w:]*")
_SAMPLE: Final = re.compile(r"[A-Za-z_:][\w:]*(?:\{(.*?)\})? ([+-]?(?:\.?\d\S*|Inf|NaN))(?: .*)?")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")


class MetricsPage:
    """The samples of a page, by their names.

    That of a thousand models has 160,000 lines, of which nobody wants all: a line is read when its name is asked for.
    """

    def __init__(self, text: str) -> None:
        """Take a page. What is no sample is passed over."""
        self._lines: dict[str, list[str]] = defaultdict(list)
        for line in text.split("\n"):
            name = _NAME.match(line)
            if name is not None:
                self._lines[name[0]].append(line)
        self._samples: dict[str, dict[str | None, list[Sample]]] = {}
        """Of the names that were asked for, by the label ``model``."""

    def samples(self, name: str) -> Iterator[Sample]:
        """Yield labels and value of each sample with this name."""
        for of_model in self._by_model(name).values():
            yield from of_model

    def total(self, name: str, **labels: str) -> float | None:
        """Return the sum of those that have all of ``labels``; None if there are none."""
        found = [value for _, value in self._having(name, labels)]
        return sum(found) if found else None

    def buckets(self, name: str, **labels: str) -> dict[float, float]:
        """Return of a histogram how many values do not exceed each bound, of all that have ``labels`` together."""
        found: dict[float, float] = defaultdict(float)
        for given, value in self._having(f"{name}_bucket", labels):
            found[float(given["le"])] += value
        return dict(sorted(found.items()))

    def _having(self, name: str, labels: Labels) -> Iterator[Sample]:
        """Yield the samples that have all of ``labels``."""
        of_one = self._by_model(name).get(labels["model"], ()) if "model" in labels else self.samples(name)
        return (sample for sample in of_one if labels.items() <= sample[0].items())

    def _by_model(self, name: str) -> dict[str | None, list[Sample]]:
        known = self._samples.get(name)
        if known is None:
            known = self._samples[name] = defaultdict(list)
            for line in self._lines.pop(name, ()):
                found = _SAMPLE.fullmatch(line)
                if found is not None:
                    labels = _labels(found[1] or "")
                    known[labels.get("model")].append((labels, float(found[2])))
        return known


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
