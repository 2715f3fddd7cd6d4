"""A connection to a member without a socket: silence, PINGs, spare connections, and bytes that nobody meant."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import h2.config
import h2.connection
import h2.events
import pytest
from h2_member import Sink
from hypothesis import given, settings
from hypothesis import strategies as st

from nerite.http2 import encode_headers, encode_request
from nerite.http2.frames import END_STREAM, header_block
from nerite.router.grpc_member import GrpcMemberCall, GrpcMemberConnection

BLOCK = encode_request([(b":method", b"POST"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"a")])


class Transport:
    """What a connection writes, and whether it is closed."""

    def __init__(self) -> None:
        self.written = b""
        self.closed = ""

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def writelines(self, buffers: list[bytes]) -> None:
        self.written += b"".join(map(bytes, buffers))

    def is_closing(self) -> bool:
        return bool(self.closed)

    def close(self) -> None:
        self.closed = self.closed or "closed"

    def abort(self) -> None:
        self.closed = self.closed or "aborted"


class Pair:
    """A connection, its transport, and the member at the other end."""

    def __init__(self) -> None:
        self.now = 0.0
        self.soon: list[Any] = []
        self.loop = SimpleNamespace(
            time=lambda: self.now, call_soon=self.soon.append, create_future=lambda: asyncio.Future(loop=self.real)
        )
        self.real = asyncio.new_event_loop()
        self.transport = Transport()
        self.queue = SimpleNamespace(
            withdraw=lambda call: None,
            begin_waiting=lambda: None,
            connected=lambda connection: None,
            disconnected=lambda connection: None,
        )
        self.connection = GrpcMemberConnection(cast(Any, self.queue), cast(Any, self.loop))
        self.member = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False))
        self.connection.opened(cast(Any, self.transport))
        self.member.initiate_connection()

    def call(self) -> Sink:
        sink = Sink()
        call = GrpcMemberCall(cast(Any, self.queue), BLOCK, sink)
        call.begin(self.connection)
        call.send((b"question",), True)
        return sink

    def move(self) -> list[h2.events.Event]:
        """Move bytes both ways; return what the member saw."""
        while self.soon:
            self.soon.pop(0)()
        written, self.transport.written = self.transport.written, b""
        seen = self.member.receive_data(written) if written else []
        if data := self.member.data_to_send():
            self.connection.receive(data)
        return seen

    def check(self, now: float, *, spare: bool = False) -> None:
        self.now = now
        self.connection.check(now, spare=spare)

    def end(self) -> None:
        self.connection.lost(None)
        self.connection.ready.cancel()
        self.real.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.end()


def pings(seen: list[h2.events.Event]) -> int:
    return sum(isinstance(event, h2.events.PingReceived) for event in seen)


def test_a_silent_member_is_asked_and_given_up(pair: Pair) -> None:
    pair.move()
    sink = pair.call()
    pair.move()
    pair.check(299.0)
    assert pings(pair.move()) == 0
    pair.check(301.0)
    assert pings(pair.move()) == 1
    pair.check(340.0)
    assert pair.transport.closed == "", "it has answered"
    pair.check(650.0)
    pair.check(660.0)
    assert pair.transport.closed == ""
    pair.check(671.0)
    assert pair.transport.closed == "aborted"
    pair.connection.lost(None)
    assert "PING" in str(sink.told[0]) and sink.told[1] is False


def test_a_member_is_not_asked_without_calls(pair: Pair) -> None:
    pair.move()
    pair.check(10_000.0)
    assert pings(pair.move()) == 0


def test_a_spare_connection_is_closed_when_idle(pair: Pair) -> None:
    pair.move()
    pair.check(30.0, spare=True)
    assert pair.transport.closed == ""
    pair.check(61.0, spare=True)
    assert pair.transport.closed == "closed" and not pair.connection.http2.room


def test_a_closed_connection_ends_its_calls_first(pair: Pair) -> None:
    pair.move()
    sink = pair.call()
    pair.connection.close()
    pair.move()
    assert pair.transport.closed == ""
    # By hand: h2 sends nothing after a GOAWAY of ours.
    status = encode_headers([(b":status", b"200"), (b"grpc-status", b"0")])
    pair.connection.receive(header_block(1, status, END_STREAM, 16_384))
    assert sink.told == [200] and pair.transport.closed == "closed"


def test_congestion_makes_calls_full(pair: Pair) -> None:
    pair.move()
    sink = Sink()
    call = GrpcMemberCall(cast(Any, pair.queue), BLOCK, sink)
    call.begin(pair.connection)
    assert not call.full
    pair.connection.set_congested(True)
    assert call.full
    pair.connection.set_congested(False)
    assert sink.writable == 1 and not call.full


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(max_size=80), max_size=8), st.booleans())
def test_bytes_that_nobody_meant_end_all_calls_once(pieces: list[bytes], greeted: bool) -> None:
    pair = Pair()
    if greeted:
        pair.move()
    sinks = [pair.call() for _ in range(3)]
    for piece in pieces:
        pair.connection.receive(piece)
    pair.end()
    assert all(sink.over.is_set() for sink in sinks)
    assert all(len([each for each in sink.told if each is True or each is False]) <= 1 for sink in sinks)
