"""Both sides of HTTP/2 (RFC 9113) as state machines without I/O. Depends only on ``hpack``.

    owner (socket, clock)  -- receive(data, now) -->  Http2Connection  -- callbacks -->  Http2Handler (the requests)
                           <-- outbound, closed ---               <-- reply, send_*, reset, pause --

``Http2Connection`` is the server's side, which is described first. ``Http2ClientConnection`` is the client's.

**Owner.** Pass bytes from the socket to ``receive``; after it, and after every other call, write ``outbound`` with
``writelines`` and clear it; close when ``finished``; call ``lost`` when the peer is gone. Stop reading while the socket
accepts no writes: replies to the peer's control frames are bounded only by the amount that is read.

**Streams.** A stream is in ``_streams`` from the peer's HEADERS until both sides have ended it, or one has reset it:
open (``state`` 0), or half-closed (``REMOTE_CLOSED``) until the reply was sent. If a reply ends before its request, we
reset the stream with NO_ERROR, so there is no third state. Of closed streams only those that we reset are remembered,
because the peer may send on them until it receives the reset; frames for any other are errors. A malformed request
ends its stream; a violation of framing, compression or the connection's window ends the connection: GOAWAY, ``closed``.

**Receiving.** DATA is passed on as it arrives, whole or in parts, and never stored; frames of other types are held
until they are complete (``max_header_block``). We grant the peer's windows: credit for the connection is returned as
bytes arrive, for a stream too unless the handler has paused it, each time half of the window is used.

**Sending.** The peer grants our windows. Data beyond them is queued without copies in the stream's ``StreamOutput`` and
counted in ``queued``. A stream whose own window is exhausted waits for its WINDOW_UPDATE; a stream blocked by the
connection's window is in ``_waiting``, which is served round-robin.

**Headers.** Blocks that we send do not use the dynamic table, so they are encoded once for all connections. Blocks that
we receive are interned by their bytes until the table changes: equal blocks yield the same ``RequestHeaders`` object.

**Bounds.** All are in ``Limits``: open streams, sizes, and the rates of everything that causes work without being a
request. The only clock is the time passed to ``receive``. The owner monitors two things: ``queued`` bytes that do not
drain (``drained``), and silent peers (``ping``, ``pings_unanswered``).

**Client.** Windows, queues, interning and bounds are the same. A stream is in ``_streams`` from ``open_stream`` until
its response is complete, which its ``ResponseHandler`` is told; ``room`` says how many more the server allows. A stream
that the server has not processed, because it refused it or its GOAWAY excludes it, is closed with ``REFUSED_STREAM``
and may be sent again on another connection. A client does not accept pushed responses, and drops interim ones.
"""

from nerite.http2.client import Http2ClientConnection
from nerite.http2.connection import Http2Connection, refusal_preface
from nerite.http2.frames import Buffer, Http2ErrorCode
from nerite.http2.headers import ReplyHeaders, RequestHeaders, encode_headers, encode_request
from nerite.http2.limits import Limits
from nerite.http2.stream import Http2Handler, ResponseHandler

__all__ = [
    "Http2ClientConnection",
    "Http2Connection",
    "Http2Handler",
    "Limits",
    "RequestHeaders",
    "ResponseHandler",
    "ReplyHeaders",
    "encode_headers",
    "encode_request",
    "refusal_preface",
    "Http2ErrorCode",
    "Buffer",
]
