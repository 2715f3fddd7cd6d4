"""The worker: a process with an instance of one or several models, and one loop that receives, executes and replies.

It runs in a fork of the fork server (``fork_server.py``), or in a Python of the model's own (``python -m
nerite.workers.child.worker CHANNEL DESCRIPTORS``), where it needs nothing but numpy. When the server ends, the channel
ends, and with it the worker.

A job that comes while the job of another instance waits for something runs on another thread.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

from nerite.backends import registry
from nerite.backends.interface import InstanceContext, ModelContext, Sleeper, TakesAdapters
from nerite.core import model_calls
from nerite.core.engine_report import EngineReport
from nerite.core.errors import Internal, NeriteError, Unsupported
from nerite.core.execution_observer import ExecutionTimes
from nerite.core.failures import ExceptionText, message_of, traceback_of
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.dispatch.busy_poll import BusyPollPolicy
from nerite.instances import instance
from nerite.observability import custom_metrics
from nerite.observability.captured_output import CapturedOutput
from nerite.workers.child.bls import BlsClient
from nerite.workers.child.fused import FusedSteps, runs_to_bytes
from nerite.workers.child.hosted_model import HostedModel, WorkerBatch, WorkerContexts, WorkerRequest
from nerite.workers.child.io import Inbox, Message, Outbox
from nerite.workers.ipc import codec, messages

_log = logging.getLogger("nerite.worker")
_GIVEN_UP: Final = 70


class EngineReporter:
    """Sends the reports of the engine at one seat. On any thread."""

    def __init__(self, seat: int, outbox: Outbox) -> None:
        self._seat = seat
        self._outbox = outbox

    def report(self, report: EngineReport) -> None:
        """Send a report."""
        self._outbox.send(messages.report_frame(self._seat, report, _place))

    def together(self) -> AbstractContextManager[None]:
        """Send what this thread sends in the block as one write."""
        return self._outbox.together()

    def give_up(self, reason: str) -> None:
        """End the process, so that the server restarts it."""
        _log.error("%s; the worker ends", reason)
        os._exit(_GIVEN_UP)


def _place(request: InferenceRequest) -> tuple[int, int] | None:
    """Return batch number and index of a request."""
    batch = request.sink
    assert isinstance(batch, WorkerBatch)
    index = batch.place(request)
    return None if index is None else (batch.number, index)


# Transport of the metrics that models count themselves.

OFTEN: Final = 0.02
"""Minimum number of seconds between two reports."""
_PART: Final = 0.02
"""Fraction of its time that a worker spends on reports, until ``REPORT_SECONDS`` limits the pause."""


class MetricsReporter:
    """Sends metrics soon after they have changed, from a thread that starts with the first change.

    A response may leave before that; then the outbox announces that a report follows.
    """

    _watched: ClassVar[bool] = False
    """A worker of this process reports its metrics. Workers in threads share them, and one reports for all."""

    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox
        self._changed = threading.Event()
        self._store: Any = None

    def watch(self) -> None:
        """Report the metrics of models, if any model can count some. Called after each load; idempotent."""
        if self._store is None and not MetricsReporter._watched and (store := custom_metrics.store()) is not None:
            MetricsReporter._watched = True
            self._store = store
            self._store.on_change = self._begin
            if self._store.collect():
                self._begin()

    def release(self) -> None:
        """Let another worker of this process report."""
        if self._store is not None:
            self._store.on_change = lambda: None
            self._store, MetricsReporter._watched = None, False

    def _begin(self) -> None:
        """Start the reporting thread. Called by the thread that counts first."""
        self._store.on_change = self._change
        self._change()
        threading.Thread(target=self._report, name="metrics", daemon=True).start()

    def _change(self) -> None:
        self._outbox.changes += 1
        self._changed.set()

    def _report(self) -> None:
        # The server may be gone already; then the reports have no receiver.
        with contextlib.suppress(OSError):
            while self._changed.wait() and self._store is not None:
                self._changed.clear()
                began = time.monotonic()
                changes = self._outbox.changes  # before collecting: the report may have more
                self._outbox.send(messages.json_frame(messages.METRICS, [changes, self._store.collect()]))
                time.sleep(min(max((time.monotonic() - began) / _PART, OFTEN), custom_metrics.REPORT_SECONDS))


_MODELS_LOGGER: Final = "triton_python_backend_utils"
"""Through it, models log with ``pb_utils.Logger``."""
_FAILED = 70
"""Exit status of a worker that cannot go on (EX_SOFTWARE)."""
_CONTROL = frozenset(
    (
        messages.RETURN,
        messages.SEGMENT,
        messages.FORGET,
        messages.ANSWER,
        messages.REPLY,
        messages.FUSED_STEPS,
        messages.CONTEXTS,
        messages.TRIM,
        messages.DEVICE_POOL,
        messages.DEVICE_GRANT,
        messages.VERBOSE,
        *messages.OF_REQUEST,
    )
)


class Worker:
    """The instances of a process, and the channel to the server."""

    def __init__(
        self,
        channel: socket.socket,
        descriptors: socket.socket,
        *,
        end: Callable[[int], NoReturn] = os._exit,
        enter: Callable[[BlsClient], None] = lambda _calls: None,
        set_verbose: Callable[[bool], None] = lambda _verbose: None,
    ) -> None:
        """``end`` ends the worker with an exit status; by default, its process.

        ``set_verbose`` is called when the server begins or ceases to log records of level VERBOSE.
        Each further thread that runs jobs calls ``enter`` first.
        """
        self._end = end
        self._set_verbose = set_verbose
        self._descriptors = descriptors
        self._inbox = Inbox(channel, self._control, self._fail)
        outbox = self.outbox = Outbox(channel, descriptors)
        self._buffer_leases = outbox.buffer_leases
        self._borrower = outbox.borrower
        self._devices = outbox.devices
        self._responses = codec.response_unpacker(self._buffer_leases, self._borrower, self._devices)
        self._batches: dict[int, WorkerBatch] = {}
        self.calls = BlsClient(self._inbox, outbox, self._batches)
        self._hosted_models: dict[int, HostedModel] = {}
        """By seat."""
        self._fused_steps = FusedSteps(self._hosted_models)
        self._contexts = WorkerContexts(partial(self.calls.ask, "contexts"))
        self._metrics = MetricsReporter(outbox)
        self._running = True
        stand_ins = self._stand_ins = ThreadPoolExecutor(messages.SEATS, "stand-in", enter, (self.calls,))
        self._inbox.on_job = lambda: stand_ins.submit(self._run_queued)

    def _fail(self, error: BaseException) -> NoReturn:
        """End the worker after an exception that is not a model's: the server fails its requests and restarts it.

        On any thread: going on without a message, or with an instance that never becomes free, would be worse.
        """
        with contextlib.suppress(Exception):
            self.outbox.log("ERROR", f"the worker cannot go on: {traceback_of(error)}", "worker.py", 0)
        self._end(_FAILED)

    def close(self) -> None:
        """Release what a worker in a thread leaves behind, after ``run``."""
        self._metrics.release()
        self.outbox.close()
        self._stand_ins.shutdown(wait=False, cancel_futures=True)

    def forked(self) -> None:
        """Leave the channel to the parent, in a process that a model has forked: two cannot share one channel."""
        self._inbox.forked = True
        self.outbox.forked()

    def run(self) -> None:
        """Serve until CLOSE or the server's end. Raises ``ConnectionError`` if that is noticed while sending."""
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

    def _run_queued(self) -> None:
        """Run the queued jobs while the main thread is busy. Another thread may have taken them already."""
        try:
            while (message := self._inbox.waiting_job()) is not None:
                self._take(message)
                del message
        except ConnectionError:
            pass  # the server is gone: the main thread notices it, too
        except BaseException as error:
            self._fail(error)

    def _take(self, job: Message) -> None:
        """Run a job on the thread that is busy with its instance; usually that is this one."""
        kind, _, body = job
        if kind == messages.EXECUTE:
            seat = body[0]  # the first byte of the batch number
        else:
            seat = 0 if kind == messages.COMPLETE else messages.read_json(body)["seat"]
            if kind in (messages.COMPLETE, messages.LOAD):
                requests = codec.request_unpacker(self._buffer_leases, self._borrower, self._devices)
                self._hosted_models[seat] = HostedModel(seat, self._do, requests)
        del body
        self._hosted_models[seat].submit(job)

    def _do(self, hosted: HostedModel, job: Message) -> None:
        kind, count, body = job
        del job
        if kind == messages.EXECUTE:
            self._execute(hosted, count, body)
        else:
            self._answer(hosted, kind, count, messages.read_json(body))

    def _control(self, kind: int, count: int, body: memoryview) -> bool:
        """Handle a control message; return False for a job.

        A batch is registered here, because it may be cancelled before its job starts.
        """
        if kind not in _CONTROL:
            if kind == messages.EXECUTE:
                number = messages.batch_number(body)
                self._batches[number] = WorkerBatch(number, self._inbox, self.outbox.part, self._forget)
            return False
        if kind == messages.ANSWER:
            self._take_answer(count, body)
        elif kind == messages.REPLY:
            self.calls.told(messages.read_json(body))
        elif kind == messages.FUSED_STEPS:
            self._fused_steps.add(**messages.read_json(body))
        elif kind == messages.CONTEXTS:
            self._contexts.receive(body, count)
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
        elif kind == messages.DEVICE_POOL:
            self._devices.opened(**messages.read_json(body))
        elif kind == messages.DEVICE_GRANT:
            self._devices.granted(**messages.read_json(body))
        elif kind == messages.VERBOSE:
            self._set_verbose(bool(count))
        elif kind == messages.TRIM:
            threading.Thread(target=self.outbox.trim, name="trim", daemon=True).start()
        elif (batch := self._batches.get(messages.read_batch(body)[0])) is not None:
            batch.receive(kind, count)
        return True

    def _take_answer(self, final: int, body: memoryview) -> None:
        number, tokens, at = messages.read_batch(body)
        response, _ = codec.read_response(self._responses, body, at)
        # After the record: an output may be a part of an input that is returned with this very message.
        for token in tokens:
            self._buffer_leases.returned(token)
        self.calls.answered(number, response, bool(final))

    def _execute(self, hosted: HostedModel, count: int, body: memoryview) -> None:
        number, tokens, at = messages.read_batch(body)
        for token in tokens:
            self._buffer_leases.returned(token)
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
        span = instance.current_span_of(requests) if self._contexts.may_have(number) else None
        responses = instance.run_model(hosted.instance, hosted.name, requests, timings, span)
        fused_runs = b""
        if at < len(body):
            (fused_steps,) = messages.NUMBER.unpack_from(body, at)
            fused_runs = runs_to_bytes(self._fused_steps.run(fused_steps, batch, responses, hosted))

        def packed() -> None:
            if None not in responses or not batch.keep(responses):
                self._forget(number)
                batch.requests.clear()

        self.outbox.result(number, responses, timings, fused_runs, packed)
        self._devices.report_copies()

    def _forget(self, number: int) -> None:
        """Record that all requests of an executed batch are answered. On any thread."""
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
            given = {**value["instance"], "cores": tuple(value["instance"]["cores"])}  # JSON has no tuples
            instance = InstanceContext(**given, reporter=EngineReporter(hosted.seat, self.outbox))
            hosted.open(read_context(value), instance)
            _restore_adapters(hosted, value.get("adapters", {}))
            self.calls.allowed.add(hosted.seat)
            self._metrics.watch()
            return {
                "checks_readiness": bool(getattr(hosted.instance, "checks_readiness", True)),
                "can_sleep": isinstance(hosted.instance, Sleeper) and hosted.instance.can_sleep,
            }
        if kind == messages.ADAPTER:
            change_adapter(hosted, value["name"], value["path"])
            return True
        if kind == messages.SLEEP:
            assert isinstance(hosted.instance, Sleeper)  # only such instances are asked to
            (hosted.instance.sleep if value["asleep"] else hosted.instance.wake)()
            return True
        if kind == messages.IS_READY:
            return hosted.instance is not None and hosted.instance.is_ready()
        if kind == messages.CLOSE:
            self._running = not value["last"]
            self.calls.allowed.discard(hosted.seat)
            del self._hosted_models[hosted.seat]
            hosted.close()
            return True
        raise Internal(f"unknown message kind {kind}")


