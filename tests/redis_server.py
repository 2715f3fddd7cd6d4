"""A Redis of the test's own: the Debian package's server, on a free port, in a folder that goes with the test."""

from __future__ import annotations

import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hiredis

import tools
from ports import free_ports
from serving import eventually


class Redis:
    """A server that runs. It can be stopped in its tracks, ended, and started again with what it had."""

    def __init__(self, folder: Path, *options: str, tls: bool = False) -> None:
        tools.require("redis-server")
        self._ports = ("--port", "0", "--tls-port") if tls else ("--port",)
        (self.port,) = free_ports(1)
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = ["redis-server", *self._ports, str(self.port), "--bind", "127.0.0.1", "--dir", str(self._folder)]
        with (self._folder / "redis.log").open("ab") as log:
            self._process = subprocess.Popen([*command, "--save", "", *self._options], stdout=log, stderr=log)
        eventually(self._listens, what="redis-server did not start")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, *command: bytes | str) -> object:
        """Send a command; return the reply."""
        return self.ask_as("", *command)

    def ask_as(self, password: str, *command: bytes | str) -> object:
        """Send a command with a password; return the reply."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=10) as connection:
            reader = hiredis.Reader()
            reply: object = False
            for words in [("AUTH", password), command] if password else [command]:
                connection.sendall(hiredis.pack_command(tuple(words)))
                while (reply := reader.gets()) is False:
                    reader.feed(connection.recv(65536))
            return reply

    @property
    def keys(self) -> list[bytes]:
        found = self.ask("KEYS", "*")
        assert isinstance(found, list)
        return sorted(found)

    @property
    def flags(self) -> tuple[str, str]:
        """What a server is started with that uses this."""
        return "--cache-config=redis,host=127.0.0.1", f"--cache-config=redis,port={self.port}"


@contextmanager
def redis_server(folder: Path, *options: str, tls: bool = False) -> Iterator[Redis]:
    """Run a Redis."""
    folder.mkdir(exist_ok=True)
    redis = Redis(folder, *options, tls=tls)
    redis.start()
    try:
        yield redis
    finally:
        redis.stop()
