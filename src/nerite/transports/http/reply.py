"""Encodes HTTP replies: status lines, headers and error replies."""

from __future__ import annotations

from collections.abc import Sequence
from sys import getsizeof
from typing import Final, NamedTuple

import orjson

from nerite.core.byte_budget import REFUSALS, Memo
from nerite.core.errors import InvalidArgument, NeriteError
from nerite.transports.http.head import RequestHead

REASONS: Final = {
    200: b"OK",
    204: b"No Content",
    302: b"Found",
    304: b"Not Modified",
    308: b"Permanent Redirect",
    400: b"Bad Request",
    401: b"Unauthorized",
    403: b"Forbidden",
    404: b"Not Found",
    405: b"Not Allowed",
    408: b"Request Timeout",
    409: b"Conflict",
    410: b"Gone",
    413: b"Request Entity Too Large",
    422: b"Unprocessable Content",
    429: b"Too Many Requests",
    431: b"Request Header Fields Too Large",
    500: b"Internal Server Error",
    501: b"Not Implemented",
    502: b"Bad Gateway",
    503: b"Service Unavailable",
    504: b"Gateway Timeout",
    507: b"Insufficient Storage",
}
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Reply(NamedTuple):
    """A reply that is not an inference response."""

    status: int
    body: bytes = b""
    content_type: str = "application/json"
    headers: bytes = b""
    rest: Sequence[bytes] = ()
    """Further parts of a large body, which are sent without joining them."""

    def encode(self) -> bytes:
        """Return the reply as bytes, without the rest."""
        if self.status in (204, 304):  # these have no body and must not have a Content-Length
            return status_line(self.status) + self.headers + b"\r\n"
        length = len(self.body) + sum(map(len, self.rest))
        return head(self.status, self.content_type, length, self.headers) + self.body


def status_line(status: int) -> bytes:
    """Return the status line of a reply."""
    return b"HTTP/1.1 %d %b\r\n" % (status, REASONS[status])


def head(status: int, content_type: str, length: int, headers: bytes = b"") -> bytes:
    """Return the status line and headers for a body of ``length`` bytes."""
    return status_line(status) + b"Content-Type: %b\r\n%bContent-Length: %d\r\n\r\n" % (
        content_type.encode(),
        headers,
        length,
    )


def chunked_head(status: int, content_type: str, retry_after: int = 0) -> bytes:
    """Return the status line and headers for a body in chunks."""
    headers = b"Content-Type: %b\r\n%bTransfer-Encoding: chunked\r\n\r\n"
    return status_line(status) + headers % (content_type.encode(), retry_line(retry_after))


def retry_line(seconds: int) -> bytes:
    """Return the ``Retry-After`` header line; empty if ``seconds`` is 0."""
    return b"Retry-After: %d\r\n" % seconds if seconds else b""


def with_header(encoded: bytes, line: bytes) -> bytes:
    """Return an encoded reply with one more header line."""
    at = encoded.index(b"\r\n\r\n")
    return encoded[:at] + b"\r\n" + line + encoded[at:]


def addressed(first: bytes, to: RequestHead, *, last: bool) -> bytes:
    """Return the first part of a reply with the header lines that its request and its connection require."""
    if last and to.version == "1.1":
        first = with_header(first, b"Connection: close")
    if to.reply_lines:
        first = with_header(first, to.reply_lines)
    if to.load is not None and (line := to.load()):
        first = with_header(first, line)
    return first


def json_reply(value: object, status: int = 200) -> Reply:
    """Return a JSON reply."""
    return Reply(status, orjson.dumps(value))


def farewell(status: int, reason: str, retry_after: int = 0) -> Reply:
    """Return the error reply after which a connection is closed."""
    headers = b"Connection: close\r\n" + retry_line(retry_after)
    return json_reply({"error": reason}, status)._replace(headers=headers)


_refusals: Final[Memo[tuple[int, str, int, str], Reply]] = Memo()
_REFUSAL: Final = 768
"""Approximate bytes of memory of an error reply without its text."""


def error_reply(error: NeriteError, content_type: str = "application/json") -> Reply:
    """Return the reply for an error.

    Memoized, because an overloaded server sends the same error again and again: rejecting requests must be cheap.
    """
    key = (error.http_status, error.message, error.retry_after, content_type)
    known = _refusals.get(key)
    if known is None:
        # Errors of models may contain lone surrogates, like file names that are not UTF-8.
        message = error.message.encode(errors="replace").decode()
        body = orjson.dumps({"error": message})
        known = Reply(error.http_status, body, content_type, retry_line(error.retry_after))
        REFUSALS.put(_refusals, key, known, _REFUSAL + getsizeof(error.message) + len(body))
    return known


PLAIN: Final = "text/plain"


def too_large(head: RequestHead, size: int, limit: int, setting: str = "--http-max-input-size") -> Reply:
    """Return the error reply for a body that exceeds the maximum size, which ``setting`` sets."""
    json_size = head.headers.get("inference-header-content-length")
    if json_size is None:
        what = f"request JSON size of {size} bytes exceeds the maximum allowed input size of {limit} bytes."
    elif json_size == "0":
        what = f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of {limit} bytes."
    else:  # Triton has no limit for tensors behind the JSON part
        what = (
            f"request size of {size} bytes, tensors included, exceeds the maximum allowed input size of {limit} bytes."
        )
    return error_reply(InvalidArgument(f"{what} Use {setting} to increase the limit."))


EMPTY: Final = Reply(200, b"", PLAIN)
BAD_REQUEST: Final = Reply(400, b"", PLAIN)
"""Reply of the SageMaker and Vertex AI ports to an unknown path."""
_NOT_ALLOWED: Final = b'{"error":"Method Not Allowed"}'
NOT_ALLOWED: Final = Reply(405, _NOT_ALLOWED, PLAIN)
NOT_ALLOWED_JSON: Final = Reply(405, _NOT_ALLOWED)
MODEL_NOT_READY: Final = Reply(400, b'{"error":"Model version not ready"}', PLAIN)
