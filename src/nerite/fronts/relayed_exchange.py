"""An HTTP exchange whose client is connected to a front: the core answers it as if the connection were its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from nerite.core.execution_observer import TraceContext
from nerite.core.tensor import Buffer
from nerite.fronts.messages import CHANGING, RelayedPiece, work_name
from nerite.transports.http import reply, routes
from nerite.transports.http.detached_exchange import DetachedExchange
from nerite.transports.http.handler import HttpHandler
from nerite.transports.http.head import RequestHead


class ReplyRelay(Protocol):
    """Sends the pieces of replies to the front."""

    def relayed(self, number: int, piece: RelayedPiece, data: Sequence[Buffer], name: bytes = b"") -> None:
        """Send a piece of a relayed reply. ``name`` is that of the work, see ``work_name``."""

    def after_acknowledgement(self, send: Callable[[], None]) -> None:
        """Send a reply once all fronts know what has changed until now."""

    def publish(self) -> None:
        """Send what has changed to all fronts."""

    def ended(self, number: int) -> None:
        """Remove a relayed request that was answered."""


class RelayedExchange(DetachedExchange):
    """One relayed HTTP request, whose reply goes to the front piece by piece."""

    def __init__(
        self,
        relay: ReplyRelay,
        number: int,
        head: RequestHead,
        handler: HttpHandler,
        secure: bool,
        outer_span: TraceContext | None,
    ) -> None:
        super().__init__(handler, head)
        self._relay = relay
        self._number = number
        self.secure = secure
        self.outer_span = outer_span

    def send(self, parts: Sequence[Buffer]) -> None:
        """Send the complete reply."""
        if self.gone:
            return
        name = self._work_name()
        self._end()
        parts = [self._addressed(bytes(parts[0])), *parts[1:]]
        route = routes.find_route(self.head.path) if self.head.method == "POST" else None
        if route is not None and route.endpoint.category in CHANGING:
            self._relay.publish()
        self._relay.after_acknowledgement(lambda: self._relay.relayed(self._number, RelayedPiece.SEND, parts, name))

    def open(self, first: bytes, data: bytes = b"") -> None:
        """Begin a reply with a head and a first chunk."""
        if not self.gone:
            self._relay.relayed(self._number, RelayedPiece.OPEN, [self._addressed(first), data], self._work_name())

    def send_pieces(self, pieces: Sequence[Buffer]) -> None:
        """Send one large chunk of the reply."""
        if not self.gone:
            self._relay.relayed(self._number, RelayedPiece.CHUNK, pieces)

    def close_reply(self) -> None:
        """End the reply that ``open`` began."""
        if not self.gone:
            self._end()
            self._relay.relayed(self._number, RelayedPiece.CLOSE, [])

    def pause(self, paused: bool) -> None:
        """Pause the responses of the work, or resume them."""
        self.writable = not paused
        if self.request is not None:
            self.request.pause(paused)

    def _work_name(self) -> bytes:
        request = self.request
        if request is None:
            return b""
        header = request.header
        version = header.model_version if header.route is None else header.route.version.label
        return work_name(request.id, header.model_name, version)

    def _addressed(self, first: bytes) -> bytes:
        return reply.addressed(first, self.head, last=False)

    def _ended(self) -> None:
        self._relay.ended(self._number)
