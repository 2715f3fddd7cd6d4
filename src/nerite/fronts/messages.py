"""Messages between the core and a front process. Framing and records are those of workers (``workers.ipc``).

From a front: an inference (CALL) or a request of another kind (RELAY_HTTP, RELAY_GRPC), each with a number of its own;
what becomes of them (CANCEL, PAUSE, RESUME); connections taken over (ADOPTED) and ended (CLOSED); the state it has
taken over (ACKNOWLEDGE); and models that its requests wait for (WANTED). From the core: responses (ANSWER), pieces of
relayed replies (RELAYED), accepted connections (CONNECTION), what all fronts must know (STATE), and models that are
waited for and cannot be loaded (NOT_LOADED). START and CONNECTION are preceded by a descriptor.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from enum import IntEnum
from typing import Final

from nerite.core.execution_observer import TraceContext
from nerite.core.request import CancelReason
from nerite.core.tensor import Buffer
from nerite.workers.ipc import messages

# From a front.
CALL: Final = 64  # the count is the protocol (see ``PROTOCOLS``), ``REPEATED``, and the operation (``OPERATIONS``)
SPAN: Final = 65  # JSON: the client's span that the next CALL or RELAY_HTTP belongs under
CANCEL: Final = 66  # the count is the reason: see ``REASONS``
PAUSE: Final = 67  # the client does not read: no more responses for now
RESUME: Final = 68
USES: Final = 79  # JSON: the shared memory regions that the next CALL uses, and the places of its inputs on GPUs
RELAY_HTTP: Final = 69  # the count is 1 for a client that is connected over TLS
RELAY_GRPC: Final = 70
CALLS: Final = 76  # inferences with one header (``groups``); the count as in CALL
ACKNOWLEDGE: Final = 71  # JSON: number of the STATE message that was taken over
CLOSED: Final = 72  # the count is the number of the port
LOG: Final = 73  # JSON: a log record
READY: Final = 74  # the front serves connections
FIGURES: Final = 75  # JSON: what the front has counted, in reply to ASK_FIGURES
ADOPTED: Final = 78  # a connection was taken over
WANTED: Final = 77  # JSON: a model that requests wait for, and the classes of their tenants
# From the core.
START: Final = 80  # pickle: options and initial state; preceded by the descriptor of the memory for bytes in flight
STATE: Final = 81  # pickle: number and changes
ANSWER: Final = 82  # the count is an ``AnswerKind``
ANSWERS: Final = 88  # last responses with one header (``groups``)
NOT_LOADED: Final = 89  # JSON: a model that could not be loaded, and the error for the requests that wait for it
RELAYED: Final = 83  # the count is a ``RelayedPiece``
CONNECTION: Final = 84  # the count is the number of the port; the body the limit of connections if it is reached, or 0
DRAIN: Final = 85  # the count is a ``DrainStep``
ASK_FIGURES: Final = 86
RETIRE: Final = (
    87  # JSON: the share of its requests that the front is to pass on, and the share from which nothing is gained
)

BYTES_SLOT: Final = 8
"""Bytes of shared memory in which a process counts its bytes in flight."""
PORTS: Final = ("http", "grpc")
"""Names of the ports that fronts serve, by number."""
PROTOCOLS: Final = ("HTTP", "GRPC")
REPEATED: Final = 2
"""Added to the protocol of a ``RepeatedRequest``."""
OPERATIONS: Final = ("", "chat", "text_completion")
"""Operations of language models, for traces of requests to the OpenAI API, by number."""
OPERATION_SHIFT: Final = 2
"""Position of the number of the operation in the count of a CALL."""
CHANGING: Final = frozenset(("model-repository", "shared-memory", "logging"))
"""Categories of endpoints that may change what fronts must know."""
REASONS: Final = tuple(CancelReason)


class AnswerKind(IntEnum):
    """What a response means for its call."""

    PART = 0
    """More responses follow."""
    LAST = 1
    REFUSED = 2
    """The last: the request was refused when it was submitted."""


class RelayedPiece(IntEnum):
    """Piece of a relayed reply."""

    SEND = 0
    """A complete HTTP reply."""
    OPEN = 1
    """Head and first chunk of a reply in chunks."""
    CHUNK = 2
    CLOSE = 3
    MESSAGE = 4
    """A gRPC message."""
    ERROR = 5
    """JSON: the error that a gRPC call fails with."""


class DrainStep(IntEnum):
    """Steps of a graceful shutdown, as in ``TransportListener``."""

    NOTIFY = 0
    STOP_ACCEPTING = 1


_CALL: Final = struct.Struct("<QQ")
_LIMIT: Final = struct.Struct("<Q")
_SIZES: Final = struct.Struct("<II")


def call_head(arrived_ns: int, began_ns: int) -> bytes:
    """Return the part of a CALL before its record: when the request was complete, and when its first bytes came."""
    return _CALL.pack(arrived_ns, began_ns)


def read_call_head(body: memoryview, at: int) -> tuple[int, int, int]:
    """Return the values that ``call_head`` encoded, and where the record begins."""
    arrived_ns, began_ns = _CALL.unpack_from(body, at)
    return arrived_ns, began_ns, at + _CALL.size


def buffers_head(name: bytes, data: Sequence[Buffer]) -> bytes:
    """Return the part before ``Packer.buffers`` in a RELAY or RELAYED message: size of the name, number of buffers."""
    return _SIZES.pack(len(name), len(data))


def read_buffers_head(body: memoryview, at: int) -> tuple[int, int, int]:
    """Return the values that ``buffers_head`` encoded, and where the buffers begin."""
    name_size, count = _SIZES.unpack_from(body, at)
    return name_size, count, at + _SIZES.size


def work_name(request_id: str, model: str, version: str) -> bytes:
    """Return the name of an inference that a relayed request runs, for the front's access log."""
    return json.dumps([request_id, model, version]).encode()


def span_frame(span: TraceContext) -> bytes:
    """Return a SPAN message."""
    return messages.json_frame(SPAN, [f"{span.trace_id:x}", *span[1:]])


def read_span(body: memoryview) -> TraceContext:
    """Return the span of a SPAN message."""
    trace_id, *rest = messages.read_json(body)
    return TraceContext(int(trace_id, 16), *rest)


def connection_frame(port: int, limit: int) -> bytes:
    """Return a CONNECTION message."""
    return messages.frame(CONNECTION, _LIMIT.pack(limit), port)


def read_limit(body: memoryview) -> int:
    """Return the limit of a CONNECTION message."""
    limit: int = _LIMIT.unpack_from(body)[0]
    return limit
