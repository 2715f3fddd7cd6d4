"""An HTTP exchange without a connection in this process; its reply goes to the code that created it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from nerite.core.failures import report
from nerite.core.request import CancelReason
from nerite.core.tensor import Buffer
from nerite.transports.http import reply
from nerite.transports.http.handler import HttpHandler
from nerite.transports.http.head import RequestHead
from nerite.transports.limits import ByteReservation

if TYPE_CHECKING:
    from nerite.core.execution_observer import TraceContext
    from nerite.core.request import InferenceRequest
    from nerite.core.response import InferenceResponse
    from nerite.transports.http.handler import HttpWork


class DetachedExchange(ABC):
    """One HTTP request and its reply; implements ``HttpExchange``. It ends once: replied to, or cancelled."""

    protocol = "HTTP"
    began_ns = 0
    outer_span: TraceContext | None = None
    secure = True
    writable = True

    def __init__(self, handler: HttpHandler, head: RequestHead) -> None:
        self._handler = handler
        self.head = head
        self.request: HttpWork | None = None
        self.gone = False
        self._reservations: list[ByteReservation] = []

    def run(self, body: memoryview) -> None:
        """Have the handler answer."""
        try:
            refusal = self._handler.begin(self.head)
            if refusal is not None:
                self.send([refusal.encode()])
            else:
                self._handler.handle(self, self.head, body)
        except Exception as error:
            self.send([reply.error_reply(report("http", error, "in a relayed request or an item of a batch")).encode()])

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Have the handler turn the response of an inference into a reply; drop it if the exchange has ended."""
        if self.request is request:
            self._handler.answer(self, request, response)

    def hold(self, share: ByteReservation) -> None:
        """Take over the bytes that were reserved for the exchange."""
        self._reservations.append(share)

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Cancel the work, whose result is dropped."""
        if self.gone:
            return
        request = self.request
        self._end()
        if request is not None:
            request.cancel(why)

    def _end(self) -> None:
        """Release what the exchange holds."""
        self.gone = True
        self.request = None
        for share in self._reservations:
            share.give_back()
        self._reservations.clear()
        self._ended()

    @abstractmethod
    def _ended(self) -> None:
        """Note that the exchange has ended."""

    @abstractmethod
    def send(self, parts: Sequence[Buffer]) -> None:
        """Take the complete reply."""

    @abstractmethod
    def open(self, first: bytes, data: bytes = b"") -> None:
        """Begin a reply with a head and a first chunk."""

    @abstractmethod
    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Take one chunk of the reply."""

    @abstractmethod
    def close_reply(self) -> None:
        """End the reply that ``open`` began."""

    def send_chunk(self, data: bytes) -> None:
        """Take one chunk of the reply."""
        self.send_pieces([data])
