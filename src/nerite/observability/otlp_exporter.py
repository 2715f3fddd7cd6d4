"""Sends traces to an OpenTelemetry collector, in batches and on a thread of its own. No request waits for it.

Traces wait in a bounded queue. If it is full they are dropped, and the log says how many. The thread encodes a few
traces at a time and rests in between, because the server's loop has to wait while it holds the interpreter lock.
"""

from __future__ import annotations

import gzip
import http.client
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from random import uniform
from typing import Final
from urllib.parse import urlsplit

from nerite import __version__
from nerite.config.options import OpenTelemetryOptions
from nerite.observability import otlp_spans
from nerite.observability.log import log
from nerite.observability.otlp_spans import SpanEncoder
from nerite.observability.trace import USUAL_SPANS, OtelTrace

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
        delivered = self._deliver(otlp_spans.message(self._resource, _SCOPE, b"".join(parts)))
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
