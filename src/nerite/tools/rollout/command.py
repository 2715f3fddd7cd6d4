"""``nerite rollout``: runs one of its commands."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Final

from nerite.cli.command import complain, did_you_mean, show

COMMANDS: Final = {
    "check": (
        "tools.rollout.check:run",
        "compare two versions of a model, and try the new one, before its first request",
    ),
}
"""Function and purpose of each command."""


def run(arguments: Sequence[str]) -> int:
    """Run a command of ``nerite rollout``; return the exit status."""
    name, rest = (arguments[0], arguments[1:]) if arguments else ("--help", ())
    if name in ("--help", "-h", "help"):
        show(_overview())
        return 0
    if name not in COMMANDS:
        complain("nerite rollout", f"unknown command '{name}'.", did_you_mean(name, COMMANDS))
        return 2
    module, _, function = COMMANDS[name][0].partition(":")
    status: int = getattr(importlib.import_module(f"nerite.{module}"), function)(rest)
    return status


def _overview() -> str:
    width = max(map(len, COMMANDS)) + 2
    commands = "\n".join(f"  nerite rollout {name:{width}}{purpose}" for name, (_, purpose) in COMMANDS.items())
    return (
        "Roll out new versions of models on a running server.\n\n"
        f"{commands}\n\n"
        "Help on a command:  nerite rollout check --help"
    )
