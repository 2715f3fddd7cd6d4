"""Who may command the servers that run on the ports of a server, and one that is started here."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath
from typing import Final

from nerite.cli.doctor.finding import Finding, Level
from nerite.cli.serve import NERITE, TRITON, Manner
from nerite.cli.usage_error import HelpRequested, UsageError
from nerite.config import exposure
from nerite.config.options import ServerOptions
from nerite.transports.port_use import owner_of

_PROC: Final = Path("/proc")
_SERVED: Final = "--model-repository=."
"""Stands for the repositories that a command line has to name."""


def findings(ports: Iterable[int], proc: Path = _PROC) -> Iterator[Finding]:
    """Yield what is found about a server that has the environment's flags, and about each on one of the ports."""
    try:
        yield of_options(NERITE.parse([_SERVED], os.environ).options, "a server that is started here by nerite serve")
    except UsageError as error:
        remedy = "Correct the variables NERITE_…, or the file that NERITE_OPTIONS_FILE names."
        yield Finding(Level.PROBLEM, f"nerite serve cannot start here: {' '.join(error.text.split())}", remedy)
    owners = {owner.pid for owner in (owner_of(port, proc) for port in ports) if owner is not None}
    for pid in sorted(owners):
        options = options_of(proc / str(pid))
        if options is not None:
            yield of_options(options, f"the server with pid {pid}")


def of_options(options: ServerOptions, server: str) -> Finding:
    """Return what there is to say of a server with these options."""
    ports = exposure.open_ports(options)
    if not ports:
        return Finding(Level.OK, f"{server}: no other machine can command it without a key")
    return Finding(Level.WARNING, f"{server}: {exposure.rights(ports)}", exposure.remedy(ports))


def options_of(process: Path) -> ServerOptions | None:
    """Return the options that a process serves with; None if it is no server, or is not ours to look at."""
    try:
        words = [os.fsdecode(word) for word in (process / "cmdline").read_bytes().split(b"\0")[:-1]]
        pairs = (os.fsdecode(pair).partition("=") for pair in (process / "environ").read_bytes().split(b"\0"))
        environment = {name: value for name, _, value in pairs if name}
    except OSError:
        return None
    started = _started(words)
    try:
        return None if started is None else started[0].parse(started[1], environment).options
    except (UsageError, HelpRequested, OSError):  # its options file may be gone
        return None


def _started(words: Sequence[str]) -> tuple[Manner, Sequence[str]] | None:
    """Return the name under which a server was started, and its arguments; None if the words start none."""
    for at, word in enumerate(words):
        name = PurePath(word).name
        if name == "tritonserver":
            return TRITON, words[at + 1 :]
        if name in ("nerite", "nerite.cli.main") and words[at + 1 : at + 2] == ["serve"]:
            return NERITE, words[at + 2 :]
    return None
