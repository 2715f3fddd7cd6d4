"""Bodies that cost those who read them most, the endpoints that they are sent to, and what they cost there.

What a process reads of a client's bytes is to cost it little processor time and memory for each of these bytes.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import json
import os
import socket
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from nerite.transports.http.routes import ENDPOINTS, Endpoint
from nerite.wire.fields import varint
from serving import PATIENCE

MODEL = "m"
_EDGE = b"edge"
_FORM = "Content-Type: multipart/form-data; boundary=edge"
_JSON = "Content-Type: application/json"
_BEGINNING = json.dumps({
    "model": MODEL, "id": "1", "prompt": "a", "input": "a", "text_input": "a", "query": "a", "documents": ["a"],
    "tokens": [1], "max_tokens": 1, "messages": [{"role": "user", "content": "a"}],
    "inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 1], "data": [1.0]}],
}).encode()[:-1]  # fmt: skip
"""Members that make a body plausible for any endpoint."""
_SEQUENCE = b',"parameters":{"sequence_id":1,"sequence_start":true}'
_UNITS = {
    "nested": b"[",
    "lists": b"[],",
    "objects": b'{"":0},',
    "texts": b'"",',
    "numbers": b"1,",
    "names in lists": b'{"model":"x"},',
}


class Bomb(NamedTuple):
    """A body, and the header lines that belong to it."""

    name: str
    body: bytes
    lines: tuple[str, ...] = (_JSON,)
    unpacked: int = 0
    """Bytes of the body without its coding, if it has one."""

    @property
    def size(self) -> int:
        """Bytes that have to be read."""
        return self.unpacked or len(self.body) + sum(map(len, self.lines))

    def request(self, path: str, method: str = "POST") -> bytes:
        """Return the whole request."""
        framing = [] if any("chunked" in line for line in self.lines) else [f"Content-Length: {len(self.body)}"]
        head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *self.lines, *framing, "", ""]
        return "\r\n".join(head).encode() + self.body


def _member(value: bytes, more: bytes = b"") -> bytes:
    return b'%b%b,"x":%b}' % (_BEGINNING, more, value)


def _members(size: int, unit: bytes) -> bytes:
    """Return an object with very many members of its own; ``unit`` has a place for a number, or none."""
    count = size // (len(unit) + 6)
    written = (unit % number for number in range(count)) if b"%" in unit else (unit for _ in range(count))
    return b"%b,%b}" % (_BEGINNING, b",".join(written))


def _part(head: bytes, data: bytes) -> bytes:
    return b"--%b\r\n%b\r\n\r\n%b\r\n" % (_EDGE, head, data)


def _form(size: int, head: bytes) -> bytes:
    unit = _part(head, b"1")
    named = _part(b'Content-Disposition: form-data; name="model"', MODEL.encode())
    return named + unit * (size // len(unit)) + b"--%b--\r\n" % _EDGE


@cache
def bombs(size: int) -> tuple[Bomb, ...]:
    """Return bodies of about ``size`` bytes each, but for those that are compressed, or have a limit of their own."""
    lists = _member(b"[" + b"[]," * (size // 3) + b"0]")
    named = _part(b'Content-Disposition: form-data; name="model"', MODEL.encode())
    field = b'Content-Disposition: form-data; name="a"'
    return (
        *(Bomb(name, _member(b"[" + unit * (size // len(unit)) + b"0]")) for name, unit in _UNITS.items()),
        Bomb("a long text", _member(b'"' + b"a" * size + b'"')),
        Bomb("escaped quotes", _member(b'"' + b'\\"' * (size // 2) + b'"')),
        Bomb("escapes", _member(b'"' + b"\\u0061" * (size // 6) + b'"')),
        Bomb("a sequence", _member(b"[" + b"[]," * (size // 3) + b"0]", _SEQUENCE)),
        Bomb("many names", _members(size, b'"k%06d":0')),
        Bomb("one name again and again", _members(size, b'"model":"m"')),
        Bomb("names with escapes", _members(size, rb'"\u006d%06d":0')),
        Bomb("no end", _BEGINNING + b',"x":"' + b"a" * size),
        Bomb("no JSON", b"\0" * size),
        Bomb("gzip", gzip.compress(lists), (_JSON, "Content-Encoding: gzip"), len(lists)),
        Bomb("deflate", zlib.compress(lists), (_JSON, "Content-Encoding: deflate"), len(lists)),
        Bomb("parts of a form", _form(size, field), (_FORM,)),
        Bomb("headers of a part", named + _part(field + b"\r\nA: b" * (size // 6), b"1") + b"--edge--", (_FORM,)),
        Bomb("headers of parts", _form(min(size, 1000 * 60_000), field + b"\nA: b" * 12_000), (_FORM,)),
        Bomb("small chunks", b"1\r\n{\r\n" * 65_000 + b"0\r\n\r\n", (_JSON, "Transfer-Encoding: chunked")),
        Bomb("headers", b"{}", (_JSON, *(f"A{number}: b" for number in range(6_000)))),
    )


@cache
def grpc_bombs(size: int) -> tuple[Bomb, ...]:
    """Return messages of about ``size`` bytes, for methods of inference."""
    named = b"\x0a\x01" + MODEL.encode()
    return (
        *(
            Bomb(name, named + unit * (size // len(unit)))
            for name, unit in {
                "empty tensors": b"\x3a\0",
                "empty parameters": b"\x22\0",
                "names": b"\x0a\x01x",
                "unknown fields": b"\x7a\0",
                "unknown numbers": b"\x78\1",
                "long numbers": b"\x78" + b"\xff" * 8 + b"\1",
                "groups": b"\x7b\x7c",
                "inputs": b"\x2a\0",
            }.items()
        ),
        Bomb("a long name", b"\x0a" + varint(size) + b"m" * size),
        Bomb("a tensor", named + b"\x3a" + varint(size) + bytes(size)),
        Bomb("packed zeros", gzip.compress(named + b"\x3a" + varint(size) + bytes(size)), (), size),
        Bomb("packed fields", gzip.compress(named + b"\x3a\0" * (size // 2)), (), size),
    )


_ARGUMENTS = {"model": MODEL, "version": "1", "command": "pause"}


def paths_of(endpoint: Endpoint) -> Iterator[str]:
    """Yield the paths of an endpoint, with something for each of its arguments."""
    for path in endpoint.paths:
        for name in endpoint.pattern.groupindex:
            path = path.replace(f"{{{name}}}", _ARGUMENTS.get(name, "a"))
        yield path


POSTED = tuple(path for endpoint in ENDPOINTS if "POST" in endpoint.methods for path in paths_of(endpoint))
"""The paths of every endpoint that takes a body."""


def send(port: int, request: bytes) -> int:
    """Send a request; return the status of the answer, or 0 if the server hangs up before it has all of it."""
    with socket.create_connection(("127.0.0.1", port), PATIENCE) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(request)
        answer = http.client.HTTPResponse(connection, method="POST")
        try:
            answer.begin()
            answer.read()
        except (ConnectionError, http.client.HTTPException):
            return 0
        return answer.status


class Watch:
    """Somebody else who asks for the server's health, as long as the block lasts."""

    def __init__(self, healthy: Callable[[], bool]) -> None:
        self._healthy = healthy
        self.answered = 0
        self.wrong: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        while True:  # once at least: a body may be refused before a pause is over
            try:
                if not self._healthy():
                    self.wrong.append("not healthy")
            except Exception as error:  # whatever it is, the test is to tell of it
                self.wrong.append(repr(error))
                return
            self.answered += 1
            if self._over.wait(0.005):
                return


class Cost(NamedTuple):
    """What something has cost processes."""

    seconds: float
    """Processor time of the loops, each of which is the first thread of a process."""
    grown: int
    """Bytes by which their memory was larger at most."""


@contextlib.contextmanager
def costing(*pids: int) -> Iterator[Callable[[], Cost]]:
    """Yield what returns the cost for processes since the block began."""
    before, began = sum(_resident(pid, "VmRSS") for pid in pids), sum(map(_loop_seconds, pids))
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak is counted from now on

    def cost() -> Cost:
        grown = sum(_resident(pid, "VmHWM") for pid in pids) - before
        return Cost(sum(map(_loop_seconds, pids)) - began, max(grown, 0))

    yield cost


def _resident(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def _loop_seconds(pid: int) -> float:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    fields = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
