"""What shows that something is wrong, and what the log of a server tells of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple


class Symptom(NamedTuple):
    """What is wrong. Equal ones are one finding."""

    kind: str
    where: str = ""
    """Which model, surface, or line of the source."""
    told: str = ""
    """What is known of it, for people."""

    @property
    def key(self) -> tuple[str, str]:
        """By which it is recognized when it comes again."""
        return self.kind, self.where


_UNFORESEEN: Final = re.compile(
    r"internal error, incident|Task exception was never|Task was destroyed|Exception ignored|Fatal Python error"
    r"|Segmentation fault|was never awaited|ResourceWarning|Traceback \(most recent call last\)"
)
_FRAME: Final = re.compile(r'File \\?"([^"\\]+)\\?", line (\d+), in ([\w<>.]+)')
_INCIDENT: Final = re.compile(r"internal error, incident ([\w-]+)")
_SEE: Final = re.compile(r"stack: see incident ([\w-]+)")
_DIED: Final = re.compile(r"worker '([^']+)' \(pid \d+\) died")
_OF_MODELS: Final = re.compile(r"/models/[^/]+/\d+/|/nerite-model-[^/]+/|a model of the fuzzer raises|^<")


class Log:
    """The log of a server, read as it grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._at = 0
        self._origins: dict[str, str] = {}
        """By the number of an incident, where it came from: the stack of later ones is not logged again."""

    def symptoms(self) -> list[Symptom]:
        """Return what the lines tell that have come since the last time."""
        with self._path.open("rb") as file:
            file.seek(self._at)
            raw = file.read()
        whole, end, _ = raw.rpartition(b"\n")
        self._at += len(whole) + len(end)
        return [*self._told(whole.decode(errors="replace").splitlines())]

    def _told(self, lines: list[str]) -> Iterator[Symptom]:
        for number, line in enumerate(lines):
            if died := _DIED.search(line):
                yield Symptom("a worker died", died[1].rstrip("0123456789_"), line[:2_000])
            if not _UNFORESEEN.search(line):
                continue
            # A record is one line; what Python itself prints is several.
            text = line if _FRAME.search(line) or "incident" in line else "\n".join(lines[number : number + 40])
            frames = _FRAME.findall(text)
            origin = f"{Path(frames[-1][0]).name}:{frames[-1][1]} {frames[-1][2]}" if frames else line[-120:]
            if incident := _INCIDENT.search(line):
                first = _SEE.search(line)
                origin = self._origins.get(first[1], origin) if first else origin
                self._origins[incident[1]] = origin
            elif frames and _OF_MODELS.search(text):
                continue
            yield Symptom("unforeseen", origin, text[:6_000])