def change_adapter(hosted: HostedModel, name: str, path: str) -> None:
    """Load a LoRA adapter, or unload it if ``path`` is empty. Raises ``NeriteError``."""
    instance = hosted.instance
    if not isinstance(instance, TakesAdapters):
        raise Unsupported(f"'{hosted.name}' has no engine that loads LoRA adapters")
    if path:
        instance.load_adapter(name, path)
    else:
        instance.unload_adapter(name)


def _restore_adapters(hosted: HostedModel, adapters: Mapping[str, str]) -> None:
    """Load the adapters that the instance had in another process. Without one of them the model is better than none."""
    for name, path in adapters.items():
        try:
            change_adapter(hosted, name, path)
        except NeriteError as error:
            _log.error("'%s' has lost the LoRA adapter '%s': %s", hosted.name, name, error.message)


class OutboxLogHandler(logging.Handler):
    """Sends the log records of a model's ``logging`` calls to the server."""

    def __init__(self, outbox: Outbox) -> None:
        super().__init__()
        self._outbox = outbox
        self.setFormatter(ExceptionText())

    def emit(self, record: logging.LogRecord) -> None:
        """Send a record."""
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
    """Return the context that ``write_context`` encoded."""
    return ModelContext(value["name"], value["version"], Path(value["directory"]), value["config"], value["settings"])


