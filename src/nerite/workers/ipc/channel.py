"""One end of a channel between two processes, on an event loop: messages over a socket, tensors in shared memory.

Both ends work alike. Each writes its tensors into an arena of its own, which the other end maps; descriptors of mapped
memory travel over a second socket, in the order of the messages that announce them. Nothing here blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Final

from nerite.core.failures import report, system_error
from nerite.workers.ipc import messages, shared_memory
from nerite.workers.ipc.shared_memory import Arena, BufferBorrower, BufferLeases, ForeignSegments, Segment

_WRITABLE: Final = 1 << 30
"""Added to the number of a foreign segment that the other end maps for writing."""


class Channel(ABC):
    """Sends and receives messages; derived classes handle them (``_handle``) and the end (``_lost``)."""

    def __init__(
        self,
        name: str,
        connection: socket.socket,
        descriptors: socket.socket,
        arena: Arena,
        foreign_segments: ForeignSegments,
    ) -> None:
        """``foreign_segments`` are those of this process: memory of the other end is added to them."""
        self._name = name
        self._socket = connection
        self._descriptors = descriptors
        self._frames = messages.Frames()
        self._arena = arena
        self._buffer_leases = BufferLeases()
        self._borrower = BufferBorrower()
        self._foreign_segments = foreign_segments
        self._known_foreign_segments: set[int] = set()
        """Numbers of the foreign segments that the other end maps."""
        self._own_foreign_segments: list[int] = []
        """Numbers of the other end's segments, which further processes may map."""
        self._unsent: deque[memoryview] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hand the channel to the loop."""
        self._loop = loop
        shared_memory.keep_spares()
        self._socket.setblocking(False)
        loop.add_reader(self._socket, self._readable)
        for segment in self._arena.segments:
            self._announce(segment)
        self._arena.on_segment.append(self._announce)
        self._foreign_segments.on_gone.append(self._forget)

    def close(self) -> None:
        """Close the connection, and release the memory of the other end."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
            self._loop.remove_writer(self._socket)
        self._socket.close()
        self._descriptors.close()
        self._unsent.clear()
        if self._announce in self._arena.on_segment:
            self._arena.on_segment.remove(self._announce)
            self._foreign_segments.on_gone.remove(self._forget)
        for number in self._own_foreign_segments:
            self._foreign_segments.remove(number)
        self._own_foreign_segments.clear()
        self._buffer_leases.leased.clear()  # the other end has ended, and returns nothing any more
        self._borrower.close()

    # What derived classes define.

    @abstractmethod
    def _handle(self, kind: int, count: int, body: memoryview) -> None:
        """Handle a message that is not about memory."""

    @abstractmethod
    def _lost(self) -> None:
        """Handle the end of the channel; called once."""

    @abstractmethod
    def _kill(self, reason: str) -> None:
        """End the other process, which can no longer be talked to."""

    # Receiving.

    def _readable(self) -> None:
        try:
            size = self._socket.recv_into(self._frames.space())
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            size = 0
        if size == 0:
            self._end()
            return
        try:
            for kind, count, body in self._frames.received(size):
                self._take(kind, count, body)
        except OSError as error:
            self._give_up(f"the server could not take a message from it: {system_error(error)}")
        except Exception as error:
            report("channel", error, f"of {self._name}")
            self._give_up("the server could not go on talking to it, see the log")

    def _take(self, kind: int, count: int, body: memoryview) -> None:
        if kind == messages.RETURN:
            for token in messages.read_tokens(body, count):
                self._buffer_leases.returned(token)
        elif kind == messages.SEGMENT:
            self._map(**messages.read_json(body))
        elif kind == messages.FORGET:
            self._borrower.forget(messages.read_json(body))
        else:
            self._handle(kind, count, body)

    def _give_up(self, reason: str) -> None:
        """End the other process because a message could not be handled.

        Later messages cannot be interpreted, as they may refer to the one that was lost.
        """
        self._kill(reason)
        self._end()

    def _end(self) -> None:
        assert self._loop is not None
        self._loop.remove_reader(self._socket)
        self._lost()

    def _map(self, **segment: Any) -> None:
        """Map memory of the other end, whose descriptor follows, and offer it to further processes."""
        descriptor = shared_memory.received_descriptors(self._descriptors)
        try:
            mapped = self._borrower.add(descriptor=descriptor, **segment)
        except BaseException:
            os.close(descriptor)
            raise
        self._own_foreign_segments.append(self._foreign_segments.add(descriptor, mapped.size, mapped.base))
        shared_memory.keep_spares()

    # Sending.

    def _send(self, message: bytes) -> None:
        if not self._unsent:
            try:
                sent = self._socket.send(message)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError:
                return  # the other end is gone; ``_readable`` reports the end of the channel
            if sent == len(message):
                return
            assert self._loop is not None
            self._loop.add_writer(self._socket, self._writable)
            self._unsent.append(memoryview(message)[sent:])
        else:
            self._unsent.append(memoryview(message))

    def _writable(self) -> None:
        unsent = self._unsent
        with contextlib.suppress(BlockingIOError, InterruptedError, OSError):
            while unsent:
                sent = self._socket.send(unsent[0])
                if sent < len(unsent[0]):
                    unsent[0] = unsent[0][sent:]
                    return
                unsent.popleft()
        if not unsent:
            assert self._loop is not None
            self._loop.remove_writer(self._socket)

    def _send_descriptor(self, descriptor: int) -> bool:
        """Send a descriptor, which the next message announces; return False if that failed.

        A process that accepts no more descriptors is stuck, and is killed.
        """
        try:
            socket.send_fds(self._descriptors, [b"."], [descriptor], socket.MSG_DONTWAIT)
        except OSError as error:
            if not isinstance(error, ConnectionError):
                self._kill(f"it took no more descriptors of shared memory ({error.strerror})")
            return False  # ``_readable`` reports the end of the channel
        return True

    def _announce(self, segment: Segment) -> None:
        self._send_segment(segment.descriptor, self._arena.segments.index(segment), segment.size)

    def _send_segment(self, descriptor: int, number: int, size: int, *, writable: bool = True) -> None:
        """Make the other end map memory."""
        if self._send_descriptor(descriptor):
            self._send(messages.segment_frame(number, size, writable=writable))

    def _in_foreign_segment(self, view: memoryview, address: int) -> tuple[int, int] | None:
        """Return the place of bytes in a foreign segment, which the other end then maps: for writing if allowed."""
        found = self._foreign_segments.find(address, len(view))
        if found is None:
            return None
        foreign_segment, place = found
        number = foreign_segment.number if view.readonly else foreign_segment.number | _WRITABLE
        if number not in self._known_foreign_segments:
            self._known_foreign_segments.add(number)
            self._send_segment(foreign_segment.descriptor, number, foreign_segment.size, writable=not view.readonly)
        return number, place

    def _forget(self, number: int) -> None:
        for each in (number, number | _WRITABLE):
            if each in self._known_foreign_segments:
                self._known_foreign_segments.remove(each)
                self._send(messages.json_frame(messages.FORGET, each))
