"""What a run has found: files that are test cases, and the table at the end."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from pathlib import Path

from fuzz.case import Case, written
from fuzz.lanes import Outcome
from fuzz.symptoms import Symptom


@dataclasses.dataclass
class Finding:
    """Something that is wrong, and the least that shows it."""

    symptom: Symptom
    cases: list[Case]
    """What has to be sent to see it; all that was sent before it, where it did not show again."""
    profile: str
    shown_again: bool
    times: int = 1

    @property
    def name(self) -> str:
        """A name for a file."""
        words = f"{self.symptom.kind} {self.symptom.where}"
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:80]

    def write(self, folder: Path, seed: int) -> Path:
        """Write it as a test case; return the file."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.case"
        number = 1
        while path.exists():
            number += 1
            path = folder / f"{self.name}-{number}.case"
        numbers = ", ".join(f"{case.surface} {case.number}" for case in self.cases[:8])
        again = "" if self.shown_again else "It did not show again: these are the inputs that were sent before it.\n"
        remark = (
            f"{self.symptom.kind}: {self.symptom.where}\nSeed {seed}, inputs: {numbers}\n{again}{self.symptom.told}"
        )
        path.write_text(written(self.cases, remark[:8_000], self.profile))
        return path

    def __str__(self) -> str:
        what = f"{self.symptom.kind}: {self.symptom.where}"
        size = f"{sum(case.size for case in self.cases):,} bytes in {len(self.cases)} inputs"
        return f"{what} ({self.times} times; {size if self.shown_again else 'did not show again'})"


class Tally:
    """How many inputs there were of each surface, and what became of them."""

    def __init__(self) -> None:
        self.inputs: Counter[str] = Counter()
        self.taken: Counter[str] = Counter()
        self.wrong: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def add(self, outcomes: list[Outcome]) -> None:
        """Count outcomes."""
        for outcome in outcomes:
            surface = outcome.case.surface
            self.inputs[surface] += 1
            self.taken[surface] += outcome.taken
            self.wrong[surface] += bool(outcome.complaint)
            self.seconds[surface] += outcome.seconds

    def table(self, seconds: float) -> str:
        """Return the figures as a table."""
        lines = ["surface       inputs   taken  refused  wrong ends  under way, in all"]
        figures = (self.inputs, self.taken, self.wrong, self.seconds)
        rows = [(name, *(each[name] for each in figures)) for name in sorted(self.inputs)]
        total = sum(self.inputs.values())
        rows.append(("all", *(sum(each.values()) for each in figures)))
        for name, count, taken, wrong, under_way in rows:
            part = taken / max(count, 1)
            lines.append(f"{name:10} {count:9,} {part:7.0%} {1 - part:8.0%} {wrong:11} {under_way:16,.1f} s")
        return "\n".join([*lines, f"{seconds:.0f} s, {total / max(seconds, 0.001):,.0f} inputs a second"])
