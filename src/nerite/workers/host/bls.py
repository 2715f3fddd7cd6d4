"""The calls that a model makes to other models, seen from the server: sent on, and their answers sent back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final, NamedTuple

from nerite.core.byte_budget import MODEL_CALLS, Memo
from nerite.core.errors import NeriteError, Unavailable
from nerite.core.failures import report
from nerite.core.headers import request_header_bytes
from nerite.core.model_calls import CallRequest
from nerite.core.request import MIXED, Caller, InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer
from nerite.dispatch import deadlocks
from nerite.dispatch.interface import ServerEntry
from nerite.instances.instance import CHECK_PATIENCE, Batch
from nerite.workers.child.bls import WINDOW, unpacked_call
from nerite.workers.host.channel import WorkerChannel
from nerite.workers.ipc import messages

# What models ask of the server beside inference: to load and unload models, and whether one is ready.


class ControlCaller(NamedTuple):
    """Who asks."""

    model: str
    version: int
    instance: str
    loading: bool
    """Its ``initialize`` runs: nobody can load or unload it meanwhile."""


class ModelControlCalls:
    """One for the server. Questions may come from any thread; all else belongs to the loop's."""

    def __init__(self, server: ServerEntry, loop: asyncio.AbstractEventLoop, loading: asyncio.Semaphore) -> None:
        """``loading`` is held by each model that is being loaded."""
        self._server = server
        self._loop = loop
        self._loading = loading
        self._under_way: set[asyncio.Task[None]] = set()
        self._loads: list[tuple[str, str]] = []
        """Models that are being loaded, each with one that its ``initialize`` wants loaded or unloaded just now."""

    def take(self, question: dict[str, Any], reply: Callable[[bytes], None], control_caller: ControlCaller) -> None:
        """Do what a worker asks, and pass the message for it to ``reply``, on the loop's thread. For any thread."""
        self._loop.call_soon_threadsafe(self._begin, question, control_caller, reply)

    def _begin(self, question: dict[str, Any], control_caller: ControlCaller, reply: Callable[[bytes], None]) -> None:
        number = question["number"]

        def answer(value: object, error: NeriteError | None = None) -> None:
            told: dict[str, Any] = {"number": number}
            if error is None:
                told["value"] = value
            else:
                said = f"Failed to process the request for model '{control_caller.instance}', message: {error.message}"
                told["error"] = messages.error_json(type(error)(said))
            reply(messages.json_frame(messages.TOLD, told))

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
        except NeriteError:
            answer(False)
            return
        if (running.name, running.version) == (control_caller.model, control_caller.version):
            # It is at work, and cannot be asked while it waits for this.
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
                answer(None, Unavailable(f"model '{model}' is being loaded, and that waits for this to be done"))
                return
            self._loads.append(wait)
            # Otherwise as many as may be loaded at once would wait for others for ever.
            self._loading.release()
        try:
            await work
            answer(None, None)
        except NeriteError as error:
            answer(None, error)
        except Exception as error:
            answer(None, report("bls", error, f"in what '{control_caller.instance}' asked for"))
        finally:
            if control_caller.loading:
                self._loads.remove(wait)
                await self._loading.acquire()

    def _leads_back(self, asking: str, wanted: str) -> bool:
        """Return whether ``wanted`` is loaded, or waits for others that are, by the load of ``asking`` itself."""
        reached = {wanted}
        while True:
            further = {there for here, there in self._loads if here in reached} - reached
            if asking in reached or not further:
                return asking in reached
            reached |= further


# What a call inherits from the requests that it is made for.
#
# Where a model works on one request, or says by ``trace`` which one a call is for, that is the parent. Where it works
# on a batch, a call is for all of them: it has the highest of their priorities and the longest of their timeouts, and
# is cancelled when all of them are. Its caller is theirs if they have one in common. If not, or if nothing tells what
# a call is for, it has no caller: what is computed for it must not answer another tenant faster.


