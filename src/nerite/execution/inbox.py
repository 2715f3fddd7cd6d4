"""What the server sends to a worker, read by whichever of its threads waits for something.

Mostly that is the main thread, which waits for the next job. While it is at work, a model may want to know whether a
request was cancelled, or wait for the answer of another model, and a thread of its own may wait until more responses
are wanted: then these read. An event loop whose coroutines wait for answers reads when there is something. Control
messages take effect where they are read. Jobs are kept for the main thread, in order; while it is at work, somebody
else is called to do them.
"""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable
from typing import NoReturn, TypeAlias

from nerite.core.errors import Unsupported
from nerite.execution.messages import Frames
from nerite.execution.vigil import Vigil

Message: TypeAlias = tuple[int, int, memoryview]
_now = time.monotonic


class Inbox:
    """The receiving end of a worker's channel."""

    def __init__(
        self,
        channel: socket.socket,
        control: Callable[[int, int, memoryview], bool],
        on_failure: Callable[[Exception], NoReturn],
    ) -> None:
        """``control`` handles a message that is no job, and returns whether it was one. Called by any thread.

        ``on_failure`` ends the process: a message could not be handled, and what follows may refer to it.
        """
        self.on_failure = on_failure
        self.forked = False
        """Whether this is the copy that a process has which the model has forked."""
        self._channel = channel
        self._coming = select.poll()
        self._coming.register(channel, select.POLLIN)
        self._control = control
        self._frames = Frames()
        self._jobs: deque[Message] = deque()
        self._ended = False
        self._at_work = False
        """The main thread does a job."""
        self._reading = threading.Lock()
        self._turn = threading.Condition()
        self._waiting = 0
        self._loops: dict[AbstractEventLoop, int] = {}
        """Event loops that read, and for how many who wait."""
        self.vigil = Vigil(0.0)
        self.on_job: Callable[[], object] = lambda: None
        """Called when a job has come while the main thread is at another, by any thread."""
        self.on_end: Callable[[], None] = lambda: None
        """Called when the server is gone, by any thread."""

    def job(self) -> Message | None:
        """Wait for the next job and return it; None when the server is gone. For the main thread."""
        jobs = self._jobs
        self._at_work = False
        if not jobs and self._reading.acquire(blocking=False):  # mostly nobody else does
            try:
                while not jobs and not self._ended:
                    self._take(self._receive(answer=False))
            finally:
                self._reading.release()
            self._released()
        while (message := self.waiting_job()) is None and not self._ended:
            self.wait(self._has_job, answer=False)
        self._at_work = True
        return message

    def waiting_job(self) -> Message | None:
        """Return the next job if one is there. For any thread."""
        try:
            return self._jobs.popleft() if self._jobs else None
        except IndexError:  # another thread was quicker
            return None

    @property
    def idle(self) -> bool:
        """Whether no job waits."""
        return not self._jobs

    def check_process(self) -> None:
        """Raise ``Unsupported`` in a process that the model has forked: what it reads and sends is its parent's."""
        if self.forked:
            raise Unsupported(
                "A process that a model has forked cannot ask the server, or send responses: the server's channel is "
                "that of the process which runs execute. Do it there, in a thread if need be, and pass the results on."
            )

    def look(self) -> None:
        """Take what has come, without waiting. For any thread. Raises as ``check_process``."""
        self.check_process()
        if self._reading.acquire(blocking=False):
            try:
                self._take(self._channel.recv_into(self._frames.space(), 0, socket.MSG_DONTWAIT))
            except BlockingIOError:
                pass
            finally:
                self._reading.release()
            self._released()

    def wait(self, ready: Callable[[], bool], *, answer: bool = True) -> None:
        """Wait until something that the server says has made ``ready`` true, or the server is gone. For any thread.

        ``answer``: it is the answer to something, rather than a job. Raises as ``check_process``.
        """
        self.check_process()
        self._call_others()
        while not ready() and not self._ended:
            if self._reading.acquire(blocking=False):
                try:
                    while not ready() and not self._ended:
                        self._take(self._receive(answer))
                finally:
                    self._reading.release()
                self._released()
                continue
            with self._turn:
                self._waiting += 1
                # Looked at after the number is up: whoever reads tells us from now on.
                if self._reading.locked() and not ready():
                    self._turn.wait()
                self._waiting -= 1

    def attend(self, loop: AbstractEventLoop) -> None:
        """Have an event loop read, too, until ``leave``. For the thread of the loop."""
        self._call_others()
        waiting = self._loops.get(loop, 0)
        self._loops[loop] = waiting + 1
        if not waiting:
            loop.add_reader(self._channel, self.look)

    def leave(self, loop: AbstractEventLoop) -> None:
        """Have an event loop read no more, once all who said ``attend`` have said this. For the thread of the loop."""
        self._loops[loop] -= 1
        if not self._loops[loop]:
            del self._loops[loop]
            loop.remove_reader(self._channel)

    def _released(self) -> None:
        """Let somebody else read."""
        if self._waiting:
            with self._turn:
                self._turn.notify_all()

    def _take(self, size: int) -> None:
        if size == 0:
            self._ended = True
            self.on_end()
            self._released()
            return
        try:
            for message in self._frames.received(size):
                if not self._control(*message):
                    self._jobs.append(message)
        except Exception as error:
            self.on_failure(error)
        self._released()
        if self._at_work:
            self._call_others()

    def stop(self) -> None:
        """Read no more: it is as if the server were gone. For any thread."""
        self._channel.shutdown(socket.SHUT_RD)

    def _call_others(self) -> None:
        """Have jobs done that would have to wait until the main thread, or another, is done with one."""
        if self._at_work and self._jobs:
            self.on_job()

    def _has_job(self) -> bool:
        return bool(self._jobs)

    def _receive(self, answer: bool) -> int:
        """Wait for bytes, awake for a moment if they are likely to come at once; return how many came."""
        vigil, receive, space = self.vigil, self._channel.recv_into, self._frames.space()
        vigil.rest(_now(), answer)
        size = -1
        while size < 0 and vigil.awake(_now()):
            try:
                size = receive(space, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        if size < 0:
            # Who sleeps in ``recv`` is woken, too, each time that the server reads what was sent to it, for nothing.
            self._coming.poll()
            size = receive(space)
        vigil.stir(_now())
        return size
