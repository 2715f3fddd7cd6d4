"""A server of its own for a model that is to be tried: a process with nothing else in it, on a port of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Final

from nerite.client import Client
from nerite.core.errors import Internal

_STARTED: Final = re.compile(r"Started (HTTP|GRPCInference)Service at [^\s]+:(\d+)")
_START_SECONDS: Final = 60.0
_STOP_SECONDS: Final = 10.0
_LOAD_SECONDS: Final = 1800.0
_FLAGS: Final = (
    "--model-control-mode=explicit",
    "--http-address=127.0.0.1",
    "--http-port=0",
    "--grpc-address=127.0.0.1",
    "--grpc-port=0",
    "--allow-metrics=false",
)
_OTHERS: Final = ("NERITE_", "AIP_", "SAGEMAKER_")
"""Variables that say how another server is to be."""


class Trial:
    """A server that runs. A context manager: the process ends with it."""

    def __init__(self, repository: Path, *, grpc: bool = False) -> None:
        """``grpc``: it speaks gRPC, too, at ``grpc_url``."""
        self.repository = repository
        self._grpc = grpc
        self._said: deque[str] = deque(maxlen=200)
        self._ports: dict[str, str] = {}
        self._started = threading.Event()

    def __enter__(self) -> Trial:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(_OTHERS)}
        flags = (*_FLAGS, f"--allow-grpc={str(self._grpc).lower()}")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nerite.cli.main", "serve", str(self.repository), *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**environment, "PYTHONDONTWRITEBYTECODE": "1"},
            # Ctrl-C is for us; we end it.
            start_new_session=True,
        )
        self._listener = threading.Thread(target=self._listen, name="trial", daemon=True)
        self._listener.start()
        self._started.wait(_START_SECONDS)
        if "HTTP" not in self._ports:
            self.__exit__(None, None, None)
            raise Internal("the server that was to try the model did not start:\n" + "\n".join(self._said))
        self.url = f"127.0.0.1:{self._ports['HTTP']}"
        # That port is opened before.
        self.grpc_url = f"127.0.0.1:{self._ports['GRPCInference']}" if self._grpc else ""
        self.client = Client(self.url, timeout=_LOAD_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._listener.join(_STOP_SECONDS)
        if self._process.stdout is not None and not self._listener.is_alive():
            self._process.stdout.close()

    @property
    def ended(self) -> bool:
        """The process has died."""
        return self._process.poll() is not None

    @property
    def last_words(self) -> str:
        """The end of the log."""
        return "\n".join(list(self._said)[-20:])

    def memory(self) -> int:
        """Return the bytes of memory that the server and its workers have; 0 where the system does not tell."""
        total = 0
        for number in _family(self._process.pid):
            try:
                lines = Path(f"/proc/{number}/smaps_rollup").read_text().splitlines()
            except OSError:
                continue
            total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
        return total

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._said.append(line)
            if "HTTP" not in self._ports and (found := _STARTED.search(line)):
                self._ports[found[1]] = found[2]
                if found[1] == "HTTP":
                    self._started.set()
        self._started.set()


def _family(ancestor: int) -> list[int]:
    """Return a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(folder.name))
    found = [ancestor]
    for number in found:
        found += children.get(number, ())
    return found
