"""The GPUs of a server: a thread for each, which makes the blocking calls of CUDA for the loop, and their pools.

The loop never waits for a GPU. Whatever may block, such as a copy, a handle to open or memory to allocate, is done by
the GPU's thread, in the order in which it was asked for, and the result comes back to the loop. A GPU that hangs holds
up the requests with tensors on it, and no others.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeAlias, TypeVar

from nerite.core.background import BackgroundWork
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.core.failures import report
from nerite.core.work_loop import STALL_SECONDS, WorkLoop
from nerite.devices import cuda, exchange
from nerite.devices.cuda import CudaStream
from nerite.devices.pools import DevicePool, PinnedPool

_log = logging.getLogger("nerite.devices")

Result = TypeVar("Result")
Done: TypeAlias = Callable[[Any, NeriteError | None], None]
"""Called on the loop with the result of a job, or with the error that it raised."""

POOL_BYTES: Final = 64 << 20
"""Default size of the pool of each GPU, as in Triton."""
_CLOSING: Final = 5.0
"""Seconds that the end of a server waits for what a GPU's thread still has to do."""
_LONG: Final = 10
"""A call to a GPU may take this many times as long as the event loop may without progress."""
_CHECKS: Final = 4
"""Number of looks at the threads within that time."""


class DeviceThread:
    """Makes the blocking calls of CUDA on one GPU, one after the other. It starts with the first job."""

    def __init__(self, device: int, loop: asyncio.AbstractEventLoop) -> None:
        self._device = device
        self._loop = loop
        self._jobs: queue.SimpleQueue[tuple[Callable[[CudaStream], Any], Done] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._began: float | None = None
        """When the job began that runs now."""

    def do(self, job: Callable[[CudaStream], Result], done: Done) -> None:
        """Run ``job`` with the thread's stream, after all earlier ones; ``done`` is called on the loop."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"gpu {self._device}", daemon=True)
            self._thread.start()
        self._jobs.put((job, done))

    async def call(self, job: Callable[[CudaStream], Result]) -> Result:
        """Return the result of a job. Raises ``NeriteError``."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def done(result: Any, error: NeriteError | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        self.do(job, done)
        return await future

    @property
    def used(self) -> bool:
        """Whether there has been a job."""
        return self._thread is not None

    def busy_for(self) -> float:
        """Return for how many seconds the job that runs now has run; 0 if none does."""
        began = self._began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """End the thread after its jobs. One that hangs is left behind."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(_CLOSING)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            del item
            result, error = None, None
            self._began = time.monotonic()
            try:
                with exchange.stream_on(self._device) as stream:
                    result = job(stream)
            except NeriteError as failed:
                error = failed.without_frames()
            except Exception as unforeseen:
                error = report("device", unforeseen, f"of GPU {self._device}")
            self._began = None
            del job
            try:
                self._loop.call_soon_threadsafe(done, result, error)
            except RuntimeError:  # the loop is closed
                return
            del done, result, error


class ClientMemory:
    """GPU memory that a client has allocated and this process has opened; closed with the last reference to it."""

    __slots__ = ("__weakref__", "_close", "address", "size")

    def __init__(self, address: int, size: int, close: Callable[[], None]) -> None:
        self.address = address
        self.size = size
        """0 if CUDA does not know it."""
        self._close = close

    def __del__(self) -> None:
        self._close()


class Devices:
    """All GPUs that the server may use, by their numbers in CUDA. Used from the loop's thread only."""

    def __init__(
        self,
        numbers: Sequence[int],
        loop: asyncio.AbstractEventLoop,
        pinned_bytes: int = 0,
        pool_bytes: Mapping[int, int] | None = None,
    ) -> None:
        """``pool_bytes`` has the size of the pool for GPUs that are not to have the default one."""
        self.numbers = tuple(numbers)
        self._threads = {number: DeviceThread(number, loop) for number in numbers}
        self._pool_bytes = pool_bytes or {}
        self._pinned_bytes = pinned_bytes
        self.pinned: PinnedPool | None = None
        """Pinned memory, from when a model first runs on a GPU in this process."""
        self._pinning = threading.Lock()
        self._pools: dict[int, DevicePool] = {}
        self._waiting: dict[int, list[Callable[[DevicePool | None], None]]] = {}
        """What waits for a pool that is being opened, by GPU."""
        self._opened: weakref.WeakValueDictionary[tuple[int, bytes], ClientMemory] = weakref.WeakValueDictionary()

    @property
    def usable(self) -> bool:
        """Whether tensors can be on a GPU: there is one, and the bindings are installed."""
        return bool(self.numbers) and cuda.installed()

    def thread(self, device: int) -> DeviceThread:
        """Return the thread of a GPU. Raises ``InvalidArgument`` if there is no such GPU."""
        thread = self._threads.get(device)
        if thread is None:
            there = ", ".join(map(str, self.numbers)) or "none"
            raise InvalidArgument(f"there is no GPU {device}; this server has: {there}")
        return thread

    def pool(self, device: int) -> DevicePool | None:
        """Return the pool of a GPU if it is open."""
        return self._pools.get(device)

    def with_pool(self, device: int, take: Callable[[DevicePool | None], None]) -> None:
        """Call ``take`` with the pool of a GPU, which is opened if it is not; with None if that is not possible."""
        pool, size = self._pools.get(device), self._pool_bytes.get(device, POOL_BYTES)
        if pool is not None or not size or device not in self._threads:
            take(pool)
            return
        if device in self._waiting:
            self._waiting[device].append(take)
            return
        self._waiting[device] = [take]

        def opened(result: DevicePool | None, error: NeriteError | None) -> None:
            if result is None:
                _log.error("no pool of %d bytes on GPU %d: %s", size, device, error and error.message)
            else:
                self._pools[device] = result
            for each in self._waiting.pop(device):
                each(result)

        self._threads[device].do(lambda _: DevicePool(device, size), opened)

    def open_pinned(self) -> PinnedPool | None:
        """Return the pool of pinned memory, which is allocated at the first call. Blocks, on any thread.

        Returns None if it is to have no bytes, or cannot be allocated.
        """
        with self._pinning:
            if self.pinned is None and self._pinned_bytes and self.usable:
                try:
                    self.pinned = PinnedPool(self._pinned_bytes)
                except NeriteError as error:
                    _log.error("no pinned memory pool of %d bytes: %s", self._pinned_bytes, error.message)
                    self._pinned_bytes = 0
            return self.pinned

    async def open_client_memory(self, device: int, handle: bytes) -> ClientMemory:
        """Open the memory that a client has exported; each handle once. Raises ``NeriteError``."""
        key = device, handle
        thread = self.thread(device)
        memory = self._opened.get(key)
        if memory is None:

            def opened(_: CudaStream) -> tuple[int, int]:
                address = cuda.open_handle(handle)
                return address, cuda.allocation_size(address)

            address, size = await thread.call(opened)
            memory = ClientMemory(address, size, lambda: thread.do(lambda _: cuda.close_handle(address), _closed))
            memory = self._opened.setdefault(key, memory)
        return memory

    def waits(self) -> dict[int, float]:
        """Return for how many seconds each GPU in use has not completed a call; 0 if it has completed all."""
        return {number: thread.busy_for() for number, thread in self._threads.items() if thread.used}

    def watch(self, stall_seconds: float) -> BackgroundWork:
        """Return what logs each call to a GPU that takes long, once, and its end. The argument is the flag."""
        limit = stall_seconds * _LONG
        loop = WorkLoop("stalls", "GPUs", stall_seconds=STALL_SECONDS + 3 * limit / _CHECKS)
        return BackgroundWork(loop, partial(self._watch, limit, loop))

    async def _watch(self, limit: float, loop: WorkLoop) -> None:
        reported: set[int] = set()
        while True:
            await asyncio.sleep(limit / _CHECKS)
            with loop.step("calls"):
                self._report_waits(limit, reported)

    def _report_waits(self, limit: float, reported: set[int]) -> None:
        for number, waited in self.waits().items():
            if waited > limit and number not in reported:
                reported.add(number)
                _log.error(
                    "GPU %d has not completed a call for %.1f s: requests with tensors on it wait; see nvidia-smi",
                    *(number, waited),
                )
            elif waited <= limit and number in reported:
                reported.discard(number)
                _log.warning("GPU %d completes calls again", number)

    def close(self) -> None:
        """End the threads, and release the pools. What the process has left on the GPUs goes with it."""
        for thread in self._threads.values():
            thread.close()
        if self.pinned is not None:
            self.pinned.close()


def _closed(_: object, error: NeriteError | None) -> None:
    if error is not None:
        _log.warning("memory of a client could not be closed: %s", error.message)
