"""Parses framed messages, on the event loop if that is quick, otherwise in a thread; and builds replies.

Also defines gRPC's statuses, header blocks, trailers and message framing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from sys import getsizeof
from typing import Final, NamedTuple, TypeVar
from urllib.parse import quote

import hpack

from nerite.core.byte_budget import ACCESS_LOG, REFUSALS, Memo
from nerite.core.errors import Exhausted, Internal, NeriteError
from nerite.http2 import encode_headers
from nerite.transports import unpacking
from nerite.transports.grpc import infer_request, wire
from nerite.transports.grpc.infer_request import InferReader, Read, broken, heavy
from nerite.transports.limits import ByteReservation, TransportLimits

T = TypeVar("T")
WINDOWS: Final[Mapping[str, int]] = {"gzip": 31, "deflate": 15}
"""``wbits`` argument of zlib for each message encoding."""
MAX_QUESTION: Final = 64 * 1024
"""Maximum size of a message, except for inferences and for loads, which may contain files."""
_PREFIX_SIZE: Final = 5
_EMPTY: Final = memoryview(b"")


class MessageTooLarge(Exhausted):
    """A message exceeds the maximum size."""


class OpenedMessage(NamedTuple):
    """Result of parsing a message in a thread."""

    message: memoryview
    """Unframed and decompressed message; empty if that failed."""
    content: Read | NeriteError
    share: ByteReservation
    """Reservation of bytes in flight."""


class MessageReader:
    """Parses the messages of calls with the same ``grpc-encoding``."""

    def __init__(self, encoding: str, limit: int, bounds: TransportLimits) -> None:
        """``limit`` is the maximum size of a message after decompression, in bytes."""
        self.limit = limit
        self.plain = encoding == "identity"
        """Messages are not compressed."""
        self._window = WINDOWS.get(encoding, 0)
        self._bounds = bounds

    def too_large(self, size: int) -> NeriteError:
        """Count a message of more than ``limit`` bytes, and return the error."""
        return self._count_refusal(self._too_large(f"({size} vs. {self.limit})"))

    def read(self, framed: memoryview, reader: InferReader) -> Read | None:
        """Return a parsed inference request; None if parsing would take long. Raises ``NeriteError``."""
        try:
            message = self._open_small(framed)
            if message is None:
                return None
            parts = wire.split(message)
            return None if heavy(parts) else reader.read(parts, message, _ignore_size)
        except _CLIENT_ERRORS as error:
            raise self._count_refusal(self._refusal(error)) from None

    def read_aside(self, framed: memoryview, reader: InferReader, then: Callable[[OpenedMessage], None]) -> None:
        """Parse an inference request in a thread, and call ``then`` with the result."""
        share = ByteReservation(self._bounds.bytes)

        def opened(result: OpenedMessage | NeriteError) -> None:
            found = result if isinstance(result, OpenedMessage) else OpenedMessage(_EMPTY, result, share)
            self._count_refusal(found.content)
            then(found)

        self._bounds.aside.run("grpc", partial(self._open, framed, reader, share), opened)

    def beginning(self, framed: memoryview) -> memoryview:
        """Return an invalid message without its frame; empty if it cannot be had without blocking."""
        try:
            return self._open_small(framed) or _EMPTY
        except _CLIENT_ERRORS:
            return _EMPTY

    def parsed(self, framed: memoryview, parse: Callable[[memoryview], T]) -> T | None:
        """Return the result of ``parse`` for a message; None if that would take long. Raises ``NeriteError``."""
        try:
            message = self._open_small(framed)
            return None if message is None or len(message) > MAX_QUESTION else parse(message)
        except _CLIENT_ERRORS as error:
            raise self._count_refusal(self._refusal(error)) from None

    def parse_aside(
        self,
        framed: memoryview,
        parse: Callable[[memoryview], T],
        then: Callable[[ByteReservation, T | NeriteError], None],
    ) -> None:
        """Run ``parse`` on a message in a thread; call ``then`` with the reservation of its memory and the result."""
        share = ByteReservation(self._bounds.bytes)

        def work() -> T:
            try:
                return parse(self._unpacked(framed, self._counter(share)))
            except _CLIENT_ERRORS as error:
                raise self._refusal(error) from None

        self._bounds.aside.run("grpc", work, lambda result: then(share, self._count_refusal(result)))

    def _open_small(self, framed: memoryview) -> memoryview | None:
        """Return a message unframed and decompressed; None if that would take long."""
        if not framed[0]:
            return framed[_PREFIX_SIZE:]
        return unpacking.unpack_small(framed[_PREFIX_SIZE:], self._coding(), self.limit)

    def _unpacked(self, framed: memoryview, take: infer_request.Take) -> memoryview:
        if not framed[0]:
            return framed[_PREFIX_SIZE:]
        return unpacking.unpack(framed[_PREFIX_SIZE:], self._coding(), self.limit, take)

    def _coding(self) -> int:
        if self.plain:
            raise Internal("received a compressed message without grpc-encoding")
        return self._window

    def _counter(self, share: ByteReservation) -> infer_request.Take:
        """Return a function that reserves memory for a message and its tensors, each limited in size."""
        left = self.limit

        def take(size: int) -> None:
            nonlocal left
            left -= size
            if left < 0:
                raise unpacking.UnpackedTooLarge
            share.take_or_raise(size)

        return take

    def _open(self, framed: memoryview, reader: InferReader, share: ByteReservation) -> OpenedMessage:
        """Parse an inference request; runs in a thread."""
        message = _EMPTY
        try:
            message = self._unpacked(framed, self._counter(share))
            parts = wire.split(message)
            return OpenedMessage(message, reader.read(parts, message, self._counter(share), aside=True), share)
        except _CLIENT_ERRORS as error:
            return OpenedMessage(message, self._refusal(error).without_frames(), share)

    def _refusal(self, error: Exception) -> NeriteError:
        """Return the error that the client gets for one of ``_CLIENT_ERRORS``."""
        if isinstance(error, unpacking.UnpackedTooLarge):
            return self._too_large(f"({self.limit}) after decompression")
        if isinstance(error, unpacking.BrokenContent):
            return Internal(f"failed to decompress the message: {error}")
        return error if isinstance(error, NeriteError) else broken()

    def _too_large(self, what: str) -> NeriteError:
        remedy = "" if self.limit == MAX_QUESTION else ". Use --grpc-max-message-size to increase the limit."
        return MessageTooLarge(f"Received message larger than max {what}{remedy}")

    def _count_refusal(self, result: T) -> T:
        """Count an error that is due to a limit. Only for the event loop's thread."""
        if isinstance(result, MessageTooLarge):
            self._bounds.refused["message_size"] += 1
        elif isinstance(result, wire.TooManyFields):
            self._bounds.refused["fields"] += 1
        return result


