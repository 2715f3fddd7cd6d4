"""Starts worker processes through the fork server, reads their output, and reports how they end."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from nerite.backends.interface import InstanceContext
from nerite.core.errors import Internal
from nerite.core.failures import report, system_error
from nerite.core.memory import memory_of_family
from nerite.workers.ipc import messages
from nerite.workers.orphans import end_those_of

_SPAWN_TIMEOUT = 30.0
_END_PATIENCE = 10.0
"""Seconds that the fork server has to end its workers and their orphans."""

Output = Callable[[str, str, str], None]
"""Called with worker name, ``stdout`` or ``stderr``, and a line."""


class ForkedProcess:
    """A worker's process: its sockets, process id and exit status."""

    def __init__(self, name: str, channel: socket.socket, descriptors: socket.socket) -> None:
        self.name = name
        self.pid = 0
        """0 until the process has started."""
        self.begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        """Done when the process has started; with an ``OSError`` if it cannot."""
        self.channel = channel
        self.descriptors = descriptors
        self.since = time.time()
        """Time of the start."""
        self.exit_status: int | None = None
        """Negative for a signal, as in ``subprocess``; None while it lives."""
        self.on_exit: Callable[[], None] | None = None
        """Called once, on the loop's thread, when ``exit_status`` is known."""
        self._reason = ""

    def resume(self) -> None:
        """Continue the process if it is stopped, so that it can handle messages before it ends."""
        if self.pid and self.exit_status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

    def kill(self, reason: str = "") -> None:
        """Kill it. ``reason``, if it was unexpected, becomes part of ``ending``."""
        if self.pid and self.exit_status is None:
            self._reason = reason
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def exited(self, status: int) -> None:
        """Record its exit status."""
        self.exit_status = status
        if self.on_exit is not None:
            try:
                self.on_exit()
            except Exception as error:  # else the reports about other processes that came with this one would be lost
                report("loop", error, f"while the end of '{self.name}' was handled")

    def write_stacks(self) -> None:
        """Make it write the stacks of its threads to its standard error. With an open model, it does so at once."""
        if self.exit_status is None:
            with contextlib.suppress(ProcessLookupError):
                _signal_main_thread(self.pid, messages.STACKS_SIGNAL)
                _signal_main_thread(self.pid, messages.THREADS_SIGNAL)

    @property
    def memory(self) -> int:
        """Private memory of it and its descendants in bytes: without files, and without tensors in shared memory."""
        return memory_of_family(self.pid)

    @property
    def ending(self) -> str:
        """How it ended, as text for logs and errors."""
        status = self.exit_status
        if self._reason:
            return f"{self._reason}, and it was killed"
        if status is None:
            return "its channel broke"
        if status >= 0:
            return f"it exited with status {status}"
        with contextlib.suppress(ValueError):
            name = signal.Signals(-status).name
            hint = " (out of memory?)" if name == "SIGKILL" else ""
            return f"it was ended by {name}{hint}"
        return f"it was ended by signal {-status}"


