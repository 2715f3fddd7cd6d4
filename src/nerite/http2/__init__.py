"""The server side of HTTP/2 (RFC 9113) as a state machine without I/O. Imports nothing but ``hpack``.

    owner (socket, clock)  -- receive(data, now) -->  Http2Connection  -- callbacks -->  Http2Handler (the requests)
                           <-- outbound, closed ---               <-- reply, send_*, reset, pause --

**Owner.** Give ``receive`` what the socket brings; after it, and after every other call, write ``outbound`` with
``writelines`` and clear it; close when ``finished``; call ``lost`` when the peer is gone. Stop reading while the socket
does not take what you write: replies to the peer's control frames are bounded by what is read, and by nothing else.

**Streams.** A stream is in ``_streams`` from the peer's HEADERS until both sides have ended it, or one has reset it:
open (``state`` 0), or half-closed (``REMOTE_CLOSED``) until the reply has left. A reply that ends before its request
makes us reset the stream with NO_ERROR, so there is no third state. Of closed streams only the ones we reset are
remembered: the peer may send on them until it hears of it; frames for any other are errors. A malformed request costs
its stream, a broken rule of framing, compression or the connection's windows costs the connection: GOAWAY, ``closed``.

**Receiving.** DATA is passed on as it arrives, whole or in parts, and never stored; a frame of any other kind is held
until it is complete (``max_header_block``). The peer's windows are ours to give: the connection's is given back
as bytes come, a stream's too unless the handler has paused it. Credit is returned when half of a window is used.

**Sending.** Our windows are the peer's to give. What they do not let out waits in the stream's ``Output``, counted in
``queued``; the buffers themselves wait, not copies. A stream whose own window is shut waits for its WINDOW_UPDATE; one
that the connection's window stops stands in ``_waiting``, and who is served there in part goes to the end.

**RequestHeaders.** Blocks that we send use no dynamic table, so they are encoded once for all connections. Blocks that
we receive are kept by their bytes for as long as the table does not change: the same ``RequestHeaders`` object comes
again.

**Bounds.** All in ``Limits``: open streams, sizes, and the rates of everything that makes work without being a request.
Only the time that ``receive`` is given counts. The owner watches two things: ``queued`` bytes that do not drain
(``drained``), and peers that say nothing (``ping``, ``pings_unanswered``).
"""

from nerite.http2.connection import Http2Connection, refusal_preface
from nerite.http2.frames import Buffer, Http2ErrorCode
from nerite.http2.headers import RequestHeaders, encode_headers
from nerite.http2.limits import Limits
from nerite.http2.stream import Http2Handler

__all__ = [
    "Http2Connection",
    "Http2Handler",
    "Limits",
    "RequestHeaders",
    "encode_headers",
    "refusal_preface",
    "Http2ErrorCode",
    "Buffer",
]
