"""What a part of the exam has found: the schema of its file, which is written again with every figure."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Kind = Literal["KIND_GPU", "KIND_CPU"]
"""What models run on: KIND_CPU is a rehearsal, of which no figure is one of a GPU."""
Outcome = Literal["ok", "failed", "cut", "skipped"]
"""Complete; with errors; ended by its limit or a crash; not tried."""

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {">=": operator.ge, "<=": operator.le, "==": operator.eq}


@dataclass(frozen=True)
class Figure:
    """A number, and what it is wanted to be."""

    name: str
    value: float
    unit: str = ""
    wanted: str | None = None
    """A comparison such as ``>= 0.95``; None if nothing is wanted of it."""

    @property
    def met(self) -> bool | None:
        """Whether the number is what is wanted; None if nothing is."""
        if self.wanted is None:
            return None
        sign, number = self.wanted.split()
        return _COMPARISONS[sign](self.value, float(number))

    def __str__(self) -> str:
        met = {None: "", True: ", met", False: ", NOT MET"}[self.met]
        wanted = f"   (wanted {self.wanted}{met})" if self.wanted is not None else ""
        return f"{self.name}: {number_text(self.value)} {self.unit}".rstrip() + wanted


@dataclass(frozen=True)
class Gap:
    """Something that was not shown, and why."""

    what: str
    why: str


@dataclass
class PartResult:
    """The result of a part. ``figures``, ``skipped`` and ``errors`` grow while it runs."""

    part: str
    kind: Kind
    command: str
    date: str
    revision: str
    """The commit of Nerite, and the digest of its sources."""
    limit: float
    """Seconds that it may take."""
    cards: list[str] = field(default_factory=list)
    driver: str = ""
    cuda: str = ""
    """That of the driver, and the one that PyTorch is built for."""
    versions: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    outcome: Outcome = "cut"
    why: str = ""
    """Of an outcome that is not ok."""
    figures: list[Figure] = field(default_factory=list)
    skipped: list[Gap] = field(default_factory=list)
    errors: list[Gap] = field(default_factory=list)

    def save(self, path: Path) -> None:
        """Write the file, in one step."""
        document = dataclasses.asdict(self)
        for written, figure in zip(document["figures"], self.figures, strict=True):
            written["met"] = figure.met
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(document, indent=1) + "\n")
        unfinished.rename(path)

    @classmethod
    def load(cls, path: Path) -> PartResult:
        """Read a file that ``save`` wrote."""
        document: dict[str, Any] = json.loads(path.read_text())
        for figure in document["figures"]:
            del figure["met"]  # follows from the others
        document["figures"] = [Figure(**each) for each in document["figures"]]
        for gaps in ("skipped", "errors"):
            document[gaps] = [Gap(**each) for each in document[gaps]]
        return cls(**document)


def number_text(value: float) -> str:
    """Return a number with three significant digits at the least, and thousands apart."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
