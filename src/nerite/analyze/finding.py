"""What measuring a configuration showed, and its form as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nerite.analyze.settings import Value


def named(changes: Mapping[str, Value]) -> str:
    """Return what people call the configuration with these changes."""
    return " ".join(f"{name}={value}" for name, value in changes.items()) or "as it is now"


@dataclass(frozen=True, slots=True)
class Figure:
    """What a level of load showed. Times are in milliseconds."""

    concurrency: int
    """Of each model that is asked."""
    rate: float
    """Answers a second. Of several models the geometric mean: a tenth more of any of them counts as much."""
    mean: float
    p99: float
    """Of several models the largest; so is the mean."""
    failed: int = 0
    each: Mapping[str, float] = field(default_factory=dict)
    """Answers a second by model, where several are asked at once."""

    @classmethod
    def of_several(cls, models: Mapping[str, Figure]) -> Figure:
        """Return what models that were asked at once showed together; of one, what it showed."""
        figures = list(models.values())
        if len(figures) == 1:
            return figures[0]
        return cls(
            figures[0].concurrency,
            statistics.geometric_mean(figure.rate for figure in figures),
            max(figure.mean for figure in figures),
            max(figure.p99 for figure in figures),
            sum(figure.failed for figure in figures),
            {model: figure.rate for model, figure in models.items()},
        )


@dataclass(frozen=True, slots=True)
class Finding:
    """A configuration, as changes to the present one, and its figures."""

    changes: Mapping[str, Value]
    figures: tuple[Figure, ...] = ()
    memory: int = 0
    """Bytes that the models took at work; 0 where the system does not tell."""
    refused: str = ""
    """Why there are no figures: it cannot be loaded, or answers nothing."""
    turns: int = 1
    """How many times it was measured; figures of several times are medians."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Return what ``to_json`` made data of. Raises ``KeyError`` or ``TypeError`` for other data."""
        figures = tuple(Figure(**figure) for figure in data["figures"])
        return cls(data["changes"], figures, data["memory"], data["refused"], data["turns"])


def combined(turns: Sequence[Finding]) -> Finding:
    """Return what measuring a configuration several times showed. Once refused, it is refused."""
    first = turns[0]
    for turn in turns:
        if turn.refused:
            return dataclasses.replace(turn, turns=len(turns))
    figures = [figure for turn in turns for figure in turn.figures]
    levels = dict.fromkeys(figure.concurrency for figure in figures)
    return dataclasses.replace(
        first,
        figures=tuple(_median([each for each in figures if each.concurrency == level]) for level in levels),
        memory=round(statistics.median(turn.memory for turn in turns)),
        turns=len(turns),
    )


def _median(figures: Sequence[Figure]) -> Figure:
    return Figure(
        figures[0].concurrency,
        statistics.median(figure.rate for figure in figures),
        statistics.median(figure.mean for figure in figures),
        statistics.median(figure.p99 for figure in figures),
        sum(figure.failed for figure in figures),
        {model: statistics.median(figure.each[model] for figure in figures) for model in figures[0].each},
    )
