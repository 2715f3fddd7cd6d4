"""A gRPC connection whose calls stand in the access log."""

from __future__ import annotations

from collections.abc import Sequence

from nerite.core.errors import NeriteError
from nerite.core.request import GaveUp, InferenceRequest
from nerite.core.tensor import Buffer
from nerite.http2 import Headers
from nerite.transports.access_log import Access, peer_of
from nerite.transports.grpc import status
from nerite.transports.grpc.connection import Call, GrpcConnection, Target
from nerite.transports.grpc.stream import StreamCall, StreamTarget


class LoggedCall(Call):
    """A unary call."""

    __slots__ = ("_access",)

    def __init__(self, connection: GrpcConnection, stream_id: int, target: Target) -> None:
        super().__init__(connection, stream_id, target)
        assert isinstance(connection, LoggedGrpcConnection)
        self._access = connection.beginning

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Take a piece of the body."""
        self._access.received += len(data)
        super().receive(data, end)

    def reply(self, head: bytes, parts: Sequence[Buffer]) -> None:
        """Send the message of the reply, and OK."""
        self._note(status.told(status.TRAILERS_OK), sum(map(len, parts)))
        super().reply(head, parts)

    def fail(self, block: bytes) -> None:
        """Send the status of a call that failed."""
        self._note(status.told(block))
        super().fail(block)

    def cancel(self, why: GaveUp) -> None:
        """Forget the call: nobody waits for its answer."""
        self._note(status.NAMES[status.CANCELLED])
        super().cancel(why)

    def _note(self, told: str, sent: int = 0) -> None:
        self._access.asks(self.request)
        self._access.answered(told, sent)


class LoggedStreamCall(StreamCall):
    """A stream: one line at its end."""

    __slots__ = ("_access", "_asked", "_sent", "_told")

    def __init__(self, connection: GrpcConnection, stream_id: int, target: StreamTarget) -> None:
        super().__init__(connection, stream_id, target)
        assert isinstance(connection, LoggedGrpcConnection)
        self._access = connection.beginning
        self._asked = self._told = self._sent = 0

    def receive(self, data: bytes | memoryview, end: bool) -> None:
        """Take a piece of the body."""
        self._access.received += len(data)
        super().receive(data, end)

    def begin(self, request: InferenceRequest, decoupled: bool) -> None:
        """Note that a request is under way."""
        self._asked += 1
        super().begin(request, decoupled)

    def refuse(self, request_id: str, error: NeriteError) -> None:
        """Say why a message leads to no inference."""
        self._asked += 1
        super().refuse(request_id, error)

    def cancel(self, why: GaveUp) -> None:
        """Forget the call: nobody waits for its responses."""
        self._note(status.CANCELLED)
        super().cancel(why)

    def _send(self, parts: Sequence[Buffer]) -> None:
        if parts:
            self._told += 1
            self._sent += sum(map(len, parts))
        super()._send(parts)

    def _finish(self, code: int, message: str, retry_after: int = 0) -> None:
        self._note(code)
        super()._finish(code, message, retry_after)

    def _note(self, code: int) -> None:
        self._access.answered(status.NAMES[code], self._sent, requests=self._asked, responses=self._told)


class LoggedGrpcConnection(GrpcConnection):
    """Gives each call its line."""

    _unary = LoggedCall
    _streaming = LoggedStreamCall
    beginning: Access
    """Of the call that is being begun."""

    def _begin(self, stream_id: int, headers: Headers) -> Call | StreamCall | None:
        self.beginning = Access(peer_of(self._transport))
        self.beginning.method, self.beginning.path = "gRPC", headers.path.decode("latin-1")
        call = super()._begin(stream_id, headers)
        if call is None:
            target: Target | None = headers.memo
            refusal = target.refusal if target is not None else None
            self.beginning.answered(status.told(refusal) if refusal is not None else "INTERNAL")
        return call
