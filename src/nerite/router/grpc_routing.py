"""Finds in gRPC messages what the choice of a member depends on, and that nothing in them says otherwise.

Parsers take the last of several fields, so a message is read to its end, but for the bytes of tensors.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from nerite.balancing.member import RoutedRequest
from nerite.balancing.prefix_hashes import BYTES_PER_TOKEN, prefix_hashes, prefix_tokens
from nerite.core.client_text import checked_name
from nerite.core.errors import Exhausted, InvalidArgument, Unsupported
from nerite.core.tensor import Buffer
from nerite.core.text import MAX_NAME
from nerite.transports import unpacking
from nerite.transports.grpc import wire
from nerite.transports.grpc.infer_request import broken
from nerite.transports.grpc.wire import MalformedMessage

PREFIX_SIZE: Final = 5
_BEGINNING: Final = 64 * 1024
"""Bytes at the beginning of a message among which those of its prompt are looked for."""
_RATIO: Final = 8
"""Bytes to which each byte of a compressed message of a stream may unpack, beyond ``_BEGINNING``."""
_PARAMETERS: Final = 0x22
_INPUT: Final = 0x2A
_NAMES: Final = (wire.MODEL_NAME, wire.MODEL_VERSION)
_LONGEST_NAME: Final = 4 * MAX_NAME
_READ: Final = {wire.MODEL_NAME: _LONGEST_NAME, wire.MODEL_VERSION: _LONGEST_NAME, _PARAMETERS: 8 * 1024, _INPUT: 64}
"""Bytes of fields that are read, from the beginning of each."""
_LONGEST_HEAD: Final = 20
"""Bytes of a tag and a length, each at most ten."""
_PROMPT: Final = b"text_input"
"""Input of language models that has the prompt."""
_SEQUENCE: Final = b"sequence_"
_SEQUENCE_ID: Final = b"sequence_id"
_SEQUENCE_START: Final = b"sequence_start"
_SEQUENCE_END: Final = b"sequence_end"
_MOST_INNER: Final = 16
"""Fields of a parameter."""
_MAX_FIELDS: Final = 1_024
"""Fields of an administrative message."""


class MessageFacts(NamedTuple):
    """What is known of a message. A value that was not found is empty."""

    model: str = ""
    version: str = ""
    sequence: str = ""
    sequence_start: bool = False
    sequence_end: bool = False
    prompt: Buffer = b""
    """Bytes of the prompt and what follows them, if the message is to a language model."""


class InferFields:
    """The fields of a ``ModelInferRequest``, read as the message arrives."""

    __slots__ = (
        "_end", "_fields", "_head", "_left", "_parameters", "_prompt", "_sequence", "_size", "_start", "_tag", "_value",
        "_wanted", "model", "tensors_at", "version",
    )  # fmt: skip

    def __init__(self) -> None:
        self.model = self.version = self._sequence = ""
        self._start = self._end = self._prompt = False
        self.tensors_at = 0
        """Offset of the bytes of the first tensor; 0 until it has come."""
        self._size = 0
        """Bytes before those that are fed."""
        self._head = b""
        """Beginning of a tag and a length."""
        self._tag = 0
        self._left = 0
        """Bytes of the field that are to come."""
        self._wanted = 0
        """How many of the first ones are read."""
        self._value: bytearray | None = None
        self._fields = self._parameters = 0

    @property
    def known(self) -> bool:
        """Whether the model has been named, and what follows is usually tensors alone."""
        return bool(self.model and self.tensors_at)

    def feed(self, data: memoryview) -> None:
        """Read more of the message. Raises ``MalformedMessage``, or ``InvalidArgument`` for what is not allowed."""
        at, size = 0, len(data)
        if self._head:
            at = self._finish_head(data)
        while at < size:
            if self._left:
                at = self._pass(data, at)
                continue
            head = _field_head(data, at)
            if head is None:
                self._head = bytes(data[at:])
                break
            tag, at, self._left = head
            if tag == wire.RAW_INPUT and not self.tensors_at:
                self.tensors_at = self._size + at
            self._begin(tag)
        self._size += size

    def finish(self) -> None:
        """Raise ``MalformedMessage`` if the message is not complete."""
        if self._head or self._left:
            raise MalformedMessage

    def facts(self, beginning: Buffer) -> MessageFacts:
        """Return what is known. ``beginning`` is that of the message. Raises ``InvalidArgument`` for wrong values."""
        return MessageFacts(
            checked_name(self.model, "the name of a model"),
            checked_name(self.version, "the version of a model"),
            checked_name(self._sequence, "sequence_id"),
            self._start,
            self._end,
            memoryview(beginning)[self.tensors_at :] if self._prompt and self.tensors_at else b"",
        )

    def _finish_head(self, data: memoryview) -> int:
        """Complete a tag and a length that began in what was fed before; return the offset behind them."""
        before = len(self._head)
        joined = self._head + bytes(data[:_LONGEST_HEAD])
        head = _field_head(memoryview(joined), 0)
        if head is None:
            self._head = joined
            return len(data)
        tag, stop, self._left = head
        self._head = b""
        if tag == wire.RAW_INPUT and not self.tensors_at:
            self.tensors_at = self._size + stop - before
        self._begin(tag)
        return stop - before

    def _begin(self, tag: int) -> None:
        """Begin with the value of a field."""
        self._fields += 1
        self._parameters += tag == _PARAMETERS
        if self._fields > wire.MAX_FIELDS:
            raise wire.TooManyFields(f"the request has more than the {wire.MAX_FIELDS} fields that are allowed")
        if self._parameters > wire.MAX_REPEATED:
            raise wire.too_many("parameters", self._parameters)
        most = _READ.get(tag, 0)
        if tag in _NAMES and self._left > most:
            raise InvalidArgument(f"a name is {self._left} bytes long, more than the {MAX_NAME} characters allowed")
        self._tag, self._wanted = tag, min(self._left, most)
        if tag in _NAMES and not self._left:
            self._take(memoryview(b""))

    def _pass(self, data: memoryview, at: int) -> int:
        """Read or pass over what has come of a field; return the offset behind it."""
        stop = min(at + self._left, len(data))
        self._left -= stop - at
        wanted = self._wanted
        if wanted:
            if self._value is None and stop - at >= wanted:
                self._wanted = 0
                self._take(data[at : at + wanted])
            else:
                value = self._value = bytearray() if self._value is None else self._value
                value += data[at : min(stop, at + wanted - len(value))]
                if len(value) == wanted:
                    self._wanted, self._value = 0, None
                    self._take(memoryview(value))
        return stop

    def _take(self, value: memoryview) -> None:
        """Take the beginning of a value."""
        try:
            if self._tag == wire.MODEL_NAME:
                self.model = str(value, "utf-8")
            elif self._tag == wire.MODEL_VERSION:
                self.version = str(value, "utf-8")
            elif self._tag == _INPUT:
                self._prompt = self._prompt or _PROMPT in bytes(value)
            elif _SEQUENCE in bytes(value):
                self._take_parameter(*_parameter(value))
        except UnicodeDecodeError:
            raise MalformedMessage from None

    def _take_parameter(self, key: bytes, value: str) -> None:
        if key == _SEQUENCE_ID:
            self._sequence = value
        elif key == _SEQUENCE_START:
            self._start = value == "1"
        elif key == _SEQUENCE_END:
            self._end = value == "1"


def _field_head(data: memoryview, at: int) -> tuple[int, int, int] | None:
    """Return tag, offset and size of the value of a field; None if more of the data is needed."""
    try:
        tag, start = _varint(data, at)
        kind = tag & 7
        if not 8 <= tag < 1 << 32 or kind not in (0, 1, 2, 5):
            raise MalformedMessage
        if kind == 2:
            size, start = _varint(data, start)
            return tag, start, size
        if kind:
            return tag, start, 8 if kind == 1 else 4
        return tag, start, _varint(data, start)[1] - start
    except IndexError:
        return None


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number and its end. Raises ``IndexError`` if more of the data is needed, or ``MalformedMessage``."""
    byte = data[at]
    value = byte & 0x7F
    shift = 0
    while byte > 0x7F:
        at += 1
        shift += 7
        if shift > 63:
            raise MalformedMessage
        byte = data[at]
        value |= (byte & 0x7F) << shift
    return value, at + 1


