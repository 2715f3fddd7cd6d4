"""The page where the figures go."""

from __future__ import annotations

import os
import platform
import re
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
