"""The documentation that the server gives of itself, made when it is asked for: models come and go."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from nerite.transports.http import reply
from nerite.transports.http.docs.document import document
from nerite.transports.http.docs.page import POLICY, page
from nerite.transports.http.docs.served import served_by
from nerite.transports.http.errands import Errands
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.reply import Reply
from nerite.transports.keys import Lock

if TYPE_CHECKING:
    from nerite.server import InferenceServer

_NOT_KEPT: Final = b"Cache-Control: no-store\r\n"
_PAGE_HEADERS: Final = (
    b"Content-Security-Policy: %b\r\nX-Content-Type-Options: nosniff\r\n" % POLICY.encode() + _NOT_KEPT
)
_host = re.compile(r"[0-9A-Za-z.\-_]+(:[0-9]+)?|\[[0-9A-Fa-f:.]+\](:[0-9]+)?").fullmatch


class Documentation:
    """Each method is named for its endpoint (``routes``), and sends one reply."""

    def __init__(self, server: InferenceServer, locks: Mapping[str, Lock]) -> None:
        self._server = server
        self._errands = Errands()
        self._key_headers = {category: lock.header for category, lock in locks.items()}

    def docs(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """Show the page."""
        self._errands.start(connection, self._page(_url(connection, head)))

    def openapi(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """Return the OpenAPI document."""
        served = served_by(self._server.manager.records)
        made = document(served, self._key_headers, _url(connection, head))
        connection.send([reply.json_reply(made)._replace(headers=_NOT_KEPT).encode()])

    async def _page(self, url: str) -> Reply:
        idle = await self._idle()
        served = served_by(self._server.manager.records)
        text = page(str(self._server.metadata()["name"]), served, idle, self._key_headers, url)
        return Reply(200, text.encode(), "text/html; charset=utf-8", _PAGE_HEADERS)

    async def _idle(self) -> list[tuple[str, str, str]]:
        """Return model, version and state of what is not served, unless listing that needs a key of its own."""
        if "model-repository" in self._key_headers:
            return []
        index = await self._server.repository_index(False)
        idle = [entry for entry in index if entry.get("state") != "READY"]
        return [(entry["name"], entry.get("version", ""), entry.get("state", "")) for entry in idle]


def _url(connection: HttpExchange, head: RequestHead) -> str:
    """Return where the client found the server, as far as it says so."""
    secure = connection.secure or head.headers.get("x-forwarded-proto") == "https"
    host = head.headers.get("host", "")
    return f"{'https' if secure else 'http'}://{host if _host(host) else 'localhost:8000'}"
