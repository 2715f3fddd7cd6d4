"""How inputs reach a server, and what counts as the end of each. A lane sends one input, or a few, at a time.

What is owed: over HTTP, to a well-framed request, an answer; to anything else an end of its connection once the client
has said its last; over gRPC an end of the call, in whichever way. Whatever else comes is a *complaint*.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import re
import ssl
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import hpack

from fuzz.case import Case
from fuzz.mutators import frames, heads
from nerite.wire.ext_proc import ProcessingResponse
from nerite.wire.grpc_service import ModelInferResponse

QUIET: Final = 0.02
"""Seconds without a byte after which a client has nothing more to say."""
_TALKATIVE: Final = 2.0
"""Seconds after which a client has heard enough of an answer that does not end."""
_KEPT: Final = 256 * 1024
"""Bytes of what a server says on a connection that are kept."""
INCIDENT: Final = b"internal error, incident"


class Address(NamedTuple):
    """A port, and how to speak with it."""

    port: int
    tls: ssl.SSLContext | None = None


class Outcome(NamedTuple):
    """What became of an input."""

    case: Case
    complaint: str = ""
    """What is wrong with how it ended: empty if nothing is."""
    said: bytes = b""
    """How the answer begins."""
    taken: bool = False
    """It was not refused."""
    seconds: float = 0.0
    """How long it was under way, with others at the same time."""


class _Client(asyncio.Protocol):
    """One end of a connection."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.transport: asyncio.Transport
        self.heard = loop.time()
        self._loop = loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self.transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)

    def data_received(self, data: bytes) -> None:
        self.heard = self._loop.time()

    def write(self, data: bytes) -> None:
        """Send bytes, if the connection is open: uvloop raises where asyncio drops them."""
        if not self.transport.is_closing():
            with contextlib.suppress(RuntimeError):
                self.transport.write(data)

    async def over(self, seconds: float) -> bool:
        """Wait until the connection is closed; return whether it was."""
        await asyncio.wait((self.closed,), timeout=seconds)
        return self.closed.done()


async def _connect(address: Address, client: type[_Client], patience: float, *protocols: str) -> _Client:
    loop = asyncio.get_running_loop()
    extra = {}
    if address.tls is not None:
        extra = {"ssl": address.tls, "server_hostname": "localhost", "ssl_shutdown_timeout": patience}
    async with asyncio.timeout(patience):
        _, made = await loop.create_connection(client, "127.0.0.1", address.port, **extra)  # type: ignore[arg-type]
    return made


class Pieces:
    """Sends bytes on a connection of their own, waits until it is quiet, and wants it closed then."""

    def __init__(self, address: Address, patience: float) -> None:
        self._address = address
        self.patience = patience

    async def send(self, case: Case) -> Outcome:
        """Send one input."""
        try:
            client = await _connect(self._address, _Listener, self.patience)
        except OSError:
            return Outcome(case, "no connection was accepted")
        assert isinstance(client, _Listener)
        loop = asyncio.get_running_loop()
        for part in case.parts:
            if client.closed.done():
                break
            client.write(part)
            if len(case.parts) > 1:
                await asyncio.sleep(0)
        began = loop.time()
        client.heard = max(client.heard, began)
        while not client.closed.done() and loop.time() - began < _TALKATIVE:
            silent = loop.time() - client.heard
            if silent >= QUIET or await client.over(QUIET - silent):
                break
        said = bytes(client.said[:2_000])
        return Outcome(case, await self._ended(client), said, said.startswith(b"HTTP/1.1 2") or b"\0\0\0\0\0" in said)

    async def _ended(self, client: _Listener) -> str:
        if not client.closed.done():
            if self._address.tls is None and not client.transport.is_closing():
                client.transport.write_eof()
            else:
                client.transport.close()
            if not await client.over(self.patience):
                client.transport.abort()
                return "the connection was not closed"
        return "an internal error" if INCIDENT in client.said else ""


