"""What an engine and the process of its pipeline say to each other. Plain data, which is pickled."""

from __future__ import annotations

import pickle
import select
import socket
import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from nerite.core.errors import NeriteError
from nerite.core.tensor import Array
from nerite.llm.engine import FinishReason
from nerite.llm.request import SamplingParameters
from nerite.llm.structured_output import Grammar

# To the process


class GenerationOrder(NamedTuple):
    """A request: as many sequences as it has numbers, each a request of its own to the pipeline."""

    numbers: Sequence[int]
    prompt: Array | tuple[str, Sequence[Array]]
    """Its tokens, or its text and pixels."""
    special_tokens: bool
    """Whether a text gets those that stand at its beginning."""
    sampling: SamplingParameters
    room: int
    """Tokens that there is room for after the prompt."""
    most: int
    """Tokens of prompt and answer; 0 where the prompt is tokens, which were counted."""
    ends: frozenset[int]
    """Tokens by which the model says that it is done."""
    grammar: Grammar | None


class DropOrder(NamedTuple):
    """Sequences that nobody wants any more. In any case a ``PipelineStep`` follows."""

    numbers: Sequence[int]


class CompileOrder(NamedTuple):
    """A grammar that is to be compiled. ``Compiled`` follows, between steps."""

    grammar: Grammar
    ends: frozenset[int]
    vocabulary: int
    """How many tokens the model knows."""


# From the process


class PipelineLoaded(NamedTuple):
    """The model is there."""

    blocks: int
    """Of the KV cache."""
    ends: frozenset[int]


Piece: TypeAlias = tuple[int, list[int], list[float], FinishReason | None, int]
"""Of a sequence: its number, new tokens, how likely they were, and how it has ended, if it has.

At the end, of a model that takes images, also how many tokens the prompt had with them; else 0.
"""


class PipelineStep(NamedTuple):
    """What a step has brought."""

    begun: Sequence[int]
    """Sequences that it was the first for."""
    refused: Sequence[tuple[int, NeriteError]]
    """Those that the pipeline did not take."""
    pieces: Sequence[Piece]
    scheduled: int
    """Sequences in the batch."""
    blocks: int
    """Of the KV cache that are in use."""
    failure: str
    """Why the step has failed, and all that was begun with it, if it has. The process ends then."""


class Compiled(NamedTuple):
    """The end of a ``CompileOrder``."""

    wrong: str
    """Why there can be no text of that form; nothing if there can."""


# Messages between an engine and the process of its pipeline: each is one piece of bytes, sent with one call.
#
# What is sent after a step delays the next one, in a process that finds nothing in the caches: what Python's own
# connections do with a message took as long there as all else between two steps.

_LENGTH: Final = struct.Struct("<I")
_AT_ONCE: Final = 1 << 16
"""Bytes that are read with one call, at most."""


def packed_message(message: object) -> bytes:
    """Return a message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class FramedPipe:
    """One end of it. One thread at a time sends, and one reads."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self._coming = select.poll()
        self._coming.register(end, select.POLLIN)

    def send(self, message: object) -> None:
        """Send what can be pickled. Raises ``OSError`` if nobody reads any more."""
        self.write(packed_message(message))

    def write(self, data: bytes) -> None:
        """Send what ``packed`` made, or the rest of it. Raises ``OSError`` if nobody reads any more."""
        self._socket.sendall(data)

    def push(self, data: bytes) -> bytes:
        """Send as much as there is room for now, and return the rest. Raises ``OSError`` if nobody reads any more."""
        try:
            return data[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data

    def receive(self) -> Any:
        """Wait for the next message and return it. Raises ``EOFError`` when there is none any more, and ``OSError``."""
        received = self._received
        while (end := self._end()) is None:
            more = self._socket.recv(_AT_ONCE)
            if not more:
                raise EOFError
            received += more
        message = pickle.loads(memoryview(received)[_LENGTH.size : end])
        del received[:end]
        return message

    def waits(self, milliseconds: int | None) -> bool:
        """Return whether a message, or a part of one, is there by then; None: whenever that is."""
        return bool(self._received or self._coming.poll(milliseconds))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _end(self) -> int | None:
        """Return where the first message ends, if it is there."""
        if len(self._received) < _LENGTH.size:
            return None
        end: int = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        return end if end <= len(self._received) else None
