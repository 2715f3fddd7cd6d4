"""Streams, which execute operations in threads of their own, and events."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue

from cuda.stand_in.enums import Failure, cudaError_t

Work = Callable[[], object]

NON_BLOCKING = 1
DISABLE_TIMING, INTERPROCESS = 2, 4


class Stream:
    """Executes operations in their order, each of which takes ``delay`` seconds, while the caller goes on."""

    def __init__(self, device: int, flags: int, priority: int, delay: float) -> None:
        self.device = device
        self.is_blocking = not flags & NON_BLOCKING
        """Whether it waits for the legacy default stream, and that for it."""
        self.priority = priority
        self.captured: list[Work] | None = None
        """What was submitted since capture began, if it did."""
        self._delay = delay
        self._lock = threading.Lock()
        self._queue: SimpleQueue[tuple[Work, int] | None] = SimpleQueue()
        """What is to be called, and what that counts; the last thing is None."""
        self._submitted = 0
        self._done = 0
        self._failed = False
        self._thread: threading.Thread | None = None

    @property
    def is_idle(self) -> bool:
        """Whether all that was submitted is done."""
        return self._done == self._submitted

    def submit(self, work: Work) -> None:
        """Execute an operation of the GPU when all before it are done; while capturing, record it."""
        if self.captured is not None:
            self.captured.append(work)
        else:
            self._put(partial(self._take_time, work) if self._delay else work)

    def mark(self, work: Work) -> None:
        """Call ``work``, which takes no time, when all that was submitted before is done."""
        if self.captured is not None:
            self.captured.append(work)
        else:
            self._put(work)

    def execute(self, work: Work) -> None:
        """Execute an operation and wait until it is done: at once, if it takes no time and nothing is before it."""
        self._check_not_capturing()
        if self.is_idle and not self._delay:
            work()
        else:
            self.submit(work)
            self.synchronize()

    def synchronize(self) -> None:
        """Wait until all that was submitted is done."""
        self._check_not_capturing()
        if threading.current_thread() is self._thread:
            raise Failure(cudaError_t.cudaErrorNotPermitted)
        if not self.is_idle:
            done = threading.Lock()
            done.acquire()
            self._queue.put((done.release, 0))
            done.acquire()
        if self._failed:
            raise Failure(cudaError_t.cudaErrorLaunchFailure)

    def close(self) -> None:
        """Let the thread end when it has done what was submitted."""
        if self._thread is not None:
            self._queue.put(None)

    def _check_not_capturing(self) -> None:
        if self.captured is not None:
            raise Failure(cudaError_t.cudaErrorStreamCaptureUnsupported)

    def _put(self, work: Work) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
                self._thread.start()
            self._submitted += 1
            self._queue.put((work, 1))

    def _take_time(self, work: Work) -> None:
        if self._delay:
            time.sleep(self._delay)
        work()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            work, counts = item
            try:
                work()
            except BaseException:
                traceback.print_exc()
                self._failed = True
            self._done += counts


class LegacyStream(Stream):
    """The default stream: waits for the blocking streams of its GPU, and is done when a call returns."""

    def __init__(self, device: int, delay: float, streams: Callable[[], Iterable[Stream]]) -> None:
        super().__init__(device, 0, 0, delay)
        self._streams = streams

    @property
    def is_idle(self) -> bool:
        """Whether the streams that it waits for are."""
        return all(each.is_idle for each in self._others())

    def submit(self, work: Work) -> None:
        """Execute an operation of the GPU."""
        self.synchronize()
        self._take_time(work)

    execute = submit

    def mark(self, work: Work) -> None:
        """Call ``work`` when all before it is done."""
        self.synchronize()
        work()

    def synchronize(self) -> None:
        """Wait for the streams that it waits for."""
        for stream in self._others():
            stream.synchronize()

    def _others(self) -> list[Stream]:
        return [each for each in self._streams() if each.is_blocking and each.device == self.device]


_completed = threading.Condition()
_POLL = 0.0005


class Event:
    """A point in a stream. Its two words count how often it was recorded, and up to which time that is done.

    They may be in memory that processes share; then each sees within half a millisecond what another recorded.
    """

    def __init__(self, device: int, flags: int, words: memoryview[int], name: str = "") -> None:
        self.device = device
        self.flags = flags
        self.name = name
        """Of its file, if other processes may open it."""
        self._words = words

    @property
    def is_complete(self) -> bool:
        """Whether all that was recorded is done."""
        return self._words[1] >= self._words[0]

    def record(self, stream: Stream) -> None:
        """Be complete when all that was submitted to ``stream`` is done."""
        with _completed:
            self._words[0] += 1
            time_recorded = self._words[0]
        stream.mark(partial(self._complete, time_recorded))

    def delay(self, stream: Stream) -> None:
        """Let what is submitted to ``stream`` from now on wait for what is recorded now."""
        stream.mark(partial(self._wait, self._words[0]))

    def synchronize(self) -> None:
        """Wait for what is recorded now."""
        self._wait(self._words[0])

    def _complete(self, time_recorded: int) -> None:
        with _completed:
            self._words[1] = max(self._words[1], time_recorded)
            _completed.notify_all()

    def _wait(self, time_recorded: int) -> None:
        with _completed:
            while self._words[1] < time_recorded:
                _completed.wait(_POLL if self.name else None)
