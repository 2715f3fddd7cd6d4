"""Reading a ``ModelInferRequest``: bytes to an ``InferenceRequest``'s header, id and data."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError

from nerite.core import dtype as dtypes
from nerite.core.dtype import DataType
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unsupported
from nerite.core.request import MAX_CORRELATION_ID, Parameter, RequestedOutput, RequestHeader, SharedPlace
from nerite.core.tensor import Buffer, TensorSpec, join_bytes
from nerite.transports.callers import Sender
from nerite.transports.grpc import infer_wire
from nerite.wire.grpc_service import ModelInferRequest

_MAX_PLANS = 1024
_MAX_HEADER = 16 * 1024
_MAX_KNOWN = 16 * 1024
_MAX_LENGTHS = 256
_MAX_SAME = 4
_CONTENTS: Mapping[str, str] = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_WIDE: Mapping[str, type[np.integer[Any]]] = {
    "int_contents": np.int32,
    "int64_contents": np.int64,
    "uint_contents": np.uint32,
    "uint64_contents": np.uint64,
}
_UNKNOWN = DataType("<invalid>", "TYPE_INVALID", 0, 1, dtypes.UINT8.numpy)


class Plan(NamedTuple):
    """What a request says besides its id and raw contents."""

    header: RequestHeader
    typed: list[Buffer | SharedPlace] | None
    """The inputs, where they came as typed contents or lie in shared memory; None if they are the raw contents."""
    shared: dict[int, SharedPlace]
    """Inputs in shared memory beside raw contents, by their place in the header."""


class Known:
    """A message that was read before: what it said, and where in its framed form the tensors are."""

    __slots__ = ("beginning", "gaps", "header", "places", "size")

    def __init__(self, header: RequestHeader, message: memoryview, raw: Sequence[Buffer]) -> None:
        """``raw`` are the contents at the end of ``message``, with nothing between them but tags and lengths."""
        framed = b"\0" + len(message).to_bytes(4) + message
        end = self.size = len(framed)
        self.header = header
        self.places: list[tuple[int, int]] = []
        for contents in reversed(raw):
            self.places.insert(0, (end - len(contents), end))
            end -= len(contents) + len(infer_wire.raw_input(len(contents)))
        self.beginning = framed[: self.places[0][0]]
        self.gaps = [(end, start, framed[end:start]) for (_, end), (start, _) in itertools.pairwise(self.places)]
        """Start, end and bytes of what is between the tensors."""

    def data(self, framed: bytes) -> list[Buffer] | None:
        """Return the tensors of ``framed``, which is as long; None if it says something else."""
        if not framed.startswith(self.beginning):
            return None
        if not self.gaps:  # one input, to the end
            return [bytearray(framed[len(self.beginning) :])]
        for start, end, expected in self.gaps:
            if framed[start:end] != expected:
                return None
        # Copies, because models may work in place.
        return [bytearray(framed[start:end]) for start, end in self.places]


class InferReader:
    """Reads the requests of every connection whose metadata say the same.

    Keeps plans by the bytes they were.
    """

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._plans: dict[bytes, Plan] = {}
        self._headers: dict[tuple[object, ...], RequestHeader] = {}
        self._known: dict[int, list[Known]] = {}
        """By length: small messages of which only the data changes."""

    def known(self, framed: bytes | memoryview) -> tuple[RequestHeader, list[Buffer]] | None:
        """Return header and data of a message that says what one before said; None if it does not."""
        candidates = self._known.get(len(framed))
        if candidates is not None:
            framed = bytes(framed)
            for known in candidates:
                data = known.data(framed)
                if data is not None:
                    return known.header, data
        return None

    def read(self, message: memoryview) -> tuple[RequestHeader, str, Sequence[Any]]:
        """Return header, id and data of a serialized request; of data in shared memory the place.

        Raises Triton's errors, ``Internal`` for broken bytes.
        """
        try:
            parts = infer_wire.split(message)
            plan = (self._plans.get(parts.header) if parts.raw else None) or self._plan(parts)
        except (infer_wire.Malformed, DecodeError):
            raise Internal("Unable to parse request") from None
        if plan.typed is not None:
            return plan.header, parts.id, plan.typed
        if len(parts.raw) + len(plan.shared) != len(plan.header.inputs):
            raise _count_error(plan.header, len(parts.raw) + len(plan.shared))
        if plan.shared:
            raw = iter(parts.raw)
            return plan.header, parts.id, [plan.shared.get(at) or next(raw) for at in range(len(plan.header.inputs))]
        if parts.plain and not plan.header.shared and len(message) <= _MAX_KNOWN:
            self._remember(Known(plan.header, message, parts.raw))
        return plan.header, parts.id, parts.raw

    def _remember(self, known: Known) -> None:
        if len(self._known) >= _MAX_LENGTHS:
            self._known.clear()
        same = self._known.setdefault(known.size, [])
        same.insert(0, known)
        del same[_MAX_SAME:]

    def _plan(self, parts: infer_wire.Parts) -> Plan:
        message = ModelInferRequest.FromString(parts.header)
        plan = self._read(message, bool(parts.raw))
        if plan.typed is None and len(parts.header) <= _MAX_HEADER:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            self._plans[parts.header] = plan
        return plan

    def _read(self, message: ModelInferRequest, raw: bool) -> Plan:
        fields, custom = _parameters(message.parameters)
        specs: list[TensorSpec] = []
        typed: list[Buffer | SharedPlace] | None = None if raw else []
        shared: dict[int, SharedPlace] = {}
        for tensor in message.inputs:
            datatype = dtypes.BY_NAME.get(tensor.datatype) or _UNKNOWN
            spec = TensorSpec(tensor.name, datatype, tuple(tensor.shape))
            specs.append(spec)
            if "shared_memory_region" in tensor.parameters:
                place = _shared_place(tensor)
                if typed is None:
                    shared[len(specs) - 1] = place
                else:
                    typed.append(place)
                continue
            if tensor.HasField("contents"):
                if raw:
                    raise InvalidArgument(
                        "contents field must not be specified when using raw_input_contents for "
                        f"'{tensor.name}' for model '{message.model_name}'"
                    )
                assert typed is not None
                typed.append(_contents(spec, tensor.contents, message.model_name))
            elif not raw:
                raise InvalidArgument(
                    f"unable to find data for input tensor '{tensor.name}' for model '{message.model_name}' in request."
                )
        header = RequestHeader(
            message.model_name,
            message.model_version,
            specs,
            [_output(output) for output in message.outputs],
            parameters={**custom, **self._sender.forwarded},
            caller=self._sender.caller,
            idempotency_key=self._sender.idempotency_key,
            shared=any("shared_memory_region" in tensor.parameters for tensor in message.inputs),
            **fields,
        )
        identity = header.identity()
        known = self._headers.get(identity)
        if known is None:
            if len(self._headers) >= _MAX_PLANS:
                self._headers.clear()
            known = self._headers[identity] = header
        return Plan(known, typed, shared)


def _count_error(header: RequestHeader, given: int) -> NeriteError:
    if given > len(header.inputs):
        return InvalidArgument(
            f"expected {len(header.inputs)} raw_input_contents entries for model '{header.model_name}', got {given}"
        )
    missing = header.inputs[given]
    return InvalidArgument(
        f"unable to find data for input tensor '{missing.name}' for model '{header.model_name}' in request."
    )


def _contents(spec: TensorSpec, contents: Any, model: str) -> Buffer:
    """Return the wire form of typed contents."""
    expected = _CONTENTS.get(spec.datatype.name)
    fields = contents.ListFields()
    for descriptor, _ in fields:
        if descriptor.name != expected:
            if fields[0][0].name == expected:
                raise InvalidArgument(
                    f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{model}', binary data "
                    "was already supplied."
                )
            given = next((name for name, field in _CONTENTS.items() if field == descriptor.name), "")
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{model}' of type "
                f"'{given}', expected datatype '{spec.datatype.name}'"
            )
    if expected is None:
        raise InvalidArgument(
            f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{model}': "
            f"datatype '{spec.datatype.name}' is raw_input_contents only"
        )
    values = getattr(contents, expected)
    if spec.datatype is dtypes.BYTES:
        return join_bytes(values)
    # Narrow integers travel in wider fields; what does not fit wraps, as it does in C.
    array = np.array(values, dtype=_WIDE.get(expected, spec.datatype.numpy)).astype(spec.datatype.numpy, copy=False)
    return array.data.cast("B") if array.size else b""


def _output(output: Any) -> RequestedOutput:
    classification = 0
    place = None
    for key, parameter in output.parameters.items():
        if key == "classification":
            if parameter.WhichOneof("parameter_choice") != "int64_param":
                raise InvalidArgument("invalid value type for 'classification' parameter, expected int64_param")
            classification = parameter.int64_param
            if classification <= 0:
                raise InvalidArgument("invalid value for 'classification' parameter, expected >= 0")
        elif key == "shared_memory_region":
            place = _shared_place(output)
            if "classification" in output.parameters:
                raise InvalidArgument("output can't set both 'shared_memory_region' and 'classification'")
    return RequestedOutput(output.name, binary=True, classification=classification, place=place)


def _shared_place(tensor: Any) -> SharedPlace:
    """Return where in shared memory a tensor is. Raises Triton's errors."""
    parameters = tensor.parameters
    region = parameters["shared_memory_region"]
    if not region.HasField("string_param"):
        raise InvalidArgument(
            f"invalid value type for 'shared_memory_region' parameter for tensor '{tensor.name}', "
            "expected string_param."
        )
    if "shared_memory_byte_size" not in parameters:
        raise InvalidArgument(
            "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
            f"'{tensor.name}'"
        )
    numbers = []
    for name in ("shared_memory_offset", "shared_memory_byte_size"):
        if name in parameters and not parameters[name].HasField("int64_param"):
            raise InvalidArgument(
                f"invalid value type for '{name}' parameter for tensor '{tensor.name}', expected int64_param."
            )
        number = parameters[name].int64_param if name in parameters else 0
        if number < 0:
            raise InvalidArgument(f"invalid value for '{name}' parameter for tensor '{tensor.name}', expected >= 0.")
        numbers.append(number)
    return SharedPlace(region.string_param, *numbers)


