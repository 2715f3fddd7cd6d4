"""The sending half of a connection: replies, cut to the peer's frame size and held back by its windows."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from nerite.http2 import frames
from nerite.http2.frames import (
    DATA,
    DATA_START,
    END_HEADERS,
    END_STREAM,
    Buffer,
    Http2ErrorCode,
    block_start,
    pack_header,
)
from nerite.http2.limits import PeerSettings
from nerite.http2.stream import REMOTE_CLOSED, Http2Handler, Http2Stream, StreamOutput

JOINED: Final = frames.MIN_MAX_FRAME_SIZE
"""Up to this size a message is copied into one bytes object with its frame headers: cheaper than a list of pieces."""

_REMEMBERED_RESETS: Final = 4_096


class Outgoing:
    """What the owner sends with. All methods may be called for streams that are gone; they then do nothing.

    The order of ``send_headers``, ``send_data`` and ``send_trailers`` on a stream is the caller's responsibility, and
    so is leaving the buffers alone until the transport has written them: they are not copied.
    """

    __slots__ = (
        "_handler",
        "_peer_window",
        "_progress",
        "_resets",
        "_send_window",
        "_streams",
        "_table_update",
        "_waiting",
        "drained",
        "outbound",
        "peer",
        "queued",
    )

    def __init__(self, handler: Http2Handler) -> None:
        self._handler = handler
        self._streams: dict[int, Http2Stream] = {}
        self._waiting: OrderedDict[int, Http2Stream] = OrderedDict()
        """Streams whose own window is open and that wait for the connection's, in the order they are served."""
        self._resets: OrderedDict[int, None] = OrderedDict()
        """The last streams that we reset. The peer may not know yet, so frames for them are nobody's mistake."""
        self._send_window = frames.DEFAULT_WINDOW
        self._peer_window = frames.DEFAULT_WINDOW
        """The peer's initial window for streams, see ``Http2Stream.credit``."""
        self._table_update = b""
        """What has to stand in front of our next header block."""
        self._progress = 0
        """Replies and KiB sent: what earns the peer the right to send control frames."""
        self.outbound: list[Buffer] = []
        """What to write, in order. The owner passes it to ``writelines`` after each call, and clears it."""
        self.peer = PeerSettings()
        self.queued = 0
        """Bytes that flow control holds back, of all streams."""
        self.drained = 0
        """Bytes that ever left after having been held back. If ``queued`` stays and this does not grow, the peer has
        stalled."""

    # -- replies

    def reply(self, stream_id: int, head: bytes, buffers: Sequence[Buffer], trailers: bytes) -> None:
        """Send a whole reply, the only thing sent on its stream: headers, one message in ``buffers``, trailers.

        ``head`` and ``trailers`` are blocks of ``encode_headers``; without trailers the message ends the stream.
        """
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        size = sum(map(len, buffers))
        if (
            0 < size <= JOINED
            and size <= self._send_window
            and size <= self._peer_window + stream.credit
            and trailers
            and len(head) + len(trailers) <= frames.MIN_MAX_FRAME_SIZE
            and not self._table_update
        ):
            self._send_window -= size
            self._progress += 1
            number = stream_id.to_bytes(4)
            self.outbound.append(
                b"".join(
                    (
                        block_start(len(head), END_HEADERS),
                        number,
                        head,
                        size.to_bytes(3),
                        DATA_START,
                        number,
                        *buffers,
                        block_start(len(trailers), END_HEADERS | END_STREAM),
                        number,
                        trailers,
                    )
                )
            )
            self._ended(stream_id, stream)
            return
        self._write_block(stream_id, head, 0)
        self._send(stream_id, stream, buffers, trailers)

    def send_headers(self, stream_id: int, block: bytes, end_stream: bool = False) -> None:
        """Send the headers of a reply, with ``end_stream`` as all of it."""
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        self._write_block(stream_id, block, END_STREAM if end_stream else 0)
        if end_stream:
            self._ended(stream_id, stream)

    def send_data(self, stream_id: int, buffers: Sequence[Buffer], end_stream: bool = False) -> None:
        """Send, or queue behind what is queued, a part of the body."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._send(stream_id, stream, buffers, b"" if end_stream else None)

    def send_trailers(self, stream_id: int, block: bytes) -> None:
        """End the stream with trailers, once what is queued has left."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._send(stream_id, stream, (), block)

    def reset(self, stream_id: int, code: int = Http2ErrorCode.CANCEL) -> None:
        """Give the stream up; what is queued of it is dropped. The handler is not called."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream_id, stream)
            self._write_reset(stream_id, code)

    def buffered(self, stream_id: int) -> int:
        """Return how many bytes of this stream flow control holds back."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None or stream.output is None else stream.output.size

    @property
    def open_streams(self) -> int:
        """How many requests are under way, counting those whose reply is held back."""
        return len(self._streams)

    # -- frames

    def _write_block(self, stream_id: int, block: bytes, flags: int) -> None:
        self._progress += 1
        block = self._table_update + block
        self._table_update = b""
        self.outbound.append(frames.header_block(stream_id, block, flags, self.peer.max_frame_size))

    def _write_reset(self, stream_id: int, code: int) -> None:
        self.outbound.append(frames.rst_stream(stream_id, code))
        self._resets[stream_id] = None
        if len(self._resets) > _REMEMBERED_RESETS:
            self._resets.popitem(last=False)

    # -- the queue of a stream

    def _send(self, stream_id: int, stream: Http2Stream, buffers: Sequence[Buffer], ending: bytes | None) -> None:
        """Queue, and send what the windows allow. Raises ``RuntimeError`` after the end of a stream."""
        output = stream.output
        waited = output is not None
        if output is None:
            output = stream.output = StreamOutput()
        elif output.ending is not None:
            raise RuntimeError(f"stream {stream_id} was ended before")
        size = 0
        for buffer in buffers:
            if len(buffer):
                size += len(buffer)
                output.chunks.append(memoryview(buffer))
        output.size += size
        output.ending = ending
        self.queued += size
        if waited:
            return
        self._flush(stream_id, stream, output)

    def _flush(self, stream_id: int, stream: Http2Stream, output: StreamOutput) -> None:
        """Send what the windows allow of ``output``, and what follows it if that was all. Calls nobody."""
        count = min(output.size, self._send_window, self._peer_window + stream.credit)
        if count > 0:
            output.size -= count
            stream.credit -= count
            self._send_window -= count
            self._progress += 1 + (count >> 10)
            self.queued -= count
            self._write_data(stream_id, output, count)
        if output.size:
            if self._peer_window + stream.credit > 0:
                self._waiting[stream_id] = stream
            return
        stream.output = None
        if output.ending is None:
            return
        if output.ending:
            self._write_block(stream_id, output.ending, END_STREAM)
        elif count <= 0:
            # There was no last DATA frame to carry the flag.
            self.outbound.append(pack_header(DATA, END_STREAM, stream_id))
        self._ended(stream_id, stream)

    def _write_data(self, stream_id: int, output: StreamOutput, count: int) -> None:
        """Move ``count`` bytes to ``outbound``: frame headers and slices, the payload is not copied."""
        append = self.outbound.append
        chunks = output.chunks
        max_frame_size = self.peer.max_frame_size
        last_flags = END_STREAM if output.ending == b"" and not output.size else 0
        start = 0
        while count:
            room = min(count, max_frame_size)
            count -= room
            append(pack_header(room << 8, 0 if count else last_flags, stream_id))
            while room:
                chunk = chunks[0]
                left = len(chunk) - start
                if left > room:
                    append(chunk[start : start + room])
                    start += room
                    break
                append(chunk[start:])
                chunks.popleft()
                start = 0
                room -= left
        if start:
            chunks[0] = chunks[0][start:]

    def _drain(self, stream_id: int, stream: Http2Stream) -> None:
        """Go on with a stream that was blocked, and tell the handler once nothing is held back."""
        output = stream.output
        if output is None:
            return
        before = output.size
        self._flush(stream_id, stream, output)
        self.drained += before - output.size
        if not output.size and output.ending is None:
            self._handler.writable(stream_id)

    def _drain_waiting(self) -> None:
        """Spend the connection's window. Who is served only in part goes to the end of the line."""
        while self._waiting and self._send_window > 0:
            stream_id, stream = self._waiting.popitem(last=False)
            self._drain(stream_id, stream)

    # -- the end of a stream

    def _ended(self, stream_id: int, stream: Http2Stream) -> None:
        """Our side has ended the stream. If the peer has not, tell it that we need no more."""
        del self._streams[stream_id]
        if not stream.state & REMOTE_CLOSED:
            self._write_reset(stream_id, Http2ErrorCode.NO_ERROR)

    def _forget(self, stream_id: int, stream: Http2Stream) -> None:
        """Drop an open stream and all that is queued of it."""
        del self._streams[stream_id]
        self._waiting.pop(stream_id, None)
        if stream.output is not None:
            self.queued -= stream.output.size
