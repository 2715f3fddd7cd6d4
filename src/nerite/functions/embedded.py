"""A server in a thread of a program: the whole server, with or without ports."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Final, TypeVar

import uvloop

from nerite.config.options import LogOptions, ServerOptions
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.core.failures import report
from nerite.core.request import CancelReason, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer
from nerite.observability.log import log
from nerite.server import InferenceServer
from nerite.server_process import ServerProcess

_T = TypeVar("_T")
_MOST_WAITING: Final = 64
"""Responses of a stream that wait for its reader; beyond that the model waits."""


class EmbeddedServer:
    """Runs a server in a thread of its own. Thread-safe."""

    def __init__(self, options: ServerOptions) -> None:
        # An embedded server has no log of stalls: what holds the interpreter lock is the program itself.
        self._options = replace(options, stall_seconds=0.0, stay_awake_microseconds=0)
        self._log = LogOverride(options.log)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop
        self._process: ServerProcess
        self._began: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.server: InferenceServer
        """The server, once it has started. For its loop's thread."""
        self.ports: Mapping[str, int] = {}
        """Numbers of the open ports by their names."""

    def start(self) -> None:
        """Start, and return when the models are loaded and the ports are open. Raises ``NeriteError``."""
        if self._thread is not None:
            raise InvalidArgument("this server was started already: create another one")
        self._log.apply()
        self._thread = threading.Thread(target=self._run, name="nerite", daemon=True)
        self._thread.start()
        self._began.result()

    def stop(self) -> None:
        """Stop gracefully, and return when all is closed. Idempotent."""
        if self.alive:
            self._loop.call_soon_threadsafe(self._process.request_stop)
        if self._thread is not None:
            self._thread.join()
        self._log.restore()

    def run(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine of the server on its loop; return its result. Raises ``Unavailable`` if it does not run."""
        return self.begin(work).result()

    def begin(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> concurrent.futures.Future[_T]:
        """Start a coroutine of the server on its loop. Raises ``Unavailable`` if it does not run."""
        self._check()
        return asyncio.run_coroutine_threadsafe(work(), self._loop)

    def do(self, act: Callable[[], object]) -> None:
        """Have the loop's thread call a function soon. Raises ``Unavailable`` if it does not run."""
        self._check()
        self._loop.call_soon_threadsafe(act)

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread is not None and self._thread.is_alive()

    def _check(self) -> None:
        if not self.alive:
            raise Unavailable("the server does not run: start it, as in: with nerite.Server(function) as server")

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._loop = runner.get_loop()
                status = runner.run(self._serve())
            if not self._began.done():
                self._began.set_exception(Unavailable(f"the server ended with status {status} before it was ready"))
        except BaseException as error:
            if self._began.done():
                report("loop", error, "of an embedded server")
            else:
                self._began.set_exception(error)

    async def _serve(self) -> int:
        self._process = ServerProcess(self._options, self._started)
        return await self._process.serve()

    def _started(self, server: InferenceServer, ports: Mapping[str, int]) -> None:
        self.server, self.ports = server, dict(ports)
        self._began.set_result(None)

    # Inference

    def infer(self, header: RequestHeader, data: Sequence[Buffer], request_id: str = "") -> InferenceCall:
        """Send a request whose model answers once or several times; return the call that has its responses."""
        call = InferenceCall(self, header, data, request_id)
        self.do(call.send)
        return call


class LogOverride:
    """The settings of an embedded server for the process's only log; the last server to stop restores the program's."""

    _applied: ClassVar[list[LogOverride]] = []
    _before: ClassVar[LogOptions]

    def __init__(self, options: LogOptions) -> None:
        self._options = options

    def apply(self) -> None:
        """Apply the settings. Raises ``OSError`` if the log file cannot be opened."""
        before = log.options
        log.configure(self._options)
        if not LogOverride._applied:
            LogOverride._before = before
        LogOverride._applied.append(self)

    def restore(self) -> None:
        """Restore the settings of the program, unless another server has some. Idempotent."""
        if self in LogOverride._applied:
            LogOverride._applied.remove(self)
            if not LogOverride._applied:
                log.configure(LogOverride._before)


class InferenceCall:
    """A request from the program, and its responses. The sink of the request. One thread, or one task, reads."""

    def __init__(self, server: EmbeddedServer, header: RequestHeader, data: Sequence[Buffer], request_id: str) -> None:
        self._server = server
        self._request = InferenceRequest(header, data, self, time.monotonic_ns(), request_id)
        self._responses: SimpleQueue[tuple[InferenceResponse, bool]] = SimpleQueue()
        self._arrived: Callable[[], object] = lambda: None
        self._paused = False
        self._over = False

    def send(self) -> None:
        """Submit the request. On the loop's thread."""
        self._server.server.infer(self._request, "")

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Take a response from the server."""
        self._responses.put((response, final))
        if not final and not self._paused and self._responses.qsize() >= _MOST_WAITING:
            self._paused = True
            request.pause(True)
        self._arrived()

    def cancel(self) -> None:
        """Cancel the request, if it has not ended. Thread-safe."""
        if not self._over:
            self._server.do(lambda: self._request.cancel(CancelReason.CANCELLED))

    def abandon(self) -> None:
        """Cancel the request because nobody reads its responses. Thread-safe; never raises."""
        with suppress(NeriteError, RuntimeError):  # the server has ended
            self.cancel()

    def next(self, timeout: float | None = None) -> tuple[InferenceResponse, bool]:
        """Wait for the next response; return it, and whether it is the last. Raises ``TimeoutError``."""
        try:
            return self._taken(*self._responses.get(timeout=timeout))
        except Empty:
            raise TimeoutError(f"no response within {timeout:g} s") from None

    async def next_async(self) -> tuple[InferenceResponse, bool]:
        """Wait for the next response on the caller's event loop."""
        loop = asyncio.get_running_loop()
        arrived = asyncio.Event()
        self._arrived = lambda: loop.call_soon_threadsafe(arrived.set)
        while self._responses.empty():
            await arrived.wait()
            arrived.clear()
        return self._taken(*self._responses.get_nowait())

    def _taken(self, response: InferenceResponse, final: bool) -> tuple[InferenceResponse, bool]:
        self._over = final
        if self._paused and not final and self._responses.qsize() < _MOST_WAITING // 2:
            self._server.do(self._resume)
        return response, final

    def _resume(self) -> None:
        if self._paused:
            self._paused = False
            self._request.pause(False)

    def all(self, timeout: float | None = None) -> Iterator[InferenceResponse]:
        """Yield the responses with outputs as they arrive. Raises the error of a response. Closing cancels the rest."""
        try:
            final = False
            while not final:
                response, final = self.next(timeout)
                if _has_outputs(response):
                    yield response
        finally:
            self.cancel()

    async def all_async(self) -> AsyncIterator[InferenceResponse]:
        """Yield the responses with outputs, on the caller's event loop. As ``all``."""
        try:
            final = False
            while not final:
                response, final = await self.next_async()
                if _has_outputs(response):
                    yield response
        finally:
            self.cancel()


def _has_outputs(response: InferenceResponse) -> bool:
    """Return whether a response has outputs. Raises its error."""
    if response.error is not None:
        raise response.error
    return not response.empty


def only(responses: list[InferenceResponse]) -> InferenceResponse:
    """Return the only response to a request. Raises ``InvalidArgument`` if a stream has sent none or several."""
    if len(responses) != 1:
        raise InvalidArgument(f"the model sent {len(responses)} responses to this request: use stream() for it")
    return responses[0]
