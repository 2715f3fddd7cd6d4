"""Takes an argument list apart by the rules of getopt_long, which Triton uses.

``--name=value`` or ``--name value`` (the next argument is the value, whatever it looks like); any prefix that fits one
flag only; flags and other arguments in any order; ``--`` ends the flags. Nothing is read or checked beyond that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from nerite.cli.flag import Flag
from nerite.cli.flags import BY_NAME, FLAGS
from nerite.cli.suggestion import did_you_mean
from nerite.cli.usage_error import UsageError


class Given(NamedTuple):
    """A flag and the text given for it, from any source. ``label`` says where, for messages."""

    flag: Flag
    text: str
    label: str


class Positional(NamedTuple):
    """An argument that is not a flag."""

    text: str


def scan(arguments: Sequence[str], program: str) -> Iterator[Given | Positional]:
    """Yield the flags in order, then the other arguments in order.

    Raises ``UsageError`` when it comes to something that is not a flag, so that a wrong value before it is found
    first. ``program`` stands before such messages.
    """
    others: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            others.extend(rest)
        elif argument.startswith("--"):
            yield _given(argument, rest, program)
        elif argument.startswith("-") and argument != "-":
            raise UsageError(f"{program}: invalid option -- '{argument[1]}'", early=True)
        else:
            others.append(argument)
    yield from map(Positional, others)


def _given(argument: str, rest: Iterator[str], program: str) -> Given:
    name, equals, text = argument[2:].partition("=")
    flag = _find(name, argument, program)
    if not flag.kind.label:
        if equals:
            raise UsageError(f"{program}: option '--{flag.name}' doesn't allow an argument", early=True)
        text = "true"
    elif not equals:
        following = next(rest, None)
        if following is None:
            raise UsageError(f"{program}: option '--{flag.name}' requires an argument", early=True)
        text = following
    return Given(flag, text, f"--{flag.name}")


def _find(name: str, argument: str, program: str) -> Flag:
    if name in BY_NAME:
        return BY_NAME[name]
    fitting = [flag for flag in FLAGS if flag.name.startswith(name)]
    # Ours come second: an abbreviation that was clear before we added a flag stays clear.
    fitting = [flag for flag in fitting if not flag.ours] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        possibilities = " ".join(f"'--{flag.name}'" for flag in fitting)
        raise UsageError(f"{program}: option '{argument}' is ambiguous; possibilities: {possibilities}", early=True)
    raise UsageError(
        f"{program}: unrecognized option '{argument}'", remedy=did_you_mean(name, BY_NAME, "--"), early=True
    )