def facts_of(framed: memoryview, window: int) -> MessageFacts | None:
    """Return the facts of the message of a call; None if it is compressed and too large for the event loop.

    ``framed`` begins with the prefix of five bytes. ``window`` is zlib's, for compressed messages. Raises
    ``NeriteError`` for a message that cannot be read, which another parser might read all the same.
    """
    message = framed[PREFIX_SIZE:]
    fields = InferFields()
    try:
        if framed[0]:
            unpacked = unpacking.unpack_small(message, _known(window), unpacking.SMALL + 1, alone=True)
            if unpacked is None:
                return None
            message = unpacked
        fields.feed(message)
        fields.finish()
    except (MalformedMessage, unpacking.BrokenContent):
        raise broken() from None
    return fields.facts(message)


def facts_of_large(framed: memoryview, window: int, limit: int) -> MessageFacts:
    """Return the facts of a compressed message of at most ``limit`` bytes. Takes its time: not for the event loop."""
    fields = InferFields()
    beginning = bytearray()
    try:
        for piece in unpacking.unpacked(framed[PREFIX_SIZE:], _known(window), limit, alone=True):
            fields.feed(memoryview(piece))
            beginning += piece[: _BEGINNING - len(beginning)]
        fields.finish()
    except unpacking.UnpackedTooLarge:
        raise Exhausted(f"the message has more than {limit} bytes after decompression") from None
    except (MalformedMessage, unpacking.BrokenContent):
        raise broken() from None
    return fields.facts(beginning)


