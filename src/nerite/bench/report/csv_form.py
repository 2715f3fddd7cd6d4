"""Outcomes as CSV: a line for each level, the names of ``json_form`` with dots."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nerite.bench.report.json_form import level
from nerite.bench.session import Outcome


def render(outcomes: Sequence[Outcome]) -> str:
    """Return the document."""
    rows = [dict(_flat("", level(outcome))) for outcome in outcomes]
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
