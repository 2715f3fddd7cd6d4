"""The exchange of one item of a batch: a request to a handler of HTTP on no connection, whose reply is collected."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from nerite.batches.running_batch import ItemAnswer
from nerite.core.execution_observer import TraceContext
from nerite.core.tensor import Buffer
from nerite.transports.http.handler import HttpHandler, answer_exchange
from nerite.transports.http.head import RequestHead
from nerite.transports.limits import ByteReservation

if TYPE_CHECKING:
    from nerite.core.request import InferenceRequest
    from nerite.core.response import InferenceResponse
    from nerite.transports.http.handler import HttpWork

_STATUS: Final = re.compile(rb"HTTP/1\.1 ([0-9]{3})")
_RETRY: Final = re.compile(rb"\r\nRetry-After: ([0-9]+)\r\n", re.IGNORECASE)
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


class ItemExchange:
    """The exchange of one item, whose reply becomes an ``ItemAnswer``; implements ``HttpExchange``."""

    protocol = "HTTP"
    began_ns = 0
    outer_span: TraceContext | None = None
    secure = True
    writable = True

    def __init__(
        self,
        handler: HttpHandler,
        head: RequestHead,
        done: Callable[[ItemAnswer], None],
        ended: Callable[[], None],
    ) -> None:
        """``ended`` is called before ``done``, and for an item that was cancelled."""
        self.head = head
        self.gone = False
        self.request: HttpWork | None = None
        self._handler = handler
        self._done = done
        self._ended = ended
        self._chunks: list[Buffer] = []
        self._reservations: list[ByteReservation] = []

    def run(self, body: memoryview) -> None:
        """Have the handler answer."""
        answer_exchange(self._handler, self, body, "in an item of a batch")

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Have the handler turn the response of an inference into a reply; drop it if the item was cancelled."""
        if self.request is request:
            self._handler.answer(self, request, response)

    def hold(self, share: ByteReservation) -> None:
        """Take over the bytes that were reserved for the exchange."""
        self._reservations.append(share)

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

    def send_chunk(self, data: bytes) -> None:
        """Take one chunk of the reply."""
        self._chunks.append(data)

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Take one large chunk of the reply."""
        self._chunks.extend(pieces)

    def close_reply(self) -> None:
        """End the reply that ``open`` began."""
        self.send(self._chunks)

    def cancel(self) -> None:
        """Cancel the item; its answer is dropped."""
        if self.gone:
            return
        request = self.request
        self._end()
        if request is not None:
            request.cancel()

    def _end(self) -> None:
        self.gone = True
        self.request = None
        self._chunks = []
        self._ended()
        for share in self._reservations:
            share.give_back()
        self._reservations.clear()
