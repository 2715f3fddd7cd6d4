"""The fork server: a small process with numpy and the worker code imported, from which workers are forked.

A fork is ready in milliseconds and shares the fork server's pages, where a fresh Python would take a tenth of a second
and 25 MB each time. The fork server runs no models and has one thread and one loop. Orders come over a socket, as a
line of JSON with the worker's descriptors attached; exits are reported back, because only the parent process learns how
a process ended.

If the server ends, the fork server notices it (``PR_SET_PDEATHSIG``, and the end of the control socket), and ends the
workers with all their descendants. If the fork server itself is killed, so are its workers (``PR_SET_PDEATHSIG``).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from nerite.core.thread_binding import adopt_thread_count, bind_to_place, one_thread
from nerite.workers.orphans import MARK, OrphanReaper, end_all, orphan_mark

_DEATH_SIGNAL = 1
_NAME = 15
_SUBREAPER = 36
_ENOUGH = 64 * 1024
_DESCRIPTORS = 4
"""Number of descriptors that come with an order."""
_PROGRAMS = {"worker": "nerite.workers.child.worker:main", "helper": "nerite.workers.helper_process:main"}
"""Programs that are imported before the fork. Others are named as ``module:function``."""


def _program(name: str) -> Callable[[int, int], None]:
    """Return the program that a fork is to run."""
    module, _, function = _PROGRAMS.get(name, name).partition(":")
    found: Callable[[int, int], None] = getattr(importlib.import_module(module), function)
    return found


def _prctl(option: int, value: int | bytes) -> None:
    """Call prctl(2), on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


class ForkServerLoop:
    """Forks workers on order, and reports how they end."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._wakeup, wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup.setblocking(False)
        self._signals = wakeup
        self._workers: dict[int, int] = {}
        """Numbers of the orders of the live workers, by process id."""
        self._orphans = OrphanReaper(self._workers)
        self._ends = False
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.set_wakeup_fd(wakeup.fileno())

    def _on_sigterm(self, *_: object) -> None:
        self._ends = True

    def run(self) -> None:
        """Serve until the server ends."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while not self._ends:
                for key, _ in selector.select(self._orphans.pause):
                    if key.fileobj is self._wakeup:
                        self._reap()
                    elif not self._obey():
                        return
                self._orphans.poll()

    def end(self) -> None:
        """End the workers and all their descendants."""
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        end_all()

    def _obey(self) -> bool:
        line, descriptors, _, _ = socket.recv_fds(self._control, _ENOUGH, 8)
        if not line:
            return False
        order = json.loads(line)
        order["mark"] = orphan_mark(os.getpid(), order["order"])
        try:
            if len(descriptors) < _DESCRIPTORS:
                raise OSError(errno.EMFILE, "no descriptors are left for the worker")
            pid = os.fork()
        except OSError as error:
            self._report(order=order["order"], failed=str(error))
        else:
            if pid == 0:
                self._become_worker(order, descriptors)
            self._workers[pid] = order["order"]
            self._report(order=order["order"], pid=pid)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return True

    def _report(self, **report: object) -> None:
        self._control.sendall(json.dumps(report).encode() + b"\n")

    def _reap(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._workers:  # otherwise it was an orphan
                order = self._workers.pop(pid)
                self._report(order=order, exited=os.waitstatus_to_exitcode(status))
                self._orphans.end(pid, orphan_mark(os.getpid(), order))

    def _become_worker(self, order: dict[str, Any], descriptors: list[int]) -> NoReturn:
        """Turn the fork into a worker. Never returns, so that nothing of the fork server's stack runs twice."""
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            # Process group and mark identify the orphans of this worker.
            os.setpgid(0, 0)
            os.environ[MARK] = order["mark"]
            _prctl(_DEATH_SIGNAL, signal.SIGKILL)
            _prctl(_NAME, order["name"].encode())
            self._control.close()
            self._wakeup.close()
            self._signals.close()
            channel, files, output, errors = descriptors
            os.dup2(output, 1)
            os.dup2(errors, 2)
            os.close(output)
            os.close(errors)
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
            if refusal := bind_to_place(order["cores"], order["memory_node"]):
                print(refusal, file=sys.stderr)
            os.environ.update(order["environment"])
            if order["program"] == "worker":
                adopt_thread_count(os.environ)
            if order["interpreter"]:
                os.set_inheritable(channel, True)
                os.set_inheritable(files, True)
                os.execv(
                    order["interpreter"],
                    [order["interpreter"], "-u", "-m", "nerite.workers.child.worker", str(channel), str(files)],
                )
            _program(order["program"])(channel, files)
        except BaseException as error:
            print(f"the worker could not start: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def main(control: int) -> None:
    """Run the fork server on a control socket."""
    _prctl(_DEATH_SIGNAL, signal.SIGTERM)
    _prctl(_SUBREAPER, 1)
    _prctl(_NAME, b"nerite forksrv")
    # Ctrl-C signals every process of the terminal; the server decides what happens then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    fork_server = ForkServerLoop(socket.socket(fileno=control))
    gc.disable()  # what is imported stays
    with one_thread():
        for program in _PROGRAMS:
            _program(program)
        for module in ("triton_python_backend_utils", "nerite.backends.python"):
            importlib.import_module(module)
    # The garbage collector never touches frozen objects, so their pages stay shared with every fork.
    gc.freeze()
    gc.enable()
    with contextlib.suppress(ConnectionError):  # the server is gone
        fork_server.run()
    fork_server.end()


if __name__ == "__main__":
    main(int(sys.argv[1]))
