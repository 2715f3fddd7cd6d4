"""Finds in the beginning of a gRPC message what the choice of a member depends on. The rest is passed on unread."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from nerite.balancing.member import RoutedRequest
from nerite.balancing.prefix_hashes import BYTES_PER_TOKEN, prefix_hashes, prefix_tokens
from nerite.core.client_text import checked
from nerite.transports.grpc import wire
from nerite.transports.grpc.wire import MalformedMessage

PREFIX_SIZE: Final = 5
_BEGINNING: Final = 64 * 1024
"""Bytes of a compressed message that are decompressed to find the name of its model."""
_PARAMETERS: Final = 0x22
_PROMPT: Final = b"text_input"
"""Input of language models that has the prompt."""
_SEQUENCE_ID: Final = b"sequence_id"
_SEQUENCE_START: Final = b"sequence_start"
_SEQUENCE_END: Final = b"sequence_end"
_MAX_FIELDS: Final = 1_024


class MessageFacts(NamedTuple):
    """What is known of a message. A value that was not found is empty."""

    model: str = ""
    version: str = ""
    sequence: str = ""
    sequence_start: bool = False
    sequence_end: bool = False
    prompt: memoryview = memoryview(b"")
    """Bytes of the prompt and what follows them, if the message is to a language model."""


UNKNOWN: Final = MessageFacts()


def facts_of(framed: memoryview, window: int, *, complete: bool) -> MessageFacts | None:
    """Return the facts of an inference; None if more of its header may come.

    ``framed`` begins with the prefix of five bytes. ``window`` is zlib's, for compressed messages. A message that
    cannot be read has no facts: the member that gets it tells the client why.
    """
    if len(framed) < PREFIX_SIZE:
        return UNKNOWN if complete else None
    size = int.from_bytes(framed[1:PREFIX_SIZE])
    message = framed[PREFIX_SIZE : PREFIX_SIZE + size]
    whole = complete or len(message) == size
    if framed[0]:
        message = _opened(message, window)
    model, version, first_tensor = wire.peek(message)
    if not (whole or (model and first_tensor)):
        return None
    try:
        return _facts(message, model, version, first_tensor)
    except MalformedMessage:  # cut off, or not a message
        return UNKNOWN


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
    """Return the text in the field ``tag`` of an administrative message; empty if there is none."""
    message = framed[PREFIX_SIZE:]
    if bytes(framed[:1]) == b"\1":
        message = _opened(message, window)
    try:
        for found, at, stop in _fields(message):
            if found == tag:
                return str(message[at:stop], "utf-8")
    except (MalformedMessage, UnicodeDecodeError):
        pass
    return ""


def _opened(message: memoryview, window: int) -> memoryview:
    """Return the beginning of a compressed message, uncompressed; empty if it is broken."""
    try:
        return memoryview(zlib.decompressobj(window).decompress(message, _BEGINNING)) if window else memoryview(b"")
    except zlib.error:
        return memoryview(b"")


def _facts(message: memoryview, model: str, version: str, first_tensor: int) -> MessageFacts:
    """Return the facts of an inference, of which ``wire.peek`` has found the rest. Raises ``MalformedMessage``."""
    header = message[:first_tensor] if model and first_tensor else message
    searched = bytes(header[:_BEGINNING])
    prompt = message[first_tensor:] if first_tensor and _PROMPT in searched else memoryview(b"")
    if model and _SEQUENCE_ID not in searched:
        return MessageFacts(checked(model, "the name of a model"), version, prompt=prompt)
    sequence, start, end = "", False, False
    try:
        for tag, at, stop in _fields(header):
            if tag == wire.MODEL_NAME:
                model = str(header[at:stop], "utf-8")
            elif tag == wire.MODEL_VERSION:
                version = str(header[at:stop], "utf-8")
            elif tag == _PARAMETERS:
                key, value = _parameter(header[at:stop])
                if key == _SEQUENCE_ID:
                    sequence = value
                elif key == _SEQUENCE_START:
                    start = value == "1"
                elif key == _SEQUENCE_END:
                    end = value == "1"
    except UnicodeDecodeError:
        raise MalformedMessage from None
    except MalformedMessage:
        if not model:
            raise
    name = checked(sequence, "sequence_id")
    return MessageFacts(checked(model, "the name of a model"), version, name, start, end, prompt)


def _parameter(entry: memoryview) -> tuple[bytes, str]:
    """Return key and value of an entry of ``parameters``; the value as text, empty if it is 0, false or no scalar."""
    key, value = b"", ""
    for tag, at, stop in _fields(entry):
        if tag == 0x0A:
            key = bytes(entry[at : min(stop, at + 64)])
        elif tag == 0x12:
            inner = entry[at:stop]
            for kind, start, end in _fields(inner):
                if kind == 0x1A:  # a string
                    value = str(inner[start:end], "utf-8")
                elif kind & 7 == 0:  # a truth value, or a number
                    number, _ = wire.read_varint(inner, start)
                    value = str(number) if number else ""
    return key, value


def _fields(message: memoryview) -> Iterator[tuple[int, int, int]]:
    """Yield tag, start and end of the value of each field, at most ``_MAX_FIELDS``. Raises ``MalformedMessage``."""
    at = 0
    for _ in range(_MAX_FIELDS):
        if at >= len(message):
            return
        tag, at, stop = wire.read_field(message, at)
        yield tag, at, stop
        at = stop
