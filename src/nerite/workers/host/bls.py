"""Calls that a model makes to other models, seen from the server: forwards them and sends the responses back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from time import monotonic_ns
from typing import Any, Final, NamedTuple

from nerite.core.byte_budget import MODEL_CALLS, Memo
from nerite.core.errors import NeriteError, NotLoaded, Unavailable
from nerite.core.failures import report
from nerite.core.headers import request_header_bytes
from nerite.core.model_calls import CallRequest
from nerite.core.request import MIXED, Caller, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import TensorData
from nerite.devices.devices import Devices
from nerite.devices.output_sinks import PooledOutputs
from nerite.dispatch import deadlocks
from nerite.dispatch.interface import ServerEntry
from nerite.instances.instance import CHECK_PATIENCE, Batch
from nerite.workers.child.bls import WINDOW, unpacked_call
from nerite.workers.ipc import messages

# Control calls: models load and unload other models, and query their readiness.


class ControlCaller(NamedTuple):
    """Identity of the instance that makes a control call."""

    model: str
    version: int
    instance: str
    loading: bool
    """Its ``initialize`` is running, so that it cannot be loaded or unloaded itself."""


class ModelControlCalls:
    """Executes the control calls of all workers. ``take`` is thread-safe; all else is for the loop's thread."""

    def __init__(self, server: ServerEntry, loop: asyncio.AbstractEventLoop, loading: asyncio.Semaphore) -> None:
        """``loading`` is held by each model that is being loaded."""
        self._server = server
        self._loop = loop
        self._loading = loading
        self._under_way: set[asyncio.Task[None]] = set()
        self._loads: list[tuple[str, str]] = []
        """Each model that is being loaded, with the model that its ``initialize`` is loading or unloading."""

    def take(self, question: dict[str, Any], reply: Callable[[bytes], None], control_caller: ControlCaller) -> None:
        """Execute a control call and pass the reply message to ``reply``, on the loop's thread. Thread-safe."""
        self._loop.call_soon_threadsafe(self._begin, question, control_caller, reply)

    def _begin(self, question: dict[str, Any], control_caller: ControlCaller, reply: Callable[[bytes], None]) -> None:
        number = question["number"]

        def answer(value: object, error: NeriteError | None = None) -> None:
            message: dict[str, Any] = {"number": number}
            if error is None:
                message["value"] = value
            else:
                text = f"Failed to process the request for model '{control_caller.instance}', message: {error.message}"
                message["error"] = messages.error_json(type(error)(text))
            reply(messages.json_frame(messages.REPLY, message))

        model = question["model"]
        if question["what"] == "ready":
            self._ask_ready(model, question["version"], control_caller, answer)
        elif question["what"] == "load":
            given = {name: unpacked_call(value) for name, value in question["parameters"].items()}
            self._run(self._server.load(model, given), model, control_caller, answer)
        else:
            self._run(self._server.unload(model, question["parameters"]), model, control_caller, answer)

    def _ask_ready(
        self, model: str, version: str, control_caller: ControlCaller, answer: Callable[[object], None]
    ) -> None:
        try:
            running = self._server.find(model, version, "")
        except NeriteError as error:
            answer(isinstance(error, NotLoaded))  # a call has it loaded
            return
        if (running.name, running.version) == (control_caller.model, control_caller.version):
            # The model is executing, and cannot be queried while it waits for this.
            answer(True)
        else:
            running.ask_ready(answer, CHECK_PATIENCE)

    def _run(
        self,
        work: Coroutine[Any, Any, None],
        model: str,
        control_caller: ControlCaller,
        answer: Callable[[object, NeriteError | None], None],
    ) -> None:
        task = self._loop.create_task(self._answered(work, model, control_caller, answer))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def _answered(
        self,
        work: Coroutine[Any, Any, None],
        model: str,
        control_caller: ControlCaller,
        answer: Callable[[object, NeriteError | None], None],
    ) -> None:
        wait = (control_caller.model, model)
        if control_caller.loading:
            if self._leads_back(*wait):
                work.close()
                answer(None, Unavailable(f"model '{model}' is being loaded, and that waits for this call"))
                return
            self._loads.append(wait)
            # Released, or models that wait for others could take all places, and deadlock.
            self._loading.release()
        try:
            await work
            answer(None, None)
        except NeriteError as error:
            answer(None, error)
        except Exception as error:
            answer(None, report("bls", error, f"in a control call of '{control_caller.instance}'"))
        finally:
            if control_caller.loading:
                self._loads.remove(wait)
                await self._loading.acquire()

    def _leads_back(self, asking: str, wanted: str) -> bool:
        """Return whether loading ``wanted`` waits, directly or indirectly, for the load of ``asking`` itself."""
        reached = {wanted}
        while True:
            further = {there for here, there in self._loads if here in reached} - reached
            if asking in reached or not further:
                return asking in reached
            reached |= further


