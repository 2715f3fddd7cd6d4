"""Hosts of a network of the test's own: network namespaces on one bridge, which exist as long as their processes do."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from serving import NERITE

_NETWORK = "10.77.0"
_CLONE_NEWNET = 0x40000000


class Host:
    """A namespace with an address, and the names of all hosts."""

    def __init__(self, name: str, number: int, process: int, switch: Sequence[str]) -> None:
        self.name = name
        self.address = f"{_NETWORK}.{number}"
        self.process = process
        self.within = _within(process)
        """The command that runs another one on this host."""
        self._port = f"port{number}"
        self._switch = switch

    def unplug(self) -> None:
        """Cut the host off, without a word to the others, as a power failure does."""
        _do(*self._switch, "ip", "link", "set", self._port, "down")

    def plug(self) -> None:
        """Connect the host again."""
        _do(*self._switch, "ip", "link", "set", self._port, "up")

    def thread(self, work: Callable[[], None]) -> threading.Thread:
        """Start a thread whose sockets are those of this host."""

        def inside() -> None:
            descriptor = os.open(f"/proc/{self.process}/ns/net", os.O_RDONLY)
            try:
                if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            finally:
                os.close(descriptor)
            work()

        started = threading.Thread(target=inside, daemon=True)
        started.start()
        return started


@contextmanager
def hosts(folder: Path, *names: str, aliases: str = "") -> Iterator[list[Host]]:
    """Make hosts of these names, which know each other. Skip the test where namespaces are not permitted.

    ``aliases``: further lines of the file with the names, ``folder / "hosts"``.
    """
    with ExitStack() as stack:
        switch = _within(stack.enter_context(_namespace()))
        _do(*switch, "ip", "link", "add", "bridge", "type", "bridge")
        _do(*switch, "ip", "link", "set", "bridge", "up")
        file = folder / "hosts"
        file.write_text(f"127.0.0.1 localhost\n{aliases}")
        made = []
        for number, name in enumerate(names, 1):
            host = Host(name, number, stack.enter_context(_namespace()), switch)
            port, inside = f"port{number}", (*host.within, "ip")
            _do(*switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.process))
            _do(*switch, "ip", "link", "set", port, "master", "bridge", "up")
            _do(*inside, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _do(*inside, "link", "set", device, "up")
            _do(*host.within, "mount", "--bind", str(file), "/etc/hosts")
            with file.open("a") as hosts_file:
                hosts_file.write(f"{host.address} {name}\n")
            made.append(host)
        yield made


@contextmanager
def _namespace() -> Iterator[int]:
    """Run a process with a network and mounts of its own; yield its number."""
    if os.geteuid() or any(shutil.which(name) is None for name in ("ip", "nsenter", "unshare", "mount")):
        pytest.skip("network namespaces need root, iproute2 and util-linux")
    command = ["unshare", "--net", "--mount", "sh", "-c", "echo ready; exec sleep infinity"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stderr is not None
    try:
        if process.stdout.readline() != b"ready\n":
            pytest.skip(f"this machine does not permit network namespaces: {process.stderr.read().decode().strip()}")
        yield process.pid
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


def _within(process: int) -> tuple[str, ...]:
    return ("nsenter", f"--net=/proc/{process}/ns/net", f"--mount=/proc/{process}/ns/mnt")


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this machine does not permit '{' '.join(command[2:])}': {done.stderr.strip()}")


def start(host: Host, command: Sequence[str], folder: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start a command of Nerite on a host."""
    path = f"{NERITE.parent}:{os.environ['PATH']}"
    with log.open("wb") as sink:
        return subprocess.Popen(
            [*host.within, "env", f"--chdir={folder}", *command],
            stdout=sink,
            stderr=sink,
            env={**os.environ, "PATH": path},
        )