def _known(window: int) -> int:
    if not window:
        raise Unsupported("the message is compressed in a way that cannot be read here: use gzip, deflate or none")
    return window


class CallMessages:
    """Follows the messages of a call as they arrive: the first one chooses a member, and does not contradict itself."""

    def __init__(self, window: int, *, one_model: bool = False) -> None:
        """``one_model``: all messages must name the model of the first one, which is what is admitted and billed."""
        self._window = window
        self._one_model = one_model
        self._over = False
        """Nothing more has to be followed."""
        self.facts: MessageFacts | None = None
        """Those of the first message, as soon as its tensors begin."""
        self._prefix = b""
        self._left = 0
        """Bytes of the message that are to come."""
        self._message: InferFields | None = None
        self._decoder: zlib._Decompress | None = None
        self._room = 0
        """Bytes to which the rest of a compressed message may unpack."""
        self._beginning = bytearray()
        """Of the first message, unpacked, until its facts are known."""

    def feed(self, data: memoryview) -> None:
        """Follow what has come. Raises ``NeriteError`` for what may not be passed on."""
        try:
            while len(data) and not self._over:
                if self._message is None:
                    data = self._begin(data)
                else:
                    part, data = data[: self._left], data[self._left :]
                    self._left -= len(part)
                    self._take(self._message, part)
                if self._message is not None and not self._left:
                    self._end(self._message)
        except (MalformedMessage, zlib.error):
            raise broken() from None

    def settle(self) -> MessageFacts:
        """Return the facts of the first message as far as it has come, which later parts must not contradict."""
        if self.facts is None:
            fields = InferFields() if self._message is None else self._message
            self.facts, self._beginning = fields.facts(bytes(self._beginning)), bytearray()
        return self.facts

    def _begin(self, data: memoryview) -> memoryview:
        """Read the prefix of a message; return what follows."""
        missing = PREFIX_SIZE - len(self._prefix)
        self._prefix += bytes(data[:missing])
        if len(self._prefix) == PREFIX_SIZE:
            self._left = int.from_bytes(self._prefix[1:])
            self._message = InferFields()
            self._decoder = zlib.decompressobj(_known(self._window)) if self._prefix[0] else None
            self._room = _BEGINNING + _RATIO * self._left
            self._prefix = b""
        return data[missing:]

    def _take(self, message: InferFields, part: memoryview) -> None:
        decoder = self._decoder
        if decoder is None:
            self._take_plain(message, part)
            return
        while len(part):
            piece = decoder.decompress(part, min(self._room, _BEGINNING) + 1)
            self._room -= len(piece)
            if self._room < 0:
                raise Exhausted(
                    f"a compressed message of a stream unpacks to more than {_RATIO} times its size, and has to be "
                    "read here: send it uncompressed"
                )
            if decoder.unused_data:
                raise MalformedMessage
            self._take_plain(message, memoryview(piece))
            part = memoryview(decoder.unconsumed_tail)

    def _take_plain(self, message: InferFields, data: memoryview) -> None:
        message.feed(data)
        if self.facts is None:
            self._beginning += data[: _BEGINNING - len(self._beginning)]
            if message.known:
                self.settle()
        elif message.model and message.model != self.facts.model:
            raise InvalidArgument(
                f"the call was admitted for model '{self.facts.model}' and then names '{message.model}': "
                "use a call for each model"
            )

    def _end(self, message: InferFields) -> None:
        if self._decoder is not None:
            self._take_plain(message, memoryview(self._decoder.flush()))
            if not self._decoder.eof:
                raise MalformedMessage
        message.finish()
        self.settle()
        self._message = self._decoder = None
        self._over = not self._one_model


