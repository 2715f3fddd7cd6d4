"""Persistent HTTP connection of the client, reopened when the server has closed it; the client's errors."""

from __future__ import annotations

import http.client
import select
import socket
import ssl
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import quote, urlsplit

import orjson

from nerite.core.tensor import Buffer


class ClientError(Exception):
    """A request failed. ``str()`` is the server's text if it answered, else the client's.

    ``status`` is the HTTP status of the answer; None without an answer, because the server did not send one or because
    the request could not be sent.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Unreachable(ClientError):
    """The connection could not be established."""


def text_in(error: object) -> str:
    """Return the text in the ``error`` field of an answer: a string, or under ``/v1`` an object with a message."""
    return str(error.get("message", error) if isinstance(error, Mapping) else error)


DEFAULT_PORT = 8000


class Address(NamedTuple):
    """Address of a server. ``prefix`` is prepended to each path, for servers behind a proxy."""

    tls: bool
    host: str
    port: int
    prefix: str

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse ``[http[s]://]host[:port][/prefix]``; the port is 8000 without a scheme. Raises ``ClientError``."""
        bare = "://" not in url
        try:
            parts = urlsplit(f"http://{url}" if bare else url)
            port = parts.port
        except ValueError as error:
            raise ClientError(f"'{url}' is not an address: {error}. Write it as HOST:PORT.") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ClientError(f"'{url}' is not an address. Write it as HOST:PORT or https://HOST:PORT.")
        if port is None:
            port = DEFAULT_PORT if bare else {"http": 80, "https": 443}[parts.scheme]
        return cls(parts.scheme == "https", parts.hostname, port, parts.path.rstrip("/"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.prefix}"


def model_path(model: str, version: str) -> str:
    """Return the path of a model, or of one of its versions."""
    return f"/v2/models/{quote(model)}" + (f"/versions/{quote(version)}" if version else "")


class HttpAnswer(NamedTuple):
    """Answer of a server. The caller owns the body: arrays that are views on it are writable."""

    status: int
    headers: http.client.HTTPMessage
    body: bytearray


class HttpClientConnection:
    """Sends requests one after the other. Not thread-safe."""

    def __init__(
        self, address: Address, headers: Mapping[str, str], timeout: float, context: ssl.SSLContext | None
    ) -> None:
        self._address = address
        self._headers = dict(headers)
        self._timeout = timeout
        self._context = context
        self._http = self._new()

    def ask(
        self, method: str, path: str, body: Sequence[Buffer] = (), headers: Mapping[str, str] | None = None
    ) -> HttpAnswer:
        """Send a request and return the answer, whatever its status. Raises ``ClientError`` if there is none."""
        try:
            if self._http.sock is not None and _has_ended(self._http.sock):
                self._http.close()
            response = self._send(self._http, method, path, body, headers or {})
            return HttpAnswer(response.status, response.headers, _whole(response))
        except (OSError, http.client.HTTPException) as error:
            # The state of the connection is undefined now.
            self._http.close()
            raise self._broken(error) from error

    def lines(
        self, method: str, path: str, body: Sequence[Buffer], headers: Mapping[str, str] | None = None
    ) -> Iterator[bytes]:
        """Yield the lines of an answer as they arrive, on a separate connection, so that other requests need not wait.

        Raises ``ClientError``, also for a status other than 200.
        """
        connection = self._new()
        try:
            response = self._send(connection, method, path, body, headers or {})
            if response.status != 200:
                raise ClientError(text_of(response.status, _whole(response)), response.status)
            while line := response.readline():
                yield line
        except (OSError, http.client.HTTPException) as error:
            raise self._broken(error) from error
        finally:
            connection.close()

    def close(self) -> None:
        """Close the connection. The next request reopens it."""
        self._http.close()

    def _new(self) -> http.client.HTTPConnection:
        host, port = self._address.host, self._address.port
        if self._address.tls:
            return http.client.HTTPSConnection(host, port, timeout=self._timeout, context=self._context)
        return http.client.HTTPConnection(host, port, timeout=self._timeout)

    def _send(
        self,
        connection: http.client.HTTPConnection,
        method: str,
        path: str,
        body: Sequence[Buffer],
        headers: Mapping[str, str],
    ) -> http.client.HTTPResponse:
        if connection.sock is None:
            try:
                connection.connect()
            except OSError as error:
                raise Unreachable(f"cannot reach {self._address}: {error.strerror or error}") from error
        length = {"Content-Length": str(sum(map(len, body)))} if method == "POST" else {}
        all_headers = {**self._headers, **length, **headers}
        connection.request(method, self._address.prefix + path, body or None, all_headers)
        return connection.getresponse()

    def _broken(self, error: Exception) -> ClientError:
        """Translate an error of the connection into a ``ClientError``."""
        if isinstance(error, TimeoutError):
            return ClientError(f"no answer from {self._address} in {self._timeout:g} seconds")
        if isinstance(error, http.client.BadStatusLine) and not isinstance(error, OSError):
            return ClientError(f"{self._address} does not speak HTTP/1.1: is that the port for gRPC?")
        return ClientError(f"the connection to {self._address} broke: {error or type(error).__name__}")


def text_of(status: int, body: Buffer) -> str:
    """Return the error text of an answer."""
    try:
        text = text_in(orjson.loads(body)["error"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        text = bytes(body).decode(errors="replace").strip()
    return text or f"HTTP status {status}"


def _has_ended(sock: socket.socket) -> bool:
    """Return whether the server has closed an idle connection.

    Checked before a request is sent, so that no request ever has to be sent twice.
    """
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))


def _whole(response: http.client.HTTPResponse) -> bytearray:
    if response.length is None:
        return bytearray(response.read())
    body = bytearray(response.length)
    view = memoryview(body)
    at = 0
    while at < len(body):
        count = response.readinto(view[at:])
        if not count:
            raise http.client.IncompleteRead(bytes(body[:at]), len(body) - at)
        at += count
    # The connection is free for the next request only after the response has been read to its end.
    response.read()
    return body
