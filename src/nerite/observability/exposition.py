"""The Prometheus text format, by hand because Triton's counters lack the ``_total`` that libraries insist on."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

_WORDS: Final = {"inf": "+Inf", "-inf": "-Inf", "nan": "NaN"}


class Family(NamedTuple):
    """A metric: its name, what it means, its type, and a value for each set of labels."""

    name: str
    help: str
    type: str
    samples: list[tuple[Mapping[str, str], float]]


def render(families: Iterable[Family]) -> bytes:
    """Return the page."""
    lines: list[str] = []
    for family in families:
        lines.append(f"# HELP {family.name} {family.help}")
        lines.append(f"# TYPE {family.name} {family.type}")
        for labels, value in family.samples:
            inner = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
            lines.append(f"{family.name}{{{inner}}} {_number(value)}" if inner else f"{family.name} {_number(value)}")
    return ("\n".join(lines) + "\n").encode()


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    if not math.isfinite(value):
        return _WORDS[repr(value)]
    return str(int(value)) if value == int(value) else repr(value)
