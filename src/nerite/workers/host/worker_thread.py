"""Workers that run in a thread of the server's process (``EXECUTION_MODE: thread``), for functions of its own program.

Such a worker has the channel, the jobs and the abilities of a worker process (streams, calls to other models,
cancellation), but no isolation: it shares the interpreter lock with the server, and a crash ends both. It cannot be
killed. Its copies of tensors stay in shared memory of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Final, NoReturn

from nerite.core import model_calls
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.tensor import TensorData
from nerite.workers.child.worker import Worker
from nerite.workers.host.fork_server import ForkedProcess

_SEND_BUFFER: Final = 4 << 20


class WorkerThread(ForkedProcess):
    """A worker in a thread, with the interface of one in a process."""

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        """Start it. Thread-safe. Raises ``OSError``."""
        channel, self._their_channel = _connected()
        descriptors, self._their_descriptors = _connected()
        super().__init__(name, channel, descriptors)
        self.pid = os.getpid()
        self.begun.set_result(None)
        self._loop = loop
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def resume(self) -> None:
        """Do nothing: threads are not stopped by signals."""

    def kill(self, reason: str = "") -> None:
        """End its channel, so that it ends when its model returns."""
        if self.exit_status is None:
            self._reason = reason
            with contextlib.suppress(OSError):
                self._their_channel.shutdown(socket.SHUT_RDWR)

    def write_stacks(self) -> None:
        """Write the stacks of all threads of this process to its standard error."""
        with contextlib.suppress(Exception):  # a program may have replaced it by an object without a descriptor
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)

    @property
    def memory(self) -> int:
        """Return 0: its memory is the server's."""
        return 0

    def _run(self) -> None:
        worker = Worker(self._their_channel, self._their_descriptors, end=self._end, enter=_calls.join)
        _calls.enter(worker.calls, self._loop)
        try:
            with contextlib.suppress(ConnectionError, SystemExit):
                worker.run()
        finally:
            worker.close()
            _calls.leave(worker.calls)
            self._their_channel.close()
            self._their_descriptors.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed already
                self._loop.call_soon_threadsafe(self.exited, 0)

    def _end(self, _status: int) -> NoReturn:
        """End the worker after an exception that is not a model's, on any of its threads."""
        self.kill("it could not go on")
        raise SystemExit


class ThreadCalls:
    """Passes what models in threads ask of the server to the worker that they belong to. Thread-safe.

    A thread that a model has started itself belongs to none; then it is the worker that was started last.
    """

    def __init__(self) -> None:
        self._mine: ContextVar[model_calls.ServerApi] = ContextVar("calls")
        self._known: dict[model_calls.ServerApi, asyncio.AbstractEventLoop] = {}
        """The workers that run, and the loops of their servers."""
        self._without = model_calls.current

    def enter(self, calls: model_calls.ServerApi, loop: asyncio.AbstractEventLoop) -> None:
        """Take the calls of the current thread as those of a worker that has started, of the server on ``loop``."""
        self.join(calls)
        self._known[calls] = loop
        model_calls.current = self

    def join(self, calls: model_calls.ServerApi) -> None:
        """Take the calls of the current thread as those of a worker."""
        self._mine.set(calls)

    def leave(self, calls: model_calls.ServerApi) -> None:
        """Forget a worker that has ended."""
        self._known.pop(calls)
        if not self._known:
            model_calls.current = self._without

    def call(
        self,
        header: RequestHeader,
        data: Sequence[TensorData],
        name: str,
        parent: InferenceRequest | None,
        *,
        decoupled: bool,
    ) -> model_calls.BlsCall:
        """Send a request to another model."""
        return self._api.call(header, data, name, parent, decoupled=decoupled)

    def load(self, model: str, parameters: Mapping[str, str | bytes]) -> None:
        """Load or reload a model."""
        self._api.load(model, parameters)

    def unload(self, model: str, *, dependents: bool) -> None:
        """Unload a model."""
        self._api.unload(model, dependents=dependents)

    def is_ready(self, model: str, version: str) -> bool:
        """Return whether a model is ready."""
        return self._api.is_ready(model, version)

    @property
    def _api(self) -> model_calls.ServerApi:
        mine = self._mine.get(None)
        if mine is not None:
            return mine
        with contextlib.suppress(RuntimeError):
            if asyncio.get_running_loop() in self._known.values():
                return self._without  # a model on the loop of the server would wait for itself
        return next(reversed(self._known), self._without)


_calls: Final = ThreadCalls()


def _connected() -> tuple[socket.socket, socket.socket]:
    here, there = socket.socketpair()
    for each in (here, there):
        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
    return here, there
