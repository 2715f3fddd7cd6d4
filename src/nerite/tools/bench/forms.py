"""An input of a request, and what is asked of the outputs."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson

from nerite.client.connection import Address
from nerite.client.tensors import HEADER_LENGTH
from nerite.core.tensor import Buffer
from nerite.wire import grpc_service


@dataclass(frozen=True, slots=True)
class RegionPlace:
    """A place in shared memory that the server knows."""

    region: str
    size: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class BenchTensor:
    """An input: its data in wire form, or where in shared memory they are."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: Buffer | RegionPlace


@dataclass(frozen=True, slots=True)
class BenchOutput:
    """An output that is asked for, and where it is to be put; None for into the answer."""

    name: str
    place: RegionPlace | None = None


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What a request says."""

    model: str
    version: str
    inputs: tuple[BenchTensor, ...]
    outputs: tuple[BenchOutput, ...] = ()
    """None: all of them, in the answer."""
    parameters: Mapping[str, Any] = field(default_factory=dict)


# What a slot sends, one request after the other: bytes that were made before.


class SequenceStep(NamedTuple):
    """A request's place in its sequence."""

    sequence_id: int
    start: bool
    end: bool


class RequestForm(ABC):
    """A request, of which all is known but its place in a sequence. Can be sent to another process."""

    @abstractmethod
    def plain(self) -> bytes:
        """Return the request as it is sent outside of sequences."""

    @abstractmethod
    def of(self, step: SequenceStep) -> bytes:
        """Return the request at a place in a sequence."""


class Script(NamedTuple):
    """What one slot sends."""

    following: Callable[[], bytes]
    """Returns the next request."""
    ending: Callable[[], bytes | None] = lambda: None
    """Returns the request that ends what is open on the server; None where nothing is."""


class Scripts(ABC):
    """Says what slots send. Each of ``shares`` generators takes its share."""

    @abstractmethod
    def begin(self, share: int, shares: int) -> Callable[[], Script]:
        """Return what makes a script for each slot."""


@dataclass(frozen=True, slots=True)
class RoundRobin(Scripts):
    """The same requests over and over; slots take the next."""

    messages: Sequence[bytes]

    def begin(self, share: int, shares: int) -> Callable[[], Script]:
        """Begin each share at another request."""
        count = len(self.messages)
        first = count * share // shares
        following = itertools.cycle([*self.messages[first:], *self.messages[:first]]).__next__
        return lambda: Script(following)


@dataclass(frozen=True, slots=True)
class Sequences(Scripts):
    """Each slot has a sequence at a time: its requests, the first and the last of them marked."""

    forms: Sequence[Sequence[RequestForm]]
    """The requests of a sequence; sequences take these in turn."""
    first_id: int = 1

    def begin(self, share: int, shares: int) -> Callable[[], Script]:
        """Give no id twice."""
        ids = itertools.count(self.first_id + share, shares)
        contents = itertools.cycle(self.forms)

        def script() -> Script:
            turn = _Turn(ids, contents)
            return Script(turn.following, turn.ending)

        return script


class _Turn:
    """One sequence after the other, of those that several share."""

    def __init__(self, ids: Iterator[int], contents: Iterator[Sequence[RequestForm]]) -> None:
        self._ids = ids
        self._contents = contents
        self._id = 0
        self._forms: Sequence[RequestForm] = ()
        self._sent = 0

    def following(self) -> bytes:
        """Return the next request of the sequence, or the first of the next."""
        if self._sent == len(self._forms):
            self._id, self._forms, self._sent = next(self._ids), next(self._contents), 0
        self._sent += 1
        step = SequenceStep(self._id, self._sent == 1, self._sent == len(self._forms))
        return self._forms[self._sent - 1].of(step)

    def ending(self) -> bytes | None:
        """Return the last request of a sequence that has begun."""
        if self._sent == len(self._forms):
            return None
        self._sent = len(self._forms)
        return self._forms[-1].of(SequenceStep(self._id, start=False, end=True))


# Requests over gRPC: a message, behind its length.


