"""Stand-ins for what surrounds a unit: callers, a loop that has its own time, a socket's transport."""

from __future__ import annotations

import heapq
import importlib
import itertools
import json
import re
from collections import deque
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError
from nerite.core.failures import Where
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer, TensorSpec
from nerite.dispatch import busy_poll
from nerite.observability.exposition import Page
from nerite.transports.unpacking import result_of
from nerite.workers import helper_process


class Caller:
    """A reply sink that keeps every answer it gets."""

    def __init__(self, answered: Callable[[InferenceRequest], None] | None = None) -> None:
        self.answers: list[tuple[InferenceRequest, InferenceResponse, bool]] = []
        self.answered = answered

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        self.answers.append((request, response, final))
        if self.answered is not None:
            self.answered(request)

    def of(self, request: InferenceRequest) -> list[InferenceResponse]:
        return [response for asked, response, _ in self.answers if asked is request]


def crossed(values: Sequence[Any]) -> list[Any]:
    """Return values as they arrive that were sent to a helper process, or by one."""
    described, buffers = helper_process.describe_call(values)
    arrived = iter(buffers)
    return [
        memoryview(bytearray(next(arrived))) if "bytes" in each else each["value"]
        for each in json.loads(json.dumps(described))
    ]


class Helpers:
    """Helper processes without processes: a call waits until it is told to be made."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, list[Any], Any]] = []
        self.cancelled = 0

    def call(self, function: str, arguments: Sequence[Any], answered: Any, what: str, *, seconds: float) -> Any:
        call = (function, crossed(arguments), answered)
        self.waiting.append(call)
        return SimpleNamespace(cancel=lambda: self._cancel(call))

    def _cancel(self, call: Any) -> None:
        if call in self.waiting:
            self.waiting.remove(call)
            self.cancelled += 1

    def answer_next(self, error: NeriteError | None = None) -> None:
        """Make the call that waits longest, or fail it."""
        function, arguments, answered = self.waiting.pop(0)
        if error is not None:
            answered([], error)
            return
        module, _, name = function.partition(":")
        try:
            returned = getattr(importlib.import_module(module), name)(*arguments)
        except NeriteError as refusal:
            answered([], refusal)
        else:
            answered(crossed(returned if isinstance(returned, tuple) else (returned,)), None)


def header(rows: int = 1, *, key: object = None, columns: int = 1, **fields: Any) -> RequestHeader:
    """A header that validation has seen: one FP32 input of ``rows`` rows."""
    made = RequestHeader("model", "", [TensorSpec("IN", dtypes.FP32, (rows, columns))], **fields)
    made.batch_size = rows
    made.batch_key = key
    return made


def request(
    rows: int = 1,
    *,
    sink: Caller | None = None,
    arrived_ns: int = 0,
    id: str = "",
    value: float = 0.0,
    **fields: Any,
) -> InferenceRequest:
    """A request whose every element is ``value``."""
    data = np.full((rows, 1), value, np.float32)
    return InferenceRequest(header(rows, **fields), [bytearray(data.tobytes())], sink or Caller(), arrived_ns, id)


class Timer:
    """What ``FakeLoop.call_later`` returns."""

    def __init__(self, at_ns: int, call: Callable[[], None]) -> None:
        self.at_ns = at_ns
        self.call = call
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeLoop:
    """As much of an event loop as the deciders' owners use. Its time passes only when a test says so.

    A turn of the loop takes ``TURN_NS``: whoever asks to be called back at once, again and again, is not called for
    ever within one moment.
    """

    TURN_NS = 50_000

    def __init__(self, now_ns: int = 1_000_000_000) -> None:
        self.now_ns = now_ns
        self.turns = 0
        self._ready: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[int, int, Timer]] = []
        self._number = itertools.count()

    def now(self) -> int:
        return self.now_ns

    def rule(self, patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Have its time be that of alarms, and of these modules."""
        patch.setattr(busy_poll, "monotonic_ns", self.now)
        for module in modules:
            patch.setattr(module, "monotonic_ns", self.now)

    def time(self) -> float:
        return self.now_ns / 1e9

    def call_soon(self, call: Callable[..., None], *arguments: Any) -> None:
        self._ready.append(lambda: call(*arguments))

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, call: Callable[..., None], *arguments: Any) -> Timer:
        timer = Timer(self.now_ns + round(delay * 1e9), lambda: call(*arguments))
        heapq.heappush(self._timers, (timer.at_ns, next(self._number), timer))
        return timer

    def pass_time(self, ns: int) -> None:
        """Let time pass without anything being done."""
        self.now_ns += ns

    def settle(self) -> None:
        """Do what is ready, without letting time pass."""
        while self._ready:
            self.turns += 1
            self._ready.popleft()()

    def forget(self) -> None:
        """Drop what is ready."""
        self._ready.clear()

    def advance(self, ns: int) -> None:
        """Let time pass, calling each timer when it is due."""
        end = self.now_ns + ns
        self.settle()
        while (timer := self._next()) is not None and max(timer.at_ns, self.now_ns + self.TURN_NS) <= end:
            heapq.heappop(self._timers)
            self.now_ns = max(timer.at_ns, self.now_ns + self.TURN_NS)
            self.turns += 1
            timer.call()
            self.settle()
        self.now_ns = end

    def _next(self) -> Timer | None:
        while self._timers and self._timers[0][2].cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][2] if self._timers else None

    @property
    def next_timer(self) -> int | None:
        """When the next timer is due."""
        timer = self._next()
        return None if timer is None else timer.at_ns


