"""Request and response headers as JSON: how they cross, once each."""

from __future__ import annotations

from typing import Any

from nerite.core import dtype as dtypes
from nerite.core.caller import Caller
from nerite.core.request import RequestedOutput, RequestHeader
from nerite.core.response import ResponseHeader
from nerite.core.tensor import TensorSpec


def describe(header: RequestHeader | ResponseHeader) -> dict[str, Any]:
    """Return a header as JSON."""
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
        "priority": header.priority,
        "timeout_us": header.timeout_us,
        "sequence": [header.sequence_id, header.sequence_start, header.sequence_end],
        "batch_size": header.batch_size,
        "tenant": None if header.caller is None else header.caller.tenant,
    }


def read_request_header(value: dict[str, Any]) -> RequestHeader:
    """Return the request header that ``describe`` was given."""
    sequence_id, start, end = value["sequence"]
    tenant = value["tenant"]
    header = RequestHeader(
        value["model"],
        value["version"],
        _specs(value),
        [RequestedOutput(name) for name in value["outputs"]],
        parameters=value["parameters"],
        priority=value["priority"],
        timeout_us=value["timeout_us"],
        sequence_id=sequence_id,
        sequence_start=start,
        sequence_end=end,
        caller=None if tenant is None else Caller(tenant),
    )
    header.batch_size = value["batch_size"]
    return header


def read_response_header(value: dict[str, Any]) -> ResponseHeader:
    """Return the response header that ``describe`` was given."""
    return ResponseHeader(value["model"], value["version"], _specs(value), value["parameters"])


def _spec(spec: TensorSpec) -> list[object]:
    return [spec.name, spec.datatype.name, spec.shape]


def _specs(value: dict[str, Any]) -> list[TensorSpec]:
    return [TensorSpec(name, dtypes.BY_NAME[datatype], tuple(shape)) for name, datatype, shape in value["tensors"]]
