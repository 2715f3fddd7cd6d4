"""Reading an infer request: JSON and the bytes behind it to an ``InferenceRequest``.

A *plan* is what the JSON part says, worked out: the request header, and where in the body each tensor is. A body whose
JSON part was seen before, under the same head, costs one dictionary look-up.
"""

from __future__ import annotations

import codecs
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from nerite.core import dtype as dtypes
from nerite.core.errors import Internal, InvalidArgument, Unsupported
from nerite.core.request import MAX_CORRELATION_ID, Parameter, RequestedOutput, RequestHeader, SharedPlace, labelled
from nerite.core.signature import Signature, show
from nerite.core.tensor import Buffer, TensorSpec, join_bytes
from nerite.transports.http import json_error, json_tensors

_MAX_INT64 = (1 << 63) - 1
_MAX_PLANS = 256
_MAX_PLAN_JSON = 16 * 1024
_INFINITY = re.compile(rb'"(?:[^"\\]|\\.)*"|Inf(?:inity)?')
"""Strings, and the two names of infinity outside of them, of which Python knows one."""


class Plan:
    """A request header, the id, and for each input its place behind the JSON part or its bytes."""

    __slots__ = ("again", "header", "id", "places", "repeats", "size", "whole")

    def __init__(
        self,
        header: RequestHeader,
        id: str,
        places: Sequence[tuple[int, int] | SharedPlace | Buffer],
        size: int,
        *,
        raw: bool = False,
    ) -> None:
        """``raw``: the plan was deduced from the model, which may be another one next time."""
        self.header = header
        self.id = id
        self.places = places
        self.size = size
        """Bytes behind the JSON part."""
        self.repeats = not raw and not id and all(isinstance(place, (tuple, SharedPlace)) for place in places)
        """The same JSON part always means this plan, and holds no data."""
        self.again = self.repeats and not header.shared
        """All data is behind the JSON part."""
        self.whole = list(places) == [(0, size)]
        """There is one input, and it is everything behind the JSON part."""

    def data(self, body: memoryview, start: int) -> list[Any]:
        """Return the inputs' bytes, given where in ``body`` the JSON part ends; their places if they lie elsewhere."""
        return [
            body[start + place[0] : start + place[1]] if isinstance(place, tuple) else place for place in self.places
        ]


