"""Command lines as tests write them."""

from __future__ import annotations

import pytest

from nerite.cli.command import UsageError
from nerite.cli.command_line import NERITE, CommandLine, parse_command_line


def run(*arguments: str, **environment: str) -> CommandLine:
    """Read a command line of ``nerite serve``."""
    return parse_command_line(arguments, environment, NERITE)


def wrong(*arguments: str, **environment: str) -> UsageError:
    """Return what is wrong with one."""
    with pytest.raises(UsageError) as caught:
        run("/m", *arguments, **environment)
    return caught.value
