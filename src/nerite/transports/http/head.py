"""Heads of HTTP requests: parsed by ``httptools`` once for each distinct head, and written line by line.

Clients send the same head again and again, byte for byte, so heads are looked up by their bytes before they are parsed.
The cached object is an immutable description that also carries what was derived from the head alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import httptools

from nerite.core.byte_budget import HTTP_HEADS, Memo
from nerite.core.errors import InvalidArgument
from nerite.core.execution_observer import REQUEST_ID, TraceContext, parse, with_request_id
from nerite.core.request import Caller
from nerite.core.text import quoted_text

MAX_HEAD = 64 * 1024
_HEAD_SIZE = 3 * 1024
_FIELD_SIZE = 448
"""Approximate bytes of memory of a head with its target, and of each header field, without their text."""

_METHOD = re.compile(rb"[A-Z_]{1,64}(?= )")
"""A method as Triton's parser accepts it, but of bounded length, because it appears in the access log."""


class BadHead(Exception):
    """Raised for bytes that are not the head of an HTTP request."""


class RequestHead:
    """Method, path and headers of a request. Immutable after parsing, except for memos."""

    __slots__ = (
        "caller",
        "chunked",
        "content_length",
        "expects_continue",
        "fields",
        "footprint",
        "headers",
        "keep_alive",
        "load",
        "method",
        "path",
        "query",
        "reply_lines",
        "route",
        "special",
        "version",
    )

    def __init__(self) -> None:
        self.method = ""
        self.path = ""
        self.query = ""
        """What follows the question mark of the request target."""
        self.version = "1.1"
        self.headers: dict[str, str] = {}
        """Header values by lower-case name; the first value if a name occurs twice."""
        self.fields: list[tuple[str, str]] = []
        """All header fields in order, with names as the client spells them."""
        self.footprint = 0
        """Approximate size in memory in bytes."""
        self.content_length = 0
        self.chunked = False
        self.keep_alive = True
        self.expects_continue = False
        self.route: Any = None
        """Memo of the router: the target."""
        self.reply_lines = b""
        """Extra header lines of every reply, set by the router, without a trailing line end."""
        self.load: Callable[[], bytes] | None = None
        """Makes the load report line of each reply, if the client requested it; set by the router."""
        self.caller: Caller | None = None
        """Who sends the request, if that is the server itself and the headers do not say it."""
        self.special = False
        """Replies are modified before they are sent: header lines are added, or the body is dropped (HEAD)."""

    @property
    def target(self) -> str:
        """The request target: the path, and the query if there is one."""
        return f"{self.path}?{self.query}" if self.query else self.path


class RememberedRequest(NamedTuple):
    """Parsed request that is reused when the same bytes arrive again on the connection."""

    beginning: bytes
    """The head and the JSON part of the body."""
    head: RequestHead
    meaning: Any
    """The handler's ``HttpQuestion.meaning``."""


