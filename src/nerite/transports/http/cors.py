"""CORS: which pages of other origins may use the HTTP port. Browsers ask, and obey; nobody else needs to.

What a reply says about it follows from the head of its request, so it is worked out once for each distinct head.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import Final

from nerite.transports.http import routes
from nerite.transports.http.head import RequestHead, bytes_of
from nerite.transports.http.reply import Reply
from nerite.transports.http.target import Target

ANY: Final = "*"
_OWN_HEADERS: Final = ("Content-Type", "Content-Encoding", "Inference-Header-Content-Length")
_EXPOSED: Final = b"Access-Control-Expose-Headers: Inference-Header-Content-Length, Content-Encoding, Retry-After"
_VARY: Final = b"Vary: Origin"
_REMEMBER_SECONDS: Final = 7200
"""For which a browser need not ask again. More than that none remembers."""
_name = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+").fullmatch


class Cors:
    """The rules: origins that are allowed, and what their pages may send."""

    def __init__(self, origins: Collection[str], key_headers: Iterable[str]) -> None:
        """``key_headers`` are those that restricted endpoints expect."""
        self._origins = frozenset(origins)
        self._any = ANY in origins
        self._headers = tuple(dict.fromkeys((*_OWN_HEADERS, *key_headers)))

    def lines(self, head: RequestHead) -> bytes:
        """Return the header lines of every reply to ``head``, without a line end behind them; empty for none."""
        if self._allowed(head):
            if self._any:
                return b"Access-Control-Allow-Origin: *\r\n" + _EXPOSED
            origin = bytes_of(head.headers["origin"])
            return b"\r\n".join((b"Access-Control-Allow-Origin: " + origin, _EXPOSED, _VARY))
        # What a cache keeps for one origin is not the answer for another.
        return _VARY if head.method == "GET" and not self._any else b""

    def preflight(self, head: RequestHead, methods: Iterable[str]) -> Reply | None:
        """Return the answer to the question whether a page may ask what it has in mind, None if ``head`` is none."""
        if head.method != "OPTIONS" or "access-control-request-method" not in head.headers or not self._allowed(head):
            return None
        # Whatever else it wants to send may pass, too: headers are for those who read them to judge.
        wanted = map(str.strip, head.headers.get("access-control-request-headers", "").split(","))
        known = {name.lower() for name in self._headers}
        names = [*self._headers, *(name for name in wanted if _name(name) and name.lower() not in known)]
        lines = (
            f"Access-Control-Allow-Methods: {', '.join(methods)}",
            f"Access-Control-Allow-Headers: {', '.join(names)}",
            f"Access-Control-Max-Age: {_REMEMBER_SECONDS}",
        )
        return Reply(204, headers="".join(f"{line}\r\n" for line in lines).encode("latin-1"))

    def _allowed(self, head: RequestHead) -> bool:
        origin = head.headers.get("origin")
        return origin is not None and (self._any or origin in self._origins)


class CorsRouter:
    """Answers what browsers ask beforehand, leaves everything else to another router, and says who may read it."""

    def __init__(self, cors: Cors, target_of: Callable[[RequestHead], Target]) -> None:
        self._cors = cors
        self._target_of = target_of

    def target(self, head: RequestHead) -> Target:
        """Return what a head asks for."""
        head.reply_lines = self._cors.lines(head)
        head.special = head.special or bool(head.reply_lines)
        route = routes.find(head.path)
        # Before any key: browsers do not send it along.
        preflight = self._cors.preflight(head, route.endpoint.methods) if route is not None else None
        return self._target_of(head) if preflight is None else Target(preflight)
