"""An input of the fuzzer, and the text that it is kept as."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

CORPUS = Path(__file__).with_name("corpus")
"""Inputs that once were findings. Every run begins with them."""


class Case(NamedTuple):
    """One input: what is sent, as the surface (``surfaces``) understands it."""

    surface: str
    parts: tuple[bytes, ...]
    number: int = 0
    """Which input of its run it is."""

    @property
    def size(self) -> int:
        """Bytes in it."""
        return sum(map(len, self.parts))


def written(cases: Iterable[Case], remark: str = "", profile: str = "") -> str:
    """Return cases as a text. What is no printable ASCII is escaped as in Python."""
    lines = [f"# {line}".rstrip() for line in remark.splitlines()]
    if profile:
        lines.append(f"profile: {profile}")
    for case in cases:
        lines.append(f"surface: {case.surface}")
        lines += [f"part: {part.decode('latin-1').encode('unicode_escape').decode()}" for part in case.parts]
    return "\n".join(lines) + "\n"


class Kept(NamedTuple):
    """What a file of the corpus says."""

    cases: tuple[Case, ...]
    profile: str
    """How its server is started; empty: in any way."""


def read(text: str) -> Kept:
    """Return the cases of a text. Raises ``ValueError`` for one that is none."""
    found: list[tuple[str, list[bytes]]] = []
    profile = ""
    for number, line in enumerate(text.splitlines(), 1):
        name, colon, value = line.partition(": ")
        if not line or line.startswith("#"):
            continue
        if name == "surface":
            found.append((value, []))
        elif name == "profile":
            profile = value
        elif line.startswith("part:") and found:
            found[-1][1].append(value.encode().decode("unicode_escape").encode("latin-1") if colon else b"")
        else:
            raise ValueError(f"line {number} is no 'surface: …', 'profile: …' or 'part: …'")
    return Kept(tuple(Case(surface, tuple(parts)) for surface, parts in found), profile)


def corpus(folder: Path = CORPUS) -> Sequence[tuple[str, Kept]]:
    """Return the files of a corpus by their names."""
    return [(path.name, read(path.read_text())) for path in sorted(folder.glob("*.case"))]
