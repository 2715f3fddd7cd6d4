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
        message.parameters["sequence_id"].int64_param = step.sequence_id
        message.parameters["sequence_start"].bool_param = step.start
        message.parameters["sequence_end"].bool_param = step.end
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
            message.parameters["triton_enable_empty_final_response"].bool_param = True
        return message


def framed(message: bytes) -> bytes:
    """Return a message as it stands in the body of a call."""
    return b"\0" + len(message).to_bytes(4) + message


def _place(tensor: Any, place: Place) -> None:
    tensor.parameters["shared_memory_region"].string_param = place.region
    tensor.parameters["shared_memory_byte_size"].int64_param = place.size
    if place.offset:
        tensor.parameters["shared_memory_offset"].int64_param = place.offset
