"""Writing a ``ModelInferResponse``: headers once for each shape of answer, tensors as they are."""

from __future__ import annotations

from collections.abc import Callable

from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec
from nerite.transports import classification
from nerite.transports.grpc import infer_wire
from nerite.wire.grpc_service import InferParameter, ModelInferResponse


def write(
    request: InferenceRequest, response: InferenceResponse, signature_of: Callable[[InferenceRequest], Signature]
) -> list[Buffer]:
    """Return the serialized response in pieces. Raises Triton's errors of formatting."""
    header = response.header
    assert header is not None
    data = response.data
    if any(output.classification for output in request.header.outputs):
        header, data = _classified(request, response, header, signature_of(request))
    beginning: bytes | None = header.encoded
    if beginning is None:
        beginning = header.encoded = _beginning(header)
    parts = infer_wire.raw_outputs(data)
    parts.insert(0, beginning)
    if request.id:
        # Fields may come in any order; only the beginning is worth keeping.
        parts.insert(1, infer_wire.response_id(request.id))
    return parts


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