_CLIENT_ERRORS: Final = (NeriteError, wire.MalformedMessage, unpacking.UnpackedTooLarge, unpacking.BrokenContent)


def _ignore_size(size: int) -> None:
    """Do nothing: the tensors of a small message are small."""


# Replies of gRPC: header blocks, trailers, the five bytes before a message, statuses.

OK: Final = 0
CANCELLED: Final = 1
DEADLINE_EXCEEDED: Final = 4
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14

_INITIAL_FIELDS: Final = [
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
]
NAMES: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""Names of the statuses by number."""
HEAD: Final = encode_headers(_INITIAL_FIELDS)
TRAILERS_OK: Final = encode_headers([(b"grpc-status", b"0")])
NOT_GRPC: Final = encode_headers([(b":status", b"415")])
_OUTER_BLANKS: Final = re.compile("^ +| +$")
_MAX_MESSAGE: Final = 4096
"""Maximum size of an error text before encoding, in bytes: clients limit the size of headers."""


@lru_cache
def head_with_encoding(encoding: str) -> bytes:
    """Return the reply headers for a compressed message."""
    return encode_headers([*_INITIAL_FIELDS, (b"grpc-encoding", encoding.encode())])


def trailers(status: int, message: str, retry_after: int = 0) -> bytes:
    """Return the trailers of a reply that fails after its headers were sent.

    ``retry_after``: seconds after which the client may retry; 0 if unspecified.
    """
    return encode_headers(_status_fields(status, message, retry_after))


_refusals: Final[Memo[tuple[int, str, int], bytes]] = Memo()
_statuses: Final[Memo[bytes, str]] = Memo()
"""Names of statuses by the last header block of a reply."""


def trailers_only(status: int, message: str, retry_after: int = 0) -> bytes:
    """Return the complete reply to a call that failed.

    Memoized: an overloaded server sends the same errors repeatedly, and load shedding must be cheap.
    """
    key = (status, message, retry_after)
    known = _refusals.get(key)
    if known is None:
        known = encode_headers([*_INITIAL_FIELDS[:2], *_status_fields(status, message, retry_after)])
        REFUSALS.put(_refusals, key, known, 256 + getsizeof(message) + len(known))
    return known


def of_error(error: NeriteError) -> bytes:
    """Return the complete reply for an error."""
    return trailers_only(error.grpc_status, error.message, error.retry_after)


def _status_fields(status: int, message: str, retry_after: int) -> list[tuple[bytes, bytes]]:
    fields = [(b"grpc-status", b"%d" % status)]
    if retry_after:
        # Obeyed by the retry policy of a client, if it has one.
        fields.append((b"grpc-retry-pushback-ms", b"%d" % (retry_after * 1000)))
    if message:
        # Percent-encoded UTF-8. Printable ASCII stands for itself, except for the percent sign and for leading and
        # trailing blanks, which a field value cannot have.
        raw = message.encode(errors="replace")[:_MAX_MESSAGE]
        text = quote(raw, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")
        fields.append((b"grpc-message", _OUTER_BLANKS.sub(lambda found: "%20" * len(found[0]), text).encode()))
    return fields


def framed(message: bytes, compressed: bool = False) -> bytes:
    """Return a message with its five-byte prefix."""
    return bytes((compressed,)) + len(message).to_bytes(4) + message


def status_name(block: bytes) -> str:
    """Return the status name in the last header block of a reply, or the HTTP status if the call was not gRPC."""
    known = _statuses.get(block)
    if known is None:
        fields = dict(hpack.Decoder().decode(block, raw=True))
        code = fields.get(b"grpc-status")
        known = NAMES[int(code)] if code is not None else fields[b":status"].decode()
        ACCESS_LOG.put(_statuses, block, known, 128 + len(block))
    return known


_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def timeout_seconds(value: bytes) -> float | None:
    """Return the seconds of a ``grpc-timeout`` value; None if it is invalid."""
    text = value.decode("latin-1")
    digits, unit = text[:-1], text[-1:]
    if not digits.isdecimal() or len(digits) > 8 or unit not in _UNITS:
        return None
    return int(digits) * _UNITS[unit]


UNREAD_TEXT: Final = "the response was dropped: the client does not read, and the connection's output buffer is full"
UNREAD: Final = trailers_only(RESOURCE_EXHAUSTED, UNREAD_TEXT)


def stalled_text(seconds: float) -> str:
    """Return the error text for a message that made no progress."""
    return f"the message made no progress for {seconds:g} s. Use --grpc-upload-timeout to wait longer."


def stalled(seconds: float) -> bytes:
    """Return the complete reply to a call whose message made no progress."""
    return trailers_only(DEADLINE_EXCEEDED, stalled_text(seconds))
