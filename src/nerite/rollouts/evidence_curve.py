"""How the evidence of a rollout has grown over time: few enough points to be drawn, stored and sent."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from nerite.judge.verdict import GateVerdict

MAX_POINTS: Final = 240
"""Even. Whenever there is one more, every second point is dropped, and the distance between them doubles."""
_FIRST_SPACING: Final = 1.0
_KINDS: Final = ("worse", "not_worse")
_SECOND: Final = 1_000_000_000


class _Point(NamedTuple):
    seconds: float
    weight: float
    values: tuple[float | None, ...]
    """By gate: evidence of harm, and of the candidate being not worse."""


class EvidenceCurve:
    """The evidence of each gate that has any, in at most ``MAX_POINTS`` points: the last one is always the latest."""

    def __init__(self) -> None:
        self._gates: tuple[str, ...] = ()
        self._points: list[_Point] = []
        self._spacing = _FIRST_SPACING
        """Seconds between two points, apart from the last one."""
        self._seconds = 0.0
        """Time under way, pauses included; that in which the server does not run does not count."""
        self._last_ns: int | None = None

    def note(self, now_ns: int, weight: float, gates: Sequence[GateVerdict]) -> None:
        """Take what the judge says now. ``weight`` is the percentage of the requests that the candidate gets."""
        if self._last_ns is not None:
            self._seconds += max(0, now_ns - self._last_ns) / _SECOND
        self._last_ns = now_ns
        judged = [gate for gate in gates if math.isfinite(gate.worse_boundary)]
        self._gates = tuple(gate.gate for gate in judged)
        values = tuple(_rounded(value) for gate in judged for value in (gate.worse, gate.not_worse))
        point = _Point(round(self._seconds, 1), weight, values)
        points = self._points
        if len(points) > 1 and points[-1].seconds - points[-2].seconds < self._spacing:
            points.pop()
        points.append(point)
        if len(points) > MAX_POINTS:
            del points[1::2]
            self._spacing *= 2

    def as_json(self) -> dict[str, Any]:
        """Return the curve by columns; ``of_json`` restores it. Evidence is the logarithm (base 10) of an e-value."""
        columns = [list(column) for column in zip(*(point.values for point in self._points), strict=True)]
        columns = columns or [[] for _ in self._gates for _ in _KINDS]
        return {
            "spacing": self._spacing,
            "seconds": [point.seconds for point in self._points],
            "weight": [point.weight for point in self._points],
            "gates": {
                gate: dict(zip(_KINDS, columns[2 * index : 2 * index + 2], strict=True))
                for index, gate in enumerate(self._gates)
            },
        }

    @classmethod
    def of_json(cls, document: Mapping[str, Any]) -> EvidenceCurve:
        """Restore a curve. Raises an exception of Python for a document of another form."""
        curve = cls()
        curve._gates = tuple(document["gates"])
        columns = [gate[kind] for gate in document["gates"].values() for kind in _KINDS]
        rows = zip(*columns, strict=True) if columns else ((),) * len(document["seconds"])
        curve._points = [
            _Point(float(seconds), float(weight), tuple(None if value is None else float(value) for value in values))
            for seconds, weight, values in zip(document["seconds"], document["weight"], rows, strict=True)
        ][-MAX_POINTS:]
        curve._spacing = max(_FIRST_SPACING, float(document["spacing"]))
        curve._seconds = curve._points[-1].seconds if curve._points else 0.0
        return curve


def _rounded(value: float) -> float | None:
    return round(value, 3) if math.isfinite(value) else None
