"""The process that calls functions for the server (``helper_pool``), one at a time.

A call comes over the channel: the length of a description, the description as JSON, and the bytes of those arguments
that are bytes. The answer is an anonymous file, described by one short message. Nothing is unpickled.

The process is stateless, so it may be killed at any time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from nerite.core.errors import NeriteError
from nerite.core.failures import traceback_of
from nerite.core.memory import memory_file, memory_of
from nerite.core.tensor import Buffer
from nerite.workers.ipc.messages import error_json

LENGTH: Final = struct.Struct("<I")
"""Length of the description of a call, which follows."""
ANSWER: Final = struct.Struct("<QI?")
"""Size of the file, length of the description at its beginning, and whether the process ends now."""
_ALIGNMENT: Final = 64
_MAX_MEMORY: Final = 128 * 1024 * 1024
"""Bytes of memory that the process may keep after a call. With more it ends, to release them."""


def describe_call(values: Sequence[Any]) -> tuple[list[Any], list[Buffer]]:
    """Return values as JSON, and the buffers of those that are bytes."""
    described: list[Any] = []
    buffers: list[Buffer] = []
    for value in values:
        if isinstance(value, bytes | bytearray | memoryview):
            described.append({"bytes": len(value)})
            buffers.append(value)
        else:
            described.append({"value": value})
    return described, buffers


def main(channel: int, files: int) -> None:
    """Answer calls until the server is gone."""
    os.close(files)
    gc.disable()  # the objects of a call form no cycles, and there may be millions of them
    with contextlib.suppress(OSError):  # if memory is short this is what should end, and not the server
        Path("/proc/self/oom_score_adj").write_text("1000")
    with socket.socket(fileno=channel) as connection:
        while (call := _received(connection)) is not None:
            file, size, described = _answered(*call)
            del call
            ends = memory_of(os.getpid()) > _MAX_MEMORY
            socket.send_fds(connection, [ANSWER.pack(size, described, ends)], [file])
            os.close(file)
            if ends:
                return


def _received(connection: socket.socket) -> tuple[str, list[Any]] | None:
    """Return the function and the arguments of the next call; None if the server is gone."""
    try:
        length = LENGTH.unpack(_exactly(connection, LENGTH.size))[0]
        call = json.loads(_exactly(connection, length))
        arguments = [
            memoryview(_exactly(connection, each["bytes"])) if "bytes" in each else each["value"]
            for each in call["arguments"]
        ]
    except ConnectionError:
        return None
    return call["function"], arguments


def _exactly(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    missing = memoryview(data)
    while missing:
        received = connection.recv_into(missing)
        if not received:
            raise ConnectionError
        missing = missing[received:]
    return data


def _answered(function: str, arguments: Sequence[Any]) -> tuple[int, int, int]:
    """Call a function; return a file with its result or exception, its size, and the length of the description."""
    buffers: list[Buffer] = []
    try:
        module, _, name = function.partition(":")
        returned = getattr(importlib.import_module(module), name)(*arguments)
        values, buffers = describe_call(returned if isinstance(returned, tuple) else (returned,))
        description = json.dumps({"values": values}).encode()
    except NeriteError as error:
        description = json.dumps({"refused": error_json(error)}).encode()
    except Exception as error:
        description = json.dumps({"failed": traceback_of(error)}).encode()
    places = []
    at = len(description)
    for buffer in buffers:
        at += -at % _ALIGNMENT
        places.append(at)
        at += len(buffer)
    file = memory_file(at)
    _write(file, description, 0)
    for buffer, place in zip(buffers, places, strict=True):
        _write(file, buffer, place)
    return file, at, len(description)


def _write(file: int, data: Buffer, at: int) -> None:
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, at)
        left = left[written:]
        at += written


def read_answer(memory: memoryview, described: int) -> tuple[dict[str, Any], list[Any]]:
    """Return the description of an answer, and its values: bytes as views on ``memory``."""
    answer: dict[str, Any] = json.loads(bytes(memory[:described]))
    values: list[Any] = []
    at = described
    for each in answer.get("values", ()):
        if "bytes" in each:
            at += -at % _ALIGNMENT
            values.append(memory[at : at + each["bytes"]])
            at += each["bytes"]
        else:
            values.append(each["value"])
    return answer, values
