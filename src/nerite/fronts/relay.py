"""A front's handlers of everything that is not an inference: the core answers, and the front passes the reply on."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from google.protobuf.message import Message

from nerite.core.request import CancelReason, RequestHeader
from nerite.core.tensor import Buffer
from nerite.fronts.core_connection import CoreConnection
from nerite.fronts.messages import RelayedPiece
from nerite.llm.openai.api import OpenAi
from nerite.transports import engine_load
from nerite.transports.grpc.methods import Answer, Handler
from nerite.transports.http import routes
from nerite.transports.http.handler import HttpExchange
from nerite.transports.http.head import RequestHead, header_bytes_of
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.inference_router import INFERENCES, InferenceRouter
from nerite.transports.http.reply import Reply
from nerite.transports.listeners import TargetOf
from nerite.wire.schema import methods
from nerite.workers.ipc import messages

_NO_MODEL: Final = RequestHeader("", "", ())


class RelayedWork:
    """A relayed HTTP request as the work of its connection."""

    def __init__(self, core: CoreConnection, connection: HttpExchange) -> None:
        self.id = ""
        self.header = _NO_MODEL
        self._core = core
        self._connection = connection
        self.number = 0

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Cancel the request: its reply is no longer wanted."""
        self._core.cancel_relay(self.number, why)

    def pause(self, paused: bool) -> None:
        """Pause the reply, or resume it."""
        self._core.pause(self.number, paused)

    def take(self, piece: RelayedPiece, name: bytes, data: list[Buffer]) -> None:
        """Pass on a piece of the reply."""
        if name:
            self.id, model, version = json.loads(name)
            self.header = RequestHeader(model, version, ())
        connection = self._connection
        if connection.request is not self:
            return
        if piece is RelayedPiece.SEND:
            connection.send(data)
        elif piece is RelayedPiece.OPEN:
            connection.open(bytes(data[0]), bytes(data[1]))
        elif piece is RelayedPiece.CHUNK:
            connection.send_pieces(data)
        else:
            connection.close_reply()


class FrontRouting:
    """Routes inferences to this process, and everything else to the core."""

    def __init__(
        self,
        router: InferenceRouter,
        openai: OpenAi,
        core: CoreConnection,
        wrapped: Callable[[TargetOf], TargetOf],
    ) -> None:
        """``wrapped`` wraps routing like that of the core, whose wrapping the replies of the core have passed."""
        self._router = router
        self._openai = openai
        self._core = core
        self._elsewhere = HttpTarget(call=self._relay)
        self._inferences = wrapped(self._inference)
        self._refusals = wrapped(lambda head: HttpTarget(refusal=self._refusal(head)))

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a head."""
        route = routes.find_route(head.path)
        inference = (
            route is not None
            and route.endpoint.category == "inference"
            and route.endpoint.name not in routes.OF_DATABASES  # the core has the databases
        )
        if inference and head.method == "POST" and engine_load.FORMAT not in head.headers:
            return self._inferences(head)
        return self._elsewhere if self._refusal(head) is None else self._refusals(head)

    def _inference(self, head: RequestHead) -> HttpTarget:
        route = routes.find_route(head.path)
        assert route is not None
        if route.endpoint.name not in INFERENCES:
            return self._openai.target(head)
        return self._router.of_route(route, head)

    def _refusal(self, head: RequestHead) -> Reply | None:
        """Return the error reply to a request of another kind that is rejected before its body is received."""
        if routes.is_openai(head.path):
            return self._openai.target(head).refusal
        route = routes.find_route(head.path)
        return None if route is None else self._router.locked(route.endpoint.category, head)

    def _relay(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        work = RelayedWork(self._core, connection)
        connection.request = work
        work.number = self._core.relay_http(
            _head_bytes(head), body, connection.secure, connection.outer_span, work.take
        )


def _head_bytes(head: RequestHead) -> bytes:
    """Return a head as it may have been received."""
    lines = [f"{head.method} {head.target} HTTP/{head.version}", *(f"{name}: {value}" for name, value in head.fields)]
    return b"".join(header_bytes_of(line) + b"\r\n" for line in (*lines, ""))


class GrpcRelay:
    """Handlers of the gRPC methods that are not inferences."""

    def __init__(self, core: CoreConnection) -> None:
        self._core = core
        self._methods = methods()

    def handler(self, path: str, owner: str = "") -> Handler:
        """Return the handler of the method at ``path`` for an owner of shared memory."""
        reply_type = self._methods[path].response

        def relay(request: Message, answer: Answer) -> None:
            def take(piece: RelayedPiece, _name: bytes, data: list[Buffer]) -> None:
                (content,) = data
                if piece is RelayedPiece.ERROR:
                    answer(messages.error_of(json.loads(bytes(content))))
                else:
                    answer(reply_type.FromString(bytes(content)))

            self._core.relay_grpc(f"{path}\0{owner}", request.SerializeToString(), take)

        return relay
