"""A client of ours that writes down what it is told, and the ``h2`` package as its server."""

from __future__ import annotations

from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.settings
from http2_peer import Frame, keep_all, parse, settings

from nerite.http2 import Http2ClientConnection, Limits, ReplyHeaders, encode_request
from nerite.http2.frames import PREFACE

REQUEST_BLOCK = encode_request(
    [(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"a"), (b"te", b"trailers")]
)


@dataclass
class Answers:
    """Keeps the events, and checks that nothing comes for a stream that is over."""

    events: list[tuple[object, ...]] = field(default_factory=list)
    bodies: dict[int, bytes] = field(default_factory=dict)
    over: set[int] = field(default_factory=set)
    connection: Http2ClientConnection = field(init=False)

    def response_started(self, stream_id: int, headers: ReplyHeaders, end_stream: bool) -> None:
        assert stream_id not in self.bodies and stream_id not in self.over
        assert 200 <= headers.status < 600
        self.bodies[stream_id] = b""
        self.events.append(("started", stream_id, headers, end_stream))
        if end_stream:
            self.over.add(stream_id)

    def data_received(self, stream_id: int, data: bytes | memoryview, end_stream: bool) -> None:
        assert stream_id not in self.over and (data or end_stream)
        self.bodies[stream_id] += data
        if end_stream:
            self.events.append(("ended", stream_id))
            self.over.add(stream_id)

    def trailers_received(self, stream_id: int, trailers: ReplyHeaders) -> None:
        assert stream_id in self.bodies and stream_id not in self.over and trailers.status == 0
        self.events.append(("trailers", stream_id, trailers.fields))
        self.over.add(stream_id)

    def stream_closed(self, stream_id: int, error_code: int) -> None:
        assert stream_id not in self.over
        self.events.append(("closed", stream_id, error_code))
        self.over.add(stream_id)

    def writable(self, stream_id: int) -> None:
        self.events.append(("writable", stream_id))

    def connection_closing(self, error_code: int, reason: str) -> None:
        self.events.append(("closing", error_code, reason))

    def take(self) -> list[tuple[object, ...]]:
        """Return the events since the last time."""
        events, self.events = self.events, []
        return events


class Client:
    """A connection of ours, fed with frames."""

    def __init__(self, limits: Limits | None = None, *entries: tuple[int, int], greeted: bool = True) -> None:
        self.answers = Answers()
        self.connection = self.answers.connection = Http2ClientConnection(
            self.answers, limits or Limits(), 0.0, keep_all
        )
        written = b"".join(map(bytes, self.connection.outbound))
        self.connection.outbound.clear()
        assert written.startswith(PREFACE)
        self.opening = parse([written[len(PREFACE) :]])
        if greeted:
            self.send(settings(*entries))

    def send(self, *frames: bytes, now: float = 0.0) -> list[Frame]:
        """Deliver frames in one piece; return what the client says to that."""
        self.connection.receive(b"".join(frames), now)
        return self.sent()

    def sent(self) -> list[Frame]:
        """Return what the client has put out since the last time."""
        frames = parse(self.connection.outbound)
        self.connection.outbound.clear()
        return frames

    def ask(self, body: bytes | None = None) -> int:
        """Open a stream, with a complete request unless ``body`` is None."""
        stream_id = self.connection.open_stream(REQUEST_BLOCK)
        if body is not None:
            self.connection.send_data(stream_id, [body], True)
        return stream_id


class H2Server:
    """The ``h2`` package as the server at the other end."""

    def __init__(self, limits: Limits | None = None, *, greeted: bool = True, **settings: int) -> None:
        self.answers = Answers()
        self.client = self.answers.connection = Http2ClientConnection(self.answers, limits or Limits(), 0.0, keep_all)
        self.server = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))
        values = {getattr(h2.settings.SettingCodes, key): settings[key] for key in settings}
        self.server.local_settings = h2.settings.Settings(client=False, initial_values=values)
        self.server.initiate_connection()
        self.requests: dict[int, bytes] = {}
        self.events: list[h2.events.Event] = []
        self.credit = True
        """The server returns credit for what it receives."""
        if greeted:
            self.pump()

    def pump(self) -> list[h2.events.Event]:
        """Move bytes both ways until there are none; return what the server saw."""
        seen: list[h2.events.Event] = []
        while True:
            upward = b"".join(map(bytes, self.client.outbound))
            self.client.outbound.clear()
            if upward:
                for event in self.server.receive_data(upward):
                    seen.append(event)
                    if isinstance(event, h2.events.RequestReceived):
                        self.requests[event.stream_id] = b""
                    elif isinstance(event, h2.events.DataReceived):
                        self.requests[event.stream_id] += event.data
                        if self.credit and event.flow_controlled_length:
                            self.server.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            downward = self.server.data_to_send()
            if downward:
                self.client.receive(downward, 0.0)
            if not upward and not downward:
                self.events += seen
                return seen

    def answer(self, stream_id: int, body: bytes = b"", status: str = "200", trailers: bool = True) -> None:
        """Send an answer, as far as the client's windows allow at once."""
        self.server.send_headers(stream_id, [(":status", status), ("content-type", "application/grpc")])
        while body:
            room = min(self.server.local_flow_control_window(stream_id), self.server.max_outbound_frame_size, len(body))
            assert room > 0, "the client grants no window"
            self.server.send_data(stream_id, body[:room])
            body = body[room:]
            self.pump()
        if trailers:
            self.server.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)
        else:
            self.server.end_stream(stream_id)
