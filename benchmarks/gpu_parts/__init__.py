"""The parts of benchmarks/gpu_exam.py, in their order. A part is a module with a function ``run(part: Part)``."""

from __future__ import annotations

from typing import NamedTuple


class PartEntry(NamedTuple):
    """A part of the exam."""

    title: str
    seconds: float
    """Its limit on a machine with a GPU."""
    not_yet: str = ""
    """Why there is no module for it."""


PARTS = {
    "machine": PartEntry("Cards, placement, metrics", 35),
    "answers": PartEntry("Answers of the frameworks", 75),
    "served": PartEntry("Served over bare", 155),
    "devices": PartEntry("Device memory of clients and steps", 35),
    "cores": PartEntry("Front processes on many cores", 95),
    "memory": PartEntry("Device memory over loads and crashes", 75),
    "engine": PartEntry("Language models", 0, not_yet="no engine yet"),
}
"""By name."""
