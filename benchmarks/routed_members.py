"""The servers behind the routers that are compared: stand-ins for engines, which can be killed, stopped and started."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from contestants import free_ports, wait_ready

_PROGRAM = Path(__file__).with_name("paced_engine.py")


class FirstMember(Protocol):
    """One of the members, to which things happen."""

    def kill(self) -> None:
        """End it at once, with all that it has under way."""

    def start_again(self) -> None:
        """Start another process in its place."""

    def stop(self) -> None:
        """Have it stand still: its connections stay, and nothing is answered."""

    def go_on(self) -> None:
        """Have it go on."""


class EngineProcess:
    """A stand-in as a process."""

    def __init__(self, folder: Path, flags: Sequence[str], under: Sequence[str]) -> None:
        self.port = free_ports()[0]
        self._command = [*under, sys.executable, str(_PROGRAM), str(self.port), *flags]
        self._log = folder / f"member-{self.port}.log"
        self.start_again()

    def start_again(self) -> None:
        """Start a process."""
        with self._log.open("ab") as sink:
            self._process = subprocess.Popen(self._command, stdout=sink, stderr=subprocess.STDOUT)

    def wait(self) -> None:
        """Return when it answers."""
        wait_ready(self.port, self._process, self._log, "health")

    def kill(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        """Have it stand still."""
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Have it go on."""
        self._process.send_signal(signal.SIGCONT)


@contextmanager
def engines(flags: Sequence[Sequence[str]], folder: Path, under: Sequence[str] = ()) -> Iterator[list[EngineProcess]]:
    """Run a stand-in for each list of flags, ``under`` another program."""
    members = [EngineProcess(folder, each, under) for each in flags]
    try:
        for member in members:
            member.wait()
        yield members
    finally:
        for member in members:
            member.kill()