class _ForkServerProcess:
    """The fork server process: forks workers on order, and reports what happens to them. They do not outlive it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Start it. Thread-safe. Raises ``OSError``."""
        self._loop = loop
        self._sending = threading.Lock()
        self._orders = 0
        self._workers: dict[int, ForkedProcess] = {}
        """Workers that have not ended, by the number of their order."""
        self._rest = b""
        with ExitStack() as on_failure, ExitStack() as theirs:
            self._control, control = _connected(on_failure, theirs)
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "nerite.workers.child.fork_server", str(control.fileno())],
                pass_fds=[control.fileno()],
                stdin=subprocess.DEVNULL,
            )
            on_failure.pop_all()
        self._control.setblocking(False)
        loop.call_soon_threadsafe(loop.add_reader, self._control, self._report)

    @property
    def ended(self) -> bool:
        """It takes no more orders."""
        return self._control.fileno() < 0 or self._process.poll() is not None

    def order(self, worker: ForkedProcess, order: Mapping[str, Any], files: Sequence[int]) -> None:
        """Order a worker. Thread-safe. Raises ``OSError`` if the fork server takes no order."""
        with self._sending:
            self._orders += 1
            number = self._orders
            self._workers[number] = worker
            try:
                socket.send_fds(self._control, [json.dumps({**order, "order": number}).encode()], files)
            except OSError:
                self._workers.pop(number, None)
                raise

    def forget(self, worker: ForkedProcess) -> None:
        """Stop waiting for a worker. If it starts later, it finds its channel closed, and ends."""
        for number in [number for number, each in self._workers.copy().items() if each is worker]:
            self._workers.pop(number, None)

    def close(self) -> None:
        """End it, and with it all remaining workers. Blocks for some seconds if it does not end by itself."""
        self._hang_up()
        self._process.send_signal(signal.SIGCONT)
        # The end of the control socket makes it end its workers.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_PATIENCE)
        self._process.kill()
        self._process.wait()
        for worker in self._workers.copy().values():
            if not worker.begun.done():
                worker.begun.set_exception(ConnectionError("the server is shutting down"))

    def _hang_up(self) -> None:
        if self._control.fileno() >= 0:
            self._loop.remove_reader(self._control)
            with self._sending:
                self._control.close()

    def _report(self) -> None:
        """Handle reports: a worker has started or could not start; a worker has ended."""
        try:
            data = self._control.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lost()
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            told: dict[str, Any] = json.loads(line)
            number = told["order"]
            worker = self._workers.get(number)
            if worker is None:  # it was forgotten
                continue
            if "pid" in told:
                worker.pid = told["pid"]
                worker.begun.set_result(None)
                continue
            del self._workers[number]
            if "failed" in told:
                worker.begun.set_exception(OSError(told["failed"]))
            else:
                worker.exited(told["exited"])

    def _lost(self) -> None:
        """Handle the end of the fork server: nothing else reports how its workers end, or ends their orphans."""
        self._hang_up()
        workers, self._workers = self._workers, {}
        pids = [worker.pid for worker in workers.values() if worker.pid]
        for worker in workers.values():
            if worker.pid:
                worker.kill(f"the process that it was started by (pid {self._process.pid}) has ended")
                worker.exited(-signal.SIGKILL)
            else:
                worker.begun.set_exception(ConnectionError("the process that starts workers has ended"))
        self._loop.run_in_executor(None, end_those_of, self._process.pid, pids)