class _Listener(_Client):
    def __init__(self) -> None:
        super().__init__()
        self.said = bytearray()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self.said) < _KEPT:
            self.said += data


class Answer(NamedTuple):
    """An HTTP answer."""

    status: int
    head: bytes
    body: bytes

    @property
    def last(self) -> bool:
        """The connection is closed behind it."""
        return b"\r\nconnection: close" in self.head.lower() or self.head.startswith(b"HTTP/1.0")


class BadAnswer(Exception):
    """What came is no HTTP."""


class _Reader(_Client):
    """Takes the answers to requests that were sent one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Answer] = []
        self.wanted: deque[bool] = deque()
        """Of each request that is not answered: whether it was HEAD."""
        self.progress: asyncio.Future[None] | None = None
        self.bad = ""
        self._held = bytearray()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._tell()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._held += data
        try:
            while self._held and self._take():
                pass
        except (BadAnswer, ValueError, IndexError) as error:
            self.bad = f"the answer is no HTTP: {error}"
            self.transport.abort()
        if not self.wanted:
            self._tell()

    def _tell(self) -> None:
        if self.progress is not None and not self.progress.done():
            self.progress.set_result(None)

    def _take(self) -> bool:
        """Take one answer, if all of it is here."""
        end = self._held.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = bytes(self._held[:end])
        status = int(head[9:12])
        if not head.startswith((b"HTTP/1.1 ", b"HTTP/1.0 ")):
            raise BadAnswer(repr(head[:80]))
        if status == 100:
            del self._held[: end + 4]
            return True
        fields = head.lower()
        at = fields.find(b"\r\ncontent-length:")
        start = stop = end + 4
        body = b""
        # Without a request it is the farewell of a server that hangs up.
        if self.wanted and self.wanted[0]:
            pass
        elif at >= 0:
            stop += int(fields[at + 17 :].split(b"\r\n", 1)[0])
            if len(self._held) < stop:
                return False
            body = bytes(self._held[start:stop])
        elif b"\r\ntransfer-encoding: chunked" in fields:
            parts = []
            while True:
                line = self._held.find(b"\r\n", stop)
                if line < 0:
                    return False
                size = int(self._held[stop:line], 16)
                stop = line + 2 + size + 2
                if len(self._held) < stop:
                    return False
                if not size:
                    break
                parts.append(bytes(self._held[line + 2 : stop - 2]))
            body = b"".join(parts)
        elif status not in (204, 304):
            raise BadAnswer(f"no length: {head[:200]!r}")
        del self._held[:stop]
        if not self.wanted:
            raise BadAnswer(f"an answer to no request: {head[:80]!r}")
        self.wanted.popleft()
        self.answers.append(Answer(status, head, body))
        return True


class Kept:
    """Sends well-framed HTTP requests over a connection that is kept, several ahead of their answers."""

    def __init__(self, address: Address, patience: float) -> None:
        self._address = address
        self.patience = patience
        self._client: _Reader | None = None

    async def send(self, cases: Sequence[Case], substitutes: Sequence[tuple[bytes, bytes]] = ()) -> list[Outcome]:
        """Send some inputs; return what became of each. ``substitutes``: what stands for what of this run."""
        outcomes: list[Outcome] = []
        todo = [(case, request(case.parts[0], case.parts[1], substitutes)) for case in cases]
        while todo:
            answers, complaint = await self.ask([raw for _, raw in todo])
            outcomes += [judged(case, answer) for (case, _), answer in zip(todo, answers, strict=False)]
            todo = todo[len(answers) :]
            if complaint and todo:
                outcomes.append(Outcome(todo.pop(0)[0], complaint))
        return outcomes

    async def ask(self, requests: Sequence[bytes]) -> tuple[list[Answer], str]:
        """Send requests; return the answers as far as this connection gives them, and what is wrong with the next."""
        client = self._client
        if client is None or client.closed.done():
            try:
                made = await _connect(self._address, _Reader, self.patience)
            except OSError:
                return [], "no connection was accepted"
            assert isinstance(made, _Reader)
            client = self._client = made
        client.answers = []
        client.wanted.extend(raw.startswith(b"HEAD ") for raw in requests)
        raw = b"".join(requests)
        chance = random.Random(zlib.crc32(raw))
        pieces = [raw] if chance.random() < 0.7 else heads.pieces(chance, raw)
        for number, piece in enumerate(pieces):
            if number:
                await asyncio.sleep(0)
            client.write(piece)
        before = -1
        while client.wanted and not client.closed.done():
            if len(client.answers) == before:
                client.transport.abort()
                await client.over(self.patience)
                return client.answers, f"no answer within {self.patience:g} s"
            before = len(client.answers)
            client.progress = asyncio.get_running_loop().create_future()
            await asyncio.wait((client.progress,), timeout=self.patience)
        answers = client.answers
        if answers and answers[-1].last and not await client.over(self.patience):
            return answers, "the connection was not closed"
        if client.wanted:
            self._client = None
        if client.bad:
            return answers, client.bad
        if client.wanted and not (answers and answers[-1].last):
            return answers, "the connection was closed without an answer"
        return answers, ""

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.transport.close()
            await client.over(self.patience)


def request(head: bytes, body: bytes, substitutes: Sequence[tuple[bytes, bytes]] = ()) -> bytes:
    """Return a request on the wire. ``head``: a line with method and path, and lines of headers."""
    for name, value in substitutes:
        head, body = head.replace(name, value), body.replace(name, value)
    first, *lines = [line.replace(b"\r", b"") for line in head.split(b"\n")]
    method, _, target = first.partition(b" ")
    named = [line.partition(b":")[0].strip().lower() for line in lines]
    if b"host" not in named:
        lines.insert(0, b"Host: localhost")
    if b"Transfer-Encoding: chunked" in lines:
        body = heads.chunked(random.Random(len(body)), body)
    else:
        lines.append(b"Content-Length: %d" % len(body))
    return heads.whole(method, target, lines, body)


def judged(case: Case, answer: Answer) -> Outcome:
    """Return what an answer to a well-framed request means."""
    said = answer.head.split(b"\r\n", 1)[0] + b"\n" + answer.body[:2_000]
    complaint = ""
    if INCIDENT in answer.body:
        complaint = "an internal error"
    elif not 200 <= answer.status < 600:
        complaint = f"status {answer.status}"
    elif answer.body and _is_json(answer.head.lower()):
        try:
            # In tensors there may be texts that are no UTF-8, and numbers that are infinite.
            json.loads(answer.body.decode(errors="replace" if answer.status == 200 else "strict"))
        except ValueError:
            complaint = "the answer is no JSON"
    return Outcome(case, complaint, said, answer.status < 300)


def _is_json(head: bytes) -> bool:
    """Return whether all of a body is JSON, by its head."""
    others = (b"\r\ncontent-encoding:", b"\r\ninference-header-content-length:")
    kind = re.search(rb"\r\ncontent-type: application/json(?!l)", head)
    return kind is not None and not any(name in head for name in others)


class Call:
    """A gRPC call that waits for its end."""

    def __init__(self, over: asyncio.Future[None]) -> None:
        self.over = over
        self.fields: list[tuple[str, str]] = []
        self.data = bytearray()
        self.reset = -1
        self.lost = False

    @property
    def status(self) -> str:
        """Its status; empty if it has none."""
        return dict(self.fields).get("grpc-status", "")


class _Http2(_Client):
    """As much of an HTTP/2 client as gRPC needs. The server's windows are larger than what is ever under way."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[int, Call] = {}
        self.next_stream = 1
        self.ready: asyncio.Future[None] = self._loop.create_future()
        self.going = False
        """The server takes no more calls."""
        self.pongs = 0
        self.pinged: asyncio.Future[None] | None = None
        self.bad = ""
        self._decoder = hpack.Decoder()
        self._held = bytearray()
        self._block = b""
        self._taken = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        settings = (4).to_bytes(2, "big") + (2**31 - 1).to_bytes(4, "big")
        window = (2**31 - 1 - 65_535).to_bytes(4, "big")
        opening = frames.frame(frames.SETTINGS, 0, 0, settings) + frames.frame(frames.WINDOW_UPDATE, 0, 0, window)
        self.write(frames.PREFACE + opening)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for call in self.calls.values():
            call.lost = True
            if not call.over.done():
                call.over.set_result(None)
        self.calls.clear()
        for future in (self.ready, self.pinged):
            if future is not None and not future.done():
                future.set_result(None)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._held += data
        at = 0
        while len(self._held) - at >= frames.HEADER_SIZE:
            size = int.from_bytes(self._held[at : at + 3], "big")
            start = at + frames.HEADER_SIZE
            if len(self._held) < start + size:
                break
            stream = int.from_bytes(self._held[at + 5 : start], "big") & 0x7FFFFFFF
            self._take(self._held[at + 3], self._held[at + 4], stream, bytes(self._held[start : start + size]))
            at = start + size
        del self._held[:at]

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        call = self.calls.get(stream)
        if kind == frames.DATA:
            self._taken += len(payload)
            if self._taken > 2**29:
                self.write(frames.frame(frames.WINDOW_UPDATE, 0, 0, self._taken.to_bytes(4, "big")))
                self._taken = 0
            if call is not None:
                call.data += payload
        elif kind in (frames.HEADERS, frames.CONTINUATION):
            self._block += payload
            if flags & frames.END_HEADERS:
                try:
                    found = self._decoder.decode(self._block)
                except hpack.HPACKError as error:
                    self.bad = f"the headers are wrong: {error}"
                    self.transport.abort()
                    return
                self._block = b""
                if call is not None:
                    call.fields += [(_text(name), _text(value)) for name, value in found]
        elif kind == frames.RST_STREAM and call is not None:
            call.reset = int.from_bytes(payload, "big")
            self._end(stream, call)
            return
        elif kind == frames.SETTINGS and not flags & frames.ACK:
            self.write(frames.frame(frames.SETTINGS, frames.ACK, 0, b""))
            if not self.ready.done():
                self.ready.set_result(None)
        elif kind == frames.PING:
            if not flags & frames.ACK:
                self.write(frames.frame(frames.PING, frames.ACK, 0, payload))
            elif self.pinged is not None and not self.pinged.done():
                self.pinged.set_result(None)
        elif kind == frames.GOAWAY:
            self.going = True
        if kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM and call is not None:
            self._end(stream, call)

    def _end(self, stream: int, call: Call) -> None:
        del self.calls[stream]
        if not call.over.done():
            call.over.set_result(None)

    def begin(self, block: bytes, parts: Sequence[bytes], end: str) -> tuple[int, Call]:
        """Make a call of a header block and what DATA frames carry."""
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        call = self.calls[stream] = Call(self._loop.create_future())
        flags = frames.END_HEADERS if parts or end else frames.END_HEADERS | frames.END_STREAM
        out = [frames.frame(frames.HEADERS, flags, stream, block)]
        for at, part in enumerate(parts, 1):
            last = at == len(parts) and not end
            out.append(frames.frame(frames.DATA, frames.END_STREAM if last else 0, stream, part))
        if end == "trailers":
            trailers = frames.literal(b"x-end", b"1")
            out.append(frames.frame(frames.HEADERS, frames.END_HEADERS | frames.END_STREAM, stream, trailers))
        self.write(b"".join(out))
        return stream, call


