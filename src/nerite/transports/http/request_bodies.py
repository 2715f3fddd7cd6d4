"""Parses and validates the JSON bodies of infer, load and shared memory requests, with Triton's error texts."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any, TypeAlias

from nerite.core import tensor as dtypes
from nerite.core.client_text import checked, checked_name
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.core.request import MAX_CORRELATION_ID, RequestedOutput, RequestHeader, SharedMemoryInput
from nerite.core.response import Parameter
from nerite.core.signature import shape_text
from nerite.core.tensor import Buffer, TensorSpec
from nerite.core.text import MAX_VALUE
from nerite.transports.http import json_tensors
from nerite.transports.http.json_text import parse_json, parse_settings

Place: TypeAlias = tuple[int, int] | SharedMemoryInput | Buffer
"""Location of an input's data: start and end behind the JSON part, a place in shared memory, or the data itself."""
_OUTSIDE_JSON = frozenset((tuple, SharedMemoryInput))


class HttpInferPlan:
    """Plan of an infer request: its header, its id, and the place of each input."""

    __slots__ = ("footprint", "header", "id", "places", "raw", "repeats", "size", "whole")

    def __init__(
        self,
        header: RequestHeader,
        id: str,
        places: Sequence[Place],
        size: int,
        *,
        raw: bool = False,
        footprint: int = 0,
    ) -> None:
        """``raw``: the plan was deduced from the model's signature, which may change, so it is not repeatable."""
        self.header = header
        self.id = id
        self.places = places
        self.size = size
        """Number of bytes behind the JSON part."""
        self.raw = raw
        self.repeats = not raw and not id and _OUTSIDE_JSON.issuperset(map(type, places))
        """The same JSON part always leads to this plan, and contains no tensor data."""
        self.footprint = footprint
        """Approximate size in memory in bytes, if the plan is repeatable."""
        self.whole = list(places) == [(0, size)]
        """The request has one input, whose data is everything behind the JSON part."""

    def of(self, id: str) -> HttpInferPlan:
        """Return the plan of the same request with another id."""
        return HttpInferPlan(self.header, id, self.places, self.size, raw=self.raw, footprint=self.footprint)

    def data(self, body: memoryview, start: int) -> list[Any]:
        """Return the data of each input, or its place in shared memory; the JSON part of ``body`` ends at ``start``."""
        return [
            body[start + place[0] : start + place[1]] if isinstance(place, tuple) else place for place in self.places
        ]


BASE64_OUTPUT = "base64_output"
"""Request parameter: outputs that the request does not list return strings as base64. An extension of Triton's API."""
MAX_ENTRIES = 1024
"""Maximum number of inputs, outputs or parameters of a request, unless the model has more inputs or outputs."""
_MAX_DIMENSIONS = 64
"""Maximum number of dimensions of a shape, as in numpy."""
_NO_INPUTS = (
    "attempt to access non-existing object member 'inputs' (the body of an inference is an object such as "
    '{"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 2], "data": [1.5, 2.5]}]})'
)
_MAX_INT64 = (1 << 63) - 1


Asked: TypeAlias = tuple[
    str, dict[str, Any], dict[str, Parameter], list[TensorSpec], list[Place], int, list[RequestedOutput]
]
"""Parsed JSON part of a request: its id, the known parameters, the custom parameters, the specs of the inputs, the
place of each input, the number of bytes behind the JSON part, and the requested outputs."""


def read_infer_document(text: bytes, max_size: int, half: bool, most: Callable[[], int] = lambda: MAX_ENTRIES) -> Asked:
    """Parse the JSON part of a request. Raises Triton's errors.

    ``max_size`` limits the bytes of each input with data in the JSON. ``half``: such data may be FP16 and BF16.
    ``most`` returns the maximum number of inputs and outputs; it is called only if the usual limit is exceeded.
    """
    document = parse_json(text, document_text)
    if not isinstance(document, dict):
        raise Internal(f"Unable to parse 'inputs': {_NO_INPUTS}")
    request_id = read_id(document)
    fields, custom = read_parameters(document.get("parameters", {}))
    specs, places, size = _read_inputs(document, max_size, half, most)
    return request_id, fields, custom, specs, places, size, _read_outputs(document, most)