@dataclass(frozen=True, slots=True)
class GrpcInferForm(RequestForm):
    """A request for an inference, over a stream or not."""

    asked: BenchRequest
    streaming: bool = False

    def plain(self) -> bytes:
        """Return the request."""
        return framed(self._message().SerializeToString())

    def of(self, step: SequenceStep) -> bytes:
        """Return the request as a part of a sequence."""
        message = self._message()
        set_parameter(message, "sequence_id", step.sequence_id)
        set_parameter(message, "sequence_start", step.start)
        set_parameter(message, "sequence_end", step.end)
        return framed(message.SerializeToString())

    def _message(self) -> Any:
        asked = self.asked
        message = grpc_service.ModelInferRequest(model_name=asked.model, model_version=asked.version)
        for tensor in asked.inputs:
            added = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            if isinstance(tensor.data, RegionPlace):
                _place(added, tensor.data)
            else:
                message.raw_input_contents.append(bytes(tensor.data))
        for output in asked.outputs:
            requested = message.outputs.add(name=output.name)
            if output.place is not None:
                _place(requested, output.place)
        if self.streaming:
            set_parameter(message, "triton_enable_empty_final_response", True)
        for name, value in asked.parameters.items():
            set_parameter(message, name, value)
        return message


def framed(message: bytes) -> bytes:
    """Return a message as it stands in the body of a call."""
    return b"\0" + len(message).to_bytes(4) + message


def _place(tensor: Any, place: RegionPlace) -> None:
    set_parameter(tensor, "shared_memory_region", place.region)
    set_parameter(tensor, "shared_memory_byte_size", place.size)
    if place.offset:
        set_parameter(tensor, "shared_memory_offset", place.offset)


def set_parameter(message: Any, name: str, value: object) -> None:
    """Set a parameter of a message by the type of its value."""
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


# Requests over HTTP/1.1, with the tensors in binary behind the JSON.


def post(address: Address, path: str, headers: Mapping[str, str], body: Sequence[Buffer]) -> bytes:
    """Return a request, head and body."""
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [f"POST {address.prefix}{path} HTTP/1.1", f"Host: {host}:{address.port}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    lines += [f"Content-Length: {sum(map(len, body))}", "", ""]
    return b"".join(("\r\n".join(lines).encode(), *body))


def infer_path(model: str, version: str, action: str) -> str:
    """Return the path under which a model does something."""
    return f"/v2/models/{quote(model)}{f'/versions/{quote(version)}' if version else ''}/{action}"


@dataclass(frozen=True, slots=True)
class HttpInferForm(RequestForm):
    """A request for an inference."""

    address: Address
    headers: Mapping[str, str]
    asked: BenchRequest

    def plain(self) -> bytes:
        """Return the request."""
        return self._message({})

    def of(self, step: SequenceStep) -> bytes:
        """Return the request as a part of a sequence."""
        return self._message(_parameters(step))

    def _message(self, parameters: Mapping[str, Any]) -> bytes:
        asked = self.asked
        inputs = []
        for tensor in asked.inputs:
            size = (
                _placed(tensor.data) if isinstance(tensor.data, RegionPlace) else {"binary_data_size": len(tensor.data)}
            )
            inputs.append({"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape, "parameters": size})
        document: dict[str, Any] = {"inputs": inputs}
        if asked.outputs:
            document["outputs"] = [
                {"name": output.name, "parameters": _placed(output.place) if output.place else {"binary_data": True}}
                for output in asked.outputs
            ]
        document["parameters"] = {"binary_data_output": True, **asked.parameters, **parameters}
        head = orjson.dumps(document)
        headers = {
            **self.headers,
            "Content-Type": "application/octet-stream",
            HEADER_LENGTH: str(len(head)),
        }
        raw = [tensor.data for tensor in asked.inputs if not isinstance(tensor.data, RegionPlace)]
        return post(self.address, infer_path(asked.model, asked.version, "infer"), headers, [head, *raw])


def _placed(place: RegionPlace) -> dict[str, Any]:
    where = {"shared_memory_region": place.region, "shared_memory_byte_size": place.size}
    return {**where, "shared_memory_offset": place.offset} if place.offset else where


@dataclass(frozen=True, slots=True)
class BenchGenerateForm(RequestForm):
    """A request of the generate extension, whose answer is an event stream."""

    address: Address
    headers: Mapping[str, str]
    model: str
    version: str
    inputs: Mapping[str, Any]
    """As JSON has them."""
    parameters: Mapping[str, Any]

    def plain(self) -> bytes:
        """Return the request."""
        return self._message({})

    def of(self, step: SequenceStep) -> bytes:
        """Return the request as a part of a sequence."""
        return self._message(_parameters(step))

    def _message(self, parameters: Mapping[str, Any]) -> bytes:
        headers = {**self.headers, "Content-Type": "application/json"}
        path = infer_path(self.model, self.version, "generate_stream")
        document = {**self.inputs, "parameters": {**self.parameters, **parameters}}
        return post(self.address, path, headers, [orjson.dumps(document)])


def _parameters(step: SequenceStep) -> dict[str, Any]:
    return {"sequence_id": step.sequence_id, "sequence_start": step.start, "sequence_end": step.end}