class FakeTransport:
    """A socket's transport that keeps what is written to it."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.writes = 0
        self.closed = False
        self.aborted = False
        self.reading = True
        self.unread = 0
        """Bytes that the client has not taken, by the test's word."""
        self.half_closes = False
        """As a plain socket does, and TLS does not."""
        self.ended = False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str) -> object:
        return ("127.0.0.1", 5000) if name == "peername" else None

    def can_write_eof(self) -> bool:
        return self.half_closes

    def write_eof(self) -> None:
        assert self.half_closes
        self.ended = True

    def write(self, data: Buffer) -> None:
        assert not self.closed and not self.ended, "a write after close is lost"
        self.writes += 1
        self.written += data

    def writelines(self, parts: Sequence[Buffer]) -> None:
        self.write(b"".join(parts))

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def taken(self) -> bytes:
        """What was written since the last time."""
        data = bytes(self.written)
        self.written.clear()
        return data


class FakeAside:
    """Does what is long when a test says so, in the same thread."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def run(self, where: Where, work: Callable[[], Any], then: Callable[[Any], None]) -> None:
        self.waiting.append(lambda: then(result_of(where, work)))

    def close(self) -> None:
        self.waiting.clear()

    def do(self) -> None:
        """Do what waits."""
        waiting, self.waiting = self.waiting, []
        for each in waiting:
            each()


class Incident:
    """Equal to the text of an internal error, whatever its number, as text or bytes."""

    def __init__(self, before: str = "", after: str = "") -> None:
        number = r"[0-9a-f]{4}-\d+"
        text = rf"internal error, incident {number}: see the server's log"
        self._pattern = re.compile(re.escape(before) + text + re.escape(after))

    def __eq__(self, other: object) -> bool:
        text = other.decode() if isinstance(other, bytes) else other
        return isinstance(text, str) and self._pattern.fullmatch(text) is not None

    __hash__ = None  # type: ignore[assignment]


def written(write: Callable[[Page], None], *, openmetrics: bool = False) -> bytes:
    """Return the page that ``write`` writes."""
    page = Page(openmetrics=openmetrics)
    write(page)
    return b"".join(page.pieces())


def samples(write: Callable[[Page], None]) -> dict[str, dict[str, float]]:
    """Return the values of the counters and gauges that ``write`` writes, by name and labels."""
    found: dict[str, dict[str, float]] = {}
    for line in written(write).decode().splitlines():
        if line.startswith("# TYPE "):
            found[line.split()[2]] = {}
        elif line[0] != "#":
            name, value = line.rsplit(" ", 1)
            name, _, labels = name.removesuffix("}").partition("{")
            found[name][labels] = float(value)
    return found
