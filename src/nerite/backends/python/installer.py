"""Makes environments and installs packages into them: with uv where it is installed, else with venv and pip."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from nerite.backends.python import environment_store
from nerite.core.errors import InvalidArgument, Unavailable

_log = logging.getLogger("nerite.python")

_TAIL: Final = 15
"""Lines of a tool that has failed that go into the error."""

_lock = threading.Lock()
_running: set[subprocess.Popen[str]] = set()


def stop() -> None:
    """End what is being made; nothing more is made in this process. For any thread."""
    with _lock:
        environment_store.stopped.set()
        for process in _running:
            process.terminate()


class Installer:
    """Fills one directory. Its methods block, and raise ``InvalidArgument`` with what a tool that failed said last."""

    def __init__(self, directory: Path, origin: Path, lock: int) -> None:
        """``origin`` is the list that the environment is made of, ``lock`` as ``environment_store.Make`` has it."""
        self.directory = directory
        self.python = directory / "bin" / "python"
        self.uv = _uv()
        self._origin = origin
        self._lock = lock

    def begin(self) -> None:
        """Make the environment, for the Python that the server runs on."""
        _log.info("making an environment of '%s' with %s", self._origin, "uv" if self.uv else "pip")
        if self.uv:
            options = ["--quiet", "--no-project", "--allow-existing", "--python", sys.executable]
            self.run([self.uv, "venv", *options, self.directory])
        else:
            self.run([sys.executable, "-m", "venv", self.directory])

    def install(self, packages: Sequence[str | Path]) -> None:
        """Install what pip would be told to."""
        if self.uv:
            self.run([self.uv, "pip", "install", "--python", self.python, *packages])
        else:
            self.install_with_pip(packages)

    def install_with_pip(self, packages: Sequence[str | Path]) -> None:
        """Install with pip even where there is uv, which does not read how pip is set up."""
        if self.uv:
            self.run([self.python, "-m", "ensurepip"])
        self.run([self.python, "-m", "pip", "--disable-pip-version-check", "install", "--no-input", *packages])

    def run(self, command: Sequence[str | Path], variables: Mapping[str, str] | None = None) -> None:
        """Run a step; ``variables`` are added to its environment."""
        run(command, f"an environment of '{self._origin}'", self._origin.parent, self._lock, variables)


def run(
    command: Sequence[str | Path],
    product: str,
    directory: Path,
    lock: int,
    variables: Mapping[str, str] | None = None,
) -> None:
    """Run a step of what makes ``product``, in ``directory``, with what it says in the log.

    It holds the lock as well, so that it may outlive the server. Raises ``InvalidArgument`` if it fails.
    """
    # The server's own packages are none of the environment's.
    ours = ("PYTHON", "VIRTUAL_ENV")
    surroundings = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    with _lock:
        if environment_store.stopped.is_set():
            raise Unavailable(f"{product} is not made: the server stops")
        process = subprocess.Popen(
            command,
            cwd=directory,
            env={**surroundings, **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=[lock],
        )
        _running.add(process)
    last: deque[str] = deque(maxlen=_TAIL)
    try:
        with process:
            for line in process.stdout or ():
                last.append(line.rstrip())
                _log.info("%s: %s", product, last[-1])
    finally:
        with _lock:
            _running.discard(process)
    if process.returncode:
        said = "\n".join(last) or f"exit status {process.returncode}"
        raise InvalidArgument(f"{product} cannot be made:\n{said}")


def _uv() -> str | None:
    beside = Path(sys.executable).with_name("uv")
    return str(beside) if beside.exists() else shutil.which("uv")
