"""The exchange of one item of a batch: a request to a handler of HTTP on no connection, whose reply is collected."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Final

from nerite.batches.running_batch import ItemAnswer
from nerite.core.execution_observer import TraceContext
from nerite.core.tensor import Buffer
from nerite.transports.http.detached_exchange import DetachedExchange
from nerite.transports.http.handler import HttpHandler
from nerite.transports.http.head import RequestHead

_STATUS: Final = re.compile(rb"HTTP/1\.1 ([0-9]{3})")
_RETRY: Final = re.compile(rb"\r\nRetry-After: ([0-9]{1,9})\r\n", re.IGNORECASE)
_END_OF_HEAD: Final = b"\r\n\r\n"


def item_head(url: str, size: int) -> RequestHead:
    """Return the head of the request that an item is, with a JSON body of ``size`` bytes."""
    head = RequestHead()
    head.method = "POST"
    head.path = url
    head.fields = [("content-type", "application/json"), ("content-length", str(size))]
    head.headers = dict(head.fields)
    head.content_length = size
    return head


class ItemExchange(DetachedExchange):
    """The exchange of one item, whose reply becomes an ``ItemAnswer``."""

    def __init__(
        self,
        handler: HttpHandler,
        head: RequestHead,
        request_id: str,
        done: Callable[[ItemAnswer], None],
        ended: Callable[[], None],
    ) -> None:
        """``ended`` is called before ``done``, and for an item that was cancelled."""
        super().__init__(handler, head)
        self.outer_span = TraceContext(0, 0, request_id=request_id)
        self._done = done
        self._on_end = ended
        self._chunks: list[Buffer] = []

    def send(self, parts: Sequence[Buffer]) -> None:
        """Take the complete reply."""
        if self.gone:
            return
        name = "" if self.request is None else self.request.id
        self._end()
        head, _, first = bytes(parts[0]).partition(_END_OF_HEAD)
        head += b"\r\n"
        status, retry = _STATUS.match(head), _RETRY.search(head)
        self._done(
            ItemAnswer(
                int(status[1]) if status is not None else 500,
                b"".join((first, *parts[1:])),
                float(retry[1]) if retry is not None else 0.0,
                name,
            )
        )

    def open(self, first: bytes, data: bytes = b"") -> None:
        """Begin a reply with a head and a first chunk."""
        self._chunks = [first + data]

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Take one chunk of the reply."""
        self._chunks.extend(pieces)

    def close_reply(self) -> None:
        """End the reply that ``open`` began."""
        self.send(self._chunks)

    def _ended(self) -> None:
        self._chunks = []
        self._on_end()
