"""The worker: a process that holds one instance of a model, and one loop that receives, executes, replies.

It runs in a fork of the template process (``template.py``), or in a Python of the model's own
(``python -m nerite.execution.worker CHANNEL DESCRIPTORS``), and needs nothing but numpy there. When the server is gone,
the channel ends, and so does the worker.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

from nerite.backends import registry
from nerite.backends.interface import Instance, InstanceContext, Model, ModelContext
from nerite.core.errors import Internal, NeriteError
from nerite.core.marks import Marks
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer
from nerite.execution import guard, messages
from nerite.execution.arena import Arena, Borrower, Loans, Segment
from nerite.execution.vigil import Vigil

_now = time.monotonic


class _Nobody:
    """The sink of a request inside a worker: answers leave as the result of ``execute``."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        raise AssertionError("a worker answers through the channel")


_NOBODY = _Nobody()


class Worker:
    """One instance of one model, and the channel to the server."""

    def __init__(self, channel: socket.socket, descriptors: socket.socket) -> None:
        self._channel = channel
        self._vigil = Vigil(0.0)
        self._descriptors = descriptors
        self._frames = messages.Frames()
        arena = Arena()
        arena.on_segment.append(self._announce)
        self._loans = Loans()
        self._borrower = Borrower()
        self._packer: messages.Packer[ResponseHeader] = messages.Packer(arena, self._loans, self._borrower)
        self._unpacker: messages.Unpacker[RequestHeader] = messages.Unpacker(self._loans, self._borrower)
        self._model: Model | None = None
        self._instance: Instance | None = None
        self._name = ""
        self._running = True

    def run(self) -> None:
        """Serve until the server says CLOSE or goes away."""
        frames = self._frames
        while self._running:
            size = self._receive(frames.space())
            if size == 0:
                return
            for kind, count, body in frames.received(size):
                self._handle(kind, count, body)
            if self._borrower.released:
                self._channel.sendall(messages.tokens_frame(self._borrower.take_released()))

    def _receive(self, space: memoryview) -> int:
        """Wait for bytes and return how many came, 0 at the end of the channel."""
        vigil, receive = self._vigil, self._channel.recv_into
        vigil.rest(_now())
        size = -1
        while size < 0 and vigil.awake(_now()):
            try:
                size = receive(space, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                os.sched_yield()
        if size < 0:
            size = receive(space)
        vigil.stir(_now())
        return size

    def _handle(self, kind: int, count: int, body: memoryview) -> None:
        if kind == messages.EXECUTE:
            self._execute(count, body)
        elif kind == messages.HEADER:
            self._unpacker.introduce(messages.read_request_header(messages.read_json(body)))
        elif kind == messages.RETURN:
            for token in messages.read_tokens(body, count):
                self._loans.returned(token)
        elif kind == messages.SEGMENT:
            _, descriptors, _, _ = socket.recv_fds(self._descriptors, 1, 1)
            self._borrower.add(descriptors[0], messages.read_json(body))
        elif kind != messages.CANCEL:  # what cannot be interrupted runs on; its answer is dropped by the server
            self._answer(kind, messages.read_json(body))

    def _execute(self, count: int, body: memoryview) -> None:
        batch, tokens, at = messages.read_batch(body)
        for token in tokens:
            self._loans.returned(token)
        now = time.monotonic_ns()
        requests: list[InferenceRequest] = []
        record = self._unpacker.record
        for _ in range(count):
            header, name, data, at = record(body, at)
            assert isinstance(header, RequestHeader)
            requests.append(InferenceRequest(header, data, _NOBODY, now, name))
            del data
        assert self._instance is not None
        marks = Marks()
        responses = guard.run(self._instance, self._name, requests, marks)
        self._reply(batch, requests, responses, marks)

    def _reply(
        self, batch: int, requests: list[InferenceRequest], responses: list[InferenceResponse], marks: Marks
    ) -> None:
        introductions: list[Buffer] = []
        records: list[Buffer] = []
        packer = self._packer
        for response in responses:
            if response.error is not None:
                messages.error_record(response.error, records)
            else:
                assert response.header is not None
                packer.record(packer.entry(response.header, introductions), "", response.data, records)
        count = len(responses)
        # Let go of inputs and outputs now, so that the tokens of those that the model did not keep travel with this.
        requests.clear()
        responses.clear()
        del response
        tokens = self._borrower.take_released()
        message = messages.batch_message(messages.RESULT, batch, count, tokens, marks, records)
        if introductions:
            self._channel.sendall(b"".join(introductions))
        self._channel.sendall(message)

    def _answer(self, kind: int, value: dict[str, Any]) -> None:
        try:
            answer = self._do(kind, value)
        except NeriteError as error:
            reply = messages.json_frame(messages.FAILED, messages.error_json(error))
        except Exception as error:
            logging.getLogger("nerite.worker").exception("'%s' failed", self._name)
            reply = messages.json_frame(
                messages.FAILED, messages.error_json(Internal(f"{type(error).__name__}: {error}"))
            )
        else:
            reply = messages.json_frame(messages.DONE, answer)
        self._channel.sendall(reply)

    def _do(self, kind: int, value: dict[str, Any]) -> object:
        if kind == messages.COMPLETE:
            return registry.backend(value["backend"]).complete(read_context(value))
        if kind == messages.LOAD:
            self._name = value["instance"]["name"]
            self._vigil = Vigil(value["stay_awake"])
            self._model = registry.backend(value["backend"]).open(read_context(value))
            self._instance = self._model.instance(InstanceContext(**value["instance"]))
            return True
        if kind == messages.IS_READY:
            return self._instance is not None and self._instance.is_ready()
        if kind == messages.CLOSE:
            self._running = False
            if self._instance is not None:
                self._instance.close()
            if self._model is not None:
                self._model.close()
            return True
        raise Internal(f"unknown message kind {kind}")

    def _announce(self, segment: Segment) -> None:
        # In this order: the server's loop must not wait for a descriptor that is still to be sent.
        socket.send_fds(self._descriptors, [b"."], [segment.descriptor])
        self._channel.sendall(messages.json_frame(messages.SEGMENT, segment.size))

    def log(self, level: str, text: str, file: str, line: int) -> None:
        """Send a log line to the server, which writes it with the instance's name."""
        # The server may be gone already; then there is nobody left to tell.
        with contextlib.suppress(OSError):
            self._channel.sendall(messages.json_frame(messages.LOG, [level, text, file, line]))


class _LogHandler(logging.Handler):
    """Sends what a model logs through ``logging`` to the server."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        self._worker.log(record.levelname, self.format(record), record.filename, record.lineno)


def write_context(backend: str, context: ModelContext, **more: object) -> dict[str, object]:
    """Return a model context as JSON, for LOAD and COMPLETE."""
    return {
        "backend": backend,
        "name": context.name,
        "version": context.version,
        "directory": str(context.directory),
        "config": dict(context.config),
        "settings": dict(context.settings),
        **more,
    }


def read_context(value: dict[str, Any]) -> ModelContext:
    """Return the context that ``write_context`` was given."""
    return ModelContext(value["name"], value["version"], Path(value["directory"]), value["config"], value["settings"])


def main(channel: int, descriptors: int) -> None:
    """Be a worker on two connected sockets, until the server is gone or has said CLOSE."""
    worker = Worker(socket.socket(fileno=channel), socket.socket(fileno=descriptors))
    root = logging.getLogger()
    root.addHandler(_LogHandler(worker))
    root.setLevel(logging.INFO)
    # A server that went away while we were sending is a normal end, like one that went away while we were waiting.
    with contextlib.suppress(ConnectionError):
        worker.run()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that a model left behind must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
