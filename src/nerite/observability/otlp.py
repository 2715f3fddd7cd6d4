"""Sends traces to an OpenTelemetry collector as OTLP spans, in batches and on a thread of its own. No request waits.

Traces wait in a bounded queue. If it is full they are dropped, and the log says how many. The thread encodes a few
traces at a time and rests in between, because the server's loop has to wait while it holds the interpreter lock.

The messages are encoded by hand, because every traced request becomes several spans with a dozen events, and objects of
the protobuf package take three times as long. Events, ids and times have fixed sizes and are packed; what repeats is
encoded once. Field numbers are those of ``opentelemetry/proto/trace/v1/trace.proto``.
"""

from __future__ import annotations

import gzip
import http.client
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from random import uniform
from typing import Any, Final
from urllib.parse import urlsplit

from nerite import __version__
from nerite.config.options import OpenTelemetryOptions
from nerite.core.byte_budget import TRACES, Memo
from nerite.core.execution_observer import ExecutionTimes
from nerite.observability.log import log
from nerite.observability.trace import COMPUTED, RECEIVED, SENT, USUAL_SPANS, OtelTrace
from nerite.wire.fields import nested_field, number_field, varint

# Spans: Triton's names, attributes and events.

SERVER: Final = 2
INTERNAL: Final = 1
"""Kinds of spans."""
_ERROR: Final = 2
_MAX_SENDS: Final = 128
"""Maximum number of send events of a span: those of the first responses of a long stream."""
_CHILD: Final = struct.Struct("<2s16s2s8s2s8scQcQ").pack
_ROOT: Final = struct.Struct("<2s16s2s8scQcQ").pack
_LINK: Final = struct.Struct("<2s2s16s2s8s").pack
_time: Final = struct.Struct("<Q").pack


def _event(name: str) -> bytes:
    """Return an event without its time, which follows."""
    encoded = nested_field(2, name.encode())
    return b"\x5a" + varint(len(encoded) + 9) + encoded + b"\x09"


_NAMES: Final = ("REQUEST_START", "QUEUE_START", "REQUEST_END", "INFER_RESPONSE_COMPLETE", *COMPUTED)
_EVENTS: Final = {name: _event(name) for name in (*_NAMES, *sum((*RECEIVED.values(), *SENT.values()), ()))}


@lru_cache(256)
def _key(name: str) -> bytes:
    return nested_field(1, name.encode())


def attribute(field: int, name: str, value: Any) -> bytes:
    """Encode an attribute as an entry of a list with this field number. Unsupported types are encoded as text."""
    if isinstance(value, int):
        encoded = b"\x18" + varint(value & 0xFFFFFFFFFFFFFFFF)
    else:
        encoded = nested_field(1, str(value).encode(errors="replace"))
    return nested_field(field, _key(name) + nested_field(2, encoded))


def attributes(field: int, values: Mapping[str, Any]) -> bytes:
    """Encode attributes."""
    return b"".join([attribute(field, name, value) for name, value in values.items()])


def _header(name: str, kind: int, values: Mapping[str, Any]) -> bytes:
    """Return name, kind and attributes of a span."""
    return nested_field(5, name.encode(errors="replace")) + number_field(6, kind) + attributes(9, values)


_REQUEST: Final = _header("InferRequest", SERVER, {})


def span(
    header: bytes, trace_id: int, span_id: int, parent: int, start: int, end: int, fields: Iterable[bytes]
) -> bytes:
    """Return a span as an entry of a list. ``fields`` are more of its fields."""
    trace, own = trace_id.to_bytes(16), span_id.to_bytes(8)
    if parent:
        ids = _CHILD(
            b"\x0a\x10", trace, b"\x12\x08", own, b"\x22\x08", parent.to_bytes(8), b"\x39", start, b"\x41", end
        )
    else:
        ids = _ROOT(b"\x0a\x10", trace, b"\x12\x08", own, b"\x39", start, b"\x41", end)
    return nested_field(2, b"".join((ids, header, *fields)))


def export_request(resource: Mapping[str, str], scope: Mapping[str, str], spans: bytes) -> bytes:
    """Return the whole message. ``spans`` are encoded spans, concatenated."""
    named = nested_field(1, nested_field(1, scope["name"].encode()) + nested_field(2, scope["version"].encode()))
    return nested_field(1, nested_field(1, attributes(1, resource)) + nested_field(2, named + spans))


