"""Pool of helper processes: runs functions that may take long or need much memory outside the server process.

Calls block neither the event loop nor the interpreter, and one that exceeds its time limit ends alone.

    call = helpers.call("nerite.some.module:function", [body, {"any": "JSON"}], answered, "reading the body", seconds=5)

The function gets the arguments, and returns a value or a tuple of values. Those that are bytes cross without encoding
and arrive as memoryviews; all others cross as JSON. ``answered`` is called once on the loop, with the values and None,
or with no values and the error: the exception of the function if that is a ``NeriteError`` with a code of its own, else
``HelperTimeout``, ``Overloaded`` or ``Internal``.

No process is started before the first call, and another one only while all are busy. A process that ends, or is killed
at its time limit or when its call is cancelled, fails only that call, and is replaced when another call needs it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final, TypeAlias

from nerite.backends.interface import InstanceContext
from nerite.core.errors import DeadlineExceeded, Internal, NeriteError, Overloaded
from nerite.core.failures import report
from nerite.core.tensor import Buffer
from nerite.workers import helper_process
from nerite.workers.host.fork_server import ForkedProcess, ForkServer
from nerite.workers.ipc.messages import error_of
from nerite.workers.ipc.shared_memory import ForeignSegments, Segment

Answered: TypeAlias = Callable[[list[Any], NeriteError | None], None]

NAME: Final = "helper"
MAX_WAITING: Final = 256
"""Maximum number of calls that wait for a process; further calls are refused."""
_MAX_PROCESSES: Final = 8
LONG_CALL: Final = 4 * 1024 * 1024
"""Calls with more bytes of arguments count as long. One process is reserved for other calls."""
_SEND_SIZE: Final = 256 * 1024
"""Bytes that are sent to a process in one turn of the loop."""
_HOSTED_SIZE: Final = 1024 * 1024
"""Answers of at least this many bytes are mapped by workers: mapping is cheaper than copying."""
_EXIT_PATIENCE: Final = 1.0
"""Seconds to wait for the exit status of a process after its channel closed."""


class HelperTimeout(DeadlineExceeded):
    """The function exceeded its time limit."""


class HelperError(Exception):
    """A function raised an unexpected exception: the text is its traceback."""


class HelperCall:
    """One call of a function, from ``HelperPool.call`` until it is answered."""

    __slots__ = ("_pool", "answered", "helper", "long", "message", "seconds", "what")

    def __init__(self, pool: HelperPool, message: list[Buffer], answered: Answered, what: str, seconds: float) -> None:
        self._pool = pool
        self.message = message
        self.long = sum(map(len, message)) > LONG_CALL
        self.answered: Answered | None = answered
        self.what = what
        self.seconds = seconds
        self.helper: _Helper | None = None
        """The process that executes it."""

    def cancel(self) -> None:
        """Cancel the call: ``answered`` is not called, and a process that executes it is killed."""
        if self.answered is None:
            return
        self.answered = None
        self.message.clear()
        if self.helper is not None:
            self.helper.process.kill()
        else:
            self._pool.forget(self)

    def answer(self, values: list[Any], error: NeriteError | None = None) -> None:
        """Pass on the answer, once."""
        answered, self.answered = self.answered, None
        self.message.clear()
        if answered is None:
            return
        try:
            answered(values, error)
        except Exception as failure:
            report("helper", failure, f"while handling the answer of {self.what}")


class HelperPool:
    """The processes, and the calls that wait for one. One per server; for the loop's thread only."""

    def __init__(
        self, fork_server: ForkServer, loop: asyncio.AbstractEventLoop, foreign_segments: ForeignSegments, most: int = 0
    ) -> None:
        """``most`` is the number of processes; by default two, or more with more than four processors.

        Large answers become ``foreign_segments``, because parts of them may be tensors for workers.
        """
        self._fork_server = fork_server
        self._loop = loop
        self._foreign_segments = foreign_segments
        self._hosted: dict[int, weakref.ref[Any]] = {}
        """Answers that are foreign segments, by their number."""
        self._most = most or min(max((os.cpu_count() or 1) // 2, 2), _MAX_PROCESSES)
        self._waiting: deque[HelperCall] = deque()
        self.helpers: set[_Helper] = set()
        self._idle: list[_Helper] = []
        self._starting = 0
        self._starter: ThreadPoolExecutor | None = None

    def call(
        self, function: str, arguments: Sequence[Any], answered: Answered, what: str, *, seconds: float
    ) -> HelperCall:
        """Call ``function``, named as ``module:name``, with a time limit of ``seconds``.

        ``what`` describes the work in messages to clients, such as "reading the JSON". Bytes among the arguments must
        not change until the answer.
        """
        described, buffers = helper_process.describe_call(arguments)
        description = json.dumps({"function": function, "arguments": described}).encode()
        message = [helper_process.LENGTH.pack(len(description)) + description, *buffers]
        call = HelperCall(self, message, answered, what, seconds)
        if len(self._waiting) >= MAX_WAITING:
            refusal = Overloaded(f"{what} has to wait for {MAX_WAITING} others: retry later", 1)
            self._loop.call_soon(call.answer, [], refusal)
            return call
        self._waiting.append(call)
        self._assign()
        return call

    def forget(self, call: HelperCall) -> None:
        """Remove a waiting call."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(call)

    def close(self) -> None:
        """End the processes. No more calls are answered."""
        self._most = 0
        self._hosted.clear()
        self._waiting.clear()
        self._idle.clear()
        for each in tuple(self.helpers):
            each.close()
        if self._starter is not None:
            self._starter.shutdown(wait=False, cancel_futures=True)

    def _assign(self) -> None:
        """Assign waiting calls to idle processes; start another process if there are too few."""
        while (call := self._next()) is not None and self._idle:
            self._waiting.remove(call)
            self._idle.pop().begin(call)
        wanted = call is not None and self._starting < len(self._waiting)
        if wanted and len(self.helpers) + self._starting < self._most:
            self._start()

    def _next(self) -> HelperCall | None:
        """Return the next call to begin: any, or one that is not long if the processes for long calls are busy."""
        if sum(each.is_long for each in self.helpers) < max(self._most - 1, 1):
            return self._waiting[0] if self._waiting else None
        return next((call for call in self._waiting if not call.long), None)

    def _start(self) -> None:
        if self._starter is None:
            self._starter = ThreadPoolExecutor(1, "helpers")
        self._starting += 1
        spawn = partial(self._fork_server.spawn, InstanceContext(NAME), None, {}, program="helper")
        self._loop.run_in_executor(self._starter, spawn).add_done_callback(self._started)

    def _started(self, made: asyncio.Future[ForkedProcess]) -> None:
        self._starting -= 1
        if made.cancelled():
            return
        error = made.exception()
        if error is None:
            started = _Helper(made.result(), self._loop, self)
            if self._most:
                self.helpers.add(started)
                self.free(started)
            else:
                started.close()
        elif not self.helpers:  # no process is left that could execute the waiting calls
            refusal = error if isinstance(error, NeriteError) else report("helper", error, "starting a process")
            waiting, self._waiting = self._waiting, deque()
            for call in waiting:
                call.answer([], refusal)

    def memory_of(self, file: int, size: int) -> memoryview:
        """Return the content of a file; it stays mapped while a view on it exists."""
        segment = Segment(file, size)
        array = segment.array(0, size)
        if size >= _HOSTED_SIZE:
            try:
                number = self._foreign_segments.add(os.dup(file), size, segment.base)
            except OSError:  # no descriptor is left: the data is copied for the workers
                return array.data
            # The last view may be released on any thread.
            self._hosted[number] = weakref.ref(array, lambda _: self._loop.call_soon_threadsafe(self._unused, number))
        return array.data

    def _unused(self, number: int) -> None:
        del self._hosted[number]
        self._foreign_segments.remove(number)

    def free(self, free: _Helper) -> None:
        """Return a process to the pool, which can take another call."""
        self._idle.append(free)
        self._assign()

    def gone(self, gone: _Helper) -> None:
        """Remove a process that takes no more calls. Idempotent."""
        self.helpers.discard(gone)
        if gone in self._idle:
            self._idle.remove(gone)
        self._assign()


class _Helper:
    """One process, and its current call."""

    def __init__(self, process: ForkedProcess, loop: asyncio.AbstractEventLoop, pool: HelperPool) -> None:
        self.process = process
        self._loop = loop
        self._pool = pool
        self._channel = process.channel
        self._call: HelperCall | None = None
        self._unsent: deque[memoryview] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._open = True
        process.descriptors.close()
        self._channel.setblocking(False)
        loop.add_reader(self._channel, self._readable)
        process.on_exit = self._ended
        if process.exit_status is not None:
            loop.call_soon(self._ended)

    @property
    def is_long(self) -> bool:
        """Its current call is long."""
        return self._call is not None and self._call.long

    def begin(self, call: HelperCall) -> None:
        """Execute a call within its time limit."""
        call.helper = self
        self._call = call
        self._unsent.extend(memoryview(each) for each in call.message if len(each))
        self._timer = self._loop.call_later(call.seconds, self._time_is_up, call)
        self._loop.add_writer(self._channel, self._writable)

    def close(self) -> None:
        """End the process."""
        self._shut()
        self.process.kill()

    def _shut(self) -> None:
        """Close the channel. Idempotent."""
        if not self._open:
            return
        self._open = False
        if self._timer is not None:
            self._timer.cancel()
        self._unsent.clear()
        self._loop.remove_reader(self._channel)
        self._loop.remove_writer(self._channel)
        self._channel.close()

    def _time_is_up(self, call: HelperCall) -> None:
        self.process.kill()
        call.answer([], HelperTimeout(f"{call.what} took more than {call.seconds:g} s, and was ended"))

    def _writable(self) -> None:
        try:
            sent = self._channel.send(self._unsent[0][:_SEND_SIZE])
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            sent = 0
            self._unsent.clear()  # the process is gone: reading reports the end of the channel
        if self._unsent:
            self._unsent[0] = self._unsent[0][sent:]
            if not self._unsent[0]:
                self._unsent.popleft()
        if not self._unsent:
            self._loop.remove_writer(self._channel)

    def _readable(self) -> None:
        files: list[int] = []
        try:
            message, files, _, _ = socket.recv_fds(self._channel, helper_process.ANSWER.size, 1)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            message = b""
        if not message:
            self._shut()
            if self.process.exit_status is None:
                self.process.kill()
                self._timer = self._loop.call_later(_EXIT_PATIENCE, self._ended)
            return
        if self._timer is not None:
            self._timer.cancel()
        call, self._call = self._call, None
        assert call is not None
        size, described, ends = helper_process.ANSWER.unpack(message)
        if ends:
            self._shut()
            self._pool.gone(self)
        else:
            self._pool.free(self)
        try:
            answer, values = helper_process.read_answer(self._pool.memory_of(files[0], size), described)
        except Exception as error:  # no descriptor or no memory may be left
            call.answer([], report("helper", error, call.what))
            return
        finally:
            for file in files:
                os.close(file)
        if "refused" in answer:
            call.answer([], error_of(answer["refused"]))
        elif "failed" in answer:
            call.answer([], report("helper", HelperError(answer["failed"]), call.what))
        else:
            call.answer(values)

    def _ended(self) -> None:
        """Handle the end of the process. Its call fails, unless it was ended on purpose."""
        if self._timer is not None:
            self._timer.cancel()
        self._shut()
        self._pool.gone(self)
        call, self._call = self._call, None
        if call is not None:
            call.answer([], Internal(f"{call.what} failed, because its helper process is gone: {self.process.ending}"))
