"""From the bytes of a message to what it says: on the event loop where that is quick, else in a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Final, NamedTuple, TypeVar

from nerite.core.errors import Exhausted, Internal, NeriteError
from nerite.transports import unpacking
from nerite.transports.bounds import Bounds, Share
from nerite.transports.grpc import contents, infer_wire
from nerite.transports.grpc.infer_request import InferReader, Read, broken, heavy

T = TypeVar("T")
WINDOWS: Final[Mapping[str, int]] = {"gzip": 31, "deflate": 15}
"""zlib's numbers for the codings of messages."""
MAX_QUESTION: Final = 64 * 1024
"""Bytes of a message that is neither an inference nor a load, which brings files."""
_PREFIX: Final = 5
_NOTHING: Final = memoryview(b"")


class MessageTooLarge(Exhausted):
    """A message has more bytes than are taken in one."""


class Opened(NamedTuple):
    """What was read in a thread."""

    message: memoryview
    """Without its length, decompressed; empty if that cannot be had."""
    said: Read | NeriteError
    share: Share
    """What it has of the bytes in flight."""


class Messages:
    """Reads the messages of calls that say the same of how they are packed."""

    def __init__(self, encoding: str, limit: int, bounds: Bounds) -> None:
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
            parts = infer_wire.split(message)
            return None if heavy(parts) else reader.read(parts, message, _uncounted)
        except _MISTAKES as error:
            raise self._noted(self._refusal(error)) from None

    def read_aside(self, framed: memoryview, reader: InferReader, then: Callable[[Opened], None]) -> None:
        """Call ``then`` with what the message of an inference says, when it was read in a thread."""
        share = Share(self._bounds.bytes)

        def opened(result: Opened | NeriteError) -> None:
            found = result if isinstance(result, Opened) else Opened(_NOTHING, result, share)
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
        self, framed: memoryview, parse: Callable[[memoryview], T], then: Callable[[Share, T | NeriteError], None]
    ) -> None:
        """Call ``then`` with what ``parse`` makes of a message, and the bytes that it takes, when that was done."""
        share = Share(self._bounds.bytes)

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

    def _unpacked(self, framed: memoryview, take: contents.Take) -> memoryview:
        if not framed[0]:
            return framed[_PREFIX:]
        return unpacking.unpack(framed[_PREFIX:], self._coding(), self.limit, take)

    def _coding(self) -> int:
        if self.plain:
            raise Internal("a compressed message came without grpc-encoding")
        return self._window

    def _counted(self, share: Share) -> contents.Take:
        """Return what is told of memory for a message or for the tensors in it, neither of which may be too large."""
        left = self.limit

        def take(size: int) -> None:
            nonlocal left
            left -= size
            if left < 0:
                raise unpacking.TooLarge
            share.take_or_raise(size)

        return take

    def _open(self, framed: memoryview, reader: InferReader, share: Share) -> Opened:
        """Read a message, in a thread."""
        message = _NOTHING
        try:
            message = self._unpacked(framed, self._counted(share))
            parts = infer_wire.split(message)
            return Opened(message, reader.read(parts, message, self._counted(share), aside=True), share)
        except _MISTAKES as error:
            return Opened(message, self._refusal(error).without_frames(), share)

    def _refusal(self, error: Exception) -> NeriteError:
        """Return what is told of one of ``_MISTAKES``."""
        if isinstance(error, unpacking.TooLarge):
            return self._too_large(f"({self.limit}) once it is unpacked")
        if isinstance(error, unpacking.Broken):
            return Internal(f"failed to decompress the message: {error}")
        return error if isinstance(error, NeriteError) else broken()

    def _too_large(self, what: str) -> NeriteError:
        remedy = "" if self.limit == MAX_QUESTION else ". Use --grpc-max-message-size to increase the limit."
        return MessageTooLarge(f"Received message larger than max {what}{remedy}")

    def _noted(self, result: T) -> T:
        """Count a refusal that is due to a limit. For the event loop's thread only."""
        if isinstance(result, MessageTooLarge):
            self._bounds.refused["message_size"] += 1
        elif isinstance(result, infer_wire.TooMany):
            self._bounds.refused["fields"] += 1
        return result


_MISTAKES: Final = (NeriteError, infer_wire.Malformed, unpacking.TooLarge, unpacking.Broken)


def _uncounted(size: int) -> None:
    """Count nothing: the tensors of a small message are small."""
