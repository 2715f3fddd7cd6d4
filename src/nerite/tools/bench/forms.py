"""Requests of a benchmark: their content, their encoding for HTTP and gRPC, and the scripts that order them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import orjson

from nerite.client.connection import Address, model_path
from nerite.client.tensors import HEADER_LENGTH
from nerite.core.tensor import Buffer
from nerite.tools.bench.planning import CancelPlan
from nerite.wire import grpc_service


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """A place in a shared memory region that is registered with the server."""

    region: str
    size: int
    offset: int = 0

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of a tensor at this place."""
        where = {"shared_memory_region": self.region, "shared_memory_byte_size": self.size}
        return {**where, "shared_memory_offset": self.offset} if self.offset else where


@dataclass(frozen=True, slots=True)
class BenchTensor:
    """An input: its data in wire format, or their place in shared memory."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer | RegionPlace


@dataclass(frozen=True, slots=True)
class BenchOutput:
    """A requested output, and its place in shared memory, or None to return it in the response."""

    name: str
    place: RegionPlace | None = None


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """Content of an inference request."""

    model: str
    version: str
    inputs: tuple[BenchTensor, ...]
    outputs: tuple[BenchOutput, ...] = ()
    """Requested outputs; empty for all outputs, in the response."""
    parameters: Mapping[str, Any] = field(default_factory=dict)


class SequenceStep(NamedTuple):
    """A request's place in its sequence, as request parameters."""

    sequence_id: int
    sequence_start: bool
    sequence_end: bool


class RequestForm(ABC):
    """A complete request except for its place in a sequence. Can be pickled and sent to another process."""

    @abstractmethod
    def encoded(self, step: SequenceStep | None = None) -> bytes:
        """Return the encoded request, at a place in a sequence or outside of any."""


class Dialogue:
    """What is planned for the current request of a slot beyond its bytes, and what follows from its answer.

    Set by ``Script.following``. This one plans nothing: each request stands alone.
    """

    __slots__ = ("cancel_after", "listens", "model", "texts")

    def __init__(self) -> None:
        self.cancel_after: float | None = None
        """Seconds after which the client cancels the request; None if it does not."""
        self.listens = False
        """True if the next request needs the text of the answer."""
        self.model = 0
        """Place of the model in ``BenchPlan.models``."""
        self.texts = 0
        """Number of texts of the request; 0 if it is not made of texts."""

    def heard(self, text: str) -> None:
        """Take the text of the answer; called if ``listens``."""

    def pause(self) -> float | None:
        """Return the seconds from the answer to the next request of the conversation, or None if it is over."""
        return None

    def broken(self) -> None:
        """End the conversation, because its request failed or was cancelled."""


class Script(NamedTuple):
    """Source of the encoded requests that one slot sends."""

    following: Callable[[], bytes]
    """Returns the next request."""
    ending: Callable[[], bytes | None] = lambda: None
    """Returns the request that ends the sequence that is open on the server, or None if none is open."""
    dialogue: Dialogue | None = None
    """Plan of the request that ``following`` returned last; None if every request is like any other."""


class Scripts(ABC):
    """Source of the scripts of all slots. Each of ``shares`` generators takes its share."""

    @abstractmethod
    def begin(self, share: int, shares: int, run: int = 0) -> Callable[[], Script]:
        """Return a factory that makes a script for each slot. ``run`` counts the levels of load."""


@dataclass(frozen=True, slots=True)
class RoundRobin(Scripts):
    """Repeats a list of requests; each slot takes the next one."""

    messages: Sequence[bytes]

    def begin(self, share: int, shares: int, run: int = 0) -> Callable[[], Script]:
        """Return a factory of scripts; each share starts at a different request."""
        count = len(self.messages)
        first = count * share // shares
        following = itertools.cycle([*self.messages[first:], *self.messages[:first]]).__next__
        return lambda: Script(following)


@dataclass(frozen=True, slots=True)
class Cancelling(Scripts):
    """Sends the requests of other scripts, some of which the client cancels."""

    scripts: Scripts
    cancel: CancelPlan
    seed: int

    def begin(self, share: int, shares: int, run: int = 0) -> Callable[[], Script]:
        """Return a factory of scripts, which draw together which of their requests are cancelled."""
        make = self.scripts.begin(share, shares, run)
        generator = np.random.default_rng([self.seed, share, run])

        def script() -> Script:
            inner, dialogue = make(), Dialogue()

            def following() -> bytes:
                dialogue.cancel_after = self.cancel.draw(generator)
                return inner.following()

            return Script(following, inner.ending, dialogue)

        return script


@dataclass(frozen=True, slots=True)
class Sequences(Scripts):
    """Sends sequences: each slot has one at a time, and marks its first and last request."""

    forms: Sequence[Sequence[RequestForm]]
    """Contents of sequences, which are used in turn."""
    first_id: int = 1

    def begin(self, share: int, shares: int, run: int = 0) -> Callable[[], Script]:
        """Return a factory of scripts; sequence ids are unique across all shares."""
        ids = itertools.count(self.first_id + share, shares)
        contents = itertools.cycle(self.forms)

        def script() -> Script:
            sequence = _SlotSequences(ids, contents)
            return Script(sequence.following, sequence.ending)

        return script