# Inheritance: what a call takes over from the requests that it is made for.
#
# Where a model works on one request, or says by ``trace`` which one a call is for, that is the parent. Where it works
# on a batch, a call is for all of its requests: it has the highest of their priorities and the longest of their
# timeouts, and is cancelled when all of them are. Its caller is theirs if they have one in common. If not, or if the
# parents of a call are unknown, it has no caller: its result must not answer another tenant faster.


class CallContext:
    """Headers of the calls of one worker, with inherited fields. Repeated headers are interned."""

    def __init__(self, *, tenants: bool = False) -> None:
        """``tenants``: requests of clients have callers."""
        self._unknown_caller = MIXED if tenants else None
        self._headers: Memo[tuple[RequestHeader, int, Caller | None], RequestHeader] = Memo()

    def header(self, own: RequestHeader, parents: Sequence[InferenceRequest], now: int) -> RequestHeader:
        """Return the header of a call: its own fields take precedence over inherited ones.

        Empty ``parents`` mean that it is unknown what the call is for.
        """
        priority, timeout_us = own.priority, own.timeout_us
        headers = [each.header for each in parents]
        if not priority and any(header.priority for header in headers):
            priority = min(header.priority for header in headers if header.priority)
        if not timeout_us and headers and all(header.timeout_us for header in headers):
            timeout_us = max(_left(each, now) for each in parents)
        caller = _common(headers) if headers else self._unknown_caller
        if timeout_us != own.timeout_us:  # the rest of a timeout differs each time, so interning would be useless
            return own.changed(priority=priority, timeout_us=timeout_us, caller=caller)
        if priority == own.priority and caller is None:
            return own
        key = own, priority, caller
        header = self._headers.get(key)
        if header is None:
            header = own.changed(priority=priority, caller=caller)
            MODEL_CALLS.put(self._headers, key, header, 2 * request_header_bytes(header))
        return header


def _common(headers: Sequence[RequestHeader]) -> Caller | None:
    """Return the common tenant of all requests; ``MIXED`` if there are several, None if there is none."""
    callers = [header.caller for header in headers if header.caller is not None]
    if not callers:
        return None
    tenant = callers[0].tenant
    return Caller(tenant) if tenant and all(each.tenant == tenant for each in callers) else MIXED


