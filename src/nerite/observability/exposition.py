"""The Prometheus text format, by hand because Triton's counters lack the ``_total`` that libraries insist on.

A page of a thousand models has 160,000 lines, of which only the numbers change. So the labels of a sample are text from
the beginning, and the lines of a histogram are one form, into which its labels and numbers are put.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Final, NamedTuple, NewType, TypeAlias

from nerite.core.text import MAX_NAME, quoted_text
from nerite.observability.histogram import Histogram, QuantileSum

Labels = NewType("Labels", str)
"""Those of a sample, as they stand between the braces: sorted by their names, as Triton writes them."""
UNLABELLED: Final = Labels("")
_WORDS: Final = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
_LABELS: Final = "\0"
"""Where the labels go in a form."""
_LABEL: Final = re.compile(r'([^=,]+)="(?:[^"\\]|\\.)*"')
_TOGETHER: Final = 256
"""Parts of a family in a piece: up to 2 MB, of histograms."""


Value: TypeAlias = float | Histogram | QuantileSum
"""That of a histogram is a distribution."""
Sample: TypeAlias = tuple[Labels, Value]


class MetricFamily(NamedTuple):
    """A metric: its name, what it means, its type, and a value for each set of labels."""

    name: str
    help: str
    type: str
    samples: Sequence[Sample]


def labels(pairs: Mapping[str, str]) -> Labels:
    """Return the text of some labels."""
    return Labels(",".join([f'{name}="{_escaped(text)}"' for name, text in sorted(pairs.items())]))


@lru_cache(1024)
def label(name: str, text: str) -> Labels:
    """Return the text of a label that many samples have."""
    return labels({name: text})


def joined(one: Labels, other: Labels) -> Labels:
    """Return the labels of both."""
    if not (one and other):
        return one or other
    return Labels(",".join([text for _, text in sorted((*_parted(one), *_parted(other)))]))


@lru_cache(256)
def _parted(of: Labels) -> tuple[tuple[str, str], ...]:
    """Return each label with its name before it. The many samples of a version have the same ones."""
    return tuple((each[1], each[0]) for each in _LABEL.finditer(of))


class Page:
    """Takes families, each of them whole or in parts, and writes down their values at once.

    Triton's form is that of Prometheus. ``openly`` it is OpenMetrics, with exemplars: that knows only counters whose
    names end with ``_total``. The others keep their names, and are of unknown type.
    """

    def __init__(self, *, openly: bool = False) -> None:
        self._openly = openly
        self._families: dict[str, list[bytes]] = {}

    @property
    def names(self) -> Iterable[str]:
        """The families there are."""
        return self._families.keys()

    def add(self, families: Iterable[MetricFamily]) -> None:
        """Take families, or more samples of those that are there."""
        for family in families:
            text = self._families.get(family.name)
            if text is None:
                text = self._families[family.name] = [_head(family, openly=self._openly).encode()]
            if family.samples:
                text.append("".join(_samples(family, openly=self._openly)).encode())

    def pieces(self) -> Iterator[bytes]:
        """Return the page, in pieces that can be put together in a moment."""
        for text in self._families.values():
            yield from (b"".join(text[at : at + _TOGETHER]) for at in range(0, len(text), _TOGETHER))
        if self._openly:
            yield b"# EOF\n"


def _head(family: MetricFamily, *, openly: bool) -> str:
    name, type_ = family.name, family.type
    if openly and type_ == "counter":
        name, type_ = (name.removesuffix("_total"), type_) if name.endswith("_total") else (name, "unknown")
    return f"# HELP {name} {_help(family.help)}\n# TYPE {name} {type_}\n"


def _samples(family: MetricFamily, *, openly: bool) -> Iterator[str]:
    name = family.name
    for of, value in family.samples:
        if isinstance(value, Histogram):
            yield _distributed(name, of, value, openly=openly)
        elif isinstance(value, QuantileSum):
            yield _summed(name, of, value)
        else:
            yield _line(name, of, value)


def _distributed(name: str, of: Labels, value: Histogram, *, openly: bool) -> str:
    before = of.replace("%", "%%") + "," if of else ""
    counts = [*accumulate(value.counts)]
    buckets = _buckets(name, tuple(value.bounds), openly=openly).replace(_LABELS, before) % tuple(counts)
    if openly and value.exemplars:
        lines = buckets.split("\n")
        for place, (trace_id, seen, at) in tuple(value.exemplars.items()):  # another thread adds to them
            lines[place] += f' # {{trace_id="{trace_id:032x}"}} {seen!r} {at:.3f}'
        buckets = "\n".join(lines)
    return buckets + _line(f"{name}_sum", of, value.total) + _line(f"{name}_count", of, counts[-1])


@lru_cache(256)
def _buckets(name: str, bounds: tuple[float, ...], *, openly: bool) -> str:
    """Return the form of the buckets of a histogram."""
    texts = (repr(float(bound)) if openly and bound != math.inf else _number(bound) for bound in (*bounds, math.inf))
    return "".join([f'{name}_bucket{{{_LABELS}le="{text}"}} %d\n' for text in texts])


def _summed(name: str, of: Labels, value: QuantileSum) -> str:
    before = f"{of}," if of else ""
    quantiles = [
        _line(name, Labels(f'{before}quantile="{_number(quantile)}"'), each) for quantile, each in value.quantiles
    ]
    return "".join([_line(f"{name}_count", of, value.events), _line(f"{name}_sum", of, value.total), *quantiles])


def _line(name: str, of: Labels, value: float) -> str:
    return f"{name}{{{of}}} {_number(value)}\n" if of else f"{name} {_number(value)}\n"


def _escaped(text: str) -> str:
    """Return the text of a label, of bounded length."""
    return _help(text).replace('"', '\\"')


def _help(text: str) -> str:
    """Return a text that models may have written as one line of bounded length, which can be encoded."""
    return quoted_text(text, MAX_NAME).replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if type(value) is int:
        return str(value)
    if not math.isfinite(value):
        return _WORDS[repr(value)]
    return str(int(value)) if value == int(value) else repr(value)
