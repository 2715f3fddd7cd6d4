"""Requests to the Kubernetes API over HTTP/1.1, and watches: answers without an end, one JSON object a line."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from itertools import starmap
from typing import Any, Final, NamedTuple

import orjson

from nerite import __version__
from nerite.core.errors import NeriteError, Unavailable
from nerite.kubernetes.access import ApiAccess
from nerite.transports.http.head import field_line, request_line

_MAX_HEAD: Final = 64 * 1024
_MAX_ANSWER: Final = 64 << 20
_MAX_LINE: Final = 4 << 20
"""Bytes of one event of a watch: the API server stores objects of 1.5 MB at most."""
_CONNECT_SECONDS: Final = 5.0
_MERGE: Final = "application/merge-patch+json"


class KubernetesError(NeriteError):
    """The API server has refused a request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Head(NamedTuple):
    status: int
    fields: Mapping[str, str]
    """By lower-case name."""


class ApiClient:
    """Sends requests to an API server, each on a connection of its own: they are few."""

    def __init__(self, access: ApiAccess) -> None:
        self.access = access

    async def get(self, path: str, seconds: float = 15.0) -> dict[str, Any]:
        """Return an object or a list. Raises ``KubernetesError``, or ``Unavailable`` without an answer."""
        return await self._request("GET", path, b"", "", seconds)

    async def patch(self, path: str, change: Mapping[str, Any], seconds: float = 15.0) -> dict[str, Any]:
        """Merge a change into an object, and return the object. Raises as ``get`` does."""
        return await self._request("PATCH", path, orjson.dumps(change), _MERGE, seconds)

    async def watch(self, path: str, silence: float) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a watch until the server ends it. ``silence``: the longest time without a byte."""
        async with self._exchange("GET", path, b"", "") as (reader, head):
            buffer = bytearray()
            async for piece in _pieces(reader, head, silence):
                buffer += piece
                while (end := buffer.find(b"\n")) >= 0:
                    line = bytes(buffer[:end])
                    del buffer[: end + 1]
                    if line:
                        yield _json(line)
                if len(buffer) > _MAX_LINE:
                    raise Unavailable(f"the API server sent an event of more than {_MAX_LINE} bytes")

    async def _request(self, method: str, path: str, body: bytes, kind: str, seconds: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(seconds), self._exchange(method, path, body, kind) as (reader, head):
                return _json(await _whole(reader, head))
        except TimeoutError:
            raise Unavailable(
                f"the API server {self.access.server} did not answer {method} {path} within {seconds:g} s"
            ) from None

    @asynccontextmanager
    async def _exchange(
        self, method: str, path: str, body: bytes, kind: str
    ) -> AsyncIterator[tuple[asyncio.StreamReader, _Head]]:
        """Send a request and read the head of its answer. Raises ``KubernetesError`` if it is refused."""
        access = self.access
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    access.host, access.port, ssl=access.tls, limit=_MAX_HEAD
                )
            writer.write(self._encoded(method, path, body, kind))
            head = await _read_head(reader)
            if not 200 <= head.status < 300:
                raise _refusal(method, path, head.status, await _whole(reader, head))
            yield reader, head
        except TimeoutError:
            what = "did not accept a connection" if writer is None else "has sent nothing for long"
            raise Unavailable(f"the API server {access.server} {what}") from None
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise Unavailable(f"the API server {access.server} cannot be reached: {_cause(error)}") from None
        finally:
            if writer is not None:
                writer.transport.abort()

    def _encoded(self, method: str, path: str, body: bytes, kind: str) -> bytes:
        access = self.access
        host = f"[{access.host}]" if ":" in access.host else access.host
        fields = {
            "Host": f"{host}:{access.port}",
            "User-Agent": f"nerite/{__version__}",
            "Accept": "application/json",
            "Connection": "close",
        }
        if token := access.token():
            fields["Authorization"] = f"Bearer {token}"
        if body:
            fields |= {"Content-Type": kind, "Content-Length": str(len(body))}
        lines = [request_line(method, access.path + path), *starmap(field_line, fields.items())]
        return b"".join((*lines, b"\r\n", body))


def _cause(error: Exception) -> str:
    if isinstance(error, asyncio.IncompleteReadError):
        return "it closed the connection before the end of its answer"
    return str(getattr(error, "strerror", None) or error)


def _json(data: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise Unavailable(f"the API server sent no JSON: {error}") from None
    if not isinstance(found, dict):
        raise Unavailable("the API server sent JSON that is no object")
    return found


def _refusal(method: str, path: str, status: int, body: bytes) -> KubernetesError:
    """Return the error that the server describes by an object of the kind ``Status``."""
    try:
        told = orjson.loads(body)
    except orjson.JSONDecodeError:
        told = None
    message = str(told.get("message", "")) if isinstance(told, dict) else ""
    remedy = {401: ". Check its token", 403: ". Grant it by a Role, as the Helm chart does"}.get(status, "")
    return KubernetesError(
        status, f"the API server refused {method} {path.partition('?')[0]}: {message or f'status {status}'}{remedy}"
    )


async def _read_head(reader: asyncio.StreamReader) -> _Head:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdecimal():
        raise ValueError("it does not speak HTTP/1.1")
    fields = (line.partition(":") for line in lines[1:] if line)
    return _Head(int(rest[:3]), {name.strip().lower(): value.strip() for name, _, value in fields})


async def _whole(reader: asyncio.StreamReader, head: _Head) -> bytes:
    data = bytearray()
    async for piece in _pieces(reader, head, None):
        data += piece
        if len(data) > _MAX_ANSWER:
            raise ValueError(f"it sent an answer of more than {_MAX_ANSWER} bytes")
    return bytes(data)


async def _pieces(reader: asyncio.StreamReader, head: _Head, silence: float | None) -> AsyncIterator[bytes]:
    """Yield the body of an answer as it comes: chunked, of a given length, or up to the end of the connection."""
    if "chunked" in head.fields.get("transfer-encoding", "").lower():
        while size := await _chunk_size(reader, silence):
            while size:
                piece = await _piece(reader, min(size, _MAX_HEAD), silence)
                size -= len(piece)
                yield piece
            await reader.readexactly(2)
        return
    left = int(head.fields["content-length"]) if "content-length" in head.fields else None
    while left is None or left > 0:
        async with asyncio.timeout(silence):
            piece = await reader.read(min(left or _MAX_HEAD, _MAX_HEAD))
        if not piece:
            if left:
                raise asyncio.IncompleteReadError(b"", left)
            return
        left = None if left is None else left - len(piece)
        yield piece


async def _chunk_size(reader: asyncio.StreamReader, silence: float | None) -> int:
    async with asyncio.timeout(silence):
        line = await reader.readuntil(b"\r\n")
    return int(line.partition(b";")[0], 16)


async def _piece(reader: asyncio.StreamReader, most: int, silence: float | None) -> bytes:
    async with asyncio.timeout(silence):
        piece = await reader.read(most)
    if not piece:
        raise asyncio.IncompleteReadError(b"", most)
    return piece
