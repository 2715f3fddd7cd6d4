"""The head of an HTTP request: parsed by ``httptools``, and parsed once for each distinct head.

A client sends the same head again and again, byte for byte, so connections look heads up by their bytes before they
parse. What is cached is an immutable description; everything derived from the head alone hangs on it too.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final

import httptools

from nerite.core.byte_budget import HTTP_HEADS, Memo
from nerite.core.trace_context import TraceContext, parse

MAX_HEAD = 64 * 1024
_HEAD = 3 * 1024
_FIELD = 448
"""Bytes that a head takes in memory, with what it leads to, and each field of it, beside the text."""

_METHOD = re.compile(rb"[A-Z_]{1,64}(?= )")
"""What Triton's parser takes for a method, of a bounded length: the access log has it."""


class BadHead(Exception):
    """The bytes are not the head of an HTTP request."""


class RequestHead:
    """Method, path and headers, and what follows from them. Never changed after parsing, but for the memos."""

    __slots__ = (
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
        "reply_lines",
        "route",
        "special",
        "version",
    )

    def __init__(self) -> None:
        self.method = ""
        self.path = ""
        self.version = "1.1"
        self.headers: dict[str, str] = {}
        """By lower-case name; of a name that stands twice, the first."""
        self.fields: list[tuple[str, str]] = []
        """As they came, names as the client spells them."""
        self.footprint = 0
        """Bytes that it takes in memory, about."""
        self.content_length = 0
        self.chunked = False
        self.keep_alive = True
        self.expects_continue = False
        self.route: Any = None
        """The router's memo."""
        self.reply_lines = b""
        """Header lines that every reply has besides its own, as the router found; no line end behind them."""
        self.load: Callable[[], bytes] | None = None
        """Makes one more header line for each reply, if the client asked for it; as the router found."""
        self.special = False
        """Replies are not sent as they are: they get other lines, or the method is HEAD and they lose the body."""


class _Parser:
    """Collects what ``httptools`` calls out."""

    def __init__(self) -> None:
        self.parser = httptools.HttpRequestParser(self)
        self.head = RequestHead()
        self.complete = False
        self.codings: list[str] = []
        """All that ``Transfer-Encoding`` says, as often as it stands."""

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
        # Now: behind a request without a body the parser has forgotten it.
        self.head.keep_alive = self.parser.should_keep_alive()


def header_text_of(raw: bytes) -> str:
    """Return bytes of a head as text, in which lone surrogates stand for bytes that are not UTF-8."""
    return raw.decode(errors="surrogateescape")


def header_bytes_of(text: str) -> bytes:
    """Return the bytes that ``text_of`` was given."""
    return text.encode(errors="surrogateescape")


def parse_head(raw: bytes) -> RequestHead:
    """Parse a head, given up to and including its empty line. Raises ``BadHead``."""
    try:
        return _parsed(raw)
    except httptools.HttpParserInvalidMethodError as error:
        # A method that the parser does not know is one that no path takes, and is told so.
        method = _METHOD.match(raw)
        if method is None:
            raise BadHead(str(error)) from None
    head = _parsed(b"POST" + raw[method.end() :])
    head.method = method[0].decode()
    return head


def _parsed(raw: bytes) -> RequestHead:
    """Do as ``parse``, for a method that the parser knows. Raises its error for any other."""
    collected = _Parser()
    parser = collected.parser
    try:
        parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        # Behind the head it is an upgrade, which nobody need grant, or a coding, which is looked at below.
        if not collected.complete:
            if isinstance(error, httptools.HttpParserInvalidMethodError):
                raise
            raise BadHead(str(error)) from None
    finally:
        del collected.parser  # which has it, too
    if not collected.complete:
        raise BadHead("incomplete")
    head = collected.head
    head.method = parser.get_method().decode("latin-1")
    head.special = head.method == "HEAD"
    head.version = parser.get_http_version()
    head.path = _origin(head.path).partition("?")[0]
    head.expects_continue = head.headers.get("expect", "").lower() == "100-continue"
    length = head.headers.get("content-length")
    if collected.codings:
        # Where a body of any other coding ends, nobody here would know.
        if collected.codings != ["chunked"] or length is not None:
            raise BadHead("a transfer coding that is not taken")
        head.chunked = True
    elif length is not None:
        head.content_length = int(length)
    head.footprint = _HEAD + 3 * len(raw) + _FIELD * len(head.fields)
    return head


def _origin(target: str) -> str:
    """Return the path of a request target, which proxies may send with scheme and host in front."""
    if target.startswith(("http://", "https://")):
        return "/" + target.split("/", 3)[3] if target.count("/") >= 3 else "/"
    return target


class HeadCache:
    """Heads by their bytes."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: Memo[bytes, RequestHead] = Memo()

    def get(self, raw: bytes) -> RequestHead:
        """Return the head that ``raw`` is. Raises ``BadHead``."""
        head = self._heads.get(raw)
        if head is None:
            head = parse_head(raw)
            HTTP_HEADS.put(self._heads, raw, head, head.footprint)
        return head

    def clear(self) -> None:
        """Forget all heads, and with them what follows from them."""
        self._heads.clear()


# The lines of a head that name a span: cut out of it, since they are new with each request of a client that traces.
#
# What is left repeats, byte for byte, and is what heads and all that hangs on them are looked up by.

_LINE: Final = re.compile(rb"\r\n(trace(?:parent|state))[ \t]*:([^\r\n]*)(?=\r\n)", re.IGNORECASE)


def split_span(head: bytes, whole: bool) -> tuple[bytes, TraceContext | None]:
    """Return a head without the lines, and the span; the head as it is if it names none, or is to stay ``whole``."""
    if b"parent" not in head and b"PARENT" not in head and b"Parent" not in head:
        return head, None
    found: dict[bytes, str] = {}
    for name, value in _LINE.findall(head):
        found.setdefault(name.lower(), value.decode("latin-1"))
    span = parse(found.get(b"traceparent"), found.get(b"tracestate"))
    return (head if whole or span is None else _LINE.sub(b"", head)), span