class _SlotSequences:
    """The consecutive sequences of one slot, taken from ids and contents that all slots share."""

    def __init__(self, ids: Iterator[int], contents: Iterator[Sequence[RequestForm]]) -> None:
        self._ids = ids
        self._contents = contents
        self._id = 0
        self._forms: Sequence[RequestForm] = ()
        self._sent = 0

    def following(self) -> bytes:
        """Return the next request of the sequence, or the first of a new one."""
        if self._sent == len(self._forms):
            self._id, self._forms, self._sent = next(self._ids), next(self._contents), 0
        self._sent += 1
        step = SequenceStep(self._id, self._sent == 1, self._sent == len(self._forms))
        return self._forms[self._sent - 1].encoded(step)

    def ending(self) -> bytes | None:
        """Return a last request for the open sequence, or None if none is open."""
        if self._sent == len(self._forms):
            return None
        self._sent = len(self._forms)
        return self._forms[-1].encoded(SequenceStep(self._id, sequence_start=False, sequence_end=True))


# Encoding for gRPC: a message preceded by its length.


@dataclass(frozen=True, slots=True)
class GrpcInferForm(RequestForm):
    """An inference request over gRPC, unary or streaming."""

    asked: BenchRequest
    streaming: bool = False

    def encoded(self, step: SequenceStep | None = None) -> bytes:
        """Return the encoded request."""
        asked = self.asked
        message = grpc_service.ModelInferRequest(model_name=asked.model, model_version=asked.version)
        for tensor in asked.inputs:
            added = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            if isinstance(tensor.data, RegionPlace):
                _set_parameters(added, tensor.data.parameters())
            else:
                message.raw_input_contents.append(bytes(tensor.data))
        for output in asked.outputs:
            requested = message.outputs.add(name=output.name)
            if output.place is not None:
                _set_parameters(requested, output.place.parameters())
        if self.streaming:
            _set_parameters(message, {"triton_enable_empty_final_response": True})
        _set_parameters(message, {**asked.parameters, **_parameters(step)})
        return framed(message.SerializeToString())


def framed(message: bytes) -> bytes:
    """Return a message with the 5-byte gRPC prefix, as in the body of a call."""
    return b"\0" + len(message).to_bytes(4) + message


def _set_parameters(message: Any, parameters: Mapping[str, object]) -> None:
    """Set the parameters of a request or tensor, each in the field for the type of its value."""
    for name, value in parameters.items():
        parameter = message.parameters[name]
        match value:
            case bool():
                parameter.bool_param = value
            case int():
                parameter.int64_param = value
            case float():
                parameter.double_param = value
            case _:
                parameter.string_param = str(value)


# Encoding for HTTP/1.1, with binary tensor data after the JSON.


def post(address: Address, path: str, headers: Mapping[str, str], body: Sequence[Buffer]) -> bytes:
    """Return an encoded POST request: head and body."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [f"POST {address.prefix}{path} HTTP/1.1", f"Host: {host}:{address.port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {sum(map(len, body))}", "", ""]
    return b"".join(("\r\n".join(lines).encode(), *body))


@dataclass(frozen=True, slots=True)
class HttpInferForm(RequestForm):
    """An inference request over HTTP."""

    address: Address
    headers: Mapping[str, str]
    asked: BenchRequest

    def encoded(self, step: SequenceStep | None = None) -> bytes:
        """Return the encoded request."""
        asked = self.asked
        inputs, raw = [], []
        for tensor in asked.inputs:
            if isinstance(tensor.data, RegionPlace):
                where = tensor.data.parameters()
            else:
                where = {"binary_data_size": len(tensor.data)}
                raw.append(tensor.data)
            inputs.append(
                {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape, "parameters": where}
            )
        document: dict[str, Any] = {"inputs": inputs}
        if asked.outputs:
            document["outputs"] = [
                {
                    "name": output.name,
                    "parameters": output.place.parameters() if output.place else {"binary_data": True},
                }
                for output in asked.outputs
            ]
        document["parameters"] = {"binary_data_output": True, **asked.parameters, **_parameters(step)}
        head = orjson.dumps(document)
        headers = {
            **self.headers,
            "Content-Type": "application/octet-stream",
            HEADER_LENGTH: str(len(head)),
        }
        return post(self.address, f"{model_path(asked.model, asked.version)}/infer", headers, [head, *raw])


@dataclass(frozen=True, slots=True)
class BenchGenerateForm(RequestForm):
    """A request of the generate extension, which is answered by an event stream."""

    address: Address
    headers: Mapping[str, str]
    model: str
    version: str
    inputs: Mapping[str, Any]
    """Inputs as JSON-serialisable values."""
    parameters: Mapping[str, Any]

    def encoded(self, step: SequenceStep | None = None) -> bytes:
        """Return the encoded request."""
        headers = {**self.headers, "Content-Type": "application/json"}
        path = f"{model_path(self.model, self.version)}/generate_stream"
        document = {**self.inputs, "parameters": {**self.parameters, **_parameters(step)}}
        return post(self.address, path, headers, [orjson.dumps(document)])


def _parameters(step: SequenceStep | None) -> dict[str, Any]:
    return step._asdict() if step is not None else {}