class CallContext:
    """The headers of the calls of one worker, with what they inherit. Repeated ones are mostly the same object."""

    def __init__(self, *, tenants: bool = False) -> None:
        """``tenants``: requests of clients have callers."""
        self._of_none = MIXED if tenants else None
        self._headers: Memo[tuple[RequestHeader, int, Caller | None], RequestHeader] = Memo()

    def header(self, own: RequestHeader, parents: Sequence[InferenceRequest], now: int) -> RequestHeader:
        """Return the header of a call: what it says itself counts more than what it inherits.

        Without ``parents`` it is not known what it is for.
        """
        priority, timeout_us = own.priority, own.timeout_us
        headers = [each.header for each in parents]
        if not priority and any(header.priority for header in headers):
            priority = min(header.priority for header in headers if header.priority)
        if not timeout_us and headers and all(header.timeout_us for header in headers):
            timeout_us = max(_left(each, now) for each in parents)
        caller = _common(headers) if headers else self._of_none
        if timeout_us != own.timeout_us:  # what is left of a timeout is another number each time
            return _with(own, priority, timeout_us, caller)
        if priority == own.priority and caller is None:
            return own
        key = own, priority, caller
        header = self._headers.get(key)
        if header is None:
            header = _with(own, priority, timeout_us, caller)
            MODEL_CALLS.put(self._headers, key, header, 2 * request_header_bytes(header))
        return header


def _common(headers: Sequence[RequestHeader]) -> Caller | None:
    """Return the tenant that all requests are of; ``MIXED`` if there are several, None if there is none."""
    callers = [header.caller for header in headers if header.caller is not None]
    if not callers:
        return None
    tenant = callers[0].tenant
    return Caller(tenant) if tenant and all(each.tenant == tenant for each in callers) else MIXED