def _text(raw: str | bytes) -> str:
    return raw if isinstance(raw, str) else raw.decode("latin-1")


class Calls:
    """Makes gRPC calls over a connection that is kept, any number at a time."""

    def __init__(self, address: Address, patience: float) -> None:
        self._address = address
        self.patience = patience
        self._client: _Http2 | None = None
        self._opening = asyncio.Lock()

    async def send(self, case: Case, substitutes: Sequence[tuple[bytes, bytes]] = ()) -> Outcome:
        """Send one input."""
        first, *lines = case.parts[0].split(b"\n")
        fields = [
            (name.strip().lower() or b"x", value.strip())
            for name, _, value in (line.partition(b": ") for line in lines)
        ]
        end = next((line[5:].decode("latin-1") for line in lines if line.startswith(b":end ")), "")
        block = frames.header_block(first, [each for each in fields if not each[0].startswith(b":")])
        parts = list(case.parts[1:])
        for name, value in substitutes:
            parts = [part.replace(name, value) for part in parts]
        call, complaint = await self.call(block, parts, end)
        said = bytes(call.data[:2_000]) if call is not None else b""
        if call is None or complaint or end == "reset":
            return Outcome(case, complaint, said)
        return Outcome(case, wrong_end(call, first), str(call.fields).encode()[:2_000] + said, call.status == "0")

    async def call(self, block: bytes, parts: Sequence[bytes], end: str = "") -> tuple[Call | None, str]:
        """Make a call; return it when it is over, and what is wrong with how it ended."""
        try:
            client = await self._open()
        except OSError:
            return None, "no connection was accepted"
        if client is None:
            return None, "the connection was closed at once"
        stream, call = client.begin(block, parts, end)
        if end == "reset":
            await asyncio.sleep(0)
            client.write(frames.frame(frames.RST_STREAM, 0, stream, (8).to_bytes(4, "big")))
            client.calls.pop(stream, None)
            return call, ""
        await asyncio.wait((call.over,), timeout=self.patience)
        if not call.over.done():
            client.transport.abort()
            self._client = None
            return call, f"no end of a call within {self.patience:g} s"
        return call, client.bad

    async def _open(self) -> _Http2 | None:
        async with self._opening:
            client = self._client
            if client is None or client.closed.done() or client.going or client.next_stream > 2**30:
                if client is not None and not client.calls:
                    client.transport.close()
                made = await _connect(self._address, _Http2, self.patience)
                assert isinstance(made, _Http2)
                client = self._client = made
                await asyncio.wait((client.ready,), timeout=self.patience)
                if not client.ready.done() or client.closed.done():
                    client.transport.abort()
                    self._client = None
                    return None
            return client

    async def close(self) -> None:
        """Close the connection."""
        client, self._client = self._client, None
        if client is not None:
            client.transport.close()
            await client.over(self.patience)


def wrong_end(call: Call, path: bytes) -> str:
    """Return what is wrong with the end of a call."""
    if call.lost or call.reset >= 0:
        return ""
    fields = dict(call.fields)
    if INCIDENT.decode() in fields.get("grpc-message", "") or INCIDENT in call.data:
        return "an internal error"
    status = fields.get("grpc-status")
    if status is None:
        return "" if fields.get(":status") != "200" else "a call without a status"
    if not status.isdecimal() or not 0 <= int(status) <= 16:
        return f"status {status}"
    if status == "0" and path.endswith(b"/ModelInfer") and call.data and not call.data[0]:
        try:
            ModelInferResponse.FromString(bytes(call.data[5:]))
        except Exception:  # protobuf has several
            return "the answer is no message"
    return _picked(bytes(call.data)) if path.endswith(b"/Process") else ""


def _picked(data: bytes) -> str:
    """Return what is wrong with the answers of a picker."""
    while data:
        size = int.from_bytes(data[1:5], "big")
        try:
            if ProcessingResponse.FromString(data[5 : 5 + size]).WhichOneof("response") is None:
                return "an answer of a picker says nothing"
        except Exception:  # protobuf has several
            return "an answer of a picker is no message"
        data = data[5 + size :]
    return ""