class SpanEncoder:
    """Encodes traces, and keeps the parts of spans that repeat. For one thread."""

    def __init__(self) -> None:
        self._headers: Memo[object, bytes] = Memo()
        """Headers by model name and version, and by the number of requests of a batch."""

    def spans_of(self, trace: OtelTrace, epoch: int) -> bytes:
        """Return the spans of a trace. ``epoch`` is the time of day at which the clock of its times was 0."""
        state = nested_field(3, trace.state.encode()) if trace.state else b""
        status = state
        if trace.error is not None:
            text = trace.error.message.encode(errors="replace")
            status += nested_field(15, nested_field(2, text) + number_field(3, _ERROR))
        spans = [] if trace.parent else [_request_span(trace, epoch, status)]
        spans.append(self._model_span(trace, epoch, status))
        for number, (_, timings) in enumerate(trace.executions):
            if timings is not None:
                spans.append(self._compute_span(trace, epoch, number, timings, status if timings.failed else state))
        return b"".join(spans)

    def _model_span(self, trace: OtelTrace, epoch: int, status: bytes) -> bytes:
        """Return the span of the model's work for the request."""
        name = trace.header.model_name
        header = self._headers.get((name, trace.version))
        if header is None:
            values = {"triton.model_name": name, "triton.model_version": trace.version}
            header = self._remember((name, trace.version), _header(name, INTERNAL, values))
        return span(
            header,
            trace.trace_id,
            trace.model_span,
            trace.parent_span if trace.parent else trace.span_id,
            epoch + trace.began_ns,
            epoch + max(trace.ended_ns, trace.final_ns),
            (
                attribute(9, "triton.trace_id", trace.number),
                attribute(9, "triton.trace_parent_id", trace.parent),
                attribute(9, "triton.request_id", trace.id) if trace.id else b"",
                _EVENTS["REQUEST_START"],
                _time(epoch + trace.began_ns),
                *[_EVENTS["QUEUE_START"] + _time(epoch + queued_ns) for queued_ns, _ in trace.executions],
                _EVENTS["REQUEST_END"] + _time(epoch + trace.ended_ns) if trace.ended_ns else b"",
                status,
            ),
        )

    def _compute_span(self, trace: OtelTrace, epoch: int, number: int, timings: ExecutionTimes, status: bytes) -> bytes:
        """Return the span of an execution. If other requests share it, it is linked to that of the first one."""
        own = trace.compute_span(number)
        header = self._headers.get(timings.requests)
        if header is None:
            values = {"nerite.batch.requests": timings.requests}
            header = self._remember(timings.requests, _header("compute", INTERNAL, values))
        end = timings.ended_ns
        if trace.last_part is not None and number == len(trace.executions) - 1:
            end = max(end, trace.last_part.ended_ns)  # it continued to respond
        leader = timings.leader
        link = b""
        if leader is not None and leader.span_id != own:
            link = _LINK(
                b"\x6a\x1c", b"\x0a\x10", leader.trace_id.to_bytes(16), b"\x12\x08", leader.span_id.to_bytes(8)
            )
        times = (timings.started_ns, timings.inputs_ready_ns, timings.computed_ns, timings.ended_ns)
        return span(
            header,
            trace.trace_id,
            own,
            trace.model_span,
            epoch + timings.started_ns,
            epoch + end,
            (*[_EVENTS[name] + _time(epoch + at) for name, at in zip(COMPUTED, times, strict=True)], status, link),
        )

    def _remember(self, key: object, header: bytes) -> bytes:
        TRACES.put(self._headers, key, header, len(header))
        return header


def _request_span(trace: OtelTrace, epoch: int, status: bytes) -> bytes:
    """Return the span of the request as the client sees it."""
    fields: list[bytes] = [attributes(9, trace.attributes)] if trace.attributes else []
    end = trace.final_ns
    if trace.protocol:
        started, received = RECEIVED[trace.protocol]
        fields += (_EVENTS[started], _time(epoch + trace.first_ns), _EVENTS[received], _time(epoch + trace.received_ns))
    if trace.answered_ns:
        fields += (_EVENTS["INFER_RESPONSE_COMPLETE"], _time(epoch + trace.answered_ns))
    if trace.sends:
        end = max(end, trace.sends[-1])
        events = [_EVENTS[name] for name in SENT[trace.protocol]]
        fields += [events[number & 1] + _time(epoch + at) for number, at in enumerate(trace.sends[:_MAX_SENDS])]
        if len(trace.sends) > _MAX_SENDS:
            fields.append(number_field(12, len(trace.sends) - _MAX_SENDS))
    fields.append(status)
    start = epoch + trace.first_ns
    return span(_REQUEST, trace.trace_id, trace.span_id, trace.parent_span, start, epoch + end, fields)


