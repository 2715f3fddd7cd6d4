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
    """Return the page."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {family.help}")
        lines.append(f"# TYPE {family.name} {family.type}")
        for labels, value in family.samples:
            inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            if isinstance(value, Distribution):
                lines += _distributed(family.name, inner, value)
            elif isinstance(value, Summed):
                lines += _summed(family.name, inner, value)
            else:
                lines.append(_line(family.name, inner, value))
    return ("\n".join(lines) + "\n").encode()


def _distributed(name: str, labels: str, value: Distribution) -> Iterator[str]:
    before = f"{labels}," if labels else ""
    count = 0
    for bound, more in zip((*value.bounds, math.inf), value.counts, strict=True):
        count += more
        yield _line(f"{name}_bucket", f'{before}le="{_number(bound)}"', count)
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
