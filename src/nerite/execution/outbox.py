"""What a worker sends to the server, from whichever of its threads has something to say."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from nerite.core.at_hand import ids_at_hand
from nerite.core.byte_budget import WORKER_REPLIES
from nerite.core.marks import Marks
from nerite.core.request import RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer
from nerite.core.text import MAX_RECORD, shown
from nerite.execution import messages, records
from nerite.execution.arena import TRIM_STEP, Arena, Borrower, Loans, Segment


class Outbox:
    """The sending end of a worker's channel. Every message leaves in one piece."""

    def __init__(self, channel: socket.socket, descriptors: socket.socket) -> None:
        self._channel = channel
        self._descriptors = descriptors
        self.loans = Loans()
        self.borrower = Borrower()
        arena = self._arena = Arena()
        arena.on_segment.append(self._announce)
        self._responses: records.Packer[ResponseHeader] = records.Packer(
            arena, self.loans, self.borrower, WORKER_REPLIES
        )
        self._requests: records.Packer[RequestHeader] = records.Packer(arena, self.loans, self.borrower, WORKER_REPLIES)
        self._sending = threading.RLock()
        """Held by whoever packs and sends. Whoever holds it may yet log a line, or give up a call, where an object of
        the model's goes and says so."""
        self._trimming = threading.Lock()
        self._gatherers: set[int] = set()
        """Threads whose messages wait until they have said everything."""
        self._gathered: list[bytes] = []
        self.changes = 0
        """How often what models count has changed after a report."""
        self._announced = 0
        """Of these, those that the server knows of."""

    def forked(self) -> None:
        """Let go of the channel, which is the parent's, in a process that a model has forked.

        And of the lock: the thread that has it may not be here.
        """
        self._channel.close()
        self._descriptors.close()
        self._sending = threading.RLock()
        self._gatherers.clear()

    def send(self, message: bytes) -> None:
        """Send a message that is ready."""
        with self._sending:
            self._emit(message)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have what this thread sends in the block leave in one go at its end, or with what another thread sends."""
        thread = threading.get_ident()
        with self._sending:
            self._gatherers.add(thread)
        try:
            yield
        finally:
            with self._sending:
                self._gatherers.discard(thread)
                self._flush()

    def result(
        self,
        batch: int,
        responses: list[InferenceResponse | None],
        marks: Marks,
        along: messages.Along | None,
        let_go: Callable[[], None],
    ) -> None:
        """Send what a batch returned. ``let_go`` is called when it is packed; ``responses`` is empty afterwards.

        So the tokens of the inputs that the model did not keep travel with the message. ``along`` is there if other
        models could follow. A response that cannot be sent is replaced by an error; the others are sent.
        """
        parts: list[Buffer] = [] if along is None else [messages.along_part(along)]
        kind = messages.RESULT if along is None else messages.RESULT_ON
        count = len(responses)
        with self._sending:
            if self.changes != self._announced:
                self.announce_changes()
            self._pack(responses, parts)
            let_go()
            responses.clear()
            tokens = self.borrower.take_released()
            self._emit(messages.batch_message(kind, batch, count, tokens, marks, parts))

    def _pack(self, responses: Sequence[InferenceResponse | None], parts: list[Buffer]) -> None:
        """Append the records of responses; that of an error in the place of one that cannot be sent."""
        packer, first = self._responses, len(parts)
        packer.begin()
        try:
            for response in responses:
                records.response_record(packer, response, parts)
        except Exception:
            packer.withdraw()
            del parts[first:]
            for response in responses:
                parts += records.sendable_response(packer, response)

    def part(self, batch: int, index: int, response: InferenceResponse, final: bool, marks: Marks) -> None:
        """Send one response to one request of a batch, and note the end of its ``marks``."""
        kind = messages.LAST if final else messages.PART
        with self._sending:
            if self.changes != self._announced:
                self.announce_changes()
            parts = records.sendable_response(self._responses, response)
            tokens = self.borrower.take_released()
            marks.end()
            self._emit(messages.batch_message(kind, batch, index, tokens, marks, parts))

    def call(self, number: int, caller: bytes, header: RequestHeader, name: str, data: Sequence[Buffer]) -> None:
        """Send a request to another model. Raises what goes wrong with it; nothing was sent then."""
        parts: list[Buffer] = [caller]
        with self._sending:
            packer = self._requests
            packer.begin()
            try:
                packer.record(header, name, data, parts)
            except BaseException:
                packer.withdraw()
                raise
            tokens = self.borrower.take_released()
            self._emit(messages.batch_message(messages.CALL, number, 1, tokens, None, parts))

    def announce_changes(self) -> None:
        """Tell the server that a report of metrics is to come, before it hears of what has changed them."""
        with self._sending:
            if self.changes != self._announced:
                self._announced = self.changes
                self._emit(messages.json_frame(messages.METRICS_DUE, self._announced))

    def return_tokens(self) -> None:
        """Tell what is done with of the server's memory, without waiting for a message to go along with."""
        with self._sending:
            self._emit(messages.tokens_frame(self.borrower.take_released()))

    def trim(self) -> None:
        """Give back memory of tensors that was not used since the last call. Takes a while, and keeps nobody waiting.

        Does nothing while another thread is at it.
        """
        if not self._trimming.acquire(blocking=False):
            return
        try:
            steps = self._arena.trim()
            while True:
                with self._sending:
                    if next(steps, steps) is steps:
                        return
                time.sleep(TRIM_STEP)
        finally:
            self._trimming.release()

    def log(self, level: str, text: str, file: str, line: int) -> None:
        """Send a log line to the server, which writes it with the instance's name and the ids of the requests."""
        text = shown(text, MAX_RECORD)
        try:
            self.send(messages.json_frame(messages.LOG, [level, text, file, line, ids_at_hand()]))
        except OSError:  # the server is gone, or this is a process that the model has forked
            with contextlib.suppress(OSError):
                os.write(2, f"{text}\n".encode(errors="backslashreplace"))

    def _announce(self, segment: Segment) -> None:
        # Whoever allocates holds ``_sending``. In this order, because the server's loop must not wait for a descriptor
        # that is still to be sent.
        socket.send_fds(self._descriptors, [b"."], [segment.descriptor])
        self._emit(messages.segment_frame(self._arena.segments.index(segment), segment.size))

    def _emit(self, message: bytes) -> None:
        """Send a message, after all that was packed before it. Whoever calls holds ``_sending``."""
        if not self._gatherers:
            self._channel.sendall(message)
            return
        self._gathered.append(message)
        if threading.get_ident() not in self._gatherers:
            self._flush()

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        if gathered:
            self._channel.sendall(b"".join(gathered))