class _Parser:
    """Receives the callbacks of ``httptools`` and builds a ``RequestHead``."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.head = RequestHead()
        self.complete = False
        self.codings: list[str] = []
        """Values of all ``Transfer-Encoding`` fields."""

    def on_url(self, url: bytes) -> None:
        self.head.path += header_text_of(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        text = header_text_of(value).rstrip(" \t")
        self.head.headers.setdefault(key, text)
        self.head.fields.append((name.decode("latin-1"), text))
        if key == "transfer-encoding":
            self.codings.append(text.lower())

    def on_headers_complete(self) -> None:
        self.complete = True
        # Read it now: after a request without a body the parser has reset it.
        self.head.keep_alive = self.parser.should_keep_alive()


def header_text_of(raw: bytes) -> str:
    """Return bytes of a head as text, with bytes that are not UTF-8 as lone surrogates."""
    return raw.decode(errors="surrogateescape")


def header_bytes_of(text: str) -> bytes:
    """Return the original bytes of a text from ``header_text_of``."""
    return text.encode(errors="surrogateescape")


# Heads of requests to others. Text of a client that would begin another line or another request is refused.

_is_method: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+").fullmatch
_is_target: Final = re.compile(rb"[!-~\x80-\xff]+").fullmatch
_is_value: Final = re.compile(rb"[\t -~\x80-\xff]*").fullmatch


def request_line(method: str, target: str) -> bytes:
    """Return the first line of a request. Raises ``InvalidArgument`` for text that would change its meaning."""
    name, path = header_bytes_of(method), header_bytes_of(target)
    if not _is_method(name) or not _is_target(path):
        raise InvalidArgument(f"the request line '{quoted_text(f'{name!r} {path!r}')}' cannot be sent")
    return b"%b %b HTTP/1.1\r\n" % (name, path)


def field_line(name: str, value: str) -> bytes:
    """Return the line of a header field. Raises ``InvalidArgument`` for text that would change the meaning of others.

    A value may have bytes that are not UTF-8, as lone surrogates.
    """
    key, text = header_bytes_of(name), header_bytes_of(value)
    if not _is_method(key) or not _is_value(text):
        raise InvalidArgument(f"header '{quoted_text(ascii(name)[1:-1])}' has a character that no header may have")
    return b"%b: %b\r\n" % (key, text)


def parse_head(raw: bytes) -> RequestHead:
    """Parse a head, including its final empty line. Raises ``BadHead``."""
    try:
        return _parsed(raw)
    except httptools.HttpParserInvalidMethodError as error:
        # No path allows a method that the parser does not know, so the request is to get "method not allowed".
        method = _METHOD.match(raw)
        if method is None:
            raise BadHead(str(error)) from None
    head = _parsed(b"POST" + raw[method.end() :])
    head.method = method[0].decode()
    return head


def _parsed(raw: bytes) -> RequestHead:
    """Parse a head with a method that the parser knows; raise the parser's error for any other."""
    collected = _Parser()
    parser = collected.parser
    try:
        parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        # After the head, the cause is an upgrade, which may be ignored, or a transfer coding, which is checked below.
        if not collected.complete:
            if isinstance(error, httptools.HttpParserInvalidMethodError):
                raise
            raise BadHead(str(error)) from None
    finally:
        del collected.parser  # break the reference cycle
    if not collected.complete:
        raise BadHead("incomplete")
    head = collected.head
    head.method = parser.get_method().decode("latin-1")
    head.special = head.method == "HEAD"
    head.version = parser.get_http_version()
    head.path, _, head.query = _origin(head.path).partition("?")
    head.expects_continue = head.headers.get("expect", "").lower() == "100-continue"
    length = head.headers.get("content-length")
    if collected.codings:
        # The end of a body in any other coding could not be determined.
        if collected.codings != ["chunked"] or length is not None:
            raise BadHead("unsupported transfer coding: only 'chunked' is accepted")
        head.chunked = True
    elif length is not None:
        head.content_length = int(length)
    head.footprint = _HEAD_SIZE + 3 * len(raw) + _FIELD_SIZE * len(head.fields)
    return head


def _origin(target: str) -> str:
    """Return the path of a request target; proxies may put scheme and host in front of it."""
    if target.startswith(("http://", "https://")):
        return "/" + target.split("/", 3)[3] if target.count("/") >= 3 else "/"
    return target


class HeadCache:
    """Cache of parsed heads by their bytes."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: Memo[bytes, RequestHead] = Memo()

    def get(self, raw: bytes) -> RequestHead:
        """Return the parsed head of ``raw``. Raises ``BadHead``."""
        head = self._heads.get(raw)
        if head is None:
            head = parse_head(raw)
            HTTP_HEADS.put(self._heads, raw, head, head.footprint)
        return head

    def clear(self) -> None:
        """Remove all heads, and with them what was derived from them."""
        self._heads.clear()


# Trace context lines differ in each request of a client that traces, and ids of a router in each: they are cut out.
#
# The remaining bytes repeat exactly and serve as the key of the head cache.

_REQUEST: Final = f"\r\n{REQUEST_ID}: ".encode()
"""As the router writes it."""
_REQUEST_LINE: Final = re.compile(_REQUEST + rb"([^\r\n]*)(?=\r\n)")
_TRACE_LINE: Final = re.compile(rb"\r\n(trace(?:parent|state))[ \t]*:([^\r\n]*)(?=\r\n)", re.IGNORECASE)


def split_span(head: bytes, whole: bool) -> tuple[bytes, TraceContext | None]:
    """Return the head without its trace context lines, and the context; the head is unchanged if ``whole``."""
    request = _REQUEST_LINE.search(head) if _REQUEST in head else None
    if request is not None and not whole:
        head = head[: request.start()] + head[request.end() :]
    span = None
    if b"parent" in head or b"PARENT" in head or b"Parent" in head:
        head, span = _split_trace(head, whole)
    return head, span if request is None else with_request_id(span, request[1])


def _split_trace(head: bytes, whole: bool) -> tuple[bytes, TraceContext | None]:
    found: dict[bytes, str] = {}
    for name, value in _TRACE_LINE.findall(head):
        found.setdefault(name.lower(), value.decode("latin-1"))
    span = parse(found.get(b"traceparent"), found.get(b"tracestate"))
    return (head if whole or span is None else _TRACE_LINE.sub(b"", head)), span
