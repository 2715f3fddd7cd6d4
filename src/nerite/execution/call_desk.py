"""The calls that a model makes to other models, seen from the server: sent on, and their answers sent back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from nerite.core.child_request import CallRequest
from nerite.core.errors import NeriteError
from nerite.core.internal_errors import report
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.tensor import Buffer
from nerite.execution import messages, waits
from nerite.execution.calls import WINDOW
from nerite.execution.channel import Channel
from nerite.execution.door import Door
from nerite.execution.inheritance import Inheritance
from nerite.execution.runner import Batch

_now = time.monotonic_ns
_READ_ON: Final = WINDOW // 2
"""Answers on their way at which a model that was paused goes on."""


class Ticket:
    """One call that is under way: the sink of its request."""

    __slots__ = ("batch", "desk", "index", "number", "on_way", "paused", "request", "starting")

    def __init__(self, desk: CallDesk, number: int, batch: int, index: int) -> None:
        self.request: InferenceRequest | None = None
        """Until its last answer: it has this as its sink, and they would hold each other and what the caller sent."""
        self.desk = desk
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
                response = InferenceResponse.failed(self.desk.refusal(request, error))
        if final:
            # What was sent for the call is given back along with the answer, if nobody else keeps it.
            request.data = ()
            self.request = None
        else:
            self.on_way += 1
            if self.on_way >= WINDOW and not self.paused:
                self.paused = True
                request.pause(True)
        self.desk.answer(self, response, final)

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


class CallDesk:
    """All calls of one worker. For the loop's thread only."""

    def __init__(
        self, door: Door, channel: Channel, batch_of: Callable[[int], Batch | None], *, tenants: bool = False
    ) -> None:
        """``batch_of`` gives the requests of a batch that the worker has. ``tenants``: requests have callers."""
        self._door = door
        self._channel = channel
        self._batch_of = batch_of
        self._inheritance = Inheritance(tenants=tenants)
        self._tickets: dict[int, Ticket] = {}

    def call(
        self, number: int, batch: int, index: int, decoupled: bool, header: RequestHeader, name: str, data: list[Buffer]
    ) -> None:
        """Send a request of the model to another model."""
        ticket = self._tickets[number] = Ticket(self, number, batch, index)
        try:
            self._call(ticket, decoupled, header, name, data)
        except Exception as error:
            failure = report("bls", error, f"in a call of model '{header.model_name}'", name)
            self.answer(ticket, InferenceResponse.failed(failure), True)

    def _call(self, ticket: Ticket, decoupled: bool, header: RequestHeader, name: str, data: list[Buffer]) -> None:
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
        self._door.infer(request, "" if decoupled else _several(header.model_name))
        ticket.starting = False
        if parents and all(parent.cancelled for parent in parents):
            request.cancel()

    def answer(self, ticket: Ticket, response: InferenceResponse, final: bool) -> None:
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
            self._door.find(model, version, "")
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

    def _of(self, batch: int) -> list[Ticket]:
        return [ticket for ticket in self._tickets.values() if ticket.batch == batch]

    def _parents(self, batch: int, index: int) -> Sequence[InferenceRequest]:
        requests = self._batch_of(batch) or ()
        return requests if index == messages.ALL else requests[index : index + 1]

    def _look_at_the_rest(self, batch: int) -> None:
        """Find out whether the calls that a batch still waits for can be answered, now that it waits for these only."""
        for request in self.under_way(batch)[:1]:
            waits.relieve(request)


def _several(model: str) -> str:
    return (
        f"Model {model} is using the decoupled. The current BLS request call doesn't support models using the "
        "decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
        "decoupled models.'"
    )