def _set_verbose(verbose: bool) -> None:
    """Have records of level VERBOSE sent to the server, or dropped here."""
    logging.getLogger(_MODELS_LOGGER).setLevel(logging.DEBUG if verbose else logging.NOTSET)


def _write_all_stacks(*_: object) -> None:
    """Write the stacks of all threads, if there are several, when the main thread interprets the next line."""
    if threading.active_count() > 1:
        faulthandler.dump_traceback(2)


def main(channel: int, descriptors: int) -> None:
    """Run a worker on two connected sockets, until the server is gone or sends CLOSE."""
    # faulthandler writes in the handler itself, without the interpreter: a C library may hold the GIL. It reads the
    # frames of its own thread only: those of a thread that runs change meanwhile, which may end by SIGSEGV.
    faulthandler.register(messages.STACKS_SIGNAL, file=2, all_threads=False)
    signal.signal(messages.THREADS_SIGNAL, _write_all_stacks)
    sys.argv = [""]  # as in Triton: a model that reads its arguments finds none, and not those of this process
    worker = Worker(socket.socket(fileno=channel), socket.socket(fileno=descriptors), set_verbose=_set_verbose)
    model_calls.current = worker.calls
    os.register_at_fork(after_in_child=worker.forked)
    for stream, descriptor in (("stdout", 1), ("stderr", 2)):
        getattr(sys, stream).flush()
        setattr(sys, stream, CapturedOutput(descriptor, stream, worker.outbox.log))
    root = logging.getLogger()
    root.addHandler(OutboxLogHandler(worker.outbox))
    root.setLevel(logging.INFO)
    # A server that ends while we send is a normal end, like one that ends while we wait.
    with contextlib.suppress(ConnectionError):
        worker.run()
    for output in (sys.stdout, sys.stderr):
        # Nothing will complete a line that a request left unfinished.
        output.write("")
        output.flush()
    # Threads that a model left behind must not keep the process alive.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
