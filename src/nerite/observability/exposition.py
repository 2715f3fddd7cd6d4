"""The Prometheus text format, by hand because Triton's counters lack the ``_total`` that libraries insist on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from nerite.observability.distribution import Distribution
from nerite.observability.quantiles import Summed

_WORDS: Final = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


Value: TypeAlias = float | Distribution | Summed
"""That of a histogram is a distribution."""


class Family(NamedTuple):
    """A metric: its name, what it means, its type, and a value for each set of labels."""

    name: str
    help: str
    type: str
    samples: Sequence[tuple[Mapping[str, str], Value]]


def render(families: Iterable[Family]) -> bytes:
    """Return the page as Triton writes it."""
    return "".join(f"{line}\n" for line in _lines(families, openly=False)).encode()


def render_openly(families: Iterable[Family]) -> bytes:
    """Return the page as OpenMetrics, with exemplars.

    That knows only counters whose names end with ``_total``. The others keep their names, and are of unknown type.
    """
    return "".join(f"{line}\n" for line in (*_lines(families, openly=True), "# EOF")).encode()


def _lines(families: Iterable[Family], *, openly: bool) -> Iterator[str]:
    for family in families:
        name, type_ = family.name, family.type
        if openly and type_ == "counter":
            name, type_ = (name.removesuffix("_total"), type_) if name.endswith("_total") else (name, "unknown")
        yield f"# HELP {name} {family.help}"
        yield f"# TYPE {name} {type_}"
        for labels, value in family.samples:
            inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            if isinstance(value, Distribution):
                yield from _distributed(family.name, inner, value, openly=openly)
            elif isinstance(value, Summed):
                yield from _summed(family.name, inner, value)
            else:
                yield _line(family.name, inner, value)


def _distributed(name: str, labels: str, value: Distribution, *, openly: bool) -> Iterator[str]:
    before = f"{labels}," if labels else ""
    count = 0
    for place, (bound, more) in enumerate(zip((*value.bounds, math.inf), value.counts, strict=True)):
        count += more
        le = _number(bound) if not openly or bound == math.inf else repr(float(bound))
        line = _line(f"{name}_bucket", f'{before}le="{le}"', count)
        exemplar = value.exemplars.get(place) if openly else None
        if exemplar is not None:
            line += f' # {{trace_id="{exemplar.trace_id:032x}"}} {exemplar.value!r} {exemplar.at:.3f}'
        yield line
    yield _line(f"{name}_sum", labels, value.total)
    yield _line(f"{name}_count", labels, count)


def _summed(name: str, labels: str, value: Summed) -> Iterator[str]:
    before = f"{labels}," if labels else ""
    yield _line(f"{name}_count", labels, value.events)
    yield _line(f"{name}_sum", labels, value.total)
    for quantile, each in value.quantiles:
        yield _line(name, f'{before}quantile="{_number(quantile)}"', each)


def _line(name: str, labels: str, value: float) -> str:
    return f"{name}{{{labels}}} {_number(value)}" if labels else f"{name} {_number(value)}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return _WORDS[repr(value)]
    return str(int(value)) if value == int(value) else repr(value)
