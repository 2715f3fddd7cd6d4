"""The two ends of a channel: a sink that keeps what it is told, and a member made of the ``h2`` package."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import h2.config
import h2.connection
import h2.events
import h2.settings

from nerite.http2 import Buffer, ReplyHeaders


class Sink:
    """What is told of a call."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.body = b""
        self.writable = 0
        self.over = asyncio.Event()

    def response_started(self, headers: ReplyHeaders, end: bool) -> None:
        self.told.append(headers.status)
        if end:
            self.over.set()

    def response_data(self, data: Buffer, end: bool) -> None:
        self.body += bytes(data)

    def trailers_received(self, trailers: ReplyHeaders) -> None:
        self.told.append(trailers.get(b"grpc-status"))
        self.over.set()

    def call_lost(self, why: str, unprocessed: bool) -> None:
        self.told += [why, unprocessed]
        self.over.set()

    def member_writable(self) -> None:
        self.writable += 1


class Member(asyncio.Protocol):
    """A connection to a member made of ``h2``."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.h2 = h2.connection.H2Connection(h2.config.H2Configuration(client_side=False, header_encoding="utf-8"))

    def connection_made(self, transport) -> None:
        self.transport = transport
        self.server.members.append(self)
        self.h2.local_settings = h2.settings.Settings(client=False, initial_values=self.server.settings)
        if self.server.greets:
            self.h2.initiate_connection()
            if self.server.leaves:
                self.h2.close_connection()
            self.flush()

    def data_received(self, data: bytes) -> None:
        if not self.server.greets:
            return
        for event in self.h2.receive_data(data):
            if isinstance(event, h2.events.DataReceived) and self.server.reads:
                self.h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            self.server.take(self, event)
        self.flush()

    def flush(self) -> None:
        self.transport.write(self.h2.data_to_send())

    def answer(self, stream_id: int, body: bytes = b"ok") -> None:
        self.h2.send_headers(stream_id, [(":status", "200")])
        self.h2.send_data(stream_id, body)
        self.h2.send_headers(stream_id, [("grpc-status", "0")], end_stream=True)


class Server:
    """A member; ``ended`` are the streams whose request is complete."""

    def __init__(self, *, greets: bool = True, answers: bool = True, leaves: bool = False, **settings: int) -> None:
        """``leaves``: it says goodbye to each connection at once."""
        self.greets = greets
        self.leaves = leaves
        self.answers = answers
        self.reads = True
        self.settings = {getattr(h2.settings.SettingCodes, key): value for key, value in settings.items()}
        self.members: list[Member] = []
        self.ended: list[tuple[Member, int]] = []
        self.reset: list[int] = []
        self.received = 0
        self.bodies: dict[int, bytes] = {}
        self.headers: list[dict[str, str]] = []
        self.answer: Callable[[Member, int], None] = Member.answer

    def take(self, member: Member, event: h2.events.Event) -> None:
        if isinstance(event, h2.events.StreamEnded):
            self.ended.append((member, event.stream_id))
            if self.answers:
                self.answer(member, event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            self.reset.append(event.stream_id)
        elif isinstance(event, h2.events.DataReceived):
            self.received += len(event.data)
            self.bodies[event.stream_id] = self.bodies.get(event.stream_id, b"") + event.data
        elif isinstance(event, h2.events.RequestReceived):
            self.headers.append(dict(event.headers))


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while True:
            if holds():
                return
            await asyncio.sleep(0.001)
