"""What a process has of CUDA: its settings, GPUs, memory, streams, events and graphs. Made by its first call."""

from __future__ import annotations

import atexit
import importlib
import itertools
import os
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from cuda.stand_in import files
from cuda.stand_in.counters import Counters, shared_words
from cuda.stand_in.enums import Failure, cudaError_t
from cuda.stand_in.handles import Exported
from cuda.stand_in.memory import Memory
from cuda.stand_in.streams import INTERPROCESS, Event, LegacyStream, Stream, Work

P = ParamSpec("P")
T = TypeVar("T")

FUNCTIONS: set[str] = set()
"""Names of the functions that can be told to fail."""

_DEFAULT_STREAMS = (0, 1, 2)
"""None, cudaStreamLegacy, cudaStreamPerThread."""


class Process:
    """Methods raise ``Failure``."""

    def __init__(self) -> None:
        folder = os.environ.get("STAND_IN_CUDA")
        self.pid = os.getpid()
        self.folder = Path(folder) if folder else None
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            files.remove(self.folder, self.pid)
            atexit.register(self._leave)
        self.devices = int(os.environ.get("STAND_IN_CUDA_DEVICES", 2))
        self.counters = Counters(self.folder)
        self.memory = Memory(self.folder, int(os.environ.get("STAND_IN_CUDA_MEMORY", 1 << 30)), self.counters)
        self.streams: dict[int, Stream] = {}
        self.events: dict[int, Event] = {}
        self.graphs_alive: dict[int, list[Work]] = {}
        """Graphs and executable graphs, by their handles: what they do."""
        self.launches: list[int] = []
        """Handles of the executable graphs that were launched."""
        self.active: set[int] = set()
        """GPUs that the process has a context on."""
        self.frameworks = bool(os.environ.get("STAND_IN_CUDA_FRAMEWORKS"))
        self._delay = float(os.environ.get("STAND_IN_CUDA_DELAY_MS", 0)) / 1000
        self._default_streams: dict[int, LegacyStream] = {}
        self._handles = itertools.count(0x1000, 0x10)
        self._current = threading.local()
        self._faults = _faults(os.environ.get("STAND_IN_CUDA_FAIL", ""))
        self._calls = {name: itertools.count(1) for name in self._faults}

    def check(self, function: str) -> None:
        """Fail if this call of a function is to fail."""
        if function in self._faults and (error := self._faults[function].get(next(self._calls[function]))):
            raise Failure(error)

    # GPUs.

    @property
    def current(self) -> int:
        """The GPU that is current in this thread."""
        return int(getattr(self._current, "device", 0))

    def require(self, device: int) -> None:
        """Fail if there is no such GPU."""
        if not self.devices:
            raise Failure(cudaError_t.cudaErrorNoDevice)
        if not 0 <= device < self.devices:
            raise Failure(cudaError_t.cudaErrorInvalidDevice)

    def use(self, device: int) -> None:
        """Make a GPU current in this thread."""
        self.require(device)
        self._current.device = device
        self.active.add(device)

    def device(self) -> int:
        """Return the GPU that is current in this thread, with a context on it."""
        self.use(self.current)
        return self.current

    # Streams, events and graphs, by their handles.

    def create_stream(self, flags: int, priority: int) -> int:
        """Return the handle of a new stream on the current GPU."""
        handle = next(self._handles)
        self.streams[handle] = Stream(self.device(), flags, priority, self._delay)
        self.counters.add("streams_created")
        return handle

    def stream(self, handle: Any) -> Stream:
        """Return a stream."""
        number = int(handle or 0)
        if number in _DEFAULT_STREAMS:
            device = self.device()
            if device not in self._default_streams:
                self._default_streams[device] = LegacyStream(device, self._delay, lambda: list(self.streams.values()))
            return self._default_streams[device]
        return _known(self.streams, number)

    def destroy_stream(self, handle: Any) -> None:
        """Destroy a stream, which still does what it was given."""
        _known(self.streams, int(handle or 0)).close()
        del self.streams[int(handle)]
        self.counters.add("streams_destroyed")

    def synchronize(self, device: int | None = None) -> None:
        """Wait for all streams, of all GPUs or of one, but for those that capture."""
        for stream in list(self.streams.values()):
            if stream.captured is None and device in (None, stream.device):
                stream.synchronize()

    def create_event(self, flags: int) -> int:
        """Return the handle of a new event on the current GPU."""
        handle = next(self._handles)
        name, words = "", memoryview(bytearray(16)).cast("q")
        if self.folder is not None and flags & INTERPROCESS:
            name = f"event-{self.pid}-{handle}"
            words = shared_words(self.folder / name, 2, os.O_CREAT)
        self.events[handle] = Event(self.device(), flags, words, name)
        self.counters.add("events_created")
        return handle

    def export_event(self, handle: Any) -> Exported:
        """Return what is to be said of an event that other processes may open."""
        event = self.event(handle)
        if not event.flags & INTERPROCESS:
            raise Failure(cudaError_t.cudaErrorInvalidResourceHandle)
        if not event.name:
            raise Failure(cudaError_t.cudaErrorNotSupported)
        _, pid, number = event.name.split("-")
        return Exported(event.device, int(pid), int(number))

    def open_event(self, exported: Exported) -> int:
        """Return the handle of an event of another process."""
        if self.folder is None:
            raise Failure(cudaError_t.cudaErrorNotSupported)
        if exported.pid == self.pid:
            raise Failure(cudaError_t.cudaErrorDeviceUninitialized)
        name = f"event-{exported.pid}-{exported.number}"
        try:
            words = shared_words(self.folder / name, 2, 0)
        except FileNotFoundError:
            raise Failure(cudaError_t.cudaErrorMapBufferObjectFailed) from None
        handle = next(self._handles)
        self.events[handle] = Event(exported.device, INTERPROCESS, words, name)
        self.counters.add("events_created")
        return handle

    def event(self, handle: Any) -> Event:
        """Return an event."""
        return _known(self.events, int(handle or 0))

    def destroy_event(self, handle: Any) -> None:
        """Destroy an event."""
        event = self.event(handle)
        del self.events[int(handle)]
        if event.name.startswith(f"event-{self.pid}-"):
            assert self.folder is not None
            (self.folder / event.name).unlink(missing_ok=True)
        self.counters.add("events_destroyed")

    def create_graph(self, work: list[Work]) -> int:
        """Return the handle of a new graph, executable or not."""
        handle = next(self._handles)
        self.graphs_alive[handle] = work
        return handle

    def graph(self, handle: Any) -> list[Work]:
        """Return what a graph does."""
        work = self.graphs_alive.get(int(handle or 0))
        if work is None:
            raise Failure(cudaError_t.cudaErrorInvalidValue)
        return work

    def destroy_graph(self, handle: Any) -> None:
        """Destroy a graph, executable or not."""
        self.graph(handle)
        del self.graphs_alive[int(handle)]

    def _leave(self) -> None:
        if self.folder is not None and self.folder.exists() and self.pid == os.getpid():
            files.remove(self.folder, self.pid)


