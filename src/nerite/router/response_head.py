"""Heads of members' responses: parsed once for each distinct head, and rewritten for clients."""

from __future__ import annotations

import re
from typing import Final

import httptools

from nerite.core.byte_budget import HTTP_REPLIES, Memo

MAX_RESPONSE_HEAD: Final = 64 * 1024
HOP_BY_HOP: Final = frozenset((
    b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te", b"trailer",
    b"transfer-encoding", b"upgrade",
))  # fmt: skip
"""Header fields that concern one connection only."""
REPORT: Final = b"endpoint-load-metrics"
_REPORT_LINE: Final = re.compile(rb"\r\nendpoint-load-metrics[ \t]*:([^\r\n]*)(?=\r\n)", re.IGNORECASE)
_SIZE: Final = 1024
"""Approximate bytes of memory of a head without its text."""


class BadResponse(Exception):
    """Raised for bytes that are not an HTTP response. The text continues a sentence about the member."""


class ResponseHead:
    """Status and framing of a response, and its head as clients get it."""

    __slots__ = ("chunked", "closes", "content_length", "events", "first", "interim", "keeps", "status")

    def __init__(self, status: int) -> None:
        self.status = status
        self.interim = 100 <= status < 200
        """Another head follows."""
        self.first = b""
        """Status line and header fields for a client, with the empty line."""
        self.content_length = 0
        self.chunked = False
        self.closes = False
        """The body lasts until the member closes the connection."""
        self.keeps = True
        """The connection may be used for another request."""
        self.events = False
        """The body is a stream of server-sent events."""


class _Collected:
    """Receives the callbacks of ``httptools``."""

    def __init__(self) -> None:
        self.reason = b""
        self.fields: list[tuple[bytes, bytes]] = []
        self.complete = False

    def on_status(self, reason: bytes) -> None:
        self.reason += reason

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields.append((name, value))

    def on_headers_complete(self) -> None:
        self.complete = True


def parse_response_head(raw: bytes) -> ResponseHead:
    """Parse a head with its final empty line. Raises ``BadResponse``."""
    collected = _Collected()
    parser = httptools.HttpResponseParser(collected)
    try:
        parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        if not collected.complete:
            raise BadResponse(f"sent what is not HTTP: {error}") from None
    if not collected.complete:
        raise BadResponse("sent an incomplete head")
    status = parser.get_status_code()
    if not 100 <= status <= 999 or status == 101:
        raise BadResponse(f"answered with status {status}, which no request asks for")
    head = ResponseHead(status)
    head.keeps = parser.get_http_version() == "1.1"
    lengths: set[bytes] = set()
    codings: list[bytes] = []
    dropped = set(HOP_BY_HOP)
    for name, value in collected.fields:
        key = name.lower()
        if key == b"connection":
            tokens = {token.strip() for token in value.lower().split(b",")}
            dropped |= tokens - {b""}
            head.keeps = (head.keeps or b"keep-alive" in tokens) and b"close" not in tokens
        elif key == b"content-length":
            lengths.add(value.strip())
        elif key == b"transfer-encoding":
            codings.append(value.strip().lower())
        elif key == b"content-type":
            head.events = value.lower().startswith(b"text/event-stream")
    if len(lengths) > 1 or (lengths and codings) or (codings and codings != [b"chunked"]):
        raise BadResponse("sent a response whose end is not clear: it has several lengths or codings")
    without = head.interim or status in (204, 304)
    lines = [b"HTTP/1.1 %d %b" % (status, collected.reason)]
    for name, value in collected.fields:
        key = name.lower()
        if key not in dropped:
            lines.append(b"%b: %b" % (name, value))
            if key == b"content-length":
                dropped.add(key)  # once
    if codings and not without:
        head.chunked = True
        lines.append(b"Transfer-Encoding: chunked")
    elif lengths:
        length = lengths.pop()
        if not length.isdigit() or len(length) > 18:
            raise BadResponse("sent a Content-Length that is not a number")
        head.content_length = 0 if without else int(length)
    elif not without:
        head.closes = True
        head.keeps = False
        lines.append(b"Transfer-Encoding: chunked")
    head.first = b"\r\n".join((*lines, b"", b""))
    return head


class ResponseHeads:
    """Parses heads, or finds them by their bytes."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: Memo[bytes, ResponseHead] = Memo()

    def get(self, raw: bytes) -> tuple[ResponseHead, bytes]:
        """Return the head of ``raw`` and its load report, which is not part of the head. Raises ``BadResponse``."""
        line = b""
        if (at := raw.find(REPORT)) >= 0 or (at := raw.lower().find(REPORT)) >= 0:
            found = _REPORT_LINE.search(raw, at - 2)
            if found is not None:
                line = found[1].strip()
                raw = raw[: found.start()] + raw[found.end() :]
        head = self._known.get(raw)
        if head is None:
            head = parse_response_head(raw)
            HTTP_REPLIES.put(self._known, raw, head, _SIZE + 2 * len(raw))
        return head, line