def _left(parent: InferenceRequest, now: int) -> int:
    """Return the microseconds that are left of a request's timeout, at least one."""
    return max(1, parent.header.timeout_us - (now - parent.arrived_ns) // 1000)


_READ_ON: Final = WINDOW // 2
"""Number of unread responses at which a paused model resumes."""


class PendingCall:
    """One unfinished call: the sink of its request."""

    __slots__ = ("batch", "bls_server", "index", "number", "paused", "request", "starting", "unread")

    def __init__(self, bls_server: BlsServer, number: int, batch: int, index: int) -> None:
        self.request: InferenceRequest | None = None
        """None after the last response: the reference cycle through ``sink`` would keep the caller's data alive."""
        self.bls_server = bls_server
        self.number = number
        self.batch = batch
        self.index = index
        self.unread = 0
        """Responses that the model has not read yet."""
        self.paused = False
        self.starting = True
        """The request is being submitted, and may be refused at once."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Pass a response to the calling model."""
        if response.error is not None:
            error = (request.refusal if isinstance(request, CallRequest) else None) or response.error
            if error is not response.error or self.starting:
                response = InferenceResponse.failed(self.bls_server.refusal(request, error))
        if final:
            # The call's data is released along with the response, if nothing else keeps it.
            request.data = ()
            self.request = None
        else:
            self.unread += 1
            if self.unread >= WINDOW and not self.paused:
                self.paused = True
                request.pause(True)
        self.bls_server.answer(self, response, final)

    def taken(self, count: int) -> None:
        """Record that the model has read responses."""
        self.unread -= count
        if self.paused and self.unread <= _READ_ON and self.request is not None:
            self.paused = False
            self.request.pause(False)

    def cancel(self) -> None:
        """Cancel the request unless its last response has come."""
        if self.request is not None:
            self.request.cancel()


class BlsServer:
    """The calls of one worker. For the loop's thread only."""

    def __init__(
        self,
        server: ServerEntry,
        send: Callable[[int, InferenceResponse, bool], None],
        batch_of: Callable[[int], Batch | None],
        *,
        tenants: bool = False,
        devices: Devices | None = None,
    ) -> None:
        """``send`` sends a response to the call of a number, and whether it is the last.

        ``batch_of`` returns a batch that the worker has. ``tenants``: requests have callers.
        """
        self._server = server
        self._devices = devices
        self._send = send
        self._batch_of = batch_of
        self._inheritance = CallContext(tenants=tenants)
        self._calls: dict[int, PendingCall] = {}

    def call(
        self,
        number: int,
        batch: int,
        index: int,
        decoupled: bool,
        header: RequestHeader,
        name: str,
        data: list[TensorData],
    ) -> None:
        """Submit a request of the model to another model."""
        call = self._calls[number] = PendingCall(self, number, batch, index)
        try:
            self._call(call, decoupled, header, name, data)
        except Exception as error:
            failure = report("bls", error, f"in a call of model '{header.model_name}'", name)
            self.answer(call, InferenceResponse.failed(failure), True)

    def _call(
        self, call: PendingCall, decoupled: bool, header: RequestHeader, name: str, data: list[TensorData]
    ) -> None:
        batch, index, now = call.batch, call.index, monotonic_ns()
        parents = self._parents(batch, index)
        header = self._inheritance.header(header, parents, now)
        if parents:
            parent = parents[0]
            if len(parents) > 1:  # a call for all of them is traced with the first that is
                parent = next((each for each in parents if getattr(each.sink, "trace", None) is not None), parent)
            request: InferenceRequest = CallRequest(parent, header, data, call, now, name)
        else:
            request = InferenceRequest(header, data, call, now, name)
        if header.preferred_device >= 0:
            self._prefer_device(request, call)
        call.request = request
        self._server.infer(request, "" if decoupled else _several(header.model_name))
        call.starting = False
        if parents and all(parent.cancelled for parent in parents):
            request.cancel()

    def _prefer_device(self, request: InferenceRequest, call: PendingCall) -> None:
        """Bring the outputs of a call to the GPU on which the model wants them, if there is such a GPU."""
        devices, device = self._devices, request.header.preferred_device
        if devices is not None and devices.usable and device in devices.numbers:
            request.sink = PooledOutputs(call, devices, device)
        else:
            request.header = request.header.changed(preferred_device=-1)

    def answer(self, call: PendingCall, response: InferenceResponse, final: bool) -> None:
        """Send a response to the calling model."""
        if final:
            # Missing if the model no longer waits for it.
            if self._calls.pop(call.number, None) is None:
                return
            self._send(call.number, response, final)
            self._break_deadlocks(call.batch)
        elif call.number in self._calls:
            self._send(call.number, response, final)

    def refusal(self, request: InferenceRequest, error: NeriteError) -> NeriteError:
        """Return the error for a request that was refused when it was submitted: Triton's text, then the remedy."""
        model, version = request.header.model_name, request.header.model_version
        prefix = f"Model {model} - Error when running inference: "
        try:
            self._server.find(model, version, "")
        except NotLoaded:
            return error.prefixed(prefix)
        except NeriteError as why:
            return type(why)(
                f"{prefix}Failed for execute the inference request. Model '{model}' is not ready.\n    {why.message}"
            )
        return error.prefixed(prefix)

    def cancel(self, number: int) -> None:
        """Cancel a call whose responses the model still waits for."""
        call = self._calls.get(number)
        if call is not None:
            call.cancel()

    def give_up(self, number: int) -> None:
        """Cancel a call whose responses the model no longer waits for."""
        call = self._calls.pop(number, None)
        if call is not None:
            call.cancel()
            self._break_deadlocks(call.batch)

    def taken(self, number: int, count: int) -> None:
        """Record that the model has read responses to a call."""
        call = self._calls.get(number)
        if call is not None:
            call.taken(count)

    def parent_cancelled(self, batch: int) -> None:
        """Cancel the calls whose requests were all cancelled."""
        for call in self._of(batch):
            if all(parent.cancelled for parent in self._parents(batch, call.index)):
                call.cancel()

    def under_way(self, batch: int) -> list[InferenceRequest]:
        """Return the unanswered calls that a batch waits for."""
        return [call.request for call in self._of(batch) if call.request is not None]

    def close(self) -> None:
        """Cancel all calls: the worker is gone."""
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.cancel()

    def _of(self, batch: int) -> list[PendingCall]:
        return [call for call in self._calls.values() if call.batch == batch]

    def _parents(self, batch: int, index: int) -> Sequence[InferenceRequest]:
        requests = self._batch_of(batch) or ()
        return requests if index == messages.ALL else requests[index : index + 1]

    def _break_deadlocks(self, batch: int) -> None:
        """Break deadlocks among the remaining calls of a batch, now that it waits for these only."""
        for request in self.under_way(batch)[:1]:
            deadlocks.break_deadlocks(request)


def _several(model: str) -> str:
    return (
        f"Model {model} is using the decoupled. The current BLS request call doesn't support models using the "
        "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
        "decoupled models.'"
    )
