"""Requests over gRPC: a message, behind its length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nerite.bench.forms.tensor import Asked, Place
from nerite.bench.scripts import Form, SequenceStep
from nerite.wire import grpc_service


@dataclass(frozen=True, slots=True)
class InferForm(Form):
    """A request for an inference, over a stream or not."""

    asked: Asked
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
            if isinstance(tensor.data, Place):
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


def _place(tensor: Any, place: Place) -> None:
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