def check_count(what: str, given: Sized, most: Callable[[], int] = lambda: MAX_ENTRIES) -> None:
    """Reject a list or object with more entries than allowed; ``most`` is called only beyond the usual limit."""
    if len(given) > MAX_ENTRIES and len(given) > (allowed := most()):
        raise InvalidArgument(f"{what} has {len(given)} entries, more than the {allowed} that a request may have")


def document_text(document: Any) -> Any:
    """Return a request without the data of its inputs, whose strings need not be valid UTF-8."""
    if not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        return document
    inputs = [
        {key: item for key, item in each.items() if key != "data"} if isinstance(each, dict) else each
        for each in document["inputs"]
    ]
    return {**document, "inputs": inputs}


def read_id(document: Mapping[str, Any]) -> str:
    """Return the id of a request; empty if it has none."""
    value = document.get("id", "")
    if not isinstance(value, str):
        raise Internal("Unable to parse 'id': attempt to access JSON non-string as string")
    return checked_id(value)


def checked_id(value: str) -> str:
    """Return the id of a request. Raises ``InvalidArgument`` if it is too long or not UTF-8."""
    return checked_name(value, "'id'")


def _read_inputs(
    document: Mapping[str, Any], max_size: int, half: bool, most: Callable[[], int]
) -> tuple[list[TensorSpec], list[Place], int]:
    """Return the specs of the inputs, their places, and the number of bytes behind the JSON part."""
    specs: list[TensorSpec] = []
    places: list[Place] = []
    at = 0
    listed = document.get("inputs")
    if not isinstance(listed, list):
        what = "attempt to access JSON non-array as array" if "inputs" in document else _NO_INPUTS
        raise Internal(f"Unable to parse 'inputs': {what}")
    if len(listed) > MAX_ENTRIES:
        check_count("'inputs'", listed, most)
    for item in listed:
        source = _source(item)
        spec = _spec(item)
        if source == "data":
            place: Place = _data(spec, item["data"], max_size, half)
        elif source == "binary_data_size":
            size = _unsigned(source, item["parameters"][source])
            place = (at, at + size)
            at += size
        else:
            place = _shared_place(item["parameters"])
        specs.append(spec)
        places.append(place)
    return specs, places, at


def _read_outputs(document: Mapping[str, Any], most: Callable[[], int]) -> list[RequestedOutput]:
    """Return the outputs that a request lists; an empty list stands for all outputs."""
    if "outputs" not in document:
        return []
    listed = document["outputs"]
    if not isinstance(listed, list):
        raise Internal("Unable to parse 'outputs': attempt to access JSON non-array as array")
    if len(listed) > MAX_ENTRIES:
        check_count("'outputs'", listed, most)
    outputs: list[RequestedOutput] = []
    for item in listed:
        name = _name(item, "an output")
        parameters = _parameters_of(item)
        if "shared_memory_region" in parameters:
            _check_shared_output(parameters)
            outputs.append(RequestedOutput(name, place=_shared_place(parameters)))
            continue
        classification = parameters.get("classification", 0)
        if type(classification) is not int or classification < 0:
            raise Internal(
                "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer"
            )
        binary = boolean_value("binary_data", parameters.get("binary_data", False))
        base64 = boolean_value("base64", parameters.get("base64", False))
        if binary and base64:
            raise InvalidArgument("Output can't set both 'binary_data' and 'base64'")
        outputs.append(RequestedOutput(name, binary=binary, base64=base64, classification=classification))
    return outputs


