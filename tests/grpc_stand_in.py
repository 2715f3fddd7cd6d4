"""A gRPC server of which a test says what it does with each call: made of the ``h2`` package, in a thread."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings

from routing import StandInMember


@dataclass
class StandInCall:
    """A call as the stand-in got it."""

    connection: StandInConnection
    stream_id: int
    headers: dict[str, str]
    body: bytes = b""
    reset: bool = False
    """The other side has reset it."""
    ended: bool = False
    """The request is complete."""

    def begin(self) -> None:
        """Send the headers of an answer."""
        self.connection.h2.send_headers(self.stream_id, [(":status", "200"), ("content-type", "application/grpc")])

    def send(self, message: bytes) -> None:
        """Send a message."""
        self.connection.h2.send_data(self.stream_id, b"\0" + len(message).to_bytes(4) + message)

    def end(self, status: int = 0, text: str = "") -> None:
        """Send the trailers."""
        fields = [("grpc-status", str(status)), ("grpc-message", text)]
        self.connection.h2.send_headers(self.stream_id, fields, end_stream=True)

    def fail(self, status: int, text: str = "", *more: tuple[str, str]) -> None:
        """Answer with a status alone."""
        fields = [(":status", "200"), ("content-type", "application/grpc"), ("grpc-status", str(status))]
        self.connection.h2.send_headers(self.stream_id, [*fields, ("grpc-message", text), *more], end_stream=True)

    def answer(self, message: bytes) -> None:
        """Send a whole answer."""
        self.begin()
        self.send(message)
        self.end()


class StandInConnection:
    """A connection to the stand-in."""

    def __init__(self, server: GrpcStandIn, raw: socket.socket) -> None:
        self._server = server
        self.raw = raw
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        self.calls: dict[int, StandInCall] = {}
        self.lock = threading.Lock()

    def run(self) -> None:
        """Serve until the end of the connection."""
        with suppress(OSError), self.raw:
            with self.lock:
                self.h2.local_settings = h2.settings.Settings(client=False, initial_values=self._server.settings)
                self.h2.initiate_connection()
                self.flush()
            while data := self.raw.recv(1 << 16):
                with self.lock:
                    for event in self.h2.receive_data(data):
                        self._take(event)
                    self.flush()

    def flush(self) -> None:
        """Write what ``h2`` has to send."""
        self.raw.sendall(self.h2.data_to_send())

    def _take(self, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.RequestReceived):
            call = self.calls[event.stream_id] = StandInCall(self, event.stream_id, dict(event.headers))
            self._server.calls.append(call)
            return
        call = self.calls.get(getattr(event, "stream_id", 0) or 0)
        if call is None:
            return
        if isinstance(event, h2.events.DataReceived):
            call.body += event.data
            if self._server.reads and event.flow_controlled_length:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            call.reset = True
        elif isinstance(event, h2.events.StreamEnded):
            call.ended = True
        else:
            return
        with suppress(h2.exceptions.ProtocolError):
            self._server.handle(call, event)


class GrpcStandIn(StandInMember):
    """A member with both ports. ``handle`` is called with each event of a call; it need not do anything."""

    def __init__(self, handle: Callable[[StandInCall, h2.events.Event], None], **settings: int) -> None:
        super().__init__()
        self.handle = handle
        self.settings = {getattr(h2.settings.SettingCodes, key): value for key, value in settings.items()}
        self.reads = True
        """Credit is returned for what was received."""
        self.calls: list[StandInCall] = []
        self.connections: list[StandInConnection] = []
        self._grpc = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.grpc_port = self._grpc.getsockname()[1]
        threading.Thread(target=self._accept_grpc, daemon=True).start()

    @property
    def member(self) -> dict[str, Any]:
        """The member, as the cluster file has it."""
        return {"http": self.address, "grpc": f"127.0.0.1:{self.grpc_port}"}

    def _accept_grpc(self) -> None:
        while True:
            try:
                raw, _ = self._grpc.accept()
            except OSError:
                return
            connection = StandInConnection(self, raw)
            self.connections.append(connection)
            threading.Thread(target=connection.run, daemon=True).start()

    def stop_grpc(self) -> None:
        """End like a killed process, as far as gRPC goes."""
        with suppress(OSError):
            self._grpc.shutdown(socket.SHUT_RDWR)
        self._grpc.close()
        for connection in tuple(self.connections):
            with suppress(OSError):
                connection.raw.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """End altogether."""
        self.stop_grpc()
        super().stop()


def at_end(answer: Callable[[StandInCall], None]) -> Callable[[StandInCall, h2.events.Event], None]:
    """Return a handler that calls ``answer`` once a request is complete."""

    def handle(call: StandInCall, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.StreamEnded):
            answer(call)

    return handle


@contextmanager
def grpc_stand_ins(*handlers: Callable[[StandInCall, h2.events.Event], None], **settings: int) -> Iterator[Any]:
    """Run a stand-in for each handler."""
    made = [GrpcStandIn(handler, **settings) for handler in handlers]
    try:
        yield made
    finally:
        for each in made:
            each.stop()