_FIELDS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "sequence_id": ("sequence_id", ("int64_param", "string_param"), "int64_param or string_param"),
    "sequence_start": ("sequence_start", ("bool_param",), "bool_param"),
    "sequence_end": ("sequence_end", ("bool_param",), "bool_param"),
    "priority": ("priority", ("int64_param", "uint64_param"), "int64_param or uint64_param"),
    "timeout": ("timeout_us", ("int64_param",), "int64_param"),
}


def _parameters(parameters: Any) -> tuple[dict[str, Any], dict[str, Parameter]]:
    """Split request parameters into the ones with a meaning and the custom ones."""
    fields: dict[str, Any] = {}
    custom: dict[str, Parameter] = {}
    for key, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        value = getattr(parameter, choice) if choice else None
        known = _FIELDS.get(key)
        if known is not None:
            name, choices, wording = known
            if choice not in choices:
                raise InvalidArgument(f"invalid value type for '{key}' parameter, expected {wording}.")
            if type(value) is int and value < 0:
                if key != "sequence_id":
                    raise InvalidArgument(f"invalid value for '{key}', expected value >= 0.")
                value += 1 << 64  # an unsigned id, in the only field that there is for it
            if type(value) is str and len(value.encode()) > MAX_CORRELATION_ID:
                raise Unsupported("string correlation ID cannot be longer than 128 characters")
            fields[name] = value
        elif key == "triton_enable_empty_final_response":
            if choice != "bool_param":
                raise InvalidArgument(f"invalid value type for '{key}' parameter, expected bool_param.")
            fields["empty_final"] = value
        elif key.startswith("triton_"):
            raise InvalidArgument(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                "starting with 'triton_' are allowed: triton_enable_empty_final_response"
            )
        elif value is None or choice == "uint64_param":
            raise InvalidArgument(
                f"invalid value type for '{key}' parameter, expected int64_param, bool_param, or string_param."
            )
        else:
            custom[key] = value
    return fields, custom
