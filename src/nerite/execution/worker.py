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
from nerite.core import header_form, host
from nerite.core.errors import Internal, NeriteError
from nerite.core.marks import Marks
from nerite.core.request import RequestHeader
from nerite.core.response import ResponseHeader
from nerite.execution import guard, messages, records
from nerite.execution.calls import Calls
from nerite.execution.inbox import Inbox
from nerite.execution.outbox import Outbox
from nerite.execution.vigil import Vigil
from nerite.execution.worker_batch import WorkerBatch, WorkerRequest
from nerite.observability.printed import PrintedLines

_CONTROL = frozenset(
    (
        messages.REQUEST_HEADER,
        messages.RESPONSE_HEADER,
        messages.RETURN,
        messages.SEGMENT,
        messages.FORGET,
        messages.ANSWER,
        messages.TOLD,
        *messages.OF_REQUEST,
    )
)


class Worker:
    """One instance of one model, and the channel to the server."""

    def __init__(self, channel: socket.socket, descriptors: socket.socket) -> None:
        self._descriptors = descriptors
        self._inbox = Inbox(channel, self._control)
        outbox = self.outbox = Outbox(channel, descriptors)
        self._loans = outbox.loans
        self._borrower = outbox.borrower
        self._requests: records.Unpacker[RequestHeader] = records.Unpacker(self._loans, self._borrower)
        self._responses: records.Unpacker[ResponseHeader] = records.Unpacker(self._loans, self._borrower)
        self._batches: dict[int, WorkerBatch] = {}
        self.calls = Calls(self._inbox, outbox, self._batches)
        self._model: Model | None = None
        self._instance: Instance | None = None
        self._name = ""
        self._running = True

    def run(self) -> None:
        """Serve until the server says CLOSE or goes away."""
        inbox = self._inbox
        while self._running and (message := inbox.job()) is not None:
            kind, count, body = message
            del message
            if kind == messages.EXECUTE:
                self._execute(count, body)
            else:
                self._answer(kind, messages.read_json(body))
            del body
            if self._borrower.released and inbox.idle:
                self.outbox.return_tokens()

    def _control(self, kind: int, count: int, body: memoryview) -> bool:
        """Handle a message that is no job; return whether it was one."""
        if kind not in _CONTROL:
            return False
        if kind == messages.ANSWER:
            self._take_answer(count, body)
        elif kind == messages.REQUEST_HEADER:
            self._requests.introduce(header_form.read_request_header(messages.read_json(body)))
        elif kind == messages.RESPONSE_HEADER:
            self._responses.introduce(header_form.read_response_header(messages.read_json(body)))
        elif kind == messages.TOLD:
            self.calls.told(messages.read_json(body))
        elif kind == messages.RETURN:
            for token in messages.read_tokens(body, count):
                self._loans.returned(token)
        elif kind == messages.SEGMENT:
            _, descriptors, _, _ = socket.recv_fds(self._descriptors, 1, 1)
            self._borrower.add(descriptor=descriptors[0], **messages.read_json(body))
        elif kind == messages.FORGET:
            self._borrower.forget(messages.read_json(body))
        elif (batch := self._batches.get(messages.read_batch(body)[0])) is not None:
            batch.hear(kind, count)
        return True

    def _take_answer(self, final: int, body: memoryview) -> None:
        number, tokens, at = messages.read_batch(body)
        response, _ = records.read_response(self._responses, body, at)
        # After the record: an output may be a part of an input that is given back with this very message.
        for token in tokens:
            self._loans.returned(token)
        self.calls.answered(number, response, bool(final))

    def _execute(self, count: int, body: memoryview) -> None:
        number, tokens, at = messages.read_batch(body)
        for token in tokens:
            self._loans.returned(token)
        now = time.monotonic_ns()
        batch = self._batches[number] = WorkerBatch(number, self._inbox, self.outbox.part, self._forget)
        requests = batch.requests
        record = self._requests.record
        for _ in range(count):
            header, name, data, at = record(body, at)
            assert isinstance(header, RequestHeader)
            requests.append(WorkerRequest(header, data, batch, now, name))
            del data
        assert self._instance is not None
        marks = batch.marks = Marks()
        responses = guard.run(self._instance, self._name, requests, marks)

        def let_go() -> None:
            if None not in responses or not batch.keep(responses):
                self._forget(number)
                batch.requests.clear()

        self.outbox.result(number, responses, marks, let_go)

    def _forget(self, number: int) -> None:
        """Note that all requests of a batch that has run are answered. On any thread."""
        self._batches.pop(number, None)

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
        self.outbox.send(reply)

    def _do(self, kind: int, value: dict[str, Any]) -> object:
        if kind == messages.COMPLETE:
            return registry.backend(value["backend"]).complete(read_context(value))
        if kind == messages.LOAD:
            self._name = value["instance"]["name"]
            self._inbox.vigil = Vigil(value["stay_awake"])
            self._model = registry.backend(value["backend"]).open(read_context(value))
            self._instance = self._model.instance(InstanceContext(**value["instance"]))
            self.calls.allowed = True
            return True
        if kind == messages.IS_READY:
            return self._instance is not None and self._instance.is_ready()
        if kind == messages.CLOSE:
            self._running = self.calls.allowed = False
            if self._instance is not None:
                self._instance.close()
            if self._model is not None:
                self._model.close()
            return True
        raise Internal(f"unknown message kind {kind}")


class _LogHandler(logging.Handler):
    """Sends what a model logs through ``logging`` to the server."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = self.format(record)
        except Exception:  # a mistake in a line that a model logs is no reason to fail its requests
            text = f"{record.msg} (not formatted: {record.args!r})"
        self._outbox.log(record.levelname, text, record.filename, record.lineno)


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
    host.current = worker.calls
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        getattr(sys, stream).flush()
        setattr(sys, stream, PrintedLines(descriptor, stream, worker.outbox.log))
    root = logging.getLogger()
    root.addHandler(_LogHandler(worker.outbox))
    root.setLevel(logging.INFO)
    # A server that went away while we were sending is a normal end, like one that went away while we were waiting.
    with contextlib.suppress(ConnectionError):
        worker.run()
    for output in (sys.stdout, sys.stderr):
        # Nobody goes on with a line that a request left unfinished.
        output.write("")
        output.flush()
    # Threads that a model left behind must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