def routed_request(
    facts: MessageFacts, session: str, *, single: bool, repeatable: bool, tenant: str = ""
) -> RoutedRequest:
    """Return what the choice of a member depends on. ``single``: the call has one answer."""
    prompt = facts.prompt
    prefix = prefix_hashes(prompt, facts.model) if prompt else ()
    return RoutedRequest(
        facts.model,
        facts.version,
        prompt_tokens=len(prompt) / BYTES_PER_TOKEN,
        answer_tokens=1.0 if single and not prompt else 0.0,
        prefix=prefix,
        prefix_tokens=prefix_tokens(len(prefix)),
        session=session,
        sequence=facts.sequence,
        sequence_start=facts.sequence_start,
        sequence_end=facts.sequence_end,
        tenant=tenant,
        repeatable=repeatable and not facts.sequence,
        streams=not single,
    )


def name_of(framed: memoryview, window: int, tag: int) -> str:
    """Return the text in the last field ``tag`` of an administrative message; empty if there is none."""
    message = framed[PREFIX_SIZE:]
    if bytes(framed[:1]) == b"\1":
        message = _opened(message, window)
    name = ""
    try:
        for found, at, stop in _fields(message, _MAX_FIELDS):
            if found == tag:
                name = str(message[at:stop], "utf-8")
    except (MalformedMessage, UnicodeDecodeError):
        return ""
    return name


def _opened(message: memoryview, window: int) -> memoryview:
    """Return the beginning of a compressed message, uncompressed; empty if it is broken."""
    try:
        return memoryview(zlib.decompressobj(window).decompress(message, _BEGINNING)) if window else memoryview(b"")
    except zlib.error:
        return memoryview(b"")


def _parameter(entry: memoryview) -> tuple[bytes, str]:
    """Return key and value of an entry of ``parameters``; the value as text, empty if it is 0, false or no scalar."""
    key, value = b"", ""
    for tag, at, stop in _fields(entry, _MOST_INNER):
        if tag == 0x0A:
            key = bytes(entry[at : min(stop, at + 64)])
        elif tag == 0x12:
            inner = entry[at:stop]
            for kind, start, end in _fields(inner, _MOST_INNER):
                if kind == 0x1A:  # a string
                    value = str(inner[start:end], "utf-8")
                elif kind & 7 == 0:  # a truth value, or a number
                    number, _ = wire.read_varint(inner, start)
                    value = str(number) if number else ""
    return key, value


def _fields(message: memoryview, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield tag, start and end of the value of each field. Raises ``MalformedMessage``, also for more than ``most``."""
    at = 0
    for _ in range(most):
        if at >= len(message):
            return
        tag, at, stop = wire.read_field(message, at)
        yield tag, at, stop
        at = stop
    if at < len(message):
        raise MalformedMessage
