"""Writing a ``ModelInferResponse``: headers once for each shape of answer, tensors as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec
from nerite.transports import classification, shared_output
from nerite.transports.grpc import infer_wire
from nerite.wire.grpc_service import InferParameter, ModelInferResponse


class Encoded(NamedTuple):
    """The reply that a response header means, cut where the tensors go: everything is known but their bytes."""

    first: bytes
    """The message's prefix and all that stands before the first tensor."""
    rest: tuple[bytes, ...]
    """What stands before each of the others."""


def write(
    request: InferenceRequest, response: InferenceResponse, signature_of: Callable[[InferenceRequest], Signature]
) -> list[Buffer]:
    """Return the serialized response with its length in front, in pieces. Raises Triton's errors of formatting."""
    header = response.header
    assert header is not None
    data = response.data
    encoded: Encoded | None = header.encoded
    if encoded is None or request.id or request.header.classifies or request.header.shared:
        if request.header.classifies:
            header, data = _classified(request, response, header, signature_of(request))
        if request.header.shared:
            data = _without_shared(request, response, header, data)
        encoded = _encode(header, [len(buffer) for buffer in data], request.id)
        plain = header is response.header and data is response.data and not request.id
        if plain and all(spec.byte_size >= 0 for spec in header.outputs):
            header.encoded = encoded
    parts: list[Buffer] = [encoded.first, *data[:1]]
    for before, buffer in zip(encoded.rest, data[1:], strict=True):
        parts += (before, buffer)
    return parts


def _encode(header: ResponseHeader, sizes: Sequence[int], request_id: str) -> Encoded:
    message = _beginning(header)
    if request_id:
        # Fields may come in any order.
        message += infer_wire.response_id(request_id)
    before = [infer_wire.raw_output(size) for size in sizes]
    whole = len(message) + sum(map(len, before)) + sum(sizes)
    first = b"\0" + whole.to_bytes(4) + message + b"".join(before[:1])
    return Encoded(first, tuple(before[1:]))


def _beginning(header: ResponseHeader) -> bytes:
    message = ModelInferResponse(
        model_name=header.model_name,
        model_version=header.model_version,
        outputs=[{"name": spec.name, "datatype": spec.datatype.name, "shape": spec.shape} for spec in header.outputs],
    )
    for key, value in header.parameters.items():
        if isinstance(value, bool):
            parameter = InferParameter(bool_param=value)
        elif isinstance(value, int):
            parameter = InferParameter(int64_param=value) if value < 1 << 63 else InferParameter(uint64_param=value)
        elif isinstance(value, float):
            parameter = InferParameter(double_param=value)
        else:
            parameter = InferParameter(string_param=value)
        message.parameters[key].CopyFrom(parameter)
    return message.SerializeToString()


def _without_shared(
    request: InferenceRequest, response: InferenceResponse, header: ResponseHeader, data: Sequence[Buffer]
) -> list[Buffer]:
    """Write outputs to shared memory that are wanted there, and return the data of the others."""
    placed = {output.name for output in request.header.outputs if output.place}
    left: list[Buffer] = []
    for spec, buffer in zip(header.outputs, data, strict=True):
        if spec.name in placed:
            shared_output.write(request, spec, buffer)
        left.append(b"" if spec.name in placed else buffer)
    return left


def _classified(
    request: InferenceRequest, response: InferenceResponse, header: ResponseHeader, signature: Signature
) -> tuple[ResponseHeader, list[Buffer]]:
    wanted = {output.name: output.classification for output in request.header.outputs}
    specs: list[TensorSpec] = []
    data: list[Buffer] = []
    for spec, buffer in zip(header.outputs, response.data, strict=True):
        count = wanted.get(spec.name, 0)
        if count:
            labels = signature.outputs[spec.name].labels
            spec, buffer = classification.top(spec, buffer, count, labels, signature.max_batch_size > 0)
        specs.append(spec)
        data.append(buffer)
    return ResponseHeader(header.model_name, header.model_version, specs, header.parameters), data