class ForkServer:
    """Starts workers through one fork server process, which is started with the first worker."""

    def __init__(self, loop: asyncio.AbstractEventLoop, output: Output) -> None:
        self._loop = loop
        self._output = output
        self._lock = threading.Lock()
        self._fork_server: _ForkServerProcess | None = None
        self._closed = False
        self._shims: Path | None = None
        self._lines: set[_Lines] = set()

    def spawn(
        self,
        instance: InstanceContext,
        interpreter: Path | None,
        environment: Mapping[str, str],
        *,
        program: str = "worker",
    ) -> ForkedProcess:
        """Start the worker of an instance and return it. Blocks; for any thread but the loop's. Raises ``Internal``.

        ``interpreter`` is the Python of the model's own environment, if it has one. ``program``: see
        ``workers.child.fork_server``.
        """
        name = instance.name
        with ExitStack() as on_failure, ExitStack() as theirs:
            try:
                order = {
                    "name": name,
                    "cores": instance.cores,
                    "memory_node": instance.memory_node,
                    "interpreter": str(interpreter) if interpreter else "",
                    "program": program,
                    "environment": {**environment, **(self._foreign_path() if interpreter else {})},
                }
                channel, their_channel = _connected(on_failure, theirs)
                descriptors, their_descriptors = _connected(on_failure, theirs)
                output, their_output = _pipe(on_failure, theirs)
                errors, their_errors = _pipe(on_failure, theirs)
                for stream in (channel, their_channel):
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
                worker = ForkedProcess(name, channel, descriptors)
                fork_server = self._running_fork_server()
                files = [their_channel.fileno(), their_descriptors.fileno(), their_output, their_errors]
                fork_server.order(worker, order, files)
                _wait_for(worker, fork_server)
            except OSError as error:
                raise Internal(f"could not start a worker process for '{name}': {system_error(error)}") from error
            on_failure.pop_all()
        self._loop.call_soon_threadsafe(self._listen, worker.name, output, errors)
        return worker

    def start(self) -> None:
        """Start the fork server process before the first worker needs it. Thread-safe. Raises ``Internal``."""
        try:
            self._running_fork_server()
        except OSError as error:
            raise Internal(f"could not start the process that starts workers: {system_error(error)}") from error

    def close(self) -> None:
        """End the fork server, and with it all remaining workers; pass on their last output."""
        with self._lock:
            self._closed = True
            fork_server, self._fork_server = self._fork_server, None
        if fork_server is not None:
            fork_server.close()
        for lines in tuple(self._lines):
            lines.read()
        if self._shims is not None:
            shutil.rmtree(self._shims)
            self._shims = None

    def _running_fork_server(self) -> _ForkServerProcess:
        """Return the running fork server process; a new one if the last has ended. Raises ``OSError``."""
        with self._lock:
            if self._closed:
                raise ConnectionError("the server is shutting down")
            if self._fork_server is None or self._fork_server.ended:
                self._fork_server = _ForkServerProcess(self._loop)
            return self._fork_server

    def _listen(self, name: str, output: int, errors: int) -> None:
        for descriptor, stream in ((output, "stdout"), (errors, "stderr")):
            _Lines(self._loop, descriptor, name, stream, self._output, self._lines)

    def _foreign_path(self) -> dict[str, str]:
        """Return an environment in which another Python finds the worker code, and nothing else of ours.

        Raises ``OSError``.
        """
        with self._lock:
            if self._shims is None:
                folder = Path(tempfile.mkdtemp(prefix="nerite-"))
                try:
                    for name in ("nerite", "triton_python_backend_utils", "c_python_backend_utils"):
                        spec = importlib.util.find_spec(name)
                        assert spec is not None and spec.origin is not None
                        (folder / name).symlink_to(Path(spec.origin).parent)
                except OSError:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
                self._shims = folder
            return {"PYTHONPATH": str(self._shims)}


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal that no other thread of the process can take, such as one of OpenBLAS."""
    send = getattr(ctypes.CDLL(None), "tgkill", None)
    if send is None:  # macOS, or an older C library
        os.kill(pid, number)
    else:
        send(pid, pid, number)


def _wait_for(worker: ForkedProcess, fork_server: _ForkServerProcess) -> None:
    """Return when a worker has started. Raises ``OSError`` if it does not start."""
    try:
        worker.begun.result(_SPAWN_TIMEOUT)
    except TimeoutError:
        fork_server.forget(worker)
        raise TimeoutError(
            f"the process that starts workers has not answered for {_SPAWN_TIMEOUT:g} s: is it stopped?"
        ) from None


def _connected(ours: ExitStack, theirs: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Return a pair of sockets, each closed with its stack."""
    here, there = socket.socketpair()
    return ours.enter_context(here), theirs.enter_context(there)


def _pipe(ours: ExitStack, theirs: ExitStack) -> tuple[int, int]:
    """Return the descriptors of a pipe, each closed with its stack."""
    here, there = os.pipe()
    ours.callback(os.close, here)
    theirs.callback(os.close, there)
    return here, there


class _Lines:
    """Reads a worker's output and passes it on line by line."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        descriptor: int,
        name: str,
        stream: str,
        output: Output,
        open_ones: set[_Lines],
    ) -> None:
        self._loop = loop
        self._descriptor = descriptor
        self._name = name
        self._stream = stream
        self._output = output
        self._rest = b""
        self._open_ones = open_ones
        open_ones.add(self)
        os.set_blocking(descriptor, False)
        loop.add_reader(descriptor, self.read)

    def read(self) -> None:
        """Pass on the available lines, and close at the end."""
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A line without an end must not grow without bound, and the last one may have none.
        if not data or len(self._rest) > 65536:
            lines.append(self._rest)
            self._rest = b""
        for line in lines:
            if line:
                self._output(self._name, self._stream, line.decode(errors="replace"))
        if not data:
            self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._open_ones.discard(self)