# The collector, and the thread that sends to it.

_RETRYABLE: Final = frozenset((429, 502, 503, 504))
"""Statuses after which a message may be sent again, by the specification of OTLP."""
_MAX_REASON: Final = 200
"""Bytes of a collector's error message that the log quotes."""
_RETRY_DELAYS: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
_MAX_RETRY_DELAY: Final = 60.0
_JITTER: Final = 0.2
"""Relative jitter of the delays, so that servers that lost the same collector do not retry at the same time."""


class CollectorUnreachable(Exception):
    """The collector did not accept a message.

    ``retryable``: it may accept the message later, after ``retry_after`` seconds if it said so.
    """

    def __init__(self, reason: str, *, retryable: bool, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.retryable = retryable
        self.retry_after = retry_after


class Collector:
    """Connection to a collector: sends messages over HTTP, one at a time. For one thread."""

    def __init__(self, options: OpenTelemetryOptions) -> None:
        self._options = options
        url = urlsplit(options.url if "://" in options.url else f"http://{options.url}")
        self._secure = url.scheme == "https"
        self._host = url.netloc.rpartition("@")[2]
        self._path = (url.path or "/") + (f"?{url.query}" if url.query else "")
        self._headers = {
            "Content-Type": "application/x-protobuf",
            "User-Agent": f"nerite/{__version__}",
            **options.headers,
        }
        if options.compress:
            self._headers["Content-Encoding"] = "gzip"
        self._connection: http.client.HTTPConnection | None = None

    def send(self, body: bytes) -> None:
        """Send a message. Raises ``CollectorUnreachable``."""
        if self._options.compress:
            body = gzip.compress(body, 6)
        reused = self._connection is not None
        try:
            status, retry_after, text = self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if reused:  # the collector may have closed the idle connection
                self.send(body)
                return
            raise CollectorUnreachable(str(error) or type(error).__name__, retryable=True) from None
        if status >= 300:
            reason = f"the collector answers {status} {text}".rstrip()
            raise CollectorUnreachable(reason, retryable=status in _RETRYABLE, retry_after=retry_after)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, body: bytes) -> tuple[int, float | None, str]:
        """Return the status, the value of ``Retry-After``, and the text of an error."""
        connection = self._connection = self._connection or self._connect()
        connection.request("POST", self._path, body, self._headers)
        response = connection.getresponse()
        content = response.read()
        retry_after = response.getheader("Retry-After", "")
        text = content[:_MAX_REASON].decode(errors="replace") if response.status >= 300 else ""
        return response.status, float(retry_after) if retry_after.isdecimal() else None, text

    def _connect(self) -> http.client.HTTPConnection:
        if not self._secure:
            return http.client.HTTPConnection(self._host, timeout=self._options.timeout)
        context = ssl.create_default_context(cafile=self._options.certificate or None)
        return http.client.HTTPSConnection(self._host, timeout=self._options.timeout, context=context)


def retry_delay(failures: int, wanted: float | None) -> float | None:
    """Return the seconds until a message is sent again after it failed ``failures`` times; None to give up.

    ``wanted`` is the delay that the collector asks for.
    """
    if failures > len(_RETRY_DELAYS):
        return None
    if wanted is not None:
        return min(wanted, _MAX_RETRY_DELAY)
    return _RETRY_DELAYS[failures - 1] * uniform(1 - _JITTER, 1 + _JITTER)


FLUSH_TIMEOUT: Final = 5.0
"""Seconds to send the remaining traces when the server stops."""
_SLICE: Final = 16
"""Traces encoded between rests, in about 0.25 ms for which the loop may wait. Fewer would wake it more often."""
_REST: Final = 31
"""Ratio of rest to work: the thread uses at most a thirty-second part of a processor."""
LOG_INTERVAL: Final = 60.0
"""Seconds between two log lines about dropped spans."""
_RESOURCE: Final = {
    "telemetry.sdk.language": "python",
    "telemetry.sdk.name": "nerite",
    "telemetry.sdk.version": __version__,
}
_SCOPE: Final = {"name": "nerite", "version": __version__}


