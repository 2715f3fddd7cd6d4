"""A gRPC client that says what honest ones do not, and a watch on what others notice of it."""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
import time

import h2.config
import h2.connection
import h2.events

from faults import resident
from serving import PATIENCE, Serving

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


class RawGrpc:
    """One connection. What is sent on it is up to the test; flow control is kept to."""

    def __init__(self, server: Serving) -> None:
        host, port = server.grpc.split(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE)
        self.http2 = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
        self.headers: dict[int, dict[bytes, bytes]] = {}
        self.ended: set[int] = set()
        self.goaway: h2.events.ConnectionTerminated | None = None
        self.closed = False
        self._ready = False
        self.http2.initiate_connection()
        self._flush()

    def begin(self, path: str = INFER, **metadata: str) -> int:
        """Begin a call; return its stream."""
        stream = self.http2.get_next_available_stream_id()
        fields = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", b"localhost"),
        ]
        fields += [(b"content-type", b"application/grpc"), (b"te", b"trailers")]
        fields += [(name.replace("_", "-").encode(), value.encode()) for name, value in metadata.items()]
        self.http2.send_headers(stream, fields)
        self._flush()
        return stream

    def send(self, stream: int, data: bytes, *, end: bool = False) -> None:
        """Send a part of a call's body, as far as the server takes it."""
        while not self._ready and not self.closed:  # until its settings are known
            self.hear()
        at = 0
        while at < len(data) and stream not in self.ended and not self.closed:
            size = min(self.http2.local_flow_control_window(stream), self.http2.max_outbound_frame_size, len(data) - at)
            if size > 0:
                self.http2.send_data(stream, data[at : at + size], end_stream=end and at + size == len(data))
                at += size
                self._flush()
            else:
                self.hear()

    def ask(self, message: bytes, path: str = INFER, *, compressed: bool = False) -> tuple[int, str]:
        """Make a call of one message; return its status."""
        stream = self.begin(path, **({"grpc_encoding": "gzip"} if compressed else {}))
        self.send(stream, framed(message, compressed=compressed), end=True)
        return self.status(stream)

    def status(self, stream: int) -> tuple[int, str]:
        """Wait for the end of a call."""
        while stream not in self.ended and not self.closed:
            self.hear()
        fields = self.headers[stream]
        return int(fields[b"grpc-status"]), fields.get(b"grpc-message", b"").decode()

    def wait_for_the_end(self) -> None:
        """Return when the server has closed the connection."""
        while not self.closed:
            self.hear()

    def close(self) -> None:
        self.socket.close()

    def _flush(self) -> None:
        with contextlib.suppress(ConnectionError):
            self.socket.sendall(self.http2.data_to_send())

    def hear(self) -> None:
        """Take what the server sends next."""
        try:
            data = self.socket.recv(65536)
        except ConnectionError:
            data = b""
        if not data:
            self.closed = True
            return
        for event in self.http2.receive_data(data):
            if isinstance(event, h2.events.RemoteSettingsChanged):
                self._ready = True
            elif isinstance(event, h2.events.DataReceived):
                self.http2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
            elif isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                self.headers.setdefault(event.stream_id, {}).update(event.headers)
            elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                self.ended.add(event.stream_id)
            elif isinstance(event, h2.events.ConnectionTerminated):
                self.goaway = event
        self._flush()


def framed(message: bytes, *, compressed: bool = False) -> bytes:
    """Return a message with its length."""
    return bytes((compressed,)) + len(message).to_bytes(4) + message


class Watch:
    """Asks whether the server is alive, again and again, on a connection of its own."""

    def __init__(self, server: Serving) -> None:
        self._server = server
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.seconds: list[float] = []
        """How long each answer took."""
        self.most_memory = 0

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def longest(self) -> float:
        return max(self.seconds)

    def _look(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._server.ports["HTTPService"], timeout=PATIENCE)
        while not self.seconds or not self._over.wait(0.005):
            began = time.monotonic()
            connection.request("GET", "/v2/health/live")
            assert connection.getresponse().read() == b""
            self.seconds.append(time.monotonic() - began)
            self.most_memory = max(self.most_memory, resident(self._server))
        connection.close()
