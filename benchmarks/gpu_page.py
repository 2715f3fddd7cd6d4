"""What was verified on GPUs: writes the table of docs/gpus.md from the results in benchmarks/gpu_results.

    python benchmarks/gpu_page.py [--add FOLDER]

--add first takes over the results that benchmarks/gpu_exam.py wrote to a folder; of each part and card the last one is
kept. What has no result is "not verified". Rehearsals on processors are refused.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from contestants import ROOT
from gpu_parts import PARTS
from gpu_parts.result import PartResult, number_text
from page import write

RESULTS = ROOT / "benchmarks" / "gpu_results"
PAGE = ROOT / "docs" / "gpus.md"
SECTION = "verified"
_NOT = "not verified"


def results(folder: Path = RESULTS) -> list[PartResult]:
    """Return the results in a folder. Raises ``ValueError`` for one that does not come from a GPU."""
    found = []
    for path in sorted(folder.glob("*.json")):
        result = PartResult.load(path)
        if result.kind != "KIND_GPU" or (not result.cards and result.outcome != "skipped"):
            raise ValueError(f"{path} is no result of a GPU, but of a rehearsal ({result.kind}, {result.cards})")
        found.append(result)
    return found


def table(found: Sequence[PartResult]) -> str:
    """Return the table: a row for each figure, and for everything that has none."""
    lines = ["| part | figure | | wanted | card | date |", "|---|---|---|---|---|---|"]
    for name, entry in PARTS.items():
        shown = [line for result in found if result.part == name for line in rows(entry.title, result)]
        lines += shown or [f"| {entry.title} | | {_NOT} | | | |"]
    return "\n".join(lines) + "\n"


def rows(title: str, result: PartResult) -> Iterable[str]:
    """Yield the rows of a result."""
    where = f"{' + '.join(result.cards)} | {result.date.partition(' ')[0]} |"
    for figure in result.figures:
        value = f"{number_text(figure.value)} {figure.unit}".strip()
        met = {None: "", True: f"{figure.wanted}", False: f"{figure.wanted}: **not met**"}[figure.met]
        yield f"| {title} | {figure.name} | {value} | {met} | {where}"
    for gap in (*result.skipped, *result.errors):
        yield f"| {title} | {gap.what} | {_NOT}: {_cell(gap.why)} | | {where}"
    if result.outcome == "cut":
        yield f"| {title} | the rest | {_NOT}: {_cell(result.why)} | | {where}"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:200]


def take_over(folder: Path, into: Path = RESULTS) -> None:
    """Copy the results of a run. Raises ``ValueError``, before anything is written, if it was a rehearsal."""
    into.mkdir(exist_ok=True)
    for result in results(folder):
        if result.outcome != "skipped":
            card = re.sub(r"\W+", "-", result.cards[0].lower())
            result.save(into / f"{card}-{result.part}.json")


def main() -> None:
    """Write the table."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--add", type=Path, help="folder with the results of a run")
    options = flags.parse_args()
    if options.add is not None:
        take_over(options.add)
    write(SECTION, table(results()), PAGE)


if __name__ == "__main__":
    main()