def _known(things: dict[int, T], handle: int) -> T:
    if handle not in things:
        raise Failure(cudaError_t.cudaErrorInvalidResourceHandle)
    return things[handle]


def _faults(text: str) -> dict[str, dict[int, cudaError_t]]:
    """Return the calls that are to fail: of each function, by their numbers. Raises ``ValueError``."""
    faults: dict[str, dict[int, cudaError_t]] = {}
    if text:
        # All functions have to be known, of whichever module this process uses the first.
        for module in ("runtime", "driver"):
            importlib.import_module(f"cuda.bindings.{module}")
    for fault in filter(None, text.split(",")):
        function, _, rest = fault.strip().partition(":")
        nth, _, error = rest.partition(":")
        if function not in FUNCTIONS or not nth.isdecimal() or (error and error not in cudaError_t.__members__):
            raise ValueError(f"STAND_IN_CUDA_FAIL={text}: '{fault}' is not function:nth or function:nth:error")
        faults.setdefault(function, {})[int(nth)] = cudaError_t[error or "cudaErrorUnknown"]
    return faults


# The process that this is.

_lock = threading.Lock()
_processes: list[Process] = []


def process() -> Process:
    """Return what this process has. Fails if it was forked by one that used CUDA."""
    if not _processes:
        with _lock:
            if not _processes:
                _processes.append(Process())
    if _processes[0].pid != os.getpid():
        raise Failure(cudaError_t.cudaErrorInitializationError)
    return _processes[0]


def is_initialized() -> bool:
    """Return whether this process has used CUDA."""
    return bool(_processes)


def returns(results: int) -> Callable[[Callable[P, Any]], Callable[P, tuple[Any, ...]]]:
    """Let a function return as the bindings do: an error, and so many results, which are None if it fails."""

    def decorate(function: Callable[P, Any]) -> Callable[P, tuple[Any, ...]]:
        name = function.__name__
        FUNCTIONS.add(name)

        @wraps(function)
        def call(*arguments: P.args, **keywords: P.kwargs) -> tuple[Any, ...]:
            try:
                process().check(name)
                result = function(*arguments, **keywords)
            except Failure as failure:
                return (failure.error, *[None] * results)
            if results == 1:
                return cudaError_t.cudaSuccess, result
            return (cudaError_t.cudaSuccess, *result) if results else (cudaError_t.cudaSuccess,)

        return call

    return decorate
