"""The server's hold on its worker processes: order one from the template, hear its output, learn of its death."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from nerite.backends.interface import InstanceContext
from nerite.core import process_memory
from nerite.core.errors import Internal
from nerite.execution import messages

_SPAWN_TIMEOUT = 30.0

Output = Callable[[str, str, str], None]
"""Called with worker name, ``stdout`` or ``stderr``, and a line."""


class WorkerProcess:
    """A worker's process: its sockets, its number, and how it ended."""

    def __init__(self, name: str, pid: int, channel: socket.socket, descriptors: socket.socket) -> None:
        self.name = name
        self.pid = pid
        self.channel = channel
        self.descriptors = descriptors
        self.since = time.time()
        """When it began."""
        self.exit_status: int | None = None
        """Minus the signal, as ``subprocess`` has it; None while it lives."""
        self.on_exit: Callable[[], None] | None = None
        """Called once, on the loop's thread, when ``exit_status`` is known."""
        self._reason = ""

    def kill(self, reason: str = "") -> None:
        """End it now. ``reason``, if it was not asked to go, is part of how it ended."""
        if self.exit_status is None:
            self._reason = reason
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def write_stacks(self) -> None:
        """Have it write the stacks of its threads to its standard error. One whose model is open does so at once."""
        if self.exit_status is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, messages.STACKS_SIGNAL)

    @property
    def memory(self) -> int:
        """Bytes that it and its own processes have for themselves now: no files, and no tensors in shared memory."""
        return process_memory.of_family(self.pid)

    @property
    def ending(self) -> str:
        """How it ended, for people."""
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


class Nursery:
    """Starts workers through one template process, which it starts when the first worker is wanted."""

    def __init__(self, loop: asyncio.AbstractEventLoop, output: Output) -> None:
        self._loop = loop
        self._output = output
        self._lock = threading.Lock()
        self._template: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._orders = 0
        self._ordered: dict[int, concurrent.futures.Future[int]] = {}
        self._workers: dict[int, WorkerProcess] = {}
        self._early_exits: dict[int, int] = {}
        self._rest = b""
        self._shims: Path | None = None
        self._lines: set[_Lines] = set()

    def warm_up(self) -> None:
        """Start the template, so that it is there when the first worker is ordered. Blocks for a moment."""
        with self._lock:
            if self._template is None or self._template.poll() is not None:
                self._start_template()

    def spawn(
        self, instance: InstanceContext, interpreter: Path | None, environment: Mapping[str, str]
    ) -> WorkerProcess:
        """Start the worker of an instance and return it. Blocks; for any thread but the loop's. Raises ``Internal``.

        ``interpreter`` is the Python of the model's own environment, if it has one.
        """
        name = instance.name
        channel, theirs = socket.socketpair()
        descriptors, their_descriptors = socket.socketpair()
        output, their_output = os.pipe()
        errors, their_errors = os.pipe()
        done: concurrent.futures.Future[int] = concurrent.futures.Future()
        for stream in (channel, theirs):
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
        order = {
            "name": name,
            "cores": instance.cores,
            "memory_node": instance.memory_node,
            "interpreter": str(interpreter) if interpreter else "",
            "environment": {**environment, **(self._foreign_path() if interpreter else {})},
        }
        try:
            with self._lock:
                if self._template is None or self._template.poll() is not None:
                    self._start_template()
                assert self._control is not None
                self._orders += 1
                self._ordered[self._orders] = done
                line = json.dumps({**order, "order": self._orders}).encode()
                files = [theirs.fileno(), their_descriptors.fileno(), their_output, their_errors]
                socket.send_fds(self._control, [line], files)
            pid = done.result(_SPAWN_TIMEOUT)
        except (OSError, concurrent.futures.TimeoutError) as error:
            for descriptor in (output, errors):
                os.close(descriptor)
            channel.close()
            descriptors.close()
            raise Internal(f"could not start a worker process for '{name}': {error!r}") from error
        finally:
            theirs.close()
            their_descriptors.close()
            os.close(their_output)
            os.close(their_errors)
        worker = WorkerProcess(name, pid, channel, descriptors)
        self._loop.call_soon_threadsafe(self._adopt, worker, output, errors)
        return worker

    def close(self) -> None:
        """End the template, and with it every worker that is left; pass on what they last said."""
        with self._lock:
            if self._control is not None:
                self._loop.remove_reader(self._control)
                self._control.close()
                self._control = None
            if self._template is not None:
                self._template.kill()
                self._template.wait()
                self._template = None
        for lines in tuple(self._lines):
            lines.read()
        if self._shims is not None:
            shutil.rmtree(self._shims)
            self._shims = None

    def _start_template(self) -> None:
        control, theirs = socket.socketpair()
        self._template = subprocess.Popen(
            [sys.executable, "-u", "-m", "nerite.execution.template", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._control = control
        self._loop.call_soon_threadsafe(self._loop.add_reader, control, self._report)

    def _report(self) -> None:
        """Take what the template says: a worker has started, a worker has ended."""
        assert self._control is not None
        data = self._control.recv(65536)
        if not data:
            self._loop.remove_reader(self._control)
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            report: dict[str, Any] = json.loads(line)
            if "order" in report:
                self._ordered.pop(report["order"]).set_result(report["pid"])
            else:
                self._exited(report["exited"], report["status"])

    def _exited(self, pid: int, status: int) -> None:
        worker = self._workers.pop(pid, None)
        if worker is None:
            self._early_exits[pid] = status
            return
        worker.exit_status = status
        if worker.on_exit is not None:
            worker.on_exit()

    def _adopt(self, worker: WorkerProcess, output: int, errors: int) -> None:
        self._workers[worker.pid] = worker
        for descriptor, stream in ((output, "stdout"), (errors, "stderr")):
            _Lines(self._loop, descriptor, worker.name, stream, self._output, self._lines)
        status = self._early_exits.pop(worker.pid, None)
        if status is not None:
            self._exited(worker.pid, status)

    def _foreign_path(self) -> dict[str, str]:
        """Return the environment in which another Python finds our worker, and nothing else of ours."""
        if self._shims is None:
            self._shims = Path(tempfile.mkdtemp(prefix="nerite-"))
            for name in ("nerite", "triton_python_backend_utils"):
                spec = importlib.util.find_spec(name)
                assert spec is not None and spec.origin is not None
                (self._shims / name).symlink_to(Path(spec.origin).parent)
        return {"PYTHONPATH": str(self._shims)}


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
        """Pass on what is there, and close at the end."""
        try:
            data = os.read(self._descriptor, 65536)
        except BlockingIOError:
            return
        *lines, self._rest = (self._rest + data).split(b"\n")
        # A line without an end must not grow for ever, and the last one may have none.
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