def read_parameters(value: Any) -> tuple[dict[str, Any], dict[str, Parameter]]:
    """Split request parameters into known ones, as fields of ``RequestHeader``, and custom ones."""
    fields: dict[str, Any] = {}
    custom: dict[str, Parameter] = {}
    if not isinstance(value, dict):
        raise Internal("failed to get request params.: attempt to get members for non-object")
    if len(value) > MAX_ENTRIES:
        check_count("'parameters'", value)
    for key, item in value.items():
        if key == "sequence_id":
            if type(item) is int and item >= 0:
                fields[key] = item
            elif type(item) is not str:
                raise Internal("Unable to parse 'sequence_id': attempt to access JSON non-string as string")
            elif len(item.encode()) > MAX_CORRELATION_ID:
                raise Unsupported("string correlation ID cannot be longer than 128 characters")
            else:
                fields[key] = checked_name(item, "'sequence_id'")
        elif key in ("sequence_start", "sequence_end"):
            fields[key] = boolean_value(key, item)
        elif key == "priority":
            fields["priority"] = _unsigned(key, item)
        elif key == "timeout":
            fields["timeout_us"] = _unsigned(key, item)
        elif key == "binary_data_output":
            fields["binary_by_default"] = boolean_value(key, item)
        elif key == BASE64_OUTPUT:
            fields["base64_by_default"] = boolean_value(key, item)
        elif key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
            )
        else:
            custom[key] = read_parameter(key, item)
    if fields.get("binary_by_default") and fields.get("base64_by_default"):
        raise InvalidArgument(f"Request can't set both 'binary_data_output' and '{BASE64_OUTPUT}'")
    return fields, custom


