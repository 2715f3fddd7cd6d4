"""Declarations of metrics, and the writer of the Prometheus text format.

Written by hand because Triton's counters lack the ``_total`` suffix that client libraries insist on, and for speed: a
page of a thousand models has 160,000 lines of which only the numbers change. Labels are therefore kept as encoded
text, and the lines of a histogram are one template for its labels and counts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Final, Generic, Literal, NamedTuple, NewType, TypeAlias, TypeVar

from nerite.core.text import MAX_NAME, quoted_text
from nerite.observability.histogram import Histogram, QuantileSum

if TYPE_CHECKING:  # workers write metrics, too, and have no options
    from nerite.config.options import MetricsOptions

Labels = NewType("Labels", str)
"""Encoded labels of a sample, as between the braces: sorted by name, as Triton writes them."""
UNLABELLED: Final = Labels("")
_WORDS: Final = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}
_LABELS: Final = "\0"
"""Placeholder of the labels in the template of a histogram."""
_LABEL: Final = re.compile(r'([^=,]+)="(?:[^"\\]|\\.)*"')
_PIECE: Final = 256
"""Samples of a family in one piece of the page: up to 0.5 MB, if they are histograms."""

Owner = TypeVar("Owner")
Value: TypeAlias = float | Histogram | QuantileSum


class Metric(NamedTuple, Generic[Owner]):
    """Declaration of a metric, with the function that reads it from its owner."""

    name: str
    kind: Literal["counter", "gauge", "histogram", "summary"]
    help: str
    read: Callable[[Owner], Value | Mapping[str, Value] | None]
    """Returns the value, or a value for each value of ``label``. None: there is no sample."""
    label: str = ""
    """Label that distinguishes the samples of one owner. For several, separated by commas, the keys are ``Labels``."""


class MetricTable(NamedTuple, Generic[Owner]):
    """Metrics of one kind of owner, in the order in which they are written."""

    metrics: Sequence[Metric[Owner]]
    labels: Sequence[str] = ()
    """Labels that identify an owner."""
    option: str = ""
    """Setting of ``MetricsOptions`` without which the metrics are not written."""
    applies: Callable[[Owner], bool] | None = None
    """Tells which owners have these metrics. If set, the metrics are on the page only if one of the owners has them."""

    def row(self, owner: Owner, *values: str) -> tuple[Labels, Owner]:
        """Return an owner with its labels, which have these values."""
        return labels(dict(zip(self.labels, values, strict=True))), owner

    def enabled(self, options: MetricsOptions) -> bool:
        """Return whether the options enable these metrics."""
        return not self.option or bool(getattr(options, self.option))


def labels(pairs: Mapping[str, str]) -> Labels:
    """Encode labels."""
    return Labels(",".join([f'{name}="{_escaped(text)}"' for name, text in sorted(pairs.items())]))


@lru_cache(1024)
def _label(name: str, text: str) -> str:
    """Encode a label that many samples have."""
    return labels({name: text})


@lru_cache(256)
def _split(encoded: Labels, name: str) -> tuple[str, str]:
    """Return the labels that stand before and after a label called ``name``, with the commas in between."""
    found = [(each[1], each[0]) for each in _LABEL.finditer(encoded)]
    before = "".join([f"{text}," for other, text in found if other < name])
    return before, "".join([f",{text}" for other, text in found if other >= name])


class Page:
    """Collects metrics, whose values are formatted at once, and returns the page.

    The format is Triton's, which is that of Prometheus, or OpenMetrics, which has exemplars. OpenMetrics knows only
    counters whose names end with ``_total``: the others keep their names and are declared to be of unknown type.
    """

    def __init__(self, *, openmetrics: bool = False) -> None:
        self._openmetrics = openmetrics
        self._families: dict[str, list[str]] = {}
        """By name: the comment lines, and then the text of each sample."""

    @property
    def names(self) -> Iterable[str]:
        """Names of the metrics written so far."""
        return self._families.keys()

    def write(self, table: MetricTable[Owner], rows: Sequence[tuple[Labels, Owner]]) -> None:
        """Write the samples of some owners. Samples of a metric are kept together, also if more are written later."""
        if table.applies is not None:
            rows = [row for row in rows if table.applies(row[1])]
            if not rows:
                return
        for metric in table.metrics:
            name, label = metric.name, metric.label
            lines = self._families.get(name)
            if lines is None:
                lines = self._families[name] = [_comments(metric, openmetrics=self._openmetrics)]
            for of, owner in rows:
                value = metric.read(owner)
                if isinstance(value, Mapping) and "," in label:
                    lines += [self._sample(name, f"{of},{encoded}", each) for encoded, each in value.items()]
                elif isinstance(value, Mapping):
                    before, after = _split(of, label)
                    lines += [
                        self._sample(name, f"{before}{_label(label, text)}{after}", each)
                        for text, each in value.items()
                    ]
                elif value is not None:
                    lines.append(self._sample(name, of, value))

    def pieces(self) -> Iterator[bytes]:
        """Yield the page in pieces, each of which is encoded within a fraction of a millisecond."""
        for lines in self._families.values():
            yield from ("".join(lines[at : at + _PIECE]).encode() for at in range(0, len(lines), _PIECE))
        if self._openmetrics:
            yield b"# EOF\n"

    def _sample(self, name: str, of: str, value: Value) -> str:
        if isinstance(value, Histogram):
            return _histogram(name, of, value, openmetrics=self._openmetrics)
        if isinstance(value, QuantileSum):
            return _summary(name, of, value)
        return _line(name, of, value)


def _comments(metric: Metric[Owner], *, openmetrics: bool) -> str:
    name, kind = metric.name, str(metric.kind)
    if openmetrics and kind == "counter":
        name, kind = (name.removesuffix("_total"), kind) if name.endswith("_total") else (name, "unknown")
    return f"# HELP {name} {_help(metric.help)}\n# TYPE {name} {kind}\n"


def _histogram(name: str, of: str, value: Histogram, *, openmetrics: bool) -> str:
    before = of.replace("%", "%%") + "," if of else ""
    counts = [*accumulate(value.counts)]
    template = _bucket_template(name, tuple(value.bounds), openmetrics=openmetrics)
    buckets = template.replace(_LABELS, before) % tuple(counts)
    if openmetrics and value.exemplars:
        lines = buckets.split("\n")
        for place, (trace_id, seen, at) in tuple(value.exemplars.items()):  # another thread adds to them
            lines[place] += f' # {{trace_id="{trace_id:032x}"}} {seen!r} {at:.3f}'
        buckets = "\n".join(lines)
    return buckets + _line(f"{name}_sum", of, value.total) + _line(f"{name}_count", of, counts[-1])


@lru_cache(256)
def _bucket_template(name: str, bounds: tuple[float, ...], *, openmetrics: bool) -> str:
    """Return the bucket lines of a histogram with placeholders for its labels and counts."""
    texts = (
        repr(float(bound)) if openmetrics and bound != math.inf else _number(bound) for bound in (*bounds, math.inf)
    )
    return "".join([f'{name}_bucket{{{_LABELS}le="{text}"}} %d\n' for text in texts])


def _summary(name: str, of: str, value: QuantileSum) -> str:
    before = f"{of}," if of else ""
    quantiles = [_line(name, f'{before}quantile="{_number(quantile)}"', each) for quantile, each in value.quantiles]
    return "".join([_line(f"{name}_count", of, value.events), _line(f"{name}_sum", of, value.total), *quantiles])


def _line(name: str, of: str, value: float) -> str:
    return f"{name}{{{of}}} {_number(value)}\n" if of else f"{name} {_number(value)}\n"


def _escaped(text: str) -> str:
    """Return the escaped value of a label, of bounded length."""
    return _help(text).replace('"', '\\"')


def _help(text: str) -> str:
    """Return a text, possibly written by a model, as one line of bounded length that can be encoded."""
    return quoted_text(text, MAX_NAME).replace("\\", "\\\\").replace("\n", "\\n")


def _number(value: float) -> str:
    if type(value) is int:
        return str(value)
    if not math.isfinite(value):
        return _WORDS[repr(value)]
    return str(int(value)) if value == int(value) else repr(value)
