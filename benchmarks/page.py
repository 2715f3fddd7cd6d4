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


def write(section: str, text: str) -> None:
    """Put ``text`` between the markers of ``section`` in the page."""
    page = PAGE.read_text()
    start, end = f"<!-- {section} -->\n", f"<!-- /{section} -->"
    before, _, rest = page.partition(start)
    _, _, after = rest.partition(end)
    PAGE.write_text(before + start + text + end + after)


def bring_up_to_date(section: str, about: str | None, report: Callable[[float, int], str], seconds: float) -> None:
    """Read the command line, measure, and write or print a section of the page. ``seconds`` is what a run takes."""
    arguments = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--seconds", type=float, default=seconds, help=f"of each run ({seconds:g})")
    arguments.add_argument("--rounds", type=int, default=5, help="the median of so many runs counts (5)")
    arguments.add_argument("--print", action="store_true", help="print the table instead of writing the page")
    given = arguments.parse_args()
    text = report(given.seconds, given.rounds)
    if given.print:
        print(text)
    else:
        write(section, text)
