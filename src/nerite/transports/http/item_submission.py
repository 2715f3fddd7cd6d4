"""Executes items of batches in this process: each is a request to the handlers of the HTTP port, on no connection."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from nerite.admission.policy import IDLE
from nerite.batches.running_batch import ItemAnswer, ItemRequest
from nerite.core.errors import NeriteError
from nerite.core.execution_observer import TraceContext
from nerite.core.request import Caller
from nerite.core.tensor import Buffer
from nerite.transports.http.handler import HttpHandler, answer_exchange
from nerite.transports.http.head import RequestHead
from nerite.transports.limits import ByteReservation

if TYPE_CHECKING:
    from nerite.core.request import InferenceRequest
    from nerite.core.response import InferenceResponse
    from nerite.models.running_version import RunningVersion
    from nerite.server import InferenceServer
    from nerite.transports.http.handler import HttpWork

_STATUS: Final = re.compile(rb"HTTP/1\.1 ([0-9]{3})")
_RETRY: Final = re.compile(rb"\r\nRetry-After: ([0-9]+)\r\n", re.IGNORECASE)
_END_OF_HEAD: Final = b"\r\n\r\n"
_NO_ROOM: Final = ItemAnswer(503, b'{"error":"the model has no idle instance"}')


def _nothing() -> None:
    """Do nothing: the item has been answered."""


class ItemSubmission:
    """Submits items to a handler. Implements ``ItemExecutor``."""

    def __init__(self, server: InferenceServer, handler: HttpHandler) -> None:
        self._server = server
        self._handler = handler
        self._under_way: Counter[str] = Counter()
        """Items under way by model."""

    def submit(self, request: ItemRequest, done: Callable[[ItemAnswer], None]) -> Callable[[], None]:
        """Execute an item, and call ``done`` once, at once or later; return a call that cancels it."""
        if not request.raised and not self._has_room(request.model):
            done(_NO_ROOM)
            return _nothing
        head = RequestHead()
        head.method = "POST"
        head.path = request.url
        head.headers = {"content-type": "application/json", "content-length": str(len(request.body))}
        head.content_length = len(request.body)
        head.caller = Caller(request.tenant, "" if request.raised else IDLE.name)
        self._under_way[request.model] += 1
        exchange = ItemExchange(self._handler, head, done, partial(self._ended, request.model))
        exchange.run(memoryview(bytearray(request.body)))
        return exchange.cancel

    def _ended(self, model: str) -> None:
        self._under_way[model] -= 1
        if not self._under_way[model]:
            del self._under_way[model]

    def has_others(self, model: str) -> bool:
        """Return whether a model executes requests that are not items."""
        return sum(version.in_flight for version in self._versions(model)) > self._under_way[model]

    def _has_room(self, model: str) -> bool:
        """Return whether a model has an instance without work. Of an engine, admission control knows it better."""
        versions = self._versions(model)
        return not versions or any(
            version.generates or (not version.pending and version.in_flight < max(len(version.instances), 1))
            for version in versions
        )

    def _versions(self, model: str) -> list[RunningVersion]:
        """Return the versions that requests to a model or a route go to; none if they get an error."""
        route = self._server.routes.get(model)
        names = [(model, "")] if route is None else [(arm.model, arm.version) for arm in route.by_weight]
        found = []
        for name, version in names:
            with contextlib.suppress(NeriteError):
                found.append(self._server.find(name, version, ""))
        return found


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