class Exporter:
    """Queue of traces, and the thread that sends them. The thread starts with the first trace."""

    def __init__(self, options: OpenTelemetryOptions, sent: Callable[[OtelTrace, int], None]) -> None:
        """``sent`` is called on the thread with sent traces, and the time of day at which the clock of traces was 0.

        Of many traces of one model that took about as long, it gets one.
        """
        self._options = options
        self._sent = sent
        self._collector = Collector(options)
        self._encoder = SpanEncoder()
        self._resource = {**_RESOURCE, **options.resource}
        self._max_queue = options.bsp_max_queue_size
        self._batch = max(1, min(options.bsp_max_export_batch_size, options.bsp_max_queue_size))
        self._delay = options.bsp_schedule_delay / 1000
        self._queue: deque[OtelTrace] = deque()
        # Counts of spans, each written by one thread only: the first two by the loop's, the others by the exporter's.
        self._entered = 0
        self._overflown = 0
        self._left = 0
        self._lost = 0
        self._logged = 0
        """Number of dropped spans that were logged."""
        self._logged_at = -LOG_INTERVAL
        self._reason = ""
        """Last error of the collector that was not logged."""
        self._rested_at = 0.0
        """Processor time of the thread at its last rest, in seconds."""
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """Number of spans that were not and will not be sent."""
        return self._overflown + self._lost

    def has_room(self) -> bool:
        """Return whether the queue has room for a new trace; if not, count its spans as dropped.

        A request whose trace would be dropped in the end is thus not traced. For the loop's thread.
        """
        waiting = self._entered - self._left
        if not waiting or waiting + USUAL_SPANS <= self._max_queue:
            return True
        self._overflown += USUAL_SPANS
        return False

    def add(self, trace: OtelTrace) -> None:
        """Queue a complete trace. For the loop's thread."""
        spans = trace.spans
        waiting = self._entered - self._left
        if waiting + spans > self._max_queue:
            self._overflown += spans
            return
        self._entered += spans
        self._queue.append(trace)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
            self._thread.start()
        if waiting + spans >= self._batch and not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send the remaining traces, for at most ``FLUSH_TIMEOUT``."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(FLUSH_TIMEOUT)
            self._lost += self._entered - self._left
            self._left = self._entered
        self._log_dropped()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._delay)
            self._wake.clear()
            while self._queue:
                self._export()
                self._log_dropped(LOG_INTERVAL)
                if self._entered - self._left < self._batch:
                    break
        while self._queue and self._export():
            """Send the rest, until the collector fails."""
        self._collector.close()

    def _export(self) -> bool:
        """Send one batch; return whether it was delivered."""
        spans = 0
        parts: list[bytes] = []
        epoch = time.time_ns() - time.monotonic_ns()
        while self._queue and spans < self._batch:
            traces: list[OtelTrace] = []
            while self._queue and spans < self._batch and len(traces) < _SLICE:
                traces.append(self._queue.popleft())
                spans += traces[-1].spans
            parts += [self._encoder.spans_of(trace, epoch) for trace in traces]
            self._report_sent(traces, epoch)
            self._rest()
        delivered = self._deliver(export_request(self._resource, _SCOPE, b"".join(parts)))
        self._left += spans
        if not delivered:
            self._lost += spans
        self._rest()
        return delivered

    def _report_sent(self, traces: Iterable[OtelTrace], epoch: int) -> None:
        """Report sent traces: of those that took about as long, the last."""
        last = {(trace.header, (trace.final_ns - trace.received_ns).bit_length()): trace for trace in traces}
        for trace in last.values():
            self._sent(trace, epoch)

    def _rest(self) -> None:
        """Sleep in proportion to the processor time used since the last rest, unless the server is stopping."""
        worked = time.thread_time()
        if not self._stopping.is_set():
            time.sleep((worked - self._rested_at) * _REST)
        self._rested_at = worked

    def _deliver(self, body: bytes) -> bool:
        """Send a message, with retries; return whether the collector has accepted it."""
        failures = 0
        while True:
            try:
                self._collector.send(body)
            except CollectorUnreachable as error:
                failures += 1
                self._reason = str(error)
                delay = retry_delay(failures, error.retry_after) if error.retryable else None
                if delay is None or self._stopping.is_set():
                    return False
                self._log_dropped(LOG_INTERVAL)
                self._stopping.wait(delay)
            else:
                return True

    def _log_dropped(self, interval: float = 0) -> None:
        """Log the number of spans dropped since the last such line, and the reason, if that line is old enough."""
        count = self.dropped - self._logged
        now = time.monotonic()
        if not count or now - self._logged_at < interval:
            return
        self._logged += count
        self._logged_at = now
        if self._reason:
            why = f"{self._reason}. Collector: {self._options.url} (--trace-config opentelemetry,url)"
        else:
            why = (
                "requests are traced faster than their spans can be sent. Raise --trace-config rate, or for bursts "
                "--trace-config opentelemetry,bsp_max_queue_size"
            )
        self._reason = ""
        log.warning(f"{count} spans were dropped: {why}", dropped_spans=count)
