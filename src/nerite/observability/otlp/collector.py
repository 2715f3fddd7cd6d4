"""A collector at the other end of a connection: takes one message at a time."""

from __future__ import annotations

import gzip
import http.client
import ssl
from typing import Final
from urllib.parse import urlsplit

from nerite import __version__
from nerite.config.options import OpenTelemetryOptions

_PASSING: Final = frozenset((429, 502, 503, 504))
"""Statuses with which a message may be sent again, by OTLP's specification."""
_MOST_SAID: Final = 200


class Unreachable(Exception):
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
        """Send a message. Raises ``Unreachable``."""
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
            raise Unreachable(str(error) or type(error).__name__, passing=True) from None
        if status >= 300:
            reason = f"the collector answers {status} {said}".rstrip()
            raise Unreachable(reason, passing=status in _PASSING, retry_after=after)

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
        text = said[:_MOST_SAID].decode(errors="replace") if answer.status >= 300 else ""
        return answer.status, float(after) if after.isdecimal() else None, text

    def _connected(self) -> http.client.HTTPConnection:
        if not self._secure:
            return http.client.HTTPConnection(self._host, timeout=self._options.timeout)
        context = ssl.create_default_context(cafile=self._options.certificate or None)
        return http.client.HTTPSConnection(self._host, timeout=self._options.timeout, context=context)
