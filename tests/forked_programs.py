"""Programs of ``nerite``, forked from a process that has imported what they need, which is most of what a start costs.

A forked program is a process as any other, with arguments, environment, directory and output of its own. It runs
``nerite.cli.main`` from its beginning, and ends as Python ends. Only its imports have been run before. Tests that are
about starting run the command itself instead, and so does everything with ``NERITE_TESTS_FORK=0``.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, Protocol

NERITE = Path(sys.executable).with_name("nerite")
_IMPORTED = (
    *("functions.command", "cli.command_line", "server_process", "tools.route", "router.process"),
    *("tools.pick", "picker.process", "tools.rollout.command"),
)
_PR_SET_NAME = 15
_LARGEST_ORDER = 1 << 20


class Process(Protocol):
    """What tests need of a process."""

    pid: int
    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def send_signal(self, sig: int) -> None: ...
    def terminate(self) -> None: ...
    def kill(self) -> None: ...


class ForkedProgram:
    """A forked program. Its exit status comes over a pipe, as only its parent can wait for it."""

    def __init__(self, words: Sequence[str], pid: int, status: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._words = words
        self._status = status

    def poll(self) -> int | None:
        """Return its exit status, None while it lives."""
        return self._ended(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status when it has ended. Raises ``subprocess.TimeoutExpired``."""
        status = self._ended(timeout)
        if status is None:
            raise subprocess.TimeoutExpired(self._words, timeout or 0.0)
        return status

    def send_signal(self, sig: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if not selector.select(timeout):
                    return None
            told = os.read(self._status, 16)
            os.close(self._status)
            assert told, "the process that forks programs is gone"
            self.returncode = int(told)
        return self.returncode


class _Forks:
    """The process that forks programs for this one; started with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._control: socket.socket | None = None

    def fork(self, words: Sequence[str], sink: IO[bytes], folder: Path | None, session: bool) -> ForkedProgram:
        place = {"folder": str(folder or Path.cwd()), "session": session}
        order = json.dumps({"words": [*words], "environment": dict(os.environ), **place})
        status, their_status = os.pipe()
        with self._lock:
            if self._control is None:
                self._control = self._start()
            socket.send_fds(self._control, [order.encode()], [sink.fileno(), their_status])
            os.close(their_status)
            pid = self._control.recv(16)
        assert pid, "the process that forks programs is gone"
        return ForkedProgram(words, int(pid), status)

    @staticmethod
    def _start() -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _LARGEST_ORDER)
            process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        atexit.register(_end, ours, process)
        return ours


def _end(control: socket.socket, process: subprocess.Popen[bytes]) -> None:
    control.close()
    process.wait()


_forks = _Forks()


def start_program(
    words: Sequence[str | Path],
    sink: IO[bytes],
    *,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
    session: bool = False,
) -> Process:
    """Start a command that writes to ``sink``; forked if it is ``nerite``, in the environment of this process."""
    command = [str(word) for word in words]
    if command[0] == str(NERITE) and not environment and os.environ.get("NERITE_TESTS_FORK") != "0":
        return _forks.fork(command, sink, folder, session)
    return subprocess.Popen(
        command,
        stdout=sink,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        cwd=folder,
        start_new_session=session,
    )


def _run(control: socket.socket) -> None:
    """Fork programs until nobody is left to order them. In a fork, returns when it is ready to be the program."""
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    pid, status = key.data
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    os.write(status, b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    os.close(status)
                    continue
                data, files, _, _ = socket.recv_fds(control, _LARGEST_ORDER, 2)
                if not data:
                    os._exit(0)
                output, status = files
                pid = os.fork()
                if not pid:
                    _become(json.loads(data), output)
                    return
                os.close(output)
                selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, status))
                control.send(b"%d" % pid)


def _become(order: dict[str, Any], output: int) -> None:
    """Take over what an order says of a program: its files, directory, environment and arguments."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.closerange(3, 1 << 20)
    os.chdir(order["folder"])
    if order["session"]:
        os.setsid()
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = order["words"]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ctypes.CDLL(None).prctl(_PR_SET_NAME, b"nerite", 0, 0, 0)


def _main(control: int) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.path[0] = str(NERITE.parent)
    main = importlib.import_module("nerite.cli.main")
    with importlib.import_module("nerite.core.thread_binding").one_thread():
        for module in _IMPORTED:
            importlib.import_module(f"nerite.{module}")
    _run(socket.socket(fileno=control))
    sys.exit(main.main())


if __name__ == "__main__":
    _main(int(sys.argv[1]))
