"""From the bytes of a message to what it says: on the event loop where that is quick, else in a thread."""

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
"""zlib's numbers for the codings of messages."""
MAX_QUESTION: Final = 64 * 1024
"""Bytes of a message that is neither an inference nor a load, which brings files."""
_PREFIX: Final = 5
_NOTHING: Final = memoryview(b"")


class MessageTooLarge(Exhausted):
    """A message has more bytes than are taken in one."""


class OpenedMessage(NamedTuple):
    """What was read in a thread."""

    message: memoryview
    """Without its length, decompressed; empty if that cannot be had."""
    said: Read | NeriteError
    share: ByteReservation
    """What it has of the bytes in flight."""


class MessageReader:
    """Reads the messages of calls that say the same of how they are packed."""

    def __init__(self, encoding: str, limit: int, bounds: TransportLimits) -> None:
        """``limit``: bytes of the largest message that is taken, after decompression."""
        self.limit = limit
        self.plain = encoding == "identity"
        """No message is compressed."""
        self._window = WINDOWS.get(encoding, 0)
        self._bounds = bounds

    def too_large(self, size: int) -> NeriteError:
        """Count a message of more than ``limit`` bytes, and return its refusal."""
        return self._noted(self._too_large(f"({size} vs. {self.limit})"))

    def read(self, framed: memoryview, reader: InferReader) -> Read | None:
        """Return what the message of an inference says; None if it takes long to read. Raises ``NeriteError``."""
        try:
            message = self._small(framed)
            if message is None:
                return None
            parts = wire.split(message)
            return None if heavy(parts) else reader.read(parts, message, _uncounted)
        except _MISTAKES as error:
            raise self._noted(self._refusal(error)) from None

    def read_aside(self, framed: memoryview, reader: InferReader, then: Callable[[OpenedMessage], None]) -> None:
        """Call ``then`` with what the message of an inference says, when it was read in a thread."""
        share = ByteReservation(self._bounds.bytes)

        def opened(result: OpenedMessage | NeriteError) -> None:
            found = result if isinstance(result, OpenedMessage) else OpenedMessage(_NOTHING, result, share)
            self._noted(found.said)
            then(found)

        self._bounds.aside.run("grpc", partial(self._open, framed, reader, share), opened)

    def beginning(self, framed: memoryview) -> memoryview:
        """Return a message, of which something is wrong, without its length; nothing if it is not to be had at once."""
        try:
            return self._small(framed) or _NOTHING
        except _MISTAKES:
            return _NOTHING

    def parsed(self, framed: memoryview, parse: Callable[[memoryview], T]) -> T | None:
        """Return what ``parse`` makes of a message; None if it takes long to read. Raises ``NeriteError``."""
        try:
            message = self._small(framed)
            return None if message is None or len(message) > MAX_QUESTION else parse(message)
        except _MISTAKES as error:
            raise self._noted(self._refusal(error)) from None

    def parse_aside(
        self,
        framed: memoryview,
        parse: Callable[[memoryview], T],
        then: Callable[[ByteReservation, T | NeriteError], None],
    ) -> None:
        """Call ``then`` with what ``parse`` makes of a message, and the bytes that it takes, when that was done."""
        share = ByteReservation(self._bounds.bytes)

        def work() -> T:
            try:
                return parse(self._unpacked(framed, self._counted(share)))
            except _MISTAKES as error:
                raise self._refusal(error) from None

        self._bounds.aside.run("grpc", work, lambda result: then(share, self._noted(result)))

    def _small(self, framed: memoryview) -> memoryview | None:
        """Return a message without its length, decompressed; None if that takes long."""
        if not framed[0]:
            return framed[_PREFIX:]
        return unpacking.unpack_small(framed[_PREFIX:], self._coding(), self.limit)

    def _unpacked(self, framed: memoryview, take: infer_request.Take) -> memoryview:
        if not framed[0]:
            return framed[_PREFIX:]
        return unpacking.unpack(framed[_PREFIX:], self._coding(), self.limit, take)

    def _coding(self) -> int:
        if self.plain:
            raise Internal("a compressed message came without grpc-encoding")
        return self._window

    def _counted(self, share: ByteReservation) -> infer_request.Take:
        """Return what is told of memory for a message or for the tensors in it, neither of which may be too large."""
        left = self.limit

        def take(size: int) -> None:
            nonlocal left
            left -= size
            if left < 0:
                raise unpacking.UnpackedTooLarge
            share.take_or_raise(size)

        return take

    def _open(self, framed: memoryview, reader: InferReader, share: ByteReservation) -> OpenedMessage:
        """Read a message, in a thread."""
        message = _NOTHING
        try:
            message = self._unpacked(framed, self._counted(share))
            parts = wire.split(message)
            return OpenedMessage(message, reader.read(parts, message, self._counted(share), aside=True), share)
        except _MISTAKES as error:
            return OpenedMessage(message, self._refusal(error).without_frames(), share)

    def _refusal(self, error: Exception) -> NeriteError:
        """Return what is told of one of ``_MISTAKES``."""
        if isinstance(error, unpacking.UnpackedTooLarge):
            return self._too_large(f"({self.limit}) once it is unpacked")
        if isinstance(error, unpacking.BrokenContent):
            return Internal(f"failed to decompress the message: {error}")
        return error if isinstance(error, NeriteError) else broken()

    def _too_large(self, what: str) -> NeriteError:
        remedy = "" if self.limit == MAX_QUESTION else ". Use --grpc-max-message-size to increase the limit."
        return MessageTooLarge(f"Received message larger than max {what}{remedy}")

    def _noted(self, result: T) -> T:
        """Count a refusal that is due to a limit. For the event loop's thread only."""
        if isinstance(result, MessageTooLarge):
            self._bounds.refused["message_size"] += 1
        elif isinstance(result, wire.TooManyFields):
            self._bounds.refused["fields"] += 1
        return result


