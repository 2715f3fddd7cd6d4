"""HTTP/1.1 load generator: slots with one connection each; the recorder and slot interface shared with gRPC."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, NamedTuple, Protocol, cast

import httptools
import numpy as np
import orjson

from nerite.client.connection import Address, text_in, text_of
from nerite.tools.bench.forms import Dialogue, Script
from nerite.tools.bench.measurement import COLUMNS, Records

# Parsers of event streams: they record the time of each event with content, and do no I/O.


class Events:
    """Events of one answer of the generate extension; each is a response."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """Arrival times of the events with content."""
        self.tokens = 0
        """Number of tokens as reported by the server, or 0."""
        self.prompt_tokens = 0
        """Number of tokens of the prompt as reported by the server, or 0."""
        self.cached_tokens = 0
        """How many of these the server had in its cache, or 0."""
        self.pieces: list[str] = []
        """Texts of the events, if these are kept."""
        self.error = ""
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Parse bytes that arrived at time ``now``."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and event != b"[DONE]":
                self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        try:
            # Not parsed otherwise: numbers may be NaN, which this parser rejects.
            document = orjson.loads(event) if event.startswith(b'{"error"') or self._looks_inside else {}
        except orjson.JSONDecodeError:
            self.error = "an event is not JSON"
            return
        if "error" in document:
            self.error = text_in(document["error"])
        elif self._has_content(document):
            self.times.append(now)

    _looks_inside = False

    def _has_content(self, document: Mapping[str, Any]) -> bool:
        return True


class ChatEvents(Events):
    """Events of a completion under ``/v1``: chunks, the first and last of which may be empty."""

    _looks_inside = True

    def _has_content(self, document: Mapping[str, Any]) -> bool:
        usage = document.get("usage")
        if usage:
            self.tokens = int(usage.get("completion_tokens") or 0)
            self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            self.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        for choice in document.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content"):
                self.pieces.append(delta["content"])
                return True
            if choice.get("text") or any(delta.get(name) for name in ("reasoning_content", "tool_calls")):
                return True
        return False


# Records of requests, kept as cheaply as possible; figures are computed later, by ``measurement``.


class Totals(NamedTuple):
    """Counts of all requests of a level of load, from its first request to its last, whether measured or not."""

    answered: int = 0
    failed: int = 0
    cancelled: int = 0
    unfinished: int = 0
    """Requests in progress when the load ended, which the client abandoned as well."""


class Recorder:
    """Growing columns of ``Records``."""

    __slots__ = (*COLUMNS, "reasons", "totals")

    def __init__(self) -> None:
        self.totals = Totals()
        """Counts of the requests of all records that were taken."""
        self._begin()

    def answered(self, due: float, sent: float, ended: float) -> None:
        """Record an answer."""
        self.due.append(due)
        self.sent.append(sent)
        self.ended.append(ended)

    def planned(self, dialogue: Dialogue) -> None:
        """Record what was planned for a request, before its answer."""
        self.model.append(dialogue.model)
        self.texts.append(dialogue.texts)

    def came(self, times: Sequence[float], tokens: int, prompt: int = 0, cached: int = 0) -> None:
        """Record the arrival times of the parts of an answer, before the answer. ``tokens`` is 0 if unknown."""
        self.first.append(times[0])
        self.last.append(times[-1])
        self.parts.append(len(times))
        self.tokens.append(tokens or len(times))
        self.prompt.append(prompt)
        self.cached.append(cached)
        self.gaps.extend(after - before for before, after in itertools.pairwise(times))

    def refused(self, reason: str) -> None:
        """Record a request that failed."""
        self.failed.append(perf_counter())
        self.reasons.append(reason)

    def gave_up(self) -> None:
        """Record a request that the client cancelled."""
        self.cancelled.append(perf_counter())

    def take(self) -> Records:
        """Return the records since the last call."""
        counts = len(self.ended), len(self.failed), len(self.cancelled), 0
        self.totals = Totals(*(before + new for before, new in zip(self.totals, counts, strict=True)))
        taken = Records(reasons=self.reasons, **{name: np.array(getattr(self, name)) for name in COLUMNS})
        self._begin()
        return taken

    def _begin(self) -> None:
        self.due, self.sent, self.ended = array("d"), array("d"), array("d")
        self.first, self.last = array("d"), array("d")
        self.parts, self.tokens, self.gaps = array("d"), array("d"), array("d")
        self.prompt, self.cached = array("d"), array("d")
        self.model, self.texts = array("d"), array("d")
        self.failed, self.cancelled = array("d"), array("d")
        self.reasons: list[str] = []


# Slots: each sends one request at a time, and reports its outcome to its loop.


class SlotWork(Protocol):
    """Closed or open loop, which decides when each slot sends its next request."""

    recorder: Recorder

    def answered(self, slot: RequestSlot) -> None:
        """Record the answer, and let the slot send its next request, or rest."""

    def failed(self, slot: RequestSlot, reason: str) -> None:
        """Record the failure, and continue as after an answer."""

    def cancelled(self, slot: RequestSlot) -> None:
        """Record that the client cancelled the request, and continue as after an answer."""


class RequestSlot(ABC):
    """Sends one request at a time. It connects by itself; ``ask`` may be called immediately."""

    __slots__ = ("_ending", "dialogue", "due", "next", "sent", "work")

    def __init__(self, work: SlotWork, script: Script) -> None:
        self.work = work
        self._ending = script.ending
        self.dialogue = script.dialogue
        self.next = script.following
        """Returns the request to send next."""
        self.due = 0.0
        self.sent = 0.0
        """Time at which the current request was sent; 0 if there is none."""

    @abstractmethod
    def ask(self) -> None:
        """Send the next request. The caller has set ``due`` and ``sent``."""

    def rest(self) -> None:
        """Send no more requests, except one that ends an open sequence."""
        ending = self._ending()
        if ending is None:
            self.sent = 0.0
        else:
            self.next = lambda: ending
            self.sent = perf_counter()
            self.ask()

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """Abandon the current request, which has failed."""

    @abstractmethod
    def cancel(self) -> None:
        """Cancel the current request, as a client does that no longer wants the answer."""

    @abstractmethod
    def close(self) -> None:
        """Close the connection, and send nothing more."""


RETRY_SECONDS: Final = 0.1
"""Delay between attempts to connect."""
_MAX_HEADS: Final = 256


class HttpPort:
    """Server that slots connect to, and the known heads of its answers."""

    def __init__(self, address: Address, context: ssl.SSLContext | None, events: Callable[[], Events] | None) -> None:
        self.address = address
        self.context = context
        self.events = events
        """Creates a parser of event streams; None if answers are not streamed."""
        self.sizes: dict[bytes, int] = {}
        """Total size of a successful answer, including the head, by its head."""

    def slot(self, work: SlotWork, script: Script) -> RequestSlot:
        """Return a new slot."""
        return HttpSlot(self, work, script)


class HttpSlot(RequestSlot, asyncio.Protocol):
    """A connection, which reconnects when the server closes it.

    Servers answer equal requests with equal heads. If the head of an answer is known, only its bytes are counted.
    """

    __slots__ = (
        "_body",
        "_closed",
        "_connecting",
        "_events",
        "_head",
        "_left",
        "_parser",
        "_pending",
        "_port",
        "_size",
        "_transport",
    )

    def __init__(self, port: HttpPort, work: SlotWork, script: Script) -> None:
        super().__init__(work, script)
        self._port = port
        self._transport: asyncio.Transport | None = None
        self._left = 0
        """Remaining bytes of an answer with a known head."""
        self._parser: httptools.HttpResponseParser | None = None
        """Parser of the current answer, unless its head is known."""
        self._head = b""
        self._size = 0
        """Size of the answer being parsed, including its head; 0 if unknown."""
        self._body = bytearray()
        self._events: Events | None = None
        self._pending = b""
        """Request that waits for the connection."""
        self._closed = False
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def ask(self) -> None:
        """Send the next request, as soon as the connection is established."""
        if self._transport is None:
            self._pending = self.next()
        else:
            self._transport.write(self.next())

    def abandon(self, reason: str) -> None:
        """Abandon the request, and abort the connection."""
        if self._transport is not None:
            self._transport.abort()
            self._lose(reason)

    def cancel(self) -> None:
        """Cancel the request, and abort the connection."""
        self._pending = b""
        if self._transport is not None:
            self._transport.abort()
            self._reconnect()
        self.work.cancelled(self)

    def close(self) -> None:
        """Close the connection."""
        self._closed = True
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    # Connection.

    async def _connect(self) -> None:
        address = self._port.address
        loop = asyncio.get_running_loop()
        while not self._closed and self._transport is None:
            try:
                await loop.create_connection(lambda: self, address.host, address.port, ssl=self._port.context)
            except OSError as error:
                if self._pending:
                    self._pending = b""
                    self.work.failed(self, f"cannot reach {address}: {error.strerror or error}")
                await asyncio.sleep(RETRY_SECONDS)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the waiting request."""
        self._transport = cast(asyncio.Transport, transport)
        if self._pending:
            pending, self._pending = self._pending, b""
            self._transport.write(pending)

    def connection_lost(self, error: Exception | None) -> None:
        """Reconnect."""
        if self._transport is not None:
            self._lose(f"the server closed the connection{f': {error}' if error else ''}")

    def _reconnect(self) -> None:
        self._transport = None
        self._parser, self._left = None, 0
        if not self._closed:
            self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def _lose(self, reason: str) -> None:
        self._reconnect()
        if self.sent and not self._closed:
            self.work.failed(self, reason)

    # Answers.

    def data_received(self, data: bytes) -> None:
        """Continue the current answer, and report it when it is complete."""
        if self._closed or self._transport is None:
            return
        if self._left:
            self._left -= len(data)
            if self._left <= 0:
                self._left = 0
                self.work.answered(self)
            return
        if self._parser is None:
            end = data.find(b"\r\n\r\n")
            # Only a complete head can be known.
            head = data[:end] if end > 0 else b""
            size = self._port.sizes.get(head)
            if size is not None:
                self._left = max(0, size - len(data))
                if not self._left:
                    self.work.answered(self)
                return
            self._begin(head)
        assert self._parser is not None
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abandon(f"the server's answer is not HTTP: {error}")

    def _begin(self, head: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._head = head
        self._size = 0
        self._body.clear()
        self._events = self._port.events() if self._port.events is not None else None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Store the size of the answer."""
        if name.lower() == b"content-length" and self._events is None:
            self._size = len(self._head) + 4 + int(value)

    def on_headers_complete(self) -> None:
        """Store the head of a successful answer of known size."""
        assert self._parser is not None
        good = self._parser.get_status_code() == 200
        if good and self._head and self._size and self._parser.should_keep_alive():
            if len(self._port.sizes) >= _MAX_HEADS:
                self._port.sizes.clear()
            self._port.sizes[self._head] = self._size
        if not good:
            self._events = None

    def on_body(self, data: bytes) -> None:
        """Parse events, or keep the text of a possible error."""
        if self._events is not None:
            self._events.feed(data, perf_counter())
        elif len(self._body) < 10_000:
            self._body += data

    def on_message_complete(self) -> None:
        """Report the outcome of the request."""
        parser, events = self._parser, self._events
        assert parser is not None
        self._parser = None
        status = parser.get_status_code()
        reason = "" if status == 200 else f"{status}: {text_of(status, self._body)}"
        if events is not None:
            if events.tokens and not events.times:
                # Tokens without text, such as the first byte of a character, came at the latest now.
                events.times.append(perf_counter())
            reason = events.error or ("" if events.times else "the answer has no content")
        if not parser.should_keep_alive() and self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        if reason:
            self.work.failed(self, reason)
            return
        if events is not None:
            self.work.recorder.came(events.times, events.tokens, events.prompt_tokens, events.cached_tokens)
            if self.dialogue is not None and self.dialogue.listens:
                self.dialogue.heard("".join(events.pieces))
        self.work.answered(self)
