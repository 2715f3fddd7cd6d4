"""The worker's ends of its channel: ``Inbox`` receives, ``Outbox`` sends.

The inbox is read by whichever thread waits for something. Usually that is the main thread, which waits for the next
job. While it runs a job, a model may query whether a request was cancelled or wait for the response of another model,
and a thread of its own may wait until it may send more responses: then these threads read. An event loop whose
coroutines wait for responses reads when the channel is readable. Control messages take effect where they are read. Jobs
are queued for the main thread; while it is busy, another thread is called to run them.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic
from typing import NoReturn, TypeAlias

from nerite.core.byte_budget import WORKER_REPLIES
from nerite.core.errors import Unsupported
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.request import RequestHeader, current_request_ids
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer, TensorData
from nerite.core.text import MAX_RECORD, quoted_text
from nerite.dispatch.busy_poll import BusyPollPolicy
from nerite.workers.child.device_memory import WorkerDevices
from nerite.workers.ipc import codec, messages
from nerite.workers.ipc.messages import Frames
from nerite.workers.ipc.shared_memory import TRIM_STEP, Arena, BufferBorrower, BufferLeases, Segment

Message: TypeAlias = tuple[int, int, memoryview]


class Inbox:
    """The receiving end of a worker's channel."""

    def __init__(
        self,
        channel: socket.socket,
        control: Callable[[int, int, memoryview], bool],
        on_failure: Callable[[Exception], NoReturn],
    ) -> None:
        """``control`` handles a control message, and returns False for a job. Called by any thread.

        ``on_failure`` ends the process: a message could not be handled, and later ones may refer to it.
        """
        self.on_failure = on_failure
        self.forked = False
        """This is the copy in a process that the model has forked."""
        self._channel = channel
        self._poll = select.poll()
        self._poll.register(channel, select.POLLIN)
        self._control = control
        self._frames = Frames()
        self._jobs: deque[Message] = deque()
        self._ended = False
        self._busy = False
        """The main thread runs a job."""
        self._reading = threading.Lock()
        self._turn = threading.Condition()
        self._waiting = 0
        self._loops: dict[AbstractEventLoop, int] = {}
        """Event loops that read, and the number of waiting coroutines of each."""
        self.poll_policy = BusyPollPolicy(0.0)
        self.on_job: Callable[[], object] = lambda: None
        """Called by any thread when a job has come while the main thread is busy."""
        self.on_end: Callable[[], None] = lambda: None
        """Called by any thread when the server is gone."""

    def job(self) -> Message | None:
        """Wait for the next job and return it; None when the server is gone. For the main thread."""
        jobs = self._jobs
        self._busy = False
        if not jobs and self._reading.acquire(blocking=False):  # usually no other thread reads
            try:
                while not jobs and not self._ended:
                    self._take(self._receive(answer=False))
            finally:
                self._reading.release()
            self._released()
        while (message := self.waiting_job()) is None and not self._ended:
            self.wait(self._has_job, answer=False)
        self._busy = True
        return message

    def waiting_job(self) -> Message | None:
        """Return the next job if one is queued. Thread-safe."""
        try:
            return self._jobs.popleft() if self._jobs else None
        except IndexError:  # another thread took it
            return None

    @property
    def idle(self) -> bool:
        """Whether no job is queued."""
        return not self._jobs

    def check_process(self) -> None:
        """Raise ``Unsupported`` in a process that the model has forked: the channel is its parent's."""
        if self.forked:
            raise Unsupported(
                "A process that a model has forked cannot ask the server, or send responses: the server's channel is "
                "that of the process which runs execute. Do it there, in a thread if need be, and pass the results on."
            )

    def poll(self) -> None:
        """Handle the messages that have arrived, without waiting. Thread-safe. Raises as ``check_process``."""
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
        """Wait until a message has made ``ready`` true, or the server is gone. Thread-safe.

        ``answer``: the wait is for a response or reply, not for a job. Raises as ``check_process``.
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
                # Checked after ``_waiting`` was incremented: from then on the reading thread notifies us.
                if self._reading.locked() and not ready():
                    self._turn.wait()
                self._waiting -= 1

    def attend(self, loop: AbstractEventLoop) -> None:
        """Make an event loop read, too, until ``leave``. For the thread of the loop."""
        self._call_others()
        waiting = self._loops.get(loop, 0)
        self._loops[loop] = waiting + 1
        if not waiting:
            loop.add_reader(self._channel, self.poll)

    def leave(self, loop: AbstractEventLoop) -> None:
        """Stop reading on an event loop, after as many calls as ``attend`` had. For the thread of the loop."""
        self._loops[loop] -= 1
        if not self._loops[loop]:
            del self._loops[loop]
            loop.remove_reader(self._channel)

    def _released(self) -> None:
        """Let another thread read."""
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
        if self._busy:
            self._call_others()

    def stop(self) -> None:
        """Stop reading, as if the server were gone. Thread-safe."""
        self._channel.shutdown(socket.SHUT_RD)

    def _call_others(self) -> None:
        """Have queued jobs run that would otherwise wait until the main thread is free."""
        if self._busy and self._jobs:
            self.on_job()

    def _has_job(self) -> bool:
        return bool(self._jobs)

    def _receive(self, answer: bool) -> int:
        """Wait for bytes, busy-polling for a moment if they are likely to come at once; return their number."""
        poll_policy, receive, space = self.poll_policy, self._channel.recv_into, self._frames.space()
        poll_policy.began(monotonic(), answer)
        size = -1
        while size < 0 and poll_policy.polls(monotonic()):
            try:
                size = receive(space, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        if size < 0:
            # A thread that sleeps in ``recv`` would also be woken each time that the server reads what was sent to it.
            self._poll.poll()
            size = receive(space)
        poll_policy.ended(monotonic())
        return size


class Outbox:
    """The sending end of a worker's channel. Thread-safe; every message is sent as a whole."""

    def __init__(self, channel: socket.socket, descriptors: socket.socket) -> None:
        self._channel = channel
        self._descriptors = descriptors
        self.buffer_leases = BufferLeases()
        self.borrower = BufferBorrower()
        arena = self._arena = Arena()
        arena.on_segment.append(self._announce)
        devices = self.devices = WorkerDevices(self.send)
        self._responses: codec.Packer[ResponseHeader] = codec.Packer(
            arena, self.buffer_leases, self.borrower, WORKER_REPLIES, device_lender=devices
        )
        self._requests: codec.Packer[RequestHeader] = codec.Packer(
            arena, self.buffer_leases, self.borrower, WORKER_REPLIES, device_lender=devices
        )
        self._sending = threading.RLock()
        """Held while packing and sending. Reentrant, because the destructor of a model's object may log a line or give
        up a call."""
        self._trimming = threading.Lock()
        self._buffering: set[int] = set()
        """Threads whose messages are buffered until the end of their block."""
        self._buffer: list[bytes] = []
        self.changes = 0
        """How often custom metrics have changed after a report."""
        self._announced = 0
        """The value of ``changes`` that the server knows of."""

    def forked(self) -> None:
        """Close the channel, which is the parent's, in a process that a model has forked.

        The lock is replaced: the thread that holds it may not exist here.
        """
        self._channel.close()
        self._descriptors.close()
        self._sending = threading.RLock()
        self._buffering.clear()

    def close(self) -> None:
        """Release the memory of this process for tensors. What the server has mapped stays."""
        with self._sending:
            self._arena.close()

    def send(self, message: bytes) -> None:
        """Send a complete message."""
        with self._sending:
            self._emit(message)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send what this thread sends in the block as one write at its end, or along with another thread's message."""
        thread = threading.get_ident()
        with self._sending:
            self._buffering.add(thread)
        try:
            yield
        finally:
            with self._sending:
                self._buffering.discard(thread)
                self._flush()

    def result(
        self,
        batch: int,
        responses: list[InferenceResponse | None],
        timings: ExecutionTimes,
        fused_runs: bytes,
        packed: Callable[[], None],
    ) -> None:
        """Send the result of a batch. ``packed`` is called when it is packed; ``responses`` is empty afterwards.

        So the tokens of inputs that the model did not keep travel with the message. ``fused_runs`` follow the records.
        A response that cannot be packed is replaced by an error; the others are sent.
        """
        parts: list[Buffer] = []
        count = len(responses)
        with self._sending:
            if self.changes != self._announced:
                self.announce_changes()
            self._pack(responses, parts)
            packed()
            responses.clear()
            if fused_runs:
                parts.append(fused_runs)
            tokens = self.borrower.take_released()
            self._emit(messages.batch_message(messages.RESULT, batch, count, tokens, timings, parts))

    def _pack(self, responses: Sequence[InferenceResponse | None], parts: list[Buffer]) -> None:
        """Append the records of responses; an error in place of one that cannot be packed."""
        packer, first = self._responses, len(parts)
        packer.begin()
        try:
            for response in responses:
                codec.response_record(packer, response, parts)
        except Exception:
            packer.withdraw()
            del parts[first:]
            for response in responses:
                parts += codec.sendable_response(packer, response)

    def part(self, batch: int, index: int, response: InferenceResponse, final: bool, timings: ExecutionTimes) -> None:
        """Send one response to one request of a batch, and set the end of its ``timings``."""
        kind = messages.LAST if final else messages.PART
        with self._sending:
            if self.changes != self._announced:
                self.announce_changes()
            parts = codec.sendable_response(self._responses, response)
            tokens = self.borrower.take_released()
            timings.end()
            self._emit(messages.batch_message(kind, batch, index, tokens, timings, parts))

    def call(self, number: int, caller: bytes, header: RequestHeader, name: str, data: Sequence[TensorData]) -> None:
        """Send a request to another model. Raises if it cannot be packed; then nothing was sent."""
        parts: list[Buffer] = [caller]
        with self._sending:
            packer = self._requests
            packer.begin()
            try:
                packer.record(header, name, data, parts)
            except BaseException:
                packer.withdraw()
                raise
            tokens = self.borrower.take_released()
            self._emit(messages.batch_message(messages.CALL, number, 1, tokens, None, parts))

    def announce_changes(self) -> None:
        """Announce a report of metrics, before the server learns of what has changed them."""
        with self._sending:
            if self.changes != self._announced:
                self._announced = self.changes
                self._emit(messages.json_frame(messages.METRICS_DUE, self._announced))

    def return_tokens(self) -> None:
        """Return tokens of the server's memory now, without waiting for a message to carry them."""
        with self._sending:
            self._emit(messages.tokens_frame(self.borrower.take_released()))

    def trim(self) -> None:
        """Release memory of tensors that was not used since the last call. Slow, but does not block other threads.

        Does nothing while another thread is doing it.
        """
        if not self._trimming.acquire(blocking=False):
            return
        try:
            steps = self._arena.trim()
            while True:
                with self._sending:
                    if next(steps, steps) is steps:
                        return
                time.sleep(TRIM_STEP)
        finally:
            self._trimming.release()

    def log(self, level: str, text: str, file: str, line: int) -> None:
        """Send a log line to the server, which adds the instance's name and the ids of the requests."""
        text = quoted_text(text, MAX_RECORD)
        try:
            self.send(messages.json_frame(messages.LOG, [level, text, file, line, current_request_ids()]))
        except OSError:  # the server is gone, or this is a process that the model has forked
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode(errors="backslashreplace"))

    def _announce(self, segment: Segment) -> None:
        # Called with ``_sending`` held. In this order, so that the server's loop never waits for a descriptor that is
        # still to be sent.
        socket.send_fds(self._descriptors, [b"."], [segment.descriptor])
        self._emit(messages.segment_frame(self._arena.segments.index(segment), segment.size))

    def _emit(self, message: bytes) -> None:
        """Send a message, after all that was packed before it. Called with ``_sending`` held."""
        if not self._buffering:
            self._channel.sendall(message)
            return
        self._buffer.append(message)
        if threading.get_ident() not in self._buffering:
            self._flush()

    def _flush(self) -> None:
        buffered, self._buffer = self._buffer, []
        if buffered:
            self._channel.sendall(b"".join(buffered))
