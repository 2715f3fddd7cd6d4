"""What measuring a configuration showed, and its form as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nerite.analyze.settings import Value


def named(changes: Mapping[str, Value]) -> str:
    """Return what people call the configuration with these changes."""
    return " ".join(f"{name}={value}" for name, value in changes.items()) or "as it is now"


@dataclass(frozen=True, slots=True)
class Figure:
    """What a level of load showed. Times are in milliseconds."""

    concurrency: int
    rate: float
    """Answers a second."""
    mean: float
    p99: float
    failed: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """A configuration, as changes to the present one, and its figures."""

    changes: Mapping[str, Value]
    figures: tuple[Figure, ...] = ()
    memory: int = 0
    """Bytes that the model took at work; 0 where the system does not tell."""
    refused: str = ""
    """Why there are no figures: it cannot be loaded, or answers nothing."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Return what ``to_json`` made data of. Raises ``KeyError`` or ``TypeError`` for other data."""
        figures = tuple(Figure(**figure) for figure in data["figures"])
        return cls(data["changes"], figures, data["memory"], data["refused"])
