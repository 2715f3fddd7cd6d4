"""Sending half of a connection: messages, split by the peer's frame size and subject to its flow control."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from nerite.http2 import frames
from nerite.http2.frames import DATA, END_STREAM, Buffer, Http2ErrorCode, pack_header
from nerite.http2.limits import PeerSettings
from nerite.http2.stream import Http2Stream, StreamEvents, StreamOutput

_REMEMBERED_RESETS: Final = 4_096


class Outgoing(ABC):
    """Sends messages. All methods may be called for closed streams and then do nothing.

    The caller is responsible for the order of headers, ``send_data`` and ``send_trailers`` on a stream, and must not
    change buffers until the transport has written them, because they are not copied.
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

    def __init__(self, handler: StreamEvents) -> None:
        self._handler = handler
        self._streams: dict[int, Http2Stream] = {}
        self._waiting: OrderedDict[int, Http2Stream] = OrderedDict()
        """Streams blocked only by the connection's window, in the order in which they are served."""
        self._resets: OrderedDict[int, None] = OrderedDict()
        """The last streams that we reset. Frames for them are no violation, because the peer may not know yet."""
        self._send_window = frames.DEFAULT_WINDOW
        self._peer_window = frames.DEFAULT_WINDOW
        """The peer's initial window for streams, see ``Http2Stream.credit``."""
        self._table_update = b""
        """Prefix that our next header block must have."""
        self._progress = 0
        """Messages and KiB sent, which entitle the peer to control frames."""
        self.outbound: list[Buffer] = []
        """Data to write, in order. The owner passes it to ``writelines`` after each call, and clears it."""
        self.peer = PeerSettings()
        self.queued = 0
        """Bytes of all streams that flow control holds back."""
        self.drained = 0
        """Total bytes sent after having been queued. If this does not grow while ``queued`` is positive, the peer has
        stalled."""

    # -- messages

    def send_data(self, stream_id: int, buffers: Sequence[Buffer], end_stream: bool = False) -> None:
        """Send a part of the body, or append it to the stream's queue."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._send(stream_id, stream, buffers, b"" if end_stream else None)

    def send_trailers(self, stream_id: int, block: bytes) -> None:
        """End the stream with trailers, after all queued data."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._send(stream_id, stream, (), block)

    def reset(self, stream_id: int, code: int = Http2ErrorCode.CANCEL) -> None:
        """Reset the stream and drop its queued data. The handler is not called."""
        stream = self._streams.get(stream_id)
        if stream is not None:
            self._forget(stream_id, stream)
            self._write_reset(stream_id, code)

    def buffered(self, stream_id: int) -> int:
        """Return the bytes of this stream that flow control holds back."""
        stream = self._streams.get(stream_id)
        return 0 if stream is None or stream.output is None else stream.output.size

    @property
    def open_streams(self) -> int:
        """Number of requests in flight, including those whose end flow control holds back."""
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
        """Queue buffers, and send what the windows allow. Raises ``RuntimeError`` after the end of a stream."""
        output = stream.output
        waited = output is not None
        if output is None:
            output = stream.output = StreamOutput()
        elif output.ending is not None:
            raise RuntimeError(f"stream {stream_id} has already ended")
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
        """Send what the windows allow of ``output``, and its ending once it is empty. Makes no callbacks."""
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
            # No last DATA frame has carried the flag.
            self.outbound.append(pack_header(DATA, END_STREAM, stream_id))
        self._ended(stream_id, stream)

    def _write_data(self, stream_id: int, output: StreamOutput, count: int) -> None:
        """Move ``count`` bytes to ``outbound`` as frame headers and slices (zero-copy)."""
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
        """Continue a stream that was blocked, and notify the handler once nothing is held back."""
        output = stream.output
        if output is None:
            return
        before = output.size
        self._flush(stream_id, stream, output)
        self.drained += before - output.size
        if not output.size and output.ending is None:
            self._handler.writable(stream_id)

    def _drain_waiting(self) -> None:
        """Spend the connection's window. A stream that was only partly served goes to the end of the queue."""
        while self._waiting and self._send_window > 0:
            stream_id, stream = self._waiting.popitem(last=False)
            self._drain(stream_id, stream)

    # -- end of a stream

    @abstractmethod
    def _ended(self, stream_id: int, stream: Http2Stream) -> None:
        """Handle that our side of a stream was completely sent."""

    def _forget(self, stream_id: int, stream: Http2Stream) -> None:
        """Drop an open stream and its queued data."""
        del self._streams[stream_id]
        self._waiting.pop(stream_id, None)
        if stream.output is not None:
            self.queued -= stream.output.size
