"""Where a report comes from: the command, the machine and the versions of both ends, so that others can judge it."""

from __future__ import annotations

import os
import platform
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import nerite
from nerite.backends.machine import usable_cores
from nerite.observability import gpus

_LOCAL: Final = ("localhost", "127.0.0.1", "::1")


def machine() -> dict[str, Any]:
    """Return what figures depend on in this machine, by name."""
    library, _ = gpus.find_library()
    found = library.gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GB",
        "GPUs": ", ".join(gpu.name for gpu in found) or "none",
    }


def _processor() -> str:
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def command_line(program: str, arguments: Sequence[str]) -> str:
    """Return a command as it was typed, without the values of headers, which may be keys."""
    shown = [program]
    hidden = False
    for argument in arguments:
        if hidden or argument.startswith("--header="):
            name = argument.removeprefix("--header=").partition(":")[0]
            text = f"{name}: ..."
            shown.append(shlex.quote(text if hidden else f"--header={text}"))
        else:
            shown.append(shlex.quote(argument))
        hidden = not hidden and argument == "--header"
    return " ".join(shown)


@dataclass(frozen=True, slots=True)
class Provenance:
    """Origin of a report."""

    command: str
    when: str
    version: str
    """Version of the program that measured."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    """Machine on which it ran."""
    server: str = ""
    """Address of the server; empty if the command started it."""
    server_version: str = ""
    """Name and version of the server; empty if it does not tell."""

    @classmethod
    def now(cls, command: str, server: str = "", server_version: str = "") -> Provenance:
        """Return the origin of a report that is made now, on this machine."""
        when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
        version = f"nerite {nerite.__version__}, Python {platform.python_version()}"
        return cls(command, when, version, machine(), server, server_version)

    def to_json(self) -> dict[str, Any]:
        """Return the origin as a JSON-serialisable document."""
        return {
            "command": self.command,
            "when": self.when,
            "version": self.version,
            "machine": dict(self.machine),
            "server": {"url": self.server, "version": self.server_version},
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Provenance:
        """Return the origin from which ``to_json`` made a document. What is missing is empty."""
        server = document.get("server") or {}
        return cls(
            str(document.get("command", "")),
            str(document.get("when", "")),
            str(document.get("version", "")),
            document.get("machine") or {},
            str(server.get("url", "")),
            str(server.get("version", "")),
        )

    def facts(self) -> Iterator[tuple[str, str]]:
        """Yield what is known, each with its name."""
        yield "Command", self.command
        yield "Time", self.when
        values = dict(self.machine)
        cores, processor = values.pop("cores", ""), values.pop("processor", "")
        parts = [f"{cores} x {processor}" if cores else str(processor)]
        parts += [f"{name}: {value}" for name, value in values.items()]
        # Of a server elsewhere nothing is known but what it tells.
        elsewhere = self.server and re.sub(r"^https?://", "", self.server).rpartition(":")[0].strip("[]") not in _LOCAL
        yield "Machine of the client" if elsewhere else "Machine", ", ".join(filter(None, parts))
        yield "Version", self.version
        if self.server:
            yield "Server", ", ".join(filter(None, (self.server, self.server_version)))
