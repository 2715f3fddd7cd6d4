"""Messages between the engine and its pipeline process (plain data, pickled), and the pipe that carries them."""

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
from nerite.llm.sampling_parameters import SamplingParameters
from nerite.llm.structured_output import Grammar

# To the pipeline process


class GenerationOrder(NamedTuple):
    """Starts a request. Each of its sequences has a number and is a separate request to the pipeline."""

    numbers: Sequence[int]
    prompt: Array | tuple[str, Sequence[Array]]
    """Tokens, or text and pixels."""
    special_tokens: bool
    """Whether special tokens are added to a text."""
    sampling: SamplingParameters
    room: int
    """Tokens that fit into the context after the prompt."""
    most: int
    """Maximum tokens of prompt and answer; 0 if the prompt is tokens, which were counted."""
    ends: frozenset[int]
    """Tokens by which the model ends its answer."""
    grammar: Grammar | None


class DropOrder(NamedTuple):
    """Cancels sequences. It is always followed by a ``PipelineStep``, even if it names no sequence."""

    numbers: Sequence[int]


class CompileOrder(NamedTuple):
    """Compiles a grammar. It is answered with ``Compiled``, between steps."""

    grammar: Grammar
    ends: frozenset[int]
    vocabulary: int
    """Size of the model's vocabulary."""


# From the pipeline process


class PipelineLoaded(NamedTuple):
    """The model is loaded."""

    blocks: int
    """Blocks of the KV cache."""
    ends: frozenset[int]


Piece: TypeAlias = tuple[int, list[int], list[float], FinishReason | None, int]
"""New output of a sequence: its number, new tokens, their log probabilities, and the finish reason, if any.

Last, at the end of a sequence of a model that takes images, the prompt's number of tokens with images; otherwise 0.
"""


class PipelineStep(NamedTuple):
    """Results of a step."""

    begun: Sequence[int]
    """Sequences that started with this step."""
    refused: Sequence[tuple[int, NeriteError]]
    """Sequences that the pipeline rejected."""
    pieces: Sequence[Piece]
    scheduled: int
    """Sequences in the batch."""
    blocks: int
    """Used blocks of the KV cache."""
    began_ns: int
    """When the step began (``time.monotonic_ns``): when the step before ended, or when work came after a pause."""
    ended_ns: int
    failure: str
    """Why the step and all started sequences failed; empty if it succeeded. After a failure the process ends."""


class Compiled(NamedTuple):
    """The result of a ``CompileOrder``."""

    wrong: str
    """Why the grammar cannot be used; empty if it can."""


# Framing: each message is one block of bytes, sent with one call. Sending after a step delays the next step, in a
# process with cold caches: there, ``multiprocessing`` connections took as long as all other work between two steps.

_LENGTH: Final = struct.Struct("<I")
_AT_ONCE: Final = 1 << 16
"""Maximum number of bytes per read."""


def packed_message(message: object) -> bytes:
    """Return a message as framed bytes."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class FramedPipe:
    """One end of a pipe for messages. At any time, one thread may send and one may read."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._received = bytearray()
        self._coming = select.poll()
        self._coming.register(end, select.POLLIN)

    def send(self, message: object) -> None:
        """Pickle and send a message. Raises ``OSError`` if the other end is closed."""
        self.write(packed_message(message))

    def write(self, data: bytes) -> None:
        """Send bytes of ``packed_message``, or the rest of them. Raises ``OSError`` if the other end is closed."""
        self._socket.sendall(data)

    def push(self, data: bytes) -> bytes:
        """Send as much as possible without blocking; return the rest. Raises ``OSError`` if the other end is closed."""
        try:
            return data[self._socket.send(data, socket.MSG_DONTWAIT) :]
        except BlockingIOError:
            return data

    def receive(self) -> Any:
        """Wait for the next message and return it. Raises ``EOFError`` at the end of the stream, or ``OSError``."""
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
        """Wait until a message, or a part of one, is available; return False on timeout. None waits indefinitely."""
        return bool(self._received or self._coming.poll(milliseconds))

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def _end(self) -> int | None:
        """Return where the first message ends in the buffer, or None if it is incomplete."""
        if len(self._received) < _LENGTH.size:
            return None
        end: int = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
        return end if end <= len(self._received) else None
