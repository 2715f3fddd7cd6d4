"""Sends traces to a collector, in batches and on a thread of its own; nobody ever waits for it.

Traces wait in a queue that is bounded: beyond that they are dropped, and the log says how many. The thread makes spans
of them a few at a time and rests in between: it has the interpreter's lock while it does, which the server's loop would
wait for.
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
from nerite.observability.otlp_spans import SpanTemplates
from nerite.observability.trace import USUAL_SPANS, OtelTrace

# A collector at the other end of a connection: takes one message at a time.

_PASSING: Final = frozenset((429, 502, 503, 504))
"""Statuses with which a message may be sent again, by OTLP's specification."""
_MAX_SAID: Final = 200


class CollectorUnreachable(Exception):
    """A message was not taken. ``passing``: later it may be, and perhaps after so many seconds."""

    def __init__(self, reason: str, *, passing: bool, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.passing = passing
        self.retry_after = retry_after


class Collector:
    """Sends messages by HTTP, over one connection that is kept. For one thread."""

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
        fresh = self._connection is None
        try:
            status, after, said = self._post(body)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            if not fresh:  # it was closed meanwhile, perhaps
                self.send(body)
                return
            raise CollectorUnreachable(str(error) or type(error).__name__, passing=True) from None
        if status >= 300:
            reason = f"the collector answers {status} {said}".rstrip()
            raise CollectorUnreachable(reason, passing=status in _PASSING, retry_after=after)

    def close(self) -> None:
        """Close the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _post(self, body: bytes) -> tuple[int, float | None, str]:
        """Return status, the seconds that the collector asks for, and the text of its answer."""
        connection = self._connection = self._connection or self._connected()
        connection.request("POST", self._path, body, self._headers)
        answer = connection.getresponse()
        said = answer.read()
        after = answer.getheader("Retry-After", "")
        text = said[:_MAX_SAID].decode(errors="replace") if answer.status >= 300 else ""
        return answer.status, float(after) if after.isdecimal() else None, text

    def _connected(self) -> http.client.HTTPConnection:
        if not self._secure:
            return http.client.HTTPConnection(self._host, timeout=self._options.timeout)
        context = ssl.create_default_context(cafile=self._options.certificate or None)
        return http.client.HTTPSConnection(self._host, timeout=self._options.timeout, context=context)


# How long to wait before a message is sent again.

_PAUSES: Final = (1.0, 2.0, 4.0, 8.0, 16.0)
_SPREAD: Final = 0.2
_LONGEST: Final = 60.0


class RetryDelays:
    """The attempts that one message has: growing pauses, or those that the collector asks for."""

    def __init__(self) -> None:
        self._made = 0

    def after(self, wanted: float | None) -> float | None:
        """Return the seconds until the next attempt, None if there is none; ``wanted`` is what the collector said."""
        if self._made == len(_PAUSES):
            return None
        pause = _PAUSES[self._made]
        self._made += 1
        if wanted is not None:
            return min(wanted, _LONGEST)
        return pause * uniform(1 - _SPREAD, 1 + _SPREAD)  # servers that lost a collector together come back apart


FLUSH_PATIENCE: Final = 5.0
"""Seconds for what is left when the server stops."""
_SLICE: Final = 64
"""Traces that are worked on before a rest: 0.3 to 0.8 ms. Fewer at a time cost more, and wake the thread more often."""
_REST: Final = 31
"""How many times as long as the work the rest is: so this takes a thirty-second part of a processor at most."""
_TELL_EVERY: Final = 60.0
"""Seconds between two lines about spans that were dropped."""
_RESOURCE: Final = {
    "telemetry.sdk.language": "python",
    "telemetry.sdk.name": "nerite",
    "telemetry.sdk.version": __version__,
}
_SCOPE: Final = {"name": "nerite", "version": __version__}


class Exporter:
    """The queue, and the thread that empties it. The thread begins with the first trace."""

    def __init__(self, options: OpenTelemetryOptions, leaves: Callable[[OtelTrace, int], None]) -> None:
        """``leaves`` is called, on the thread, with traces that are sent, and when the clock of their times was 0.

        Where many are, that is one of those to the same model that took about as long.
        """
        self._options = options
        self._leaves = leaves
        self._collector = Collector(options)
        self._templates = SpanTemplates()
        self._resource = {**_RESOURCE, **options.resource}
        self._most = options.bsp_max_queue_size
        self._batch = max(1, min(options.bsp_max_export_batch_size, options.bsp_max_queue_size))
        self._delay = options.bsp_schedule_delay / 1000
        self._queue: deque[OtelTrace] = deque()
        # Each of these is written by one thread: the loop's, and ours.
        self._entered = 0
        self._left = 0
        self._overflown = 0
        self._lost = 0
        self._told = 0
        """How many of those that were dropped the log knows of."""
        self._told_at = -_TELL_EVERY
        self._reason = ""
        """Why the collector did not take something, since the log was told."""
        self._rested_at = 0.0
        """What the thread had computed by the last rest, in seconds."""
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def dropped(self) -> int:
        """Spans that no collector has got, and none will."""
        return self._overflown + self._lost

    def has_room(self) -> bool:
        """Return whether there is room for a trace that begins now; if not, count its spans as dropped.

        So what would be dropped in the end costs nothing. For the loop's thread.
        """
        waiting = self._entered - self._left
        if not waiting or waiting + USUAL_SPANS <= self._most:
            return True
        self._overflown += USUAL_SPANS
        return False

    def add(self, trace: OtelTrace) -> None:
        """Take a trace that is complete. For the loop's thread."""
        spans = trace.spans
        waiting = self._entered - self._left
        if waiting + spans > self._most:
            self._overflown += spans
            return
        self._entered += spans
        self._queue.append(trace)
        if self._thread is None:
            self._begin()
        if waiting + spans >= self._batch and not self._wake.is_set():
            self._wake.set()

    def close(self) -> None:
        """Send what is there, as far as that can be done in ``FLUSH_PATIENCE``."""
        self._stopping.set()
        self._wake.set()
        if self._thread is not None:
            self._thread.join(FLUSH_PATIENCE)
            self._lost += self._entered - self._left
            self._left = self._entered
        self._tell()

    def _begin(self) -> None:
        self._thread = threading.Thread(target=self._work, name="traces", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while not self._stopping.is_set():
            self._wake.wait(self._delay)
            self._wake.clear()
            while self._queue:
                self._export()
                self._tell_sometimes()
                if self._entered - self._left < self._batch:
                    break
        while self._queue and self._export():
            """What is left; nothing, once the collector takes no more."""
        self._collector.close()

    def _export(self) -> bool:
        """Send one batch; return whether it arrived."""
        spans = 0
        parts: list[bytes] = []
        epoch = time.time_ns() - time.monotonic_ns()
        while self._queue and spans < self._batch:
            traces: list[OtelTrace] = []
            while self._queue and spans < self._batch and len(traces) < _SLICE:
                traces.append(self._queue.popleft())
                spans += traces[-1].spans
            parts.append(self._templates.spans_of(traces, epoch))
            self._show(traces, epoch)
            self._rest()
        delivered = self._deliver(otlp_spans.message(self._resource, _SCOPE, b"".join(parts)))
        self._left += spans
        if not delivered:
            self._lost += spans
        self._rest()
        return delivered

    def _show(self, traces: Iterable[OtelTrace], epoch: int) -> None:
        """Tell of traces that leave: of those that took about as long, the last."""
        last = {(trace.header, (trace.final_ns - trace.received_ns).bit_length()): trace for trace in traces}
        for trace in last.values():
            self._leaves(trace, epoch)

    def _rest(self) -> None:
        """Leave the processor to others, for as long as this took. Not when there is no time left."""
        worked = time.thread_time()
        if not self._stopping.is_set():
            time.sleep((worked - self._rested_at) * _REST)
        self._rested_at = worked

    def _deliver(self, body: bytes) -> bool:
        """Send a message, several times if need be; return whether the collector has taken it."""
        retries = RetryDelays()
        while True:
            try:
                self._collector.send(body)
            except CollectorUnreachable as error:
                self._reason = str(error)
                pause = retries.after(error.retry_after) if error.passing else None
                if pause is None or self._stopping.is_set():
                    return False
                self._tell_sometimes()
                self._stopping.wait(pause)
            else:
                return True

    def _tell_sometimes(self) -> None:
        if self.dropped > self._told and time.monotonic() - self._told_at >= _TELL_EVERY:
            self._tell()

    def _tell(self) -> None:
        """Say how many spans were dropped since that was said, and why."""
        count = self.dropped - self._told
        if not count:
            return
        self._told += count
        self._told_at = time.monotonic()
        if self._reason:
            why = f"{self._reason}. Collector: {self._options.url} (--trace-config opentelemetry,url)"
        else:
            why = (
                "requests are traced faster than they can be sent: raise --trace-config rate, or "
                "--trace-config opentelemetry,bsp_max_queue_size where they come in bursts"
            )
        self._reason = ""
        log.warning(f"{count} spans were dropped: {why}", dropped_spans=count)
