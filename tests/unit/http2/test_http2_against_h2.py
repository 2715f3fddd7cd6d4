"""The ``h2`` package as the client, doing whatever a client may do, over a wire that cuts bytes anywhere.

What has to hold: ``h2`` never finds fault with what it gets; each stream brings exactly its bytes, or ends in exactly
one reset; and when all windows are opened in the end, everything that was under way arrives.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.settings
from http2_peer import DATA, HEAD, TRAILERS, Recorder, keep_all, parse
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from nerite.http2 import Http2Connection, Http2ErrorCode, Limits

WINDOW = h2.settings.SettingCodes.INITIAL_WINDOW_SIZE
FRAME = h2.settings.SettingCodes.MAX_FRAME_SIZE
TABLE = h2.settings.SettingCodes.HEADER_TABLE_SIZE

SIZES = st.one_of(st.integers(0, 40), st.integers(0, 3_000), st.integers(0, 70_000))
WIRE = st.one_of(st.integers(1, 20), st.integers(1, 2_000), st.integers(1, 200_000))
REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/x"), (":authority", "a"), ("te", "trailers")]


def content(stream_id: int, start: int, size: int) -> bytes:
    """Bytes that tell where they belong."""
    return bytes((stream_id + position * 7 + (position >> 8)) & 0xFF for position in range(start, start + size))


@dataclass
class Exchange:
    """One stream as each side sees it."""

    sent: int = 0
    sent_end: bool = False
    cancelled: bool = False
    replied: int = 0
    replied_end: bool = False
    refused: bool = False
    """The server's handler reset it."""

    received: bytes = b""
    received_end: bool = False
    answer: bytes = b""
    answer_end: bool = False
    heads: int = 0
    closed: list[int] = field(default_factory=list)
    """What the server's handler was told."""
    resets: list[int] = field(default_factory=list)
    """What the client was told."""


class Server(Recorder):
    """Checks the order of events and writes them into the exchanges."""

    def __init__(self, exchanges: dict[int, Exchange]) -> None:
        super().__init__()
        self.exchanges = exchanges
        self.known: set[int] = set()

    def request_started(self, stream_id, headers, end_stream):
        assert stream_id not in self.known
        self.known.add(stream_id)
        self.exchanges[stream_id].received_end = end_stream

    def data_received(self, stream_id, data, end_stream):
        exchange = self.exchanges[stream_id]
        assert stream_id in self.known and not exchange.received_end and not exchange.closed and not exchange.refused
        exchange.received += data
        exchange.received_end = end_stream

    def stream_closed(self, stream_id, error_code):
        assert stream_id in self.known
        self.exchanges[stream_id].closed.append(error_code)

    def writable(self, stream_id):
        assert not self.exchanges[stream_id].replied_end
        assert self.connection.buffered(stream_id) == 0

    def connection_closing(self, error_code, reason):
        raise AssertionError(f"closed: {error_code} {reason}")


