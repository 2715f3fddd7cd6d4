"""What the processes of a test did with the stand-in for CUDA, and what they hold: from the folder that they share."""

from __future__ import annotations

import struct
from collections import Counter
from pathlib import Path

from stand_ins.cuda.cuda.stand_in.files import ALLOCATION, COUNTERS, EVENT, MAPPING, Held, held

__all__ = ["ALLOCATION", "EVENT", "MAPPING", "Held", "counts", "counts_of_each", "live"]


def counts(folder: Path) -> Counter[str]:
    """Return the counts of all processes together, also those that have ended: ``live_bytes`` of these are stale."""
    return sum(counts_of_each(folder).values(), Counter())


def counts_of_each(folder: Path) -> dict[int, Counter[str]]:
    """Return the counts of each process, by its number."""
    found = {}
    for file in folder.glob("counts-*"):
        words = struct.unpack(f"={len(COUNTERS)}q", file.read_bytes())
        found[int(file.name.partition("-")[2])] = Counter(dict(zip(COUNTERS, words, strict=True)))
    return found


def live(folder: Path, kind: str | None = None) -> list[Held]:
    """Return the allocations and the mappings that living processes hold, or those of one kind, in order of names."""
    kinds = (ALLOCATION, MAPPING) if kind is None else (kind,)
    return sorted((each for each in held(folder) if each.kind in kinds), key=lambda each: each.name)
