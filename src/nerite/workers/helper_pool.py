"""Calls of functions in processes beside the server (``helper``): what may take long, or much memory.

They hold up neither the event loop nor the interpreter, and one that takes too long ends alone.

    call = helpers.call("nerite.some.module:function", [body, {"any": "JSON"}], answered, "reading the body", seconds=5)

The function gets the arguments, and returns a value or a tuple of values. Those that are bytes cross as they are; they
arrive as memoryviews. All others cross as JSON. ``answered`` is called once on the loop, with the values and None, or
with none and the error: what the function raised if that is a ``NeriteError`` that has its code, else
``HelperTimeout``, ``Overloaded`` or ``Internal``.

There are no processes until the first call, and more only while all are busy. A process that ends, or is killed
at its time limit or when its call is cancelled, fails only that call, and is replaced when the next one needs it.
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
from nerite.core.errors import Internal, NeriteError, Overloaded, TooLate
from nerite.core.failures import report
from nerite.core.tensor import Buffer
from nerite.workers import helper_process
from nerite.workers.host.fork_server import ForkedProcess, ForkServer
from nerite.workers.ipc.messages import error_of
from nerite.workers.ipc.shared_memory import ForeignSegments, Segment

Answered: TypeAlias = Callable[[list[Any], NeriteError | None], None]

NAME: Final = "helper"
MOST_WAITING: Final = 256
"""Calls that wait for a process. What comes then is refused."""
_MOST_PROCESSES: Final = 8
_LONG: Final = 4 * 1024 * 1024
"""Bytes of arguments from which on a call takes long. One process is left for the others."""
_SEND_SIZE: Final = 256 * 1024
"""Bytes that are passed to a process in one turn of the loop."""
_HOSTED_SIZE: Final = 1024 * 1024
"""Bytes of an answer from which on workers map it: copying less takes less."""
_EXIT_PATIENCE: Final = 1.0
"""Seconds to wait for the news of how a process ended, after its channel closed."""


class HelperTimeout(TooLate):
    """The function took more than the seconds that it was given."""


class HelperError(Exception):
    """A function raised what it was not meant to raise: the text is its traceback."""


class HelperCall:
    """One call of a function, from ``HelperPool.call`` until it is answered."""

    __slots__ = ("_pool", "answered", "helper", "long", "message", "seconds", "what")

    def __init__(self, pool: HelperPool, message: list[Buffer], answered: Answered, what: str, seconds: float) -> None:
        self._pool = pool
        self.message = message
        self.long = sum(map(len, message)) > _LONG
        self.answered: Answered | None = answered
        self.what = what
        self.seconds = seconds
        self.helper: _Helper | None = None
        """The process that has it."""

    def cancel(self) -> None:
        """Cancel the call: ``answered`` is not called, and a process that is at work on it is killed."""
        if self.answered is None:
            return
        self.answered = None
        self.message.clear()
        if self.helper is not None:
            self.helper.process.kill()
        else:
            self._pool.forget(self)

    def answer(self, values: list[Any], error: NeriteError | None = None) -> None:
        """Pass the answer on, if that has not been done."""
        answered, self.answered = self.answered, None
        self.message.clear()
        if answered is None:
            return
        try:
            answered(values, error)
        except Exception as failure:
            report("helper", failure, f"in what came of {self.what}")


class HelperPool:
    """The processes, and the calls that wait for one. One for the server; for the loop's thread only."""

    def __init__(
        self, fork_server: ForkServer, loop: asyncio.AbstractEventLoop, foreign_segments: ForeignSegments, most: int = 0
    ) -> None:
        """``most`` processes; by default two, or more where there are more than four processors.

        Large answers are ``foreign_segments``, as parts of them may be tensors for workers.
        """
        self._fork_server = fork_server
        self._loop = loop
        self._foreign_segments = foreign_segments
        self._hosted: dict[int, weakref.ref[Any]] = {}
        """The answers that are guests, by their number."""
        self._most = most or min(max((os.cpu_count() or 1) // 2, 2), _MOST_PROCESSES)
        self._waiting: deque[HelperCall] = deque()
        self._helpers: set[_Helper] = set()
        self._idle: list[_Helper] = []
        self._starting = 0
        self._starter: ThreadPoolExecutor | None = None

    def call(
        self, function: str, arguments: Sequence[Any], answered: Answered, what: str, *, seconds: float
    ) -> HelperCall:
        """Have ``function``, named as ``module:name``, called; it may run for so many ``seconds``.

        ``what`` it does is part of messages to clients, such as "reading the JSON". Bytes among the arguments must not
        change until the answer.
        """
        described, buffers = helper_process.describe_call(arguments)
        description = json.dumps({"function": function, "arguments": described}).encode()
        message = [helper_process.LENGTH.pack(len(description)) + description, *buffers]
        call = HelperCall(self, message, answered, what, seconds)
        if len(self._waiting) >= MOST_WAITING:
            refusal = Overloaded(f"{what} has to wait for {MOST_WAITING} others: come again", 1)
            self._loop.call_soon(call.answer, [], refusal)
            return call
        self._waiting.append(call)
        self._look()
        return call

    def forget(self, call: HelperCall) -> None:
        """Take a call out that waits."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(call)

    def close(self) -> None:
        """End the processes. Calls are not answered any more."""
        self._most = 0
        self._hosted.clear()
        self._waiting.clear()
        self._idle.clear()
        for each in tuple(self._helpers):
            each.close()
        if self._starter is not None:
            self._starter.shutdown(wait=False, cancel_futures=True)

    def _look(self) -> None:
        """Give calls that wait to processes that are idle; start another where there are too few."""
        while (call := self._next()) is not None and self._idle:
            self._waiting.remove(call)
            self._idle.pop().begin(call)
        wanted = call is not None and self._starting < len(self._waiting)
        if wanted and len(self._helpers) + self._starting < self._most:
            self._start()

    def _next(self) -> HelperCall | None:
        """Return the call whose turn it is, if that may begin which takes long."""
        if sum(each.is_long for each in self._helpers) < max(self._most - 1, 1):
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
                self._helpers.add(started)
                self.free(started)
            else:
                started.close()
        elif not self._helpers:  # nothing else would take what waits
            refusal = error if isinstance(error, NeriteError) else report("helper", error, "starting a process")
            waiting, self._waiting = self._waiting, deque()
            for call in waiting:
                call.answer([], refusal)

    def memory_of(self, file: int, size: int) -> memoryview:
        """Return what is in a file; it stays as long as a view on it."""
        segment = Segment(file, size)
        array = segment.array(0, size)
        if size >= _HOSTED_SIZE:
            try:
                number = self._foreign_segments.add(os.dup(file), size, segment.base)
            except OSError:  # no descriptor is left: what lies there is copied for the workers
                return array.data
            # The last view may end in any thread.
            self._hosted[number] = weakref.ref(array, lambda _: self._loop.call_soon_threadsafe(self._unused, number))
        return array.data

    def _unused(self, number: int) -> None:
        del self._hosted[number]
        self._foreign_segments.remove(number)

    def free(self, free: _Helper) -> None:
        """Take note that a process can take another call."""
        self._idle.append(free)
        self._look()

    def gone(self, gone: _Helper) -> None:
        """Take note that a process takes no more calls. It may be said twice."""
        self._helpers.discard(gone)
        if gone in self._idle:
            self._idle.remove(gone)
        self._look()


class _Helper:
    """One process, and the call that it has."""

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
        """It has a call that takes long."""
        return self._call is not None and self._call.long

    def begin(self, call: HelperCall) -> None:
        """Have a call answered, in the seconds that it has."""
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
        """Close the channel."""
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
            self._unsent.clear()  # the process is gone: the end of the channel is read, too
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
        """Take note that the process is gone. Its call fails, unless it was ended on purpose."""
        if self._timer is not None:
            self._timer.cancel()
        self._shut()
        self._pool.gone(self)
        call, self._call = self._call, None
        if call is not None:
            call.answer(
                [], Internal(f"{call.what} failed, because the process that did it is gone: {self.process.ending}")
            )