class Conversation(RuleBasedStateMachine):
    """Rules are what either side may do at any time, and the wire moving some bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.exchanges: dict[int, Exchange] = {}
        self.upward = bytearray()
        self.downward = bytearray()
        self.written: Counter[int] = Counter()
        """Bytes of each stream in the DATA frames that the server's owner has written."""
        self.unacknowledged_settings = 1
        """h2 takes an acknowledgement as meant for whatever it said last, so the client waits for each."""

    @initialize(
        concurrent=st.integers(1, 5),
        stream_window=st.sampled_from([1, 1_000, 65_535, 100_000]),
        connection_window=st.sampled_from([65_535, 80_000, 1 << 20]),
        frame_size=st.sampled_from([16_384, 50_000]),
        window=st.sampled_from([0, 1, 100, 65_535, 200_000]),
    )
    def connect(self, concurrent, stream_window, connection_window, frame_size, window):
        limits = Limits(
            max_concurrent_streams=concurrent,
            stream_window=stream_window,
            connection_window=connection_window,
            max_frame_size=frame_size,
            max_ping_strikes=0,
        )
        self.server = Server(self.exchanges)
        self.connection = self.server.connection = Http2Connection(self.server, limits, 0.0, keep_all)
        self.client = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
        self.client.local_settings = h2.settings.Settings(client=True, initial_values={WINDOW: window})
        self.client.initiate_connection()

    # -- the client

    def open_streams(self, sending: bool = False) -> list[int]:
        return [
            stream_id
            for stream_id, exchange in self.exchanges.items()
            if not (exchange.cancelled or exchange.resets or exchange.answer_end or (sending and exchange.sent_end))
        ]

    @precondition(lambda self: len(self.exchanges) < 12)
    @rule(ends=st.booleans(), deadline=st.sampled_from([None, None, "1S", "20m", "300u"]))
    def client_starts(self, ends, deadline):
        if self.client.open_outbound_streams >= self.client.remote_settings.max_concurrent_streams:
            return
        stream_id = self.client.get_next_available_stream_id()
        self.exchanges[stream_id] = Exchange(sent_end=ends)
        headers = REQUEST + ([("grpc-timeout", deadline)] if deadline else [])
        self.client.send_headers(stream_id, headers, end_stream=ends)

    @precondition(lambda self: self.open_streams(sending=True))
    @rule(choice=st.data(), size=SIZES, padding=st.sampled_from([None, None, 0, 200]), ends=st.booleans())
    def client_sends(self, choice, size, padding, ends):
        stream_id = choice.draw(st.sampled_from(self.open_streams(sending=True)))
        exchange = self.exchanges[stream_id]
        overhead = 0 if padding is None else padding + 1
        room = min(self.client.local_flow_control_window(stream_id), self.client.max_outbound_frame_size) - overhead
        if room < 0:
            return
        size = min(size, room)
        self.client.send_data(stream_id, content(stream_id, exchange.sent, size), end_stream=ends, pad_length=padding)
        exchange.sent += size
        exchange.sent_end = ends

    @precondition(lambda self: self.open_streams(sending=True))
    @rule(choice=st.data())
    def client_sends_trailers(self, choice):
        stream_id = choice.draw(st.sampled_from(self.open_streams(sending=True)))
        self.client.send_headers(stream_id, [("x-checksum", "1")], end_stream=True)
        self.exchanges[stream_id].sent_end = True

    @precondition(lambda self: self.open_streams())
    @rule(choice=st.data())
    def client_cancels(self, choice):
        stream_id = choice.draw(st.sampled_from(self.open_streams()))
        self.client.reset_stream(stream_id, error_code=8)
        self.exchanges[stream_id].cancelled = True

    @rule(size=st.integers(1, 100_000))
    def client_opens_the_connection(self, size):
        self.client.increment_flow_control_window(size)

    @precondition(lambda self: self.open_streams())
    @rule(choice=st.data(), size=st.integers(1, 100_000))
    def client_opens_a_stream(self, choice, size):
        self.client.increment_flow_control_window(size, choice.draw(st.sampled_from(self.open_streams())))

    @precondition(lambda self: not self.unacknowledged_settings)
    @rule(
        window=st.sampled_from([0, 10, 1_000, 65_535, 150_000]),
        frame_size=st.sampled_from([16_384, 30_000]),
        table=st.sampled_from([0, 100, 4_096, 10_000]),
    )
    def client_changes_settings(self, window, frame_size, table):
        self.unacknowledged_settings += 1
        self.client.update_settings({WINDOW: window, FRAME: frame_size, TABLE: table})
        # h2 would refuse a larger frame that comes in one piece with the acknowledgement.
        self.client.max_inbound_frame_size = max(self.client.max_inbound_frame_size, frame_size)

    @rule()
    def client_pings(self):
        self.client.ping(b"12345678")

    # -- the server

    def served(self, ending: bool = False) -> list[int]:
        return [
            stream_id
            for stream_id in sorted(self.server.known)
            if not (self.exchanges[stream_id].closed or self.exchanges[stream_id].refused)
            and not self.exchanges[stream_id].replied_end
        ]

    def start_reply(self, stream_id: int) -> None:
        if not self.exchanges[stream_id].heads:
            self.exchanges[stream_id].heads = 1
            self.connection.send_headers(stream_id, HEAD)

    @precondition(lambda self: self.served())
    @rule(choice=st.data(), sizes=st.lists(SIZES, max_size=4), trailers=st.booleans())
    def server_replies(self, choice, sizes, trailers):
        stream_id = choice.draw(st.sampled_from(self.served()))
        exchange = self.exchanges[stream_id]
        if exchange.heads:
            return
        buffers = []
        for size in sizes:
            buffers.append(memoryview(content(stream_id, exchange.replied, size)))
            exchange.replied += size
        exchange.heads = 1
        exchange.replied_end = True
        self.connection.reply(stream_id, HEAD, buffers, TRAILERS if trailers else b"")

    @precondition(lambda self: self.served())
    @rule(choice=st.data(), size=SIZES, ends=st.sampled_from(["", "", "data", "trailers"]))
    def server_sends(self, choice, size, ends):
        stream_id = choice.draw(st.sampled_from(self.served()))
        exchange = self.exchanges[stream_id]
        self.start_reply(stream_id)
        buffer = content(stream_id, exchange.replied, size)
        exchange.replied += size
        exchange.replied_end = bool(ends)
        self.connection.send_data(stream_id, [buffer], end_stream=ends == "data")
        if ends == "trailers":
            self.connection.send_trailers(stream_id, TRAILERS)

    @precondition(lambda self: self.served())
    @rule(choice=st.data())
    def server_resets(self, choice):
        stream_id = choice.draw(st.sampled_from(self.served()))
        self.exchanges[stream_id].refused = True
        self.connection.reset(stream_id, Http2ErrorCode.INTERNAL_ERROR)

    @precondition(lambda self: self.served())
    @rule(choice=st.data(), pause=st.booleans())
    def server_holds_back(self, choice, pause):
        stream_id = choice.draw(st.sampled_from(self.served()))
        (self.connection.pause if pause else self.connection.resume)(stream_id)

    @rule()
    def server_pings(self):
        self.connection.ping()

    # -- the wire

    @rule(size=WIRE)
    def bytes_go_up(self, size):
        self.upward += self.client.data_to_send()
        chunk = bytearray(self.upward[:size])
        del self.upward[:size]
        self.connection.receive(memoryview(chunk), 0.0)
        chunk[:] = b"\xee" * len(chunk)

    def unsent(self) -> Counter[int]:
        """Return the bytes of each stream in the DATA frames that wait for the owner to write them."""
        sizes: Counter[int] = Counter()
        for frame in parse(self.connection.outbound):
            if frame.kind == DATA:
                sizes[frame.stream_id] += len(frame.payload)
        return sizes

    @rule(size=WIRE)
    def bytes_come_down(self, size):
        self.written += self.unsent()
        for buffer in self.connection.outbound:
            self.downward += buffer
        self.connection.outbound.clear()
        chunk = bytes(self.downward[:size])
        del self.downward[:size]
        for event in self.client.receive_data(chunk):
            self.client_learns(event)

    def client_learns(self, event: h2.events.Event) -> None:
        assert not isinstance(event, h2.events.ConnectionTerminated)
        if isinstance(event, h2.events.SettingsAcknowledged):
            self.unacknowledged_settings -= 1
        exchange = self.exchanges.get(getattr(event, "stream_id", None) or 0)
        if exchange is None or exchange.cancelled:
            return
        if isinstance(event, h2.events.DataReceived):
            exchange.answer += event.data
        elif isinstance(event, h2.events.StreamEnded):
            assert not exchange.answer_end
            exchange.answer_end = True
        elif isinstance(event, h2.events.StreamReset):
            exchange.resets.append(event.error_code)

    # -- what has to hold

    @invariant()
    def what_arrives_is_what_was_sent(self):
        for stream_id, exchange in self.exchanges.items():
            assert exchange.received == content(stream_id, 0, len(exchange.received))
            assert len(exchange.received) <= exchange.sent
            assert exchange.answer == content(stream_id, 0, len(exchange.answer))
            assert len(exchange.answer) <= exchange.replied
            assert len(exchange.closed) + exchange.refused <= 1
            assert len(exchange.resets) <= 1

    @invariant()
    def the_books_are_in_order(self):
        if not hasattr(self, "connection"):
            return
        written = self.written + self.unsent()
        waiting = {
            stream_id: exchange.replied - written[stream_id]
            for stream_id, exchange in self.exchanges.items()
            if not (exchange.closed or exchange.refused)
        }
        assert min(waiting.values(), default=0) >= 0
        assert self.connection.queued == sum(waiting.values())
        assert all(self.connection.buffered(stream_id) == size for stream_id, size in waiting.items())

    def teardown(self):
        if not hasattr(self, "connection"):
            return
        self.client.increment_flow_control_window(1 << 29)
        for _ in range(200):
            for stream_id in self.open_streams():
                if self.client.remote_flow_control_window(stream_id) < 1 << 20:
                    self.client.increment_flow_control_window(1 << 24, stream_id)
            for stream_id in self.open_streams(sending=True):
                self.client.end_stream(stream_id)
                self.exchanges[stream_id].sent_end = True
            for stream_id in self.served():
                self.connection.resume(stream_id)
                if self.exchanges[stream_id].received_end:
                    self.start_reply(stream_id)
                    self.connection.send_trailers(stream_id, TRAILERS)
                    self.exchanges[stream_id].replied_end = True
            self.bytes_go_up(1 << 30)
            self.bytes_come_down(1 << 30)
        self.what_arrives_is_what_was_sent()
        self.the_books_are_in_order()
        assert self.connection.open_streams == 0 and self.connection.queued == 0
        assert not self.connection.closed
        for stream_id, exchange in self.exchanges.items():
            self.check(stream_id, exchange)

    def check(self, stream_id: int, exchange: Exchange) -> None:
        if stream_id not in self.server.known:
            # Never served: refused, unless the client gave up first.
            assert exchange.cancelled or exchange.resets == [Http2ErrorCode.REFUSED_STREAM]
        elif exchange.cancelled:
            # Whoever was first: the end of the reply had left, or the server heard of the cancellation.
            assert exchange.replied_end or exchange.refused or exchange.closed == [Http2ErrorCode.CANCEL]
        elif exchange.refused:
            assert exchange.resets == [Http2ErrorCode.INTERNAL_ERROR] and not exchange.answer_end
        else:
            assert exchange.closed == []
            assert exchange.answer_end and len(exchange.answer) == exchange.replied
            if exchange.received_end:
                assert len(exchange.received) == exchange.sent
            # Otherwise the reply was complete before the request, and the server wanted no more of it; h2 does not
            # tell if the client had said all of it by then.
            told = exchange.received_end or exchange.sent_end
            assert exchange.resets == [Http2ErrorCode.NO_ERROR] or (told and exchange.resets == [])


Conversation.TestCase.settings = settings(
    max_examples=150,
    stateful_step_count=50,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
TestConversation = Conversation.TestCase
