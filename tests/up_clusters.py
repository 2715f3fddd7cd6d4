"""``nerite up`` as a subprocess, for tests."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from process_family import command_of, processes_of
from serving import NERITE, eventually


class Up:
    """A cluster that runs."""

    def __init__(self, file: Path, log: Path) -> None:
        self._log = log
        with log.open("wb") as sink:
            command = [str(NERITE), "up", str(file)]
            self.process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, cwd=file.parent)

    @property
    def text(self) -> str:
        return self._log.read_text(errors="replace")

    def is_ready(self) -> bool:
        assert self.process.poll() is None, self.text
        return "everything is ready" in self.text

    def pid_of(self, address: str) -> int:
        """Return the process of the server that listens there."""
        port = address.rpartition(":")[2]
        (pid,) = [pid for pid in processes_of(self.process.pid) if f"--http-port={port}" in command_of(pid)]
        return pid

    def address_of(self, name: str) -> str:
        """Return where a process has said to be ready."""
        return re.findall(rf"^{re.escape(name)} is ready at (\S+) ", self.text, re.MULTILINE)[0]


@contextmanager
def up(file: Path, folder: Path) -> Iterator[Up]:
    running = Up(file, folder / "up.log")
    try:
        eventually(running.is_ready, what="not everything is ready")
        yield running
    finally:
        if running.process.poll() is None:
            running.process.send_signal(signal.SIGINT)
        running.process.wait(60)
