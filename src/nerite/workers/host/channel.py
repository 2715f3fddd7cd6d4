"""The server's end of the channel to a worker.

It has two modes. A loader thread talks to a worker that completes a configuration, and waits for the reply (``ask``).
The channel of a worker with models in it belongs to the loop (``attach``), and nothing ever blocks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nerite.core.byte_budget import WORKER_HEADERS
from nerite.core.errors import NeriteError, Unavailable
from nerite.core.execution_observer import ExecutionTimes, context_of
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import EMPTY, InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer
from nerite.devices.devices import Devices
from nerite.observability.custom_metrics import ReportedMetrics
from nerite.observability.log import log as server_log
from nerite.workers.host.bls import BlsServer
from nerite.workers.host.device_memory import WorkerDeviceMemory
from nerite.workers.host.fork_server import ForkedProcess
from nerite.workers.ipc import codec, messages
from nerite.workers.ipc.channel import Channel
from nerite.workers.ipc.shared_memory import TRIM_EVERY, Arena, ForeignSegments

Log = Callable[[str, str, str, str, int, str], None]
"""Called with worker name, level, text, file and line of the log call, and the ids of the requests that it is about."""

Ask = Callable[[dict[str, Any], Callable[[bytes], None]], None]
"""Called with an ASK message of a model, and a function that sends the reply."""

OnResult = Callable[[int, list[InferenceResponse | None], ExecutionTimes, memoryview], None]


class WorkerChannel(Channel):
    """Packs the messages to one worker, and unpacks those from it."""

    def __init__(
        self,
        process: ForkedProcess,
        arena: Arena,
        foreign_segments: ForeignSegments,
        log: Log,
        ask: Ask,
        devices: Devices | None = None,
    ) -> None:
        """``ask`` handles ASK messages, on whichever thread uses the channel.

        With ``devices``, tensors may be on them.
        """
        super().__init__(f"worker '{process.name}'", process.channel, process.descriptors, arena, foreign_segments)
        self._process = process
        self._log = log
        self._ask = ask
        self._devices = None if devices is None else WorkerDeviceMemory(devices, self._send)
        self._responses: codec.Packer[ResponseHeader] = codec.Packer(
            *(arena, self._buffer_leases, self._borrower, WORKER_HEADERS, self._in_foreign_segment),
            device_lender=self._devices,
        )
        self._trim_timer: asyncio.TimerHandle | None = None
        self._results = codec.response_unpacker(self._buffer_leases, self._borrower, self._devices)
        self._calls = codec.request_unpacker(self._buffer_leases, self._borrower, self._devices)
        self._answers: dict[int, Callable[[Any, NeriteError | None], None]] = {}
        """Handlers of replies, by the number of the request."""
        self._last_number = 0
        self._on_result: OnResult | None = None
        self._on_part: Callable[[int, int, InferenceResponse, bool, ExecutionTimes], None] | None = None
        self._on_report: Callable[[int, memoryview], None] = _ignored
        self.metrics = ReportedMetrics()
        """Metrics that the models in the worker count themselves."""
        self._on_end: Callable[[], None] | None = None
        self._bls_server: BlsServer | None = None
        self._sends_contexts = False
        """The worker has asked for the trace contexts of requests."""
        self._verbose = server_log.verbose_level > 0
        """What the worker was told of the verbosity."""
        if self._verbose:
            self._socket.sendall(messages.frame(messages.VERBOSE, count=1))

    def ask(self, kind: int, value: object) -> Any:
        """Send a request and wait for the reply. Not after ``attach``. Raises the worker's error or ``Unavailable``."""
        answers: list[tuple[Any, NeriteError | None]] = []
        try:
            self._socket.sendall(self._question(kind, value, lambda answer, error: answers.append((answer, error))))
            while not answers:
                size = self._socket.recv_into(self._frames.space())
                if size == 0:
                    raise ConnectionError
                for frame in self._frames.received(size):
                    self._take(*frame)
        except ConnectionError:
            raise Unavailable(f"the worker process of '{self._process.name}' ended while loading") from None
        answer, error = answers.pop()
        if error is None:
            return answer
        try:
            raise error
        finally:
            del error  # breaks the cycle with this frame

    def attach(
        self,
        loop: asyncio.AbstractEventLoop,
        on_result: OnResult,
        on_part: Callable[[int, int, InferenceResponse, bool, ExecutionTimes], None],
        on_report: Callable[[int, memoryview], None],
        on_end: Callable[[], None],
        bls_server: BlsServer,
    ) -> None:
        """Hand the channel to the loop.

        ``on_result`` takes the result of a batch, and what follows the records. ``on_part`` takes a single response to
        a request of a batch, whether it is the last, and its times. ``on_report`` takes a report of the
        engine at a seat. ``on_end`` is called once, when the worker's side is closed. ``bls_server`` handles the
        models' calls to other models.
        """
        self._bls_server = bls_server
        self._on_result = on_result
        self._on_part = on_part
        self._on_report = on_report
        self._on_end = on_end
        self._begin(loop)
        server_log.followers.add(self._tell_verbosity)
        self._tell_verbosity()

    def request(self, kind: int, value: object, answered: Callable[[Any, NeriteError | None], None]) -> None:
        """Send a request; ``answered`` takes the reply. Only after ``attach``."""
        self._send(self._question(kind, value, answered))

    def introduce(self, number: int, chain: dict[str, Any]) -> None:
        """Send steps that may follow a batch in the worker; ``execute`` refers to them by the number."""
        self._send(messages.json_frame(messages.FUSED_STEPS, {"number": number, "chain": chain}))

    def packer(self) -> codec.Packer[RequestHeader]:
        """Return the packer for the requests of one instance, which was just loaded."""
        return codec.Packer(
            *(self._arena, self._buffer_leases, self._borrower, WORKER_HEADERS, self._in_foreign_segment),
            device_lender=self._devices,
        )

    def execute(
        self,
        packer: codec.Packer[RequestHeader],
        batch: int,
        requests: Sequence[InferenceRequest],
        fused_steps: int,
        *,
        traced: bool,
    ) -> None:
        """Send a batch, and the number of its fused steps; 0 for none. ``traced``: requests may have trace contexts.

        Raises the error of a request that cannot be packed; then nothing was sent.
        """
        parts: list[Buffer] = []
        packer.begin()
        try:
            contexts = _contexts_frame(batch, requests) if traced and self._sends_contexts else b""
            for request in requests:
                packer.record(request.header, request.id, request.data, parts)
        except BaseException:
            packer.withdraw()
            raise
        if fused_steps:
            parts.append(messages.NUMBER.pack(fused_steps))
        tokens = self._borrower.take_released()
        message = messages.batch_message(messages.EXECUTE, batch, len(requests), tokens, None, parts)
        self._send(contexts + message if contexts else message)

    def send_contexts(self, batches: Iterable[tuple[int, Sequence[InferenceRequest]]]) -> None:
        """Send the trace contexts of the batches that the worker has, and of each batch from now on."""
        self._sends_contexts = True
        for number, requests in batches:
            self._send(_contexts_frame(number, requests))

    def answer(self, call: int, response: InferenceResponse, final: bool) -> None:
        """Send a response to a call of the model; an error in its place if it cannot be packed."""
        parts = codec.sendable_response(self._responses, response)
        tokens = self._borrower.take_released()
        self._send(messages.batch_message(messages.ANSWER, call, final, tokens, None, parts))

    def notify(self, kind: int, batch: int, index: int) -> None:
        """Send a message about one request of a batch: CANCEL, PAUSE or RESUME."""
        self._send(messages.request_frame(kind, batch, index))

    def close(self) -> None:
        """Close the connection. The worker, if it is still alive, exits."""
        if self._trim_timer is not None:
            self._trim_timer.cancel()
        server_log.followers.discard(self._tell_verbosity)
        self._on_end = None
        if self._devices is not None:
            self._devices.close()
        super().close()

    def _lost(self) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()

    def _kill(self, reason: str) -> None:
        """Kill the worker: its requests fail, and it restarts."""
        self._process.kill(reason)

    def _handle(self, kind: int, count: int, body: memoryview) -> None:
        if kind == messages.RESULT:
            self._result(count, body)
        elif kind in (messages.PART, messages.LAST):
            self._part(count, body, kind == messages.LAST)
        elif kind == messages.REPORT:
            self._on_report(count, body)
        elif kind == messages.METRICS:
            self.metrics.reported(*messages.read_json(body))
        elif kind == messages.METRICS_DUE:
            self.metrics.due(messages.read_json(body))
        elif kind == messages.CALL:
            self._call(body)
        elif kind == messages.CANCEL_CALL and self._bls_server is not None:
            self._bls_server.cancel(messages.read_batch(body)[0])
        elif kind == messages.GIVE_UP and self._bls_server is not None:
            self._bls_server.give_up(messages.read_batch(body)[0])
        elif kind == messages.TAKEN and self._bls_server is not None:
            self._bls_server.taken(messages.read_batch(body)[0], count)
        elif kind == messages.ASK:
            self._ask(messages.read_json(body), self._send)
        elif kind == messages.DEVICE_WANTED and self._devices is not None:
            self._devices.wanted(**messages.read_json(body))
        elif kind == messages.DEVICE_COPIES and self._devices is not None:
            self._devices.copied(messages.read_json(body))
        elif kind == messages.LOG:
            self._log(self._process.name, *messages.read_json(body))
        elif kind == messages.DONE:
            self._answers.pop(count)(messages.read_json(body), None)
        elif kind == messages.FAILED:
            self._answers.pop(count)(None, messages.read_error(body))

    def _map(self, **segment: Any) -> None:
        super()._map(**segment)
        if self._loop is not None and self._trim_timer is None:
            self._trim_timer = self._loop.call_later(TRIM_EVERY, self._trim)

    def _question(self, kind: int, value: object, answered: Callable[[Any, NeriteError | None], None]) -> bytes:
        self._last_number = (self._last_number + 1) & 0xFFFF
        self._answers[self._last_number] = answered
        return messages.json_frame(kind, value, self._last_number)

    def _result(self, count: int, body: memoryview) -> None:
        batch, tokens, at = messages.read_batch(body)
        timings, at = messages.read_timings(body, at)
        responses, at = codec.read_responses(self._results, body, at, count)
        # After the records: an output may be a part of an input that is returned with this very message.
        for token in tokens:
            self._buffer_leases.returned(token)
        assert self._on_result is not None
        self._on_result(batch, responses, timings, body[at:])

    def _part(self, index: int, body: memoryview, final: bool) -> None:
        batch, tokens, at = messages.read_batch(body)
        timings, at = messages.read_timings(body, at)
        response, _ = codec.read_response(self._results, body, at)
        for token in tokens:
            self._buffer_leases.returned(token)
        assert self._on_part is not None
        self._on_part(batch, index, EMPTY if response is None else response, final, timings)

    def _call(self, body: memoryview) -> None:
        call, tokens, at = messages.read_batch(body)
        batch, index, decoupled, at = messages.read_caller(body, at)
        header, name, data, _ = self._calls.record(body, at)
        for token in tokens:
            self._buffer_leases.returned(token)
        assert isinstance(header, RequestHeader) and self._bls_server is not None
        self._bls_server.call(call, batch, index, decoupled, header, name, data)

    def _tell_verbosity(self) -> None:
        """Tell the worker whether records of level VERBOSE are written, if that has changed."""
        verbose = server_log.verbose_level > 0
        if verbose != self._verbose:
            self._verbose = verbose
            self._send(messages.frame(messages.VERBOSE, count=verbose))

    def _trim(self) -> None:
        """Make the worker release unused memory, now and every few seconds."""
        assert self._loop is not None
        if not self._unsent:
            self._send(messages.frame(messages.TRIM))
        self._trim_timer = self._loop.call_later(TRIM_EVERY, self._trim)


def _contexts_frame(batch: int, requests: Sequence[InferenceRequest]) -> bytes:
    return messages.contexts_frame(batch, [context_of(request) for request in requests])


def _ignored(_seat: int, _body: memoryview) -> None:
    """Ignore a report: no model is loaded yet."""
