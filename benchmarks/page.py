"""The page where the figures go."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable
from pathlib import Path

from contestants import ROOT

PAGE = ROOT / "docs" / "benchmarks.md"


def machine() -> str:
    """Return what this was measured on."""
    model = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    name = model[1] if model else platform.processor()
    return f"{os.cpu_count()} processors ({name}), Python {platform.python_version()}, client and server on one machine"


def write(section: str, text: str, page: Path = PAGE) -> None:
    """Put ``text`` between the markers of ``section`` in the page."""
    start, end = f"<!-- {section} -->\n", f"<!-- /{section} -->"
    before, _, rest = page.read_text().partition(start)
    _, _, after = rest.partition(end)
    page.write_text(before + start + text + end + after)


def command_line(about: str | None, seconds: float, rounds: int) -> argparse.ArgumentParser:
    """Return the flags that measurements have in common, with what a run and their number are by default."""
    flags = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--seconds", type=type(seconds), default=seconds, help="of each run (default: %(default)g)")
    flags.add_argument(
        "--rounds", type=int, default=rounds, help="runs of each; the median counts (default: %(default)s)"
    )
    flags.add_argument("--print", action="store_true", help="print the tables and leave the page alone")
    return flags


def publish(section: str, text: str, given: argparse.Namespace) -> None:
    """Print ``text``, where the command line says so; or put it into the page."""
    if given.print:
        print(text)
    else:
        write(section, text)


def bring_up_to_date(section: str, about: str | None, report: Callable[[float, int], str], seconds: float) -> None:
    """Read the command line, measure, and write or print a section of the page. ``seconds`` is what a run takes."""
    given = command_line(about, seconds, 5).parse_args()
    publish(section, report(given.seconds, given.rounds), given)
