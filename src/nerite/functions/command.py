"""The command ``nerite serve``: repositories, models by name, and functions that are served as models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nerite.cli.command_line import run as run_command


def run(arguments: Sequence[str]) -> int:
    """Run ``nerite serve``; return the exit status."""
    if all(each.startswith("-") or Path(each).is_dir() for each in arguments):
        return run_command(arguments)
    # Imported here, because a server of repositories need not load the code for functions and downloads.
    from nerite.functions.serving import serve_named

    return serve_named(arguments)
