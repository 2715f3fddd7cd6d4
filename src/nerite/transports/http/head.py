"""The head of an HTTP request: parsed by ``httptools``, and parsed once for each distinct head.

A client sends the same head again and again, byte for byte, so connections look heads up by their bytes before they
parse. What is cached is an immutable description; everything derived from the head alone hangs on it too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httptools

MAX_HEAD = 64 * 1024
_MAX_CACHED_HEAD = 4096
_MAX_CACHED = 1024


class BadHead(Exception):
    """The bytes are not the head of an HTTP request."""


class RequestHead:
    """Method, path and headers, and what follows from them. Never changed after parsing, but for the memos."""

    __slots__ = (
        "chunked",
        "content_length",
        "expects_continue",
        "fields",
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
        self.head.path += url.decode("latin-1")

    def on_header(self, name: bytes, value: bytes) -> None:
        key = name.decode("latin-1").lower()
        text = value.decode("latin-1").rstrip(" \t")
        self.head.headers.setdefault(key, text)
        self.head.fields.append((name.decode("latin-1"), text))
        if key == "transfer-encoding":
            self.codings.append(text.lower())

    def on_headers_complete(self) -> None:
        self.complete = True
        # Now: behind a request without a body the parser has forgotten it.
        self.head.keep_alive = self.parser.should_keep_alive()


def parse(raw: bytes) -> RequestHead:
    """Parse a head, given up to and including its empty line. Raises ``BadHead``."""
    collected = _Parser()
    parser = collected.parser
    try:
        parser.feed_data(raw)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        # Behind the head it is an upgrade, which nobody need grant, or a coding, which is looked at below.
        if not collected.complete:
            raise BadHead(str(error)) from None
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
    return head


def _origin(target: str) -> str:
    """Return the path of a request target, which proxies may send with scheme and host in front."""
    if target.startswith(("http://", "https://")):
        return "/" + target.split("/", 3)[3] if target.count("/") >= 3 else "/"
    return target


class HeadCache:
    """Heads by their bytes, bounded."""

    __slots__ = ("_heads",)

    def __init__(self) -> None:
        self._heads: dict[bytes, RequestHead] = {}

    def get(self, raw: bytes) -> RequestHead:
        """Return the head that ``raw`` is. Raises ``BadHead``."""
        head = self._heads.get(raw)
        if head is None:
            head = parse(raw)
            if len(raw) <= _MAX_CACHED_HEAD:
                if len(self._heads) >= _MAX_CACHED:
                    self._heads.clear()
                self._heads[raw] = head
        return head

    def clear(self) -> None:
        """Forget all heads, and with them what follows from them."""
        self._heads.clear()
