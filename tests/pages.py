"""Documents whose blocks are run: taken apart, and run with a server in the place of localhost:8000."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from serving import NERITE, PATIENCE, Serving

ROOT = Path(__file__).resolve().parents[1]


class Page:
    """A document of the repository. ``blocks`` are language and text of each fenced block."""

    def __init__(self, name: str) -> None:
        self.text = text = (ROOT / name).read_text()
        self.blocks: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)

    def block(self, part: str) -> str:
        """Return the one block that contains ``part``."""
        (found,) = [text for _, text in self.blocks if part in text]
        return found


def run(
    command: list[str] | str,
    server: Serving | None = None,
    cwd: Path = ROOT,
    seconds: float = PATIENCE,
    status: int = 0,
) -> str:
    """Run a command, which must end with ``status``; the port of the page becomes that of ``server``.

    Return what it printed.
    """

    def here(text: str) -> str:
        return text if server is None else text.replace("localhost:8000", server.http)

    environment = {**os.environ, "PATH": f"{NERITE.parent}:{os.environ['PATH']}"}
    try:
        done = subprocess.run(
            here(command) if isinstance(command, str) else [here(word) for word in command],
            shell=isinstance(command, str),
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        said = "\n".join(each.decode() for each in (late.stdout, late.stderr) if isinstance(each, bytes))
        raise AssertionError(f"{command} has not ended after {seconds:g} s. It said:\n{said}") from None
    assert done.returncode == status, done.stderr
    return done.stdout


def rows(name: str, key: str) -> dict[str, dict[str, str]]:
    """Return the rows of a document's tables with the first column ``key``: by the first cell, what the others say.

    Tables with the same rows become one.
    """
    found: dict[str, dict[str, str]] = {}
    head: list[str] = []
    for line in (ROOT / name).read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells and not head:
            head = cells
        elif not cells:
            head = []
        elif head[0] == key and not cells[0].startswith("---"):
            found.setdefault(cells[0].strip("`"), {}).update(zip(head[1:], cells[1:], strict=True))
    return found
