"""Slots over HTTP/1.1: a connection each."""

from __future__ import annotations

import asyncio
import itertools
import ssl
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any, Final, Protocol, cast

import httptools
import numpy as np
import orjson

from nerite.client.connection import Address, text_in, text_of
from nerite.tools.bench.forms import Script
from nerite.tools.bench.measurement import COLUMNS, Records

# Event streams as they come: when each event with content came, without I/O.


class Events:
    """The events of one answer of the generate extension: each is a response."""

    def __init__(self) -> None:
        self.times: list[float] = []
        """When the events with content came."""
        self.tokens = 0
        """How many tokens the server says there were; 0 if it does not."""
        self.error = ""
        self._rest = b""

    def feed(self, data: bytes, now: float) -> None:
        """Take what came at a time."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            event = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and event != b"[DONE]":
                self._take(event, now)

    def _take(self, event: bytes, now: float) -> None:
        try:
            # Numbers may be NaN here, which makes an event no JSON for this reader; it is a response all the same.
            document = orjson.loads(event) if event.startswith(b'{"error"') or self._looks_inside else {}
        except orjson.JSONDecodeError:
            self.error = "an event is no JSON"
            return
        if "error" in document:
            self.error = text_in(document["error"])
        elif self._has_content(document):
            self.times.append(now)

    _looks_inside = False

    def _has_content(self, document: Mapping[str, Any]) -> bool:
        return True


class ChatEvents(Events):
    """The events of a completion under ``/v1``: chunks, of which the first and the last may be empty."""

    _looks_inside = True

    def _has_content(self, document: Mapping[str, Any]) -> bool:
        usage = document.get("usage")
        if usage:
            self.tokens = int(usage.get("completion_tokens") or 0)
        for choice in document.get("choices") or ():
            delta = choice.get("delta") or {}
            if choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls")):
                return True
        return False


# Takes down what became of requests, as cheaply as can be; others work out what it means.


class Recorder:
    """Columns of ``Records`` that grow."""

    __slots__ = ("due", "ended", "failed", "first", "gaps", "last", "parts", "reasons", "sent", "tokens")

    def __init__(self) -> None:
        self._begin()

    def answered(self, due: float, sent: float, ended: float) -> None:
        """Note an answer."""
        self.due.append(due)
        self.sent.append(sent)
        self.ended.append(ended)

    def came(self, times: Sequence[float], tokens: int) -> None:
        """Note when the parts of an answer came; before the answer itself. ``tokens`` is 0 if nobody counted."""
        self.first.append(times[0])
        self.last.append(times[-1])
        self.parts.append(len(times))
        self.tokens.append(tokens or len(times))
        self.gaps.extend(after - before for before, after in itertools.pairwise(times))

    def refused(self, reason: str) -> None:
        """Note a request that was not answered, or with an error."""
        self.failed.append(perf_counter())
        self.reasons.append(reason)

    def take(self) -> Records:
        """Return what was noted since the last time."""
        taken = Records(reasons=self.reasons, **{name: np.array(getattr(self, name)) for name in COLUMNS})
        self._begin()
        return taken

    def _begin(self) -> None:
        self.due, self.sent, self.ended = array("d"), array("d"), array("d")
        self.first, self.last = array("d"), array("d")
        self.parts, self.tokens, self.gaps = array("d"), array("d"), array("d")
        self.failed = array("d")
        self.reasons: list[str] = []


# A slot: what carries one request at a time, and is told what comes of it.


class SlotWork(Protocol):
    """Who gives slots their work."""

    recorder: Recorder

    def answered(self, slot: RequestSlot) -> None:
        """Note the answer, and give the slot its next request, or put it aside."""

    def failed(self, slot: RequestSlot, reason: str) -> None:
        """Note that there is no answer, or a refusal; the rest as for ``answered``."""


class RequestSlot(ABC):
    """Carries one request at a time. ``ask`` may be called at once after it was made; it connects by itself."""

    __slots__ = ("_ending", "due", "next", "sent", "work")

    def __init__(self, work: SlotWork, script: Script) -> None:
        self.work = work
        self._ending = script.ending
        self.next = script.following
        """Returns the request to send next."""
        self.due = 0.0
        self.sent = 0.0
        """When the request under way was sent; 0 if there is none."""

    @abstractmethod
    def ask(self) -> None:
        """Send the next request; ``due`` and ``sent`` were set by the caller."""

    def rest(self) -> None:
        """Send no more of the load: only, once, what ends a sequence that is open."""
        ending = self._ending()
        if ending is None:
            self.sent = 0.0
        else:
            self.next = lambda: ending
            self.sent = perf_counter()
            self.ask()

    @abstractmethod
    def abandon(self, reason: str) -> None:
        """Give up the request under way."""

    @abstractmethod
    def close(self) -> None:
        """Send nothing more, and hang up."""


RETRY_SECONDS: Final = 0.1
"""Between two attempts to connect."""
_MAX_HEADS: Final = 256


class HttpPort:
    """Where slots connect to, and what they know of the answers that come from there."""

    def __init__(self, address: Address, context: ssl.SSLContext | None, events: Callable[[], Events] | None) -> None:
        self.address = address
        self.context = context
        self.events = events
        """Makes a reader for answers that are event streams; None where answers come whole."""
        self.sizes: dict[bytes, int] = {}
        """How long an answer is that is a success and has this head; all of it, with the head."""

    def slot(self, work: SlotWork, script: Script) -> RequestSlot:
        """Make a slot."""
        return HttpSlot(self, work, script)


class HttpSlot(RequestSlot, asyncio.Protocol):
    """A connection. It is made anew when the server has closed it.

    Servers answer alike requests with alike heads: an answer whose head is known is measured and not read.
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
        """Bytes of the answer that are still to come, where that is known."""
        self._parser: httptools.HttpResponseParser | None = None
        """Of an answer that has to be read."""
        self._head = b""
        self._size = 0
        """How long the answer is that is being read, with its head; 0 if it does not say."""
        self._body = bytearray()
        self._events: Events | None = None
        self._pending = False
        """A request waits for the connection."""
        self._closed = False
        self._connecting = asyncio.get_running_loop().create_task(self._connect())

    def ask(self) -> None:
        """Send the next request, now or as soon as there is a connection."""
        if self._transport is None:
            self._pending = True
        else:
            self._transport.write(self.next())

    def abandon(self, reason: str) -> None:
        """Give up the request, and the connection with it."""
        if self._transport is not None:
            self._transport.abort()
            self._lose(reason)

    def close(self) -> None:
        """Hang up."""
        self._closed = True
        self._connecting.cancel()
        if self._transport is not None:
            self._transport.abort()

    # -- the connection

    async def _connect(self) -> None:
        address = self._port.address
        loop = asyncio.get_running_loop()
        while not self._closed and self._transport is None:
            try:
                await loop.create_connection(lambda: self, address.host, address.port, ssl=self._port.context)
            except OSError as error:
                if self._pending:
                    self._pending = False
                    self.work.failed(self, f"cannot reach {address}: {error.strerror or error}")
                await asyncio.sleep(RETRY_SECONDS)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send what waits."""
        self._transport = cast(asyncio.Transport, transport)
        if self._pending:
            self._pending = False
            self._transport.write(self.next())

    def connection_lost(self, error: Exception | None) -> None:
        """Connect again."""
        if self._transport is not None:
            self._lose(f"the server closed the connection{f': {error}' if error else ''}")

    def _lose(self, reason: str) -> None:
        self._transport = None
        self._parser, self._left = None, 0
        if self._closed:
            return
        self._connecting = asyncio.get_running_loop().create_task(self._connect())
        if self.sent:
            self.work.failed(self, reason)

    # -- answers

    def data_received(self, data: bytes) -> None:
        """Go on with the answer, and say when it is complete."""
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
            # What is known of heads is known of whole ones.
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
            self.abandon(f"the server's answer is no HTTP: {error}")

    def _begin(self, head: bytes) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._head = head
        self._size = 0
        self._body.clear()
        self._events = self._port.events() if self._port.events is not None else None

    def on_header(self, name: bytes, value: bytes) -> None:
        """Remember how long an answer of this kind is."""
        if name.lower() == b"content-length" and self._events is None:
            self._size = len(self._head) + 4 + int(value)

    def on_headers_complete(self) -> None:
        """See whether the answer is what was asked for."""
        assert self._parser is not None
        good = self._parser.get_status_code() == 200
        if good and self._head and self._size and self._parser.should_keep_alive():
            if len(self._port.sizes) >= _MAX_HEADS:
                self._port.sizes.clear()
            self._port.sizes[self._head] = self._size
        if not good:
            self._events = None

    def on_body(self, data: bytes) -> None:
        """Look at the events, or keep what may be the text of an error."""
        if self._events is not None:
            self._events.feed(data, perf_counter())
        elif len(self._body) < 10_000:
            self._body += data

    def on_message_complete(self) -> None:
        """Say what came of the request."""
        parser, events = self._parser, self._events
        assert parser is not None
        self._parser = None
        status = parser.get_status_code()
        reason = "" if status == 200 else f"{status}: {text_of(status, self._body)}"
        if events is not None:
            reason = events.error or ("" if events.times else "an answer without content")
        if not parser.should_keep_alive() and self._transport is not None:
            self._transport.abort()
            self._transport = None
            self._connecting = asyncio.get_running_loop().create_task(self._connect())
        if reason:
            self.work.failed(self, reason)
            return
        if events is not None:
            self.work.recorder.came(events.times, events.tokens)
        self.work.answered(self)