_MISTAKES: Final = (NeriteError, wire.MalformedMessage, unpacking.UnpackedTooLarge, unpacking.BrokenContent)


def _uncounted(size: int) -> None:
    """Count nothing: the tensors of a small message are small."""


# gRPC's framing of replies: header blocks, trailers, the five bytes before a message, statuses.

OK: Final = 0
CANCELLED: Final = 1
DEADLINE_EXCEEDED: Final = 4
RESOURCE_EXHAUSTED: Final = 8
UNIMPLEMENTED: Final = 12
INTERNAL: Final = 13
UNAVAILABLE: Final = 14

_BEGINNING: Final = [
    (b":status", b"200"),
    (b"content-type", b"application/grpc"),
    (b"grpc-accept-encoding", b"identity, deflate, gzip"),
]
NAMES: Final = (
    "OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE", "UNIMPLEMENTED",
    "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
)  # fmt: skip
"""By number."""
HEAD: Final = encode_headers(_BEGINNING)
TRAILERS_OK: Final = encode_headers([(b"grpc-status", b"0")])
NOT_GRPC: Final = encode_headers([(b":status", b"415")])
_OUTER_BLANKS: Final = re.compile("^ +| +$")
_MAX_MESSAGE: Final = 4096
"""Bytes of an error text, before it is encoded: a client limits the headers it takes."""


@lru_cache
def head_with_encoding(encoding: str) -> bytes:
    """Return the headers of a reply whose message is compressed."""
    return encode_headers([*_BEGINNING, (b"grpc-encoding", encoding.encode())])


def trailers(status: int, message: str, retry_after: int = 0) -> bytes:
    """Return the trailers of a reply that ends with an error after its headers were sent.

    ``retry_after``: seconds after which the client may try again; 0 says nothing about that.
    """
    return encode_headers(_status_fields(status, message, retry_after))


_refusals: Final[Memo[tuple[int, str, int], bytes]] = Memo()
_statuses: Final[Memo[bytes, str]] = Memo()
"""By the last headers of a reply."""


def trailers_only(status: int, message: str, retry_after: int = 0) -> bytes:
    """Return the whole reply to a call that failed.

    Remembered, as a server of which too much is asked says the same again and again: refusing must be cheap.
    """
    key = (status, message, retry_after)
    known = _refusals.get(key)
    if known is None:
        known = encode_headers([*_BEGINNING[:2], *_status_fields(status, message, retry_after)])
        REFUSALS.put(_refusals, key, known, 256 + getsizeof(message) + len(known))
    return known


def of_error(error: NeriteError) -> bytes:
    """Return the whole reply that a refusal is."""
    return trailers_only(error.grpc_status, error.message, error.retry_after)


def _status_fields(status: int, message: str, retry_after: int) -> list[tuple[bytes, bytes]]:
    fields = [(b"grpc-status", b"%d" % status)]
    if retry_after:
        # What a client's retry policy obeys, where it has one.
        fields.append((b"grpc-retry-pushback-ms", b"%d" % (retry_after * 1000)))
    if message:
        # Percent-encoded UTF-8; printable ASCII but the percent sign stands for itself, but for blanks at the ends,
        # which a field's value cannot have.
        raw = message.encode(errors="replace")[:_MAX_MESSAGE]
        text = quote(raw, safe=" !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~")
        fields.append((b"grpc-message", _OUTER_BLANKS.sub(lambda found: "%20" * len(found[0]), text).encode()))
    return fields


def framed(message: bytes, compressed: bool = False) -> bytes:
    """Return a message with its length in front."""
    return bytes((compressed,)) + len(message).to_bytes(4) + message


def told(block: bytes) -> str:
    """Return the status that a reply's last headers have: its name, or that of HTTP where the call was none of gRPC."""
    known = _statuses.get(block)
    if known is None:
        fields = dict(hpack.Decoder().decode(block, raw=True))
        code = fields.get(b"grpc-status")
        known = NAMES[int(code)] if code is not None else fields[b":status"].decode()
        ACCESS_LOG.put(_statuses, block, known, 128 + len(block))
    return known


_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}


def timeout_seconds(value: bytes) -> float | None:
    """Return what a ``grpc-timeout`` means, None if it means nothing."""
    text = value.decode("latin-1")
    digits, unit = text[:-1], text[-1:]
    if not digits.isdecimal() or len(digits) > 8 or unit not in _UNITS:
        return None
    return int(digits) * _UNITS[unit]


UNREAD_TEXT: Final = "the answer was dropped: the client leaves as much unread as the server keeps for a connection"
UNREAD: Final = trailers_only(RESOURCE_EXHAUSTED, UNREAD_TEXT)


def stalled_text(seconds: float) -> str:
    """Return what is said of a message that does not come on."""
    return f"the message did not come on for {seconds:g} s. Use --grpc-upload-timeout to wait longer."


def stalled(seconds: float) -> bytes:
    """Return the whole reply to a call whose message does not come on."""
    return trailers_only(DEADLINE_EXCEEDED, stalled_text(seconds))