def read_parameter(key: str, value: Any) -> Parameter:
    """Return the value of a custom parameter. Raises ``InvalidArgument`` if the value or ``key`` is not allowed."""
    checked_name(key, "the name of a parameter")
    if isinstance(value, str):
        return checked(value, f"parameter '{key}'", MAX_VALUE)
    if type(value) is int and value > _MAX_INT64:
        return float(value)  # like every number beyond a signed 64-bit integer
    if isinstance(value, (bool, int, float)):
        return value
    raise InvalidArgument(f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'.")


def _spec(item: Any) -> TensorSpec:
    name = _name(item, "an input")
    datatype_name = _member(item, "datatype", str, "string")
    datatype = dtypes.BY_NAME.get(datatype_name)
    shape = _member(item, "shape", list, "array")
    if len(shape) > _MAX_DIMENSIONS:
        raise InvalidArgument(
            f"'shape' of input '{name}' has {len(shape)} entries, "
            f"more than the {_MAX_DIMENSIONS} that a tensor may have"
        )
    for size in shape:
        if type(size) is not int or size < 0:
            raise Internal("Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer")
    if datatype is None:
        raise InvalidArgument(f"invalid datatype for input {name}")
    spec = TensorSpec(name, datatype, tuple(shape))
    if spec.elements > _MAX_INT64:
        raise InvalidArgument(
            f"invalid shape for input '{name}': shape {shape_text(shape)} causes total element count to exceed "
            f"maximum size of {_MAX_INT64}"
        )
    return spec


def _data(spec: TensorSpec, value: object, max_size: int, half: bool) -> Buffer:
    """Return the bytes of an input whose data is in the JSON."""
    if spec.byte_size > max_size:
        raise InvalidArgument(
            f"JSON input '{spec.name}' has a byte_size ({spec.byte_size} bytes) that exceeds the maximum "
            f"allowed value of {max_size} bytes. Use --http-max-input-size to increase the limit."
        )
    return json_tensors.read_tensor(spec, value, half)


def _source(item: Any) -> str:
    """Return which of three possible sources an input names. Raises ``InvalidArgument`` unless it is exactly one."""
    members = item if isinstance(item, dict) else {}
    parameters = _parameters_of(members)
    sources = ["data"] if "data" in members else []
    sources += [key for key in ("binary_data_size", "shared_memory_region") if key in parameters]
    if len(sources) == 1:
        return sources[0]
    what = "But set " + " ".join(f"'{source}'" for source in sources) if sources else "But no field is set"
    raise InvalidArgument(
        "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
        f"'shared_memory_region' in 'parameters'. {what}"
    )


def _shared_place(parameters: Mapping[str, Any]) -> SharedMemoryInput:
    """Return the place of a tensor in shared memory."""
    region = parameters["shared_memory_region"]
    if not isinstance(region, str):
        raise Internal("Unable to parse 'shared_memory_region': attempt to access JSON non-string as string")
    offset, size = parameters.get("shared_memory_offset", 0), parameters.get("shared_memory_byte_size", 0)
    checked_name(region, "'shared_memory_region'")
    return SharedMemoryInput(
        region, _unsigned("shared_memory_offset", offset), _unsigned("shared_memory_byte_size", size)
    )


def _check_shared_output(parameters: Mapping[str, Any]) -> None:
    """Reject an output in shared memory that also requests another form."""
    if "classification" in parameters:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
    for form in ("binary_data", "base64"):
        if parameters.get(form):
            raise InvalidArgument(f"Output can't set both 'shared_memory_region' and '{form}'")


def _parameters_of(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of an input or output; anything but an object counts as none, as in Triton."""
    parameters = item.get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def boolean_value(key: str, value: object) -> bool:
    """Return ``value``. Raises Triton's error if it is not a boolean."""
    if type(value) is not bool:
        raise Internal(f"Unable to parse '{key}': attempt to access JSON non-boolean as boolean")
    return value


def _unsigned(key: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise Internal(f"Unable to parse '{key}': attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def _name(item: Any, of: str) -> str:
    """Return the name in an entry of ``inputs`` or ``outputs``."""
    return checked_name(_member(item, "name", str, "string"), f"the name of {of}")


def _member(item: Any, key: str, kind: type, called: str) -> Any:
    """Return a required member of an entry of ``inputs`` or ``outputs``."""
    if not isinstance(item, dict) or key not in item:
        raise Internal(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")
    if not isinstance(item[key], kind):
        raise Internal(f"Unable to parse '{key}': attempt to access JSON non-{called} as {called}")
    return item[key]


# Load requests.


def read_load_parameters(document: Mapping[str, Any]) -> dict[str, str | bytes]:
    """Return the parameters of a load request, with files decoded. Raises Triton's errors for invalid ones."""
    found: dict[str, str | bytes] = {}
    parameters = document.get("parameters", {})
    if not isinstance(parameters, dict):
        raise Internal('attempt to get members for non-object\n    Write "parameters" as an object: names and texts.')
    check_count("'parameters'", parameters)
    for name, value in parameters.items():
        if not isinstance(value, str):
            raise Internal(
                f"attempt to access JSON non-string as string\n    Write the value of load parameter '{name}' as text."
            )
        if name == "config":
            found[name] = value
        elif name.startswith("file:"):
            found[name] = _decoded(name, value)
        else:
            raise Internal(
                "unexpected error on creating Triton parameter\n"
                f"    There is no load parameter '{name}', only 'config' and 'file:<path>'."
            )
    return found


def _decoded(name: str, text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(
            f"load parameter '{name}' is not base64: {error}\n    Send the content of the file in base64, in one line."
        ) from None


# Registration of shared memory.


def system_region(region: str, body: memoryview) -> tuple[str, str, int, int]:
    """Return the name, key, offset and size of a region. Raises Triton's errors."""
    if not region:
        raise InvalidArgument("'region name' is necessary to register system shared memory region")
    document = _document(body)
    key = _region_member(document, "key")
    if not isinstance(key, str):
        raise Internal("attempt to access JSON non-string as string")
    offset = _region_unsigned(document.get("offset", 0))
    return (
        region,
        checked_name(key, "'key'"),
        offset,
        _region_unsigned(_region_member(document, "byte_size")),
    )


def cuda_region(region: str, body: memoryview) -> tuple[str, bytes, int, int]:
    """Return name, handle, GPU and size of a region of CUDA memory. Raises Triton's errors."""
    if not region:
        raise InvalidArgument("'region name' is necessary to register cuda shared memory region")
    document = _document(body)
    handle = _region_member(document, "raw_handle")
    if not isinstance(handle, dict) or "b64" not in handle:
        raise Internal("attempt to access non-existing object member 'b64'")
    try:
        raw = base64.b64decode(handle["b64"], validate=True)
    except (TypeError, ValueError):
        raw = b""
    device, size = (_region_unsigned(_region_member(document, name)) for name in ("device_id", "byte_size"))
    return region, raw, device, size


def _document(body: memoryview) -> dict[str, Any]:
    document = parse_settings(body)
    if not isinstance(document, dict):
        raise Internal("attempt to access non-existing object member 'key'")
    return document


def _region_member(document: dict[str, Any], name: str) -> Any:
    if name not in document:
        raise InvalidArgument(f"Shared memory register request has no '{name}' field")
    return document[name]


def _region_unsigned(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise Internal("attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value
