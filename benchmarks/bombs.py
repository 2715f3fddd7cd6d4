"""What bodies made to be expensive cost those who read them: processor time of the event loop, and memory.

    python benchmarks/bombs.py [--size BYTES] [--all] [--targets WORD ...] [--bombs WORD ...] [--print]

Each body is sent to every endpoint that takes one: of a server, of a server with front processes, of a router, and as a
gateway does to a picker, which passes it back. The table has the most expensive endpoint of each. Costs are per
megabyte; what is smaller counts as one. --all prints each endpoint, too.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from contestants import ROOT
from page import machine, publish

sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

from bombed import TARGETS, BombTarget  # noqa: E402
from bombs import Bomb, Cost, bombs  # noqa: E402

_MEGABYTE: Final = 1 << 20


class Worst(NamedTuple):
    """The most expensive endpoint for a body."""

    path: str
    cost: Cost
    size: int

    @property
    def milliseconds(self) -> float:
        """Of the loop, for a megabyte."""
        return self.cost.seconds * 1e3 * _MEGABYTE / max(self.size, _MEGABYTE)

    @property
    def bytes(self) -> float:
        """Of memory, for each byte."""
        return self.cost.grown / max(self.size, _MEGABYTE)


def measured(target: BombTarget, bomb: Bomb, *, talks: bool) -> Worst:
    """Send a body to all endpoints."""
    found = []
    for path in target.paths:
        one = Worst(path, target.cost(path, bomb), bomb.size)
        found.append(one)
        if talks:
            print(f"{target.name:8} {bomb.name:26} {path:40} {one.milliseconds:7.1f} ms {one.bytes:6.2f} B", flush=True)
    dearest = max(found, key=lambda each: each.milliseconds)
    largest = max(found, key=lambda each: each.bytes)
    return dearest._replace(cost=dearest.cost._replace(grown=int(largest.bytes * max(dearest.size, _MEGABYTE))))


def report(size: int, names: Sequence[str], kinds: Sequence[str], *, talks: bool) -> str:
    """Measure, and return the section of the page."""
    chosen = [each for each in bombs(size) if not kinds or any(kind in each.name for kind in kinds)]
    columns: dict[str, list[Worst]] = {}
    for name in names:
        with tempfile.TemporaryDirectory() as folder, TARGETS[name](Path(folder)) as target:
            columns[name] = [measured(target, bomb, talks=talks) for bomb in chosen]
    lines = [
        f"Measured on {machine()}; bodies of {size / 1e6:g} MB; ms of the loop for a megabyte, and bytes of memory for "
        "a byte, at the most expensive endpoint.",
        "",
        "| body | " + " | ".join(names) + " |",
        "|---|" + "---|" * len(names),
    ]
    for place, bomb in enumerate(chosen):
        cells = (columns[name][place] for name in names)
        lines.append(
            f"| {bomb.name} | " + " | ".join(f"{one.milliseconds:.1f}; {one.bytes:.1f}" for one in cells) + " |"
        )
    return "\n".join((*lines, ""))


def main() -> None:
    """Read the command line, measure, and write or print the section."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--size", type=int, default=16_000_000, help="bytes of a body (default: %(default)s)")
    flags.add_argument("--all", action="store_true", help="print the cost at each endpoint")
    flags.add_argument("--targets", nargs="+", default=[*TARGETS], choices=[*TARGETS], help="(default: all)")
    flags.add_argument("--bombs", nargs="+", default=[], metavar="WORD", help="only those with a word in their names")
    flags.add_argument("--print", action="store_true", help="print the table and leave the page alone")
    given = flags.parse_args()
    publish("bombs", report(given.size, given.targets, given.bombs, talks=given.all), given)


if __name__ == "__main__":
    main()