def _left(parent: InferenceRequest, now: int) -> int:
    """Return how many microseconds are left of a request's timeout, at least one."""
    return max(1, parent.header.timeout_us - (now - parent.arrived_ns) // 1000)


def _with(own: RequestHeader, priority: int, timeout_us: int, caller: Caller | None) -> RequestHeader:
    return RequestHeader(
        own.model_name,
        own.model_version,
        own.inputs,
        own.outputs,
        parameters=own.parameters,
        priority=priority,
        timeout_us=timeout_us,
        sequence_id=own.sequence_id,
        sequence_start=own.sequence_start,
        sequence_end=own.sequence_end,
        caller=caller,
    )


_now = time.monotonic_ns
_READ_ON: Final = WINDOW // 2
"""Answers on their way at which a model that was paused goes on."""


class PendingCall:
    """One call that is under way: the sink of its request."""

    __slots__ = ("batch", "bls_server", "index", "number", "on_way", "paused", "request", "starting")

    def __init__(self, bls_server: BlsServer, number: int, batch: int, index: int) -> None:
        self.request: InferenceRequest | None = None
        """Until its last answer: it has this as its sink, and they would hold each other and what the caller sent."""
        self.bls_server = bls_server
        self.number = number
        self.batch = batch
        self.index = index
        self.on_way = 0
        """Answers that the model has not read yet."""
        self.paused = False
        self.starting = True
        """It is being looked at whether the request can be queued."""

    def respond(self, request: InferenceRequest, response: InferenceResponse, final: bool) -> None:
        """Pass an answer to the model that called."""
        if response.error is not None:
            error = (request.refusal if isinstance(request, CallRequest) else None) or response.error
            if error is not response.error or self.starting:
                response = InferenceResponse.failed(self.bls_server.refusal(request, error))
        if final:
            # What was sent for the call is given back along with the answer, if nobody else keeps it.
            request.data = ()
            self.request = None
        else:
            self.on_way += 1
            if self.on_way >= WINDOW and not self.paused:
                self.paused = True
                request.pause(True)
        self.bls_server.answer(self, response, final)

    def taken(self, count: int) -> None:
        """Note that the model has read some answers."""
        self.on_way -= count
        if self.paused and self.on_way <= _READ_ON and self.request is not None:
            self.paused = False
            self.request.pause(False)

    def cancel(self) -> None:
        """Cancel the request, if its last answer has not come."""
        if self.request is not None:
            self.request.cancel()


class BlsServer:
    """All calls of one worker. For the loop's thread only."""

    def __init__(
        self,
        server: ServerEntry,
        channel: WorkerChannel,
        batch_of: Callable[[int], Batch | None],
        *,
        tenants: bool = False,
    ) -> None:
        """``batch_of`` gives the requests of a batch that the worker has. ``tenants``: requests have callers."""
        self._server = server
        self._channel = channel
        self._batch_of = batch_of
        self._inheritance = CallContext(tenants=tenants)
        self._tickets: dict[int, PendingCall] = {}

    def call(
        self, number: int, batch: int, index: int, decoupled: bool, header: RequestHeader, name: str, data: list[Buffer]
    ) -> None:
        """Send a request of the model to another model."""
        ticket = self._tickets[number] = PendingCall(self, number, batch, index)
        try:
            self._call(ticket, decoupled, header, name, data)
        except Exception as error:
            failure = report("bls", error, f"in a call of model '{header.model_name}'", name)
            self.answer(ticket, InferenceResponse.failed(failure), True)

    def _call(self, ticket: PendingCall, decoupled: bool, header: RequestHeader, name: str, data: list[Buffer]) -> None:
        batch, index, now = ticket.batch, ticket.index, _now()
        parents = self._parents(batch, index)
        header = self._inheritance.header(header, parents, now)
        if parents:
            parent = parents[0]
            if len(parents) > 1:  # the trace of a call for all of them is that of the first that has one
                parent = next((each for each in parents if getattr(each.sink, "trace", None) is not None), parent)
            request: InferenceRequest = CallRequest(parent, header, data, ticket, now, name)
        else:
            request = InferenceRequest(header, data, ticket, now, name)
        ticket.request = request
        self._server.infer(request, "" if decoupled else _several(header.model_name))
        ticket.starting = False
        if parents and all(parent.cancelled for parent in parents):
            request.cancel()

    def answer(self, ticket: PendingCall, response: InferenceResponse, final: bool) -> None:
        """Send an answer to the model that called."""
        if final:
            # Not there if nobody waits for it any more.
            if self._tickets.pop(ticket.number, None) is None:
                return
            self._channel.answer(ticket.number, response, final)
            self._look_at_the_rest(ticket.batch)
        elif ticket.number in self._tickets:
            self._channel.answer(ticket.number, response, final)

    def refusal(self, request: InferenceRequest, error: NeriteError) -> NeriteError:
        """Return what the model is told of a request that was not even queued: Triton's text, then the remedy."""
        model, version = request.header.model_name, request.header.model_version
        prefix = f"Model {model} - Error when running inference: "
        try:
            self._server.find(model, version, "")
        except NeriteError as why:
            return type(why)(
                f"{prefix}Failed for execute the inference request. Model '{model}' is not ready.\n    {why.message}"
            )
        return error.prefixed(prefix)

    def cancel(self, number: int) -> None:
        """Cancel a call of which the model still waits for the answers."""
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.cancel()

    def give_up(self, number: int) -> None:
        """Take note that the model does not wait for the answers to a call any more."""
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            ticket.cancel()
            self._look_at_the_rest(ticket.batch)

    def taken(self, number: int, count: int) -> None:
        """Take note that the model has read answers to a call."""
        ticket = self._tickets.get(number)
        if ticket is not None:
            ticket.taken(count)

    def parent_cancelled(self, batch: int) -> None:
        """Cancel the calls that are for nobody any more, because requests of a batch were cancelled."""
        for ticket in self._of(batch):
            if all(parent.cancelled for parent in self._parents(batch, ticket.index)):
                ticket.cancel()

    def under_way(self, batch: int) -> list[InferenceRequest]:
        """Return the calls that a batch waits for."""
        return [ticket.request for ticket in self._of(batch) if ticket.request is not None]

    def close(self) -> None:
        """Cancel everything: the worker is gone."""
        tickets, self._tickets = self._tickets, {}
        for ticket in tickets.values():
            ticket.cancel()

    def _of(self, batch: int) -> list[PendingCall]:
        return [ticket for ticket in self._tickets.values() if ticket.batch == batch]

    def _parents(self, batch: int, index: int) -> Sequence[InferenceRequest]:
        requests = self._batch_of(batch) or ()
        return requests if index == messages.ALL else requests[index : index + 1]

    def _look_at_the_rest(self, batch: int) -> None:
        """Find out whether the calls that a batch still waits for can be answered, now that it waits for these only."""
        for request in self.under_way(batch)[:1]:
            deadlocks.break_deadlocks(request)


def _several(model: str) -> str:
    return (
        f"Model {model} is using the decoupled. The current BLS request call doesn't support models using the "
        "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
        "decoupled models.'"
    )
