"""The text of ``--help``, from the table of flags."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterator

from nerite.cli.flag import Flag
from nerite.cli.flags import FLAGS, GROUPS

_SOURCES = (
    "Every flag can also be set by an environment variable, --http-port by NERITE_HTTP_PORT, or in a TOML file that "
    "--options-file or NERITE_OPTIONS_FILE names. A flag goes before the environment, the environment before the "
    "file. A flag may be shortened as long as it stays clear which one is meant."
)


def usage(synopsis: str, width: int = 0) -> str:
    """Return the whole text for a terminal of ``width`` columns; 0 asks the terminal."""
    width = max(50, min(width or shutil.get_terminal_size((100, 24)).columns, 120))
    lines = [f"Usage: {synopsis}"]
    for group in GROUPS:
        lines += ["", f"{group}:"] if group else [""]
        for flag in FLAGS:
            if flag.group == group:
                lines.extend(_entry(flag, width))
    return "\n".join([*lines, "", *textwrap.wrap(_SOURCES, width)])


def description(flag: Flag) -> str:
    """Return what a flag means, its default, and whether it has an effect."""
    text = flag.help
    if flag.default:
        text += f" Default: {flag.default}."
    if flag.accepted:
        text += f" (No effect: {flag.accepted}.)"
    return text


def _entry(flag: Flag, width: int) -> Iterator[str]:
    yield f"  --{flag.name} <{flag.kind.label}>" if flag.kind.label else f"  --{flag.name}"
    yield from textwrap.wrap(
        description(flag), width, initial_indent=" " * 8, subsequent_indent=" " * 8, break_on_hyphens=False
    )
