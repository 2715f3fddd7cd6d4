"""Requests over HTTP/1.1, with the tensors in binary behind the JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import orjson

from nerite.bench.forms.tensor import Asked, Place
from nerite.bench.scripts import Form, SequenceStep
from nerite.client.address import Address
from nerite.client.infer_form import HEADER_LENGTH
from nerite.core.tensor import Buffer


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
class InferForm(Form):
    """A request for an inference."""

    address: Address
    headers: Mapping[str, str]
    asked: Asked

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
            size = _placed(tensor.data) if isinstance(tensor.data, Place) else {"binary_data_size": len(tensor.data)}
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
        raw = [tensor.data for tensor in asked.inputs if not isinstance(tensor.data, Place)]
        return post(self.address, infer_path(asked.model, asked.version, "infer"), headers, [head, *raw])


def _placed(place: Place) -> dict[str, Any]:
    where = {"shared_memory_region": place.region, "shared_memory_byte_size": place.size}
    return {**where, "shared_memory_offset": place.offset} if place.offset else where


@dataclass(frozen=True, slots=True)
class GenerateForm(Form):
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
