"""The worker: a process with an instance of a model, or of several, and one loop that receives, executes, replies.

It runs in a fork of the template process (``template.py``), or in a Python of the model's own (``python -m
nerite.workers.child.worker CHANNEL DESCRIPTORS``), and needs nothing but numpy there. When the server is gone, the
channel ends, and so does the worker.

A job that comes while that of another instance waits for something is done by another thread.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from nerite.backends import registry
from nerite.backends.interface import InstanceContext, ModelContext
from nerite.core import model_calls
from nerite.core.engine_report import EngineReport
from nerite.core.errors import Internal, NeriteError
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import ExceptionText, message_of, traceback_of
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.dispatch.busy_poll import BusyPollPolicy
from nerite.instances import instance
from nerite.observability import custom_metrics
from nerite.observability.log import CapturedOutput
from nerite.workers.child.bls import BlsClient
from nerite.workers.child.fused import FusedSteps
from nerite.workers.child.hosted_model import HostedModel, WorkerBatch, WorkerContexts, WorkerRequest
from nerite.workers.child.io import Inbox, Message, Outbox
from nerite.workers.ipc import codec, messages

# The way of an engine's reports out of its worker.

_log = logging.getLogger("nerite.worker")
_GIVEN_UP: Final = 70


class EngineReporter:
    """Of the instance at one seat. On any thread."""

    def __init__(self, seat: int, outbox: Outbox) -> None:
        self._seat = seat
        self._outbox = outbox

    def report(self, report: EngineReport) -> None:
        """Send a report."""
        self._outbox.send(messages.report_frame(self._seat, report, _place))

    def together(self) -> AbstractContextManager[None]:
        """Have what this thread sends in the block leave in one go."""
        return self._outbox.together()

    def give_up(self, reason: str) -> None:
        """End the process: the server makes another."""
        _log.error("%s; the worker ends", reason)
        os._exit(_GIVEN_UP)


def _place(request: InferenceRequest) -> tuple[int, int] | None:
    """Return the batch of a request, and where in it that is."""
    batch = request.sink
    assert isinstance(batch, WorkerBatch)
    index = batch.place(request)
    return None if index is None else (batch.number, index)


# The way of the metrics that models count themselves out of their worker.

OFTEN: Final = 0.02
"""Seconds between two reports, at the least."""
SELDOM: Final = 0.1
"""The same, where there is so much to report that it takes long."""
_PART: Final = 0.02
"""Of its time, what a worker spends on reports; until they are seldom."""


class MetricsReporter:
    """Sends what was counted soon after it has changed, from a thread that is there as soon as there is something.

    A response may leave before that, and then the outbox says that a report is to come.
    """

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._changed = threading.Event()
        self._store: Any = None

    def watch(self) -> None:
        """Report what models count, if there is a model that can. Called when one was loaded; any number of times."""
        if self._store is None and (store := custom_metrics.store()) is not None:
            self._store = store
            self._store.on_change = self._begin
            if self._store.collect():
                self._begin()

    def _begin(self) -> None:
        """Have a thread report from now on. Called by whichever thread counts first."""
        self._store.on_change = self._change
        self._change()
        threading.Thread(target=self._report, name="metrics", daemon=True).start()

    def _change(self) -> None:
        self._outbox.changes += 1
        self._changed.set()

    def _report(self) -> None:
        # The server may be gone already; then there is nobody left to tell.
        with contextlib.suppress(OSError):
            while self._changed.wait():
                self._changed.clear()
                began = time.monotonic()
                changes = self._outbox.changes  # before they are collected: more may be in the report than it says
                self._outbox.send(messages.json_frame(messages.METRICS, [changes, self._store.collect()]))
                time.sleep(min(max((time.monotonic() - began) / _PART, OFTEN), SELDOM))


_FAILED = 70
"""Exit status of a worker that cannot go on (EX_SOFTWARE)."""
_CONTROL = frozenset(
    (
        messages.RETURN,
        messages.SEGMENT,
        messages.FORGET,
        messages.ANSWER,
        messages.TOLD,
        messages.STRETCH,
        messages.CONTEXTS,
        messages.TRIM,
        *messages.OF_REQUEST,
    )
)


class Worker:
    """The instances of a process, and the channel to the server."""

    def __init__(self, channel: socket.socket, descriptors: socket.socket) -> None:
        self._descriptors = descriptors
        self._inbox = Inbox(channel, self._control, self._fail)
        outbox = self.outbox = Outbox(channel, descriptors)
        self._buffer_leases = outbox.buffer_leases
        self._borrower = outbox.borrower
        self._responses = codec.response_unpacker(self._buffer_leases, self._borrower)
        self._batches: dict[int, WorkerBatch] = {}
        self.calls = BlsClient(self._inbox, outbox, self._batches)
        self._hosted_models: dict[int, HostedModel] = {}
        """By seat."""
        self._fused_segments: dict[int, FusedSteps] = {}
        self._contexts = WorkerContexts(partial(self.calls.ask, "contexts"))
        self._metrics = MetricsReporter(outbox)
        self._running = True
        stand_ins = ThreadPoolExecutor(messages.SEATS, "stand-in")
        self._inbox.on_job = lambda: stand_ins.submit(self._do_waiting)

    def _fail(self, error: BaseException) -> NoReturn:
        """End the process after an exception that is not a model's: the server fails its requests and starts another.

        On any thread: to go on without a message, or with an instance that never becomes free, would be worse.
        """
        with contextlib.suppress(Exception):
            self.outbox.log("ERROR", f"the worker cannot go on: {traceback_of(error)}", "worker.py", 0)
        os._exit(_FAILED)

    def forked(self) -> None:
        """Leave the channel to the parent, in a process that a model has forked: two cannot read and write one."""
        self._inbox.forked = True
        self.outbox.forked()

    def run(self) -> None:
        """Serve until the server says CLOSE or goes away. Raises ``ConnectionError`` if that shows while it sends."""
        inbox = self._inbox
        try:
            while self._running and (message := inbox.job()) is not None:
                self._take(message)
                del message
                if self._borrower.released and inbox.idle:
                    self.outbox.return_tokens()
        except (ConnectionError, SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            self._fail(error)

    def _do_waiting(self) -> None:
        """Do the jobs that wait, while the main thread is at one. One that has come may be done already."""
        try:
            while (message := self._inbox.waiting_job()) is not None:
                self._take(message)
                del message
        except ConnectionError:
            pass  # the server is gone: the main thread hears of it, too
        except BaseException as error:
            self._fail(error)

    def _take(self, job: Message) -> None:
        """Have a job done by whoever is at work for its instance: mostly, here and now."""
        kind, _, body = job
        if kind == messages.EXECUTE or kind == messages.EXECUTE_ON:
            seat = body[0]  # of the number of the batch, which comes first
        else:
            seat = 0 if kind == messages.COMPLETE else messages.read_json(body)["seat"]
            if kind in (messages.COMPLETE, messages.LOAD):
                requests = codec.request_unpacker(self._buffer_leases, self._borrower)
                self._hosted_models[seat] = HostedModel(seat, self._do, requests)
        del body
        self._hosted_models[seat].attend(job)

    def _do(self, hosted: HostedModel, job: Message) -> None:
        kind, count, body = job
        del job
        if kind == messages.EXECUTE:
            self._execute(hosted, count, body)
        elif kind == messages.EXECUTE_ON:
            self._execute(hosted, count, body, follows=True)
        else:
            self._answer(hosted, kind, count, messages.read_json(body))

    def _control(self, kind: int, count: int, body: memoryview) -> bool:
        """Handle a message that is no job; return whether it was one.

        A batch is known from here on: it may be cancelled before its job is begun.
        """
        if kind not in _CONTROL:
            if kind == messages.EXECUTE or kind == messages.EXECUTE_ON:
                number = messages.batch_number(body)
                self._batches[number] = WorkerBatch(number, self._inbox, self.outbox.part, self._forget)
            return False
        if kind == messages.ANSWER:
            self._take_answer(count, body)
        elif kind == messages.TOLD:
            self.calls.told(messages.read_json(body))
        elif kind == messages.STRETCH:
            told = messages.read_json(body)
            self._fused_segments[told["number"]] = FusedSteps(told["hops"])
        elif kind == messages.CONTEXTS:
            self._contexts.hear(body, count)
        elif kind == messages.RETURN:
            for token in messages.read_tokens(body, count):
                self._buffer_leases.returned(token)
        elif kind == messages.SEGMENT:
            _, descriptors, _, _ = socket.recv_fds(self._descriptors, 1, 1)
            if not descriptors:
                raise OSError(errno.EMFILE, "no descriptor is left in the worker for shared memory")
            try:
                self._borrower.add(descriptor=descriptors[0], **messages.read_json(body))
            finally:
                os.close(descriptors[0])
        elif kind == messages.FORGET:
            self._borrower.forget(messages.read_json(body))
        elif kind == messages.TRIM:
            threading.Thread(target=self.outbox.trim, name="trim", daemon=True).start()
        elif (batch := self._batches.get(messages.read_batch(body)[0])) is not None:
            batch.hear(kind, count)
        return True

    def _take_answer(self, final: int, body: memoryview) -> None:
        number, tokens, at = messages.read_batch(body)
        response, _ = codec.read_response(self._responses, body, at)
        # After the record: an output may be a part of an input that is given back with this very message.
        for token in tokens:
            self._buffer_leases.returned(token)
        self.calls.answered(number, response, bool(final))

    def _execute(self, hosted: HostedModel, count: int, body: memoryview, *, follows: bool = False) -> None:
        number, tokens, at = messages.read_batch(body)
        for token in tokens:
            self._buffer_leases.returned(token)
        fused_segment: FusedSteps | None = None
        if follows:
            which, at = messages.read_fused(body, at)
            fused_segment = self._fused_segments[which]
        now = time.monotonic_ns()
        batch = self._batches[number]
        requests = batch.requests
        record = hosted.requests.record
        for _ in range(count):
            header, name, data, at = record(body, at)
            assert isinstance(header, RequestHeader)
            requests.append(WorkerRequest(header, data, batch, now, name))
            del data
        batch.begin()
        assert hosted.instance is not None
        timings = batch.timings = ExecutionTimes()
        batch.contexts = self._contexts
        span = instance.current_span_of(requests) if self._contexts.may_tell(number) else None
        responses = instance.run_model(hosted.instance, hosted.name, requests, timings, span)
        along = None if fused_segment is None else fused_segment.follow(batch, responses, hosted, self._hosted_models)

        def let_go() -> None:
            if None not in responses or not batch.keep(responses):
                self._forget(number)
                batch.requests.clear()

        self.outbox.result(number, responses, timings, along, let_go)

    def _forget(self, number: int) -> None:
        """Note that all requests of a batch that has run are answered. On any thread."""
        self._batches.pop(number, None)
        self._contexts.forget(number)

    def _answer(self, hosted: HostedModel, kind: int, question: int, value: dict[str, Any]) -> None:
        try:
            answer = self._answered(hosted, kind, value)
        except NeriteError as error:
            reply = messages.json_frame(messages.FAILED, messages.error_json(error), question)
        except Exception as error:
            logging.getLogger("nerite.worker").error("'%s' failed\n%s", hosted.name, traceback_of(error))
            failure = Internal(f"{type(error).__name__}: {message_of(error)}")
            reply = messages.json_frame(messages.FAILED, messages.error_json(failure), question)
        else:
            reply = messages.json_frame(messages.DONE, answer, question)
        self.outbox.announce_changes()
        self.outbox.send(reply)
        if not self._running:
            self._inbox.stop()

    def _answered(self, hosted: HostedModel, kind: int, value: dict[str, Any]) -> object:
        if kind == messages.COMPLETE:
            context = read_context(value)
            return registry.backend_of(context).complete(context)
        if kind == messages.LOAD:
            self._inbox.poll_policy = BusyPollPolicy(value["stay_awake"])
            reporter = EngineReporter(hosted.seat, self.outbox)
            hosted.open(read_context(value), InstanceContext(**value["instance"], reporter=reporter))
            self.calls.allowed.add(hosted.seat)
            self._metrics.watch()
            return {"checks_readiness": bool(getattr(hosted.instance, "checks_readiness", True))}
        if kind == messages.IS_READY:
            return hosted.instance is not None and hosted.instance.is_ready()
        if kind == messages.CLOSE:
            self._running = not value["last"]
            self.calls.allowed.discard(hosted.seat)
            del self._hosted_models[hosted.seat]
            hosted.close()
            return True
        raise Internal(f"unknown message kind {kind}")


class _LogHandler(logging.Handler):
    """Sends what a model logs through ``logging`` to the server."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox
        self.setFormatter(ExceptionText())

    def emit(self, record: logging.LogRecord) -> None:
        self._outbox.log(record.levelname, self.format(record), record.filename, record.lineno)


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
    # Written by the handler itself, which needs no interpreter: a library in C may hold that.
    faulthandler.register(messages.STACKS_SIGNAL, file=2)
    sys.argv = [""]  # as with Triton: a model that reads its arguments finds none, and not those of this process
    worker = Worker(socket.socket(fileno=channel), socket.socket(fileno=descriptors))
    model_calls.current = worker.calls
    os.register_at_fork(after_in_child=worker.forked)
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        getattr(sys, stream).flush()
        setattr(sys, stream, CapturedOutput(descriptor, stream, worker.outbox.log))
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