class Reader:
    """Makes plans for one head: the model, the version and the forwarded headers are fixed."""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        forwarded: Mapping[str, Parameter],
        max_size: int,
    ) -> None:
        self.model_name = model_name
        self.model_version = model_version
        self._forwarded = forwarded
        self._max_size = max_size
        self._plans: dict[bytes, Plan] = {}
        self._headers: dict[tuple[object, ...], RequestHeader] = {}

    def plan(self, text: bytes) -> Plan:
        """Return how to read a body whose JSON part is ``text``. Raises Triton's errors."""
        plan = self._plans.get(text)
        if plan is None:
            plan = self._make(text)
            if len(text) <= _MAX_PLAN_JSON and plan.repeats:
                if len(self._plans) >= _MAX_PLANS:
                    self._plans.clear()
                self._plans[text] = plan
        return plan

    def raw(self, signature: Signature, body: memoryview) -> Plan:
        """Return how to read a body that is the bytes of the model's only input. Raises Triton's errors."""
        try:
            return self._raw(signature, body)
        except InvalidArgument as error:
            raise labelled(error, "") from None

    def _raw(self, signature: Signature, body: memoryview) -> Plan:
        size = len(body)
        inputs = list(signature.inputs.values())
        if len(inputs) != 1:
            raise InvalidArgument(
                f"Raw request must only have 1 input (found 1) to be deduced but got {len(inputs)} inputs in "
                f"'{self.model_name}' model configuration"
            )
        declared = inputs[0]
        batch = (1,) if signature.max_batch_size > 0 else ()
        if declared.datatype is dtypes.BYTES:
            if declared.dims != (1,):
                raise InvalidArgument(
                    f"For BYTE datatype raw input '{declared.name}', the model must have input shape [1]"
                )
            spec = TensorSpec(declared.name, declared.datatype, (*batch, 1))
            place: tuple[int, int] | Buffer = join_bytes([bytes(body)])
        else:
            shape = self._deduced(declared.name, declared.dims, size // declared.datatype.size)
            spec = TensorSpec(declared.name, declared.datatype, (*batch, *shape))
            if spec.byte_size != size:
                # Triton's name for an input that nobody has named.
                raise InvalidArgument(
                    f"input byte size mismatch for input 'raw_input' for model '{self.model_name}'. "
                    f"Expected {spec.byte_size}, got {size} (a body that is empty, or whose "
                    f"Inference-Header-Content-Length is 0, is the data of '{declared.name}' without any JSON)"
                )
            place = (0, size)
        header = RequestHeader(
            self.model_name,
            self.model_version,
            [spec],
            parameters=dict(self._forwarded),
            binary_by_default=True,
        )
        return Plan(self._intern(header), "", [place], size, raw=True)

    def _deduced(self, name: str, dims: Sequence[int], elements: int) -> tuple[int, ...]:
        if dims.count(-1) > 1:
            raise InvalidArgument(
                f"The shape of the raw input '{name}' can not be deduced because there are more than one "
                "variable-sized dimension"
            )
        known = math.prod(size for size in dims if size != -1)
        return tuple(elements // known if size == -1 and known else size for size in dims)

    def _intern(self, header: RequestHeader) -> RequestHeader:
        """Return the one header that says this, so that what others note on it is found again."""
        identity = header.identity()
        known = self._headers.get(identity)
        if known is None:
            if len(self._headers) >= _MAX_PLANS:
                self._headers.clear()
            known = self._headers[identity] = header
        return known

    def _make(self, text: bytes) -> Plan:
        document = parse(text)
        if not isinstance(document, dict):
            raise Internal("Unable to parse 'inputs': attempt to access non-existing object member 'inputs'")
        return self._read(document, self._id(document))

    def _id(self, document: dict[str, Any]) -> str:
        value = document.get("id", "")
        if not isinstance(value, str):
            raise Internal("Unable to parse 'id': attempt to access JSON non-string as string")
        return value

    def _read(self, document: dict[str, Any], request_id: str) -> Plan:
        fields, custom = self._parameters(document.get("parameters", {}))
        specs: list[TensorSpec] = []
        places: list[tuple[int, int] | SharedPlace | Buffer] = []
        at = 0
        inputs = document.get("inputs")
        if not isinstance(inputs, list):
            what = (
                "attempt to access JSON non-array as array"
                if "inputs" in document
                else "attempt to access non-existing object member 'inputs'"
            )
            raise Internal(f"Unable to parse 'inputs': {what}")
        for item in inputs:
            source = _source(item)
            spec = self._spec(item)
            place, at = self._place(item, source, spec, at)
            specs.append(spec)
            places.append(place)
        header = RequestHeader(
            self.model_name,
            self.model_version,
            specs,
            self._outputs(document),
            parameters={**custom, **self._forwarded},
            shared=any(isinstance(place, SharedPlace) for place in places),
            **fields,
        )
        return Plan(self._intern(header), request_id, places, at)

    def _spec(self, item: Any) -> TensorSpec:
        name = _member(item, "name", str, "string")
        datatype_name = _member(item, "datatype", str, "string")
        datatype = dtypes.BY_NAME.get(datatype_name)
        shape = _member(item, "shape", list, "array")
        for size in shape:
            if type(size) is not int or size < 0:
                raise Internal(
                    "Unable to parse 'shape': attempt to access JSON non-unsigned-integer as unsigned-integer"
                )
        if datatype is None:
            raise InvalidArgument(f"invalid datatype for input {name}")
        spec = TensorSpec(name, datatype, tuple(shape))
        if spec.elements > _MAX_INT64:
            raise InvalidArgument(
                f"invalid shape for input '{name}': shape {show(shape)} causes total element count to exceed "
                f"maximum size of {_MAX_INT64}"
            )
        return spec

    def _place(
        self, item: dict[str, Any], source: str, spec: TensorSpec, at: int
    ) -> tuple[tuple[int, int] | SharedPlace | Buffer, int]:
        """Return where an input's bytes are, or the bytes; and where those of the next one begin."""
        if source == "data":
            if spec.byte_size > self._max_size:
                raise InvalidArgument(
                    f"JSON input '{spec.name}' has a byte_size ({spec.byte_size} bytes) that exceeds the maximum "
                    f"allowed value of {self._max_size} bytes. Use --http-max-input-size to increase the limit."
                )
            return json_tensors.read(spec, item["data"]), at
        if source == "binary_data_size":
            size = _unsigned(source, item["parameters"][source])
            return (at, at + size), at + size
        return _shared_place(item["parameters"]), at

    def _outputs(self, document: dict[str, Any]) -> list[RequestedOutput]:
        if "outputs" not in document:
            return []
        listed = document["outputs"]
        if not isinstance(listed, list):
            raise Internal("Unable to parse 'outputs': attempt to access JSON non-array as array")
        outputs: list[RequestedOutput] = []
        for item in listed:
            name = _member(item, "name", str, "string")
            parameters = _parameters_of(item)
            if "shared_memory_region" in parameters:
                _check_place(parameters)
                outputs.append(RequestedOutput(name, place=_shared_place(parameters)))
                continue
            classification = parameters.get("classification", 0)
            if type(classification) is not int or classification < 0:
                raise Internal(
                    "Unable to set 'classification': attempt to access JSON non-unsigned-integer as unsigned-integer"
                )
            binary = parameters.get("binary_data", False)
            if type(binary) is not bool:
                raise Internal("Unable to parse 'binary_data': attempt to access JSON non-boolean as boolean")
            outputs.append(RequestedOutput(name, binary=binary, classification=classification))
        return outputs

    def _parameters(self, value: Any) -> tuple[dict[str, Any], dict[str, Parameter]]:
        """Split request parameters into the ones with a meaning and the custom ones."""
        fields: dict[str, Any] = {}
        custom: dict[str, Parameter] = {}
        if not isinstance(value, dict):
            raise Internal("failed to get request params.: attempt to get members for non-object")
        for key, item in value.items():
            if key == "sequence_id":
                if type(item) is int and item >= 0:
                    fields[key] = item
                elif type(item) is not str:
                    raise Internal("Unable to parse 'sequence_id': attempt to access JSON non-string as string")
                elif len(item) > MAX_CORRELATION_ID:
                    raise Unsupported("string correlation ID cannot be longer than 128 characters")
                else:
                    fields[key] = item
            elif key in ("sequence_start", "sequence_end"):
                fields[key] = _boolean(key, item)
            elif key == "priority":
                fields["priority"] = _unsigned(key, item)
            elif key == "timeout":
                fields["timeout_us"] = _unsigned(key, item)
            elif key == "binary_data_output":
                fields["binary_by_default"] = _boolean(key, item)
            elif key.startswith("triton_"):
                raise InvalidArgument(
                    "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified."
                )
            elif type(item) is int and item > _MAX_INT64:
                custom[key] = float(item)  # as all numbers beyond a signed integer are
            elif isinstance(item, (str, bool, int, float)):
                custom[key] = item
            else:
                raise InvalidArgument(
                    f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
                )
        return fields, custom


def _source(item: Any) -> str:
    """Return which of its three possible sources an input names. Raises ``InvalidArgument`` unless it is just one."""
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


def _shared_place(parameters: Mapping[str, Any]) -> SharedPlace:
    """Return where in shared memory a tensor is."""
    region = parameters["shared_memory_region"]
    if not isinstance(region, str):
        raise Internal("Unable to parse 'shared_memory_region': attempt to access JSON non-string as string")
    offset, size = parameters.get("shared_memory_offset", 0), parameters.get("shared_memory_byte_size", 0)
    return SharedPlace(region, _unsigned("shared_memory_offset", offset), _unsigned("shared_memory_byte_size", size))


def _check_place(parameters: Mapping[str, Any]) -> None:
    """Refuse an output in shared memory that is also wanted otherwise."""
    if "classification" in parameters:
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'classification'")
    if parameters.get("binary_data"):
        raise InvalidArgument("Output can't set both 'shared_memory_region' and 'binary_data'")


def _parameters_of(item: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the parameters of an input or output; what is no object says nothing, as in Triton."""
    parameters = item.get("parameters")
    return parameters if isinstance(parameters, dict) else {}


def _boolean(key: str, value: object) -> bool:
    if type(value) is not bool:
        raise Internal(f"Unable to parse '{key}': attempt to access JSON non-boolean as boolean")
    return value


def _unsigned(key: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise Internal(f"Unable to parse '{key}': attempt to access JSON non-unsigned-integer as unsigned-integer")
    return value


def _member(item: Any, key: str, kind: type, called: str) -> Any:
    """Return a required member of an entry of ``inputs`` or ``outputs``."""
    if not isinstance(item, dict) or key not in item:
        raise Internal(f"Unable to parse '{key}': attempt to access non-existing object member '{key}'")
    if not isinstance(item[key], kind):
        raise Internal(f"Unable to parse '{key}': attempt to access JSON non-{called} as {called}")
    return item[key]


def parse(text: bytes) -> Any:
    """Parse JSON; NaN and Infinity are numbers here, and strings may be any bytes.

    Raises ``Internal`` in Triton's words, ``InvalidArgument`` for too much nesting.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        json_error.check(text.removeprefix(codecs.BOM_UTF8))
    except json_error.JsonError as error:
        raise Internal(f"failed to parse the request JSON buffer: {error}") from None
    except json_error.TooDeep:
        raise InvalidArgument(f"JSON nesting depth exceeds maximum allowed limit ({json_error.MAX_DEPTH})") from None
    plain = _INFINITY.sub(lambda found: found[0] if found[0][:1] == b'"' else b"Infinity", text)
    return json.loads(plain.decode("utf-8-sig", "surrogateescape"))
