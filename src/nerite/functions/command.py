"""The command ``nerite serve``: repositories, and functions that are served as models (``FILE.py:NAME``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from nerite.cli.command_line import run as run_command
from nerite.functions.function_source import FunctionSource


def run(arguments: Sequence[str]) -> int:
    """Run ``nerite serve``; return the exit status."""
    sources = {each: source for each in arguments if (source := _source(each)) is not None}
    if not sources:
        return run_command(arguments)
    # Imported here, because a server of repositories need not load the code for functions.
    from nerite.functions.serving import serve_sources

    named = [sources[each] for each in arguments if each in sources]
    return serve_sources(named, [each for each in arguments if each not in sources])


def _source(argument: str) -> FunctionSource | None:
    """Return the functions that an argument names; None for flags and repositories."""
    if argument.startswith("-") or "/" in argument.rpartition(":")[2] or Path(argument).is_dir():
        return None
    return FunctionSource.parse(argument)
