"""Request and response headers as JSON, in which each crosses a worker's channel once, and their size in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from nerite.core import tensor as dtypes
from nerite.core.request import (
    Assignment,
    Caller,
    IdempotencyKey,
    RequestedOutput,
    RequestHeader,
    SharedMemoryInput,
)
from nerite.core.response import Parameter, ResponseHeader
from nerite.core.tensor import TensorSpec


def header_to_json(header: RequestHeader | ResponseHeader) -> dict[str, Any]:
    """Return the JSON form of a header."""
    if isinstance(header, ResponseHeader):
        return {
            "model": header.model_name,
            "version": header.model_version,
            "tensors": [_spec(spec) for spec in header.outputs],
            "parameters": header.parameters,
        }
    return {
        "model": header.model_name,
        "version": header.model_version,
        "tensors": [_spec(spec) for spec in header.inputs],
        "outputs": [output.name for output in header.outputs],
        "parameters": header.parameters,
        "forwarded": [*header.forwarded],
        "priority": header.priority,
        "timeout_us": header.timeout_us,
        "sequence": [header.sequence_id, header.sequence_start, header.sequence_end],
        "batch_size": header.batch_size,
        "tenant": None if header.caller is None else header.caller.tenant,
        "device_outputs": sorted(header.device_outputs),
        "preferred_device": header.preferred_device,
    }


def request_header_from_json(value: dict[str, Any]) -> RequestHeader:
    """Return the request header that ``header_to_json`` was given."""
    sequence_id, start, end = value["sequence"]
    tenant = value["tenant"]
    header = RequestHeader(
        value["model"],
        value["version"],
        _specs(value),
        [RequestedOutput(name) for name in value["outputs"]],
        parameters=value["parameters"],
        forwarded=value["forwarded"],
        priority=value["priority"],
        timeout_us=value["timeout_us"],
        sequence_id=sequence_id,
        sequence_start=start,
        sequence_end=end,
        caller=None if tenant is None else Caller(tenant),
        device_outputs=frozenset(value["device_outputs"]),
        preferred_device=value["preferred_device"],
    )
    header.batch_size = value["batch_size"]
    return header


def whole_header_to_json(header: RequestHeader) -> dict[str, Any]:
    """Return the JSON form of a request header with what ``header_to_json`` omits: form of the answer, caller, key.

    Of places in shared memory it has those on GPUs (``device_outputs``).
    """
    return {
        **header_to_json(header),
        "outputs": [
            [each.name, each.binary, each.base64, each.classification, _device_place(header, each)]
            for each in header.outputs
        ],
        "by_default": [header.binary_by_default, header.base64_by_default, header.empty_final],
        "caller": header.caller,
        "idempotency_key": header.idempotency_key,
        "sticky_fields": header.sticky_fields,
        "assignment": header.assignment,
    }


def whole_header_from_json(value: dict[str, Any]) -> RequestHeader:
    """Return the request header that ``whole_header_to_json`` was given."""
    sequence_id, start, end = value["sequence"]
    binary, base64, empty_final = value["by_default"]
    caller, key, assignment = value["caller"], value["idempotency_key"], value["assignment"]
    return RequestHeader(
        value["model"],
        value["version"],
        _specs(value),
        [
            RequestedOutput(
                name,
                binary=as_bytes,
                base64=as_base64,
                classification=classes,
                place=None if place is None else SharedMemoryInput(*place),
            )
            for name, as_bytes, as_base64, classes, place in value["outputs"]
        ],
        parameters=value["parameters"],
        forwarded=value["forwarded"],
        priority=value["priority"],
        timeout_us=value["timeout_us"],
        sequence_id=sequence_id,
        sequence_start=start,
        sequence_end=end,
        binary_by_default=binary,
        base64_by_default=base64,
        empty_final=empty_final,
        caller=None if caller is None else Caller(*caller),
        idempotency_key=None if key is None else IdempotencyKey(*key),
        sticky_fields=value["sticky_fields"],
        assignment=None if assignment is None else Assignment(*assignment),
        device_outputs=frozenset(value["device_outputs"]),
    )


def _device_place(header: RequestHeader, output: RequestedOutput) -> tuple[str, int, int] | None:
    place = output.place if output.name in header.device_outputs else None
    return None if place is None else (place.region, place.offset, place.byte_size)


def response_header_from_json(value: dict[str, Any]) -> ResponseHeader:
    """Return the response header that ``header_to_json`` was given."""
    return ResponseHeader(value["model"], value["version"], _specs(value), value["parameters"])


def _spec(spec: TensorSpec) -> list[object]:
    return [spec.name, spec.datatype.name, spec.shape]


def _specs(value: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec(name, dtypes.BY_NAME[datatype], tuple(shape)) for name, datatype, shape in value["tensors"]]


# Estimated bytes of headers in memory, including the objects they consist of. Measured with ``tracemalloc`` (a test
# repeats this) and rounded up: names count four bytes per character. An estimate takes about a microsecond, so it is
# for insertions into a memo or a cache, not for each request.

REQUEST: Final = 2048
RESPONSE: Final = 448
INPUT: Final = 768
"""Bytes of an input, including what the model's backend stores on the header."""
SPEC: Final = 320
"""Bytes of any other tensor: an output, a state."""
DIMENSION: Final = 40
REQUESTED: Final = 448
"""Bytes of a requested output, including its part of the header's identity."""
PARAMETER: Final = 448
"""Bytes of a parameter without name and value, including its part of the header's identity."""


def request_header_bytes(header: RequestHeader) -> int:
    """Return the estimated bytes of a request header and its ``identity``."""
    size = REQUEST + 4 * (len(header.model_name) + len(header.model_version))
    for spec in header.inputs:
        size += INPUT + 4 * len(spec.name) + DIMENSION * len(spec.shape)
    for output in header.outputs:
        size += REQUESTED + 4 * len(output.name)
        if output.place is not None:
            size += PARAMETER + 4 * len(output.place.region)
    if header.parameters:
        size += parameters_bytes(header.parameters)
    if header.sticky_fields:
        size += parameters_bytes(header.sticky_fields)
    return size if header.caller is None else size + 4 * len(header.caller.wanted_class)


def response_header_bytes(header: ResponseHeader) -> int:
    """Return the estimated bytes of a response header without the transports' encodings, which may double it."""
    size = RESPONSE + tensor_specs_bytes(header.outputs)
    return size + parameters_bytes(header.parameters) if header.parameters else size


def tensor_specs_bytes(specs: Iterable[TensorSpec]) -> int:
    """Return the estimated bytes of tensor specifications."""
    size = 0
    for spec in specs:
        size += SPEC + 4 * len(spec.name) + DIMENSION * len(spec.shape)
    return size


def parameters_bytes(parameters: Mapping[str, Parameter]) -> int:
    """Return the estimated bytes of parameters, including their text in an identity."""
    size = 0
    for name, value in parameters.items():
        size += PARAMETER + 8 * len(name)
        if type(value) is str:
            size += 2 * len(value) if value.isascii() else 8 * len(value)
    return size
