"""Parses a ``ModelInferRequest``: from bytes to the header, id and tensor data of an ``InferenceRequest``.

Parsed headers are memoized as plans, since clients repeat them. Typed contents are converted here to tensor bytes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from google.protobuf.message import DecodeError

from nerite.core import headers
from nerite.core import tensor as dtypes
from nerite.core.byte_budget import GRPC_PLANS, Memo
from nerite.core.client_text import checked, checked_name
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unsupported
from nerite.core.request import MAX_CORRELATION_ID, RequestedOutput, RequestHeader, SharedMemoryInput
from nerite.core.response import Parameter
from nerite.core.tensor import Buffer, DataType, TensorSpec
from nerite.core.text import MAX_VALUE
from nerite.transports.access import SenderHeaders
from nerite.transports.grpc import wire
from nerite.transports.grpc.wire import MAX_FIELDS, MalformedMessage, each_field, read_field, read_varint
from nerite.wire.grpc_service import ModelInferRequest

# Typed contents: protobuf's encoding of numbers and strings, converted to the bytes of a tensor.
#
# Floats have the same encoding in both, so they are not copied. Varints are decoded with numpy, in pieces. Protobuf's
# own parser would create a Python object per element, and hold the GIL meanwhile.

CONTENTS: Final[Mapping[str, str]] = {
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
"""Field of ``InferTensorContents`` by datatype."""
_NAMES: Final = (
    "", "bool_contents", "int_contents", "int64_contents", "uint_contents", "uint64_contents", "fp32_contents",
    "fp64_contents", "bytes_contents",
)  # fmt: skip
"""Names of the fields by field number."""
_WIRE_TYPES: Final = (-1, 0, 0, 0, 0, 0, 5, 1, 2)
"""Wire type of a single element by field number."""
_BYTES_FIELD: Final = 8
_BYTES_TAG: Final = _BYTES_FIELD << 3 | 2
_PACKED: Final = 2
_MAX_VARINT_BYTES: Final = 10
"""Maximum length of a 64-bit varint."""
PIECE: Final = 256 * 1024
_MAX_PYTHON_BYTES: Final = 128
"""Bytes of varints up to which Python is faster than numpy."""
_UINT64_MASK: Final = (1 << 64) - 1
PAUSE_EVERY: Final = 4096
"""Number of strings after which a background thread sleeps, so that the event loop can take the GIL."""
_PAUSE_SECONDS: Final = 0.0002
_LENGTH_PREFIXES: Final = tuple(size.to_bytes(4, "little") for size in range(0x80))
"""Length prefixes of short strings in the wire form of a tensor."""

Take = Callable[[int], None]
"""Reserves the bytes of a tensor before they are allocated; an exception that it raises ends the work."""


def read_contents(spec: TensorSpec, messages: Sequence[memoryview], model: str, take: Take, *, aside: bool) -> Buffer:
    """Return the bytes of a tensor whose typed contents are the concatenated ``messages``.

    ``aside``: this is a background thread, which yields the GIL now and then. Raises ``MalformedMessage`` for bytes
    that are not a message, and ``InvalidArgument`` with Triton's text for contents of another type.
    """
    expected = CONTENTS.get(spec.datatype.name)
    if expected == _NAMES[_BYTES_FIELD]:
        found, others = _read_strings(messages, take, aside=aside)
        _check(spec, model, expected, others | {_BYTES_FIELD} if found else others)
        return found
    given: dict[int, list[memoryview]] = {}
    for message in messages:
        for tag, _, at, stop in each_field(message, MAX_FIELDS, f"in the contents of '{spec.name}'"):
            number, kind = tag >> 3, tag & 7
            if (
                0 < number <= _BYTES_FIELD
                and kind in (_PACKED, _WIRE_TYPES[number])
                and (stop > at or number == _BYTES_FIELD)
            ):
                # Unpacked elements, concatenated, are the bytes of a packed field.
                given.setdefault(number, []).append(message[at:stop])
    _check(spec, model, expected, given.keys())
    if not given:
        return b""
    ((number, chunks),) = given.items()
    if _WIRE_TYPES[number]:
        return _read_fixed(chunks, spec.datatype.size, take)
    return _read_varints(chunks, spec.datatype.numpy, take)


def _check(spec: TensorSpec, model: str, expected: str | None, given: Any) -> None:
    """Raise Triton's errors unless all ``given`` field numbers are the expected field."""
    names = [_NAMES[number] for number in sorted(given)]
    for name in names:
        if name != expected:
            if names[0] == expected:
                raise InvalidArgument(
                    f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{model}', binary data "
                    "was already supplied."
                )
            type_of = next((datatype for datatype, field in CONTENTS.items() if field == name), "")
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{model}' of type "
                f"'{type_of}', expected datatype '{spec.datatype.name}'"
            )
    if expected is None:
        raise InvalidArgument(
            f"unexpected explicit tensor data for input tensor '{spec.name}' for model '{model}': "
            f"datatype '{spec.datatype.name}' is raw_input_contents only"
        )


def _read_fixed(chunks: list[memoryview], size: int, take: Take) -> Buffer:
    if any(len(chunk) % size for chunk in chunks):
        raise MalformedMessage
    if len(chunks) == 1:
        return chunks[0]
    take(sum(map(len, chunks)))
    return bytearray().join(chunks)


def _read_varints(chunks: list[memoryview], datatype: np.dtype[Any], take: Take) -> Buffer:
    if sum(map(len, chunks)) <= _MAX_PYTHON_BYTES:
        return np.array([*_read_few_varints(chunks)], np.uint64).astype(datatype).data.cast("B")
    count = sum(int(np.count_nonzero(piece < 0x80)) for chunk in chunks for piece in _varint_pieces(chunk))
    take(count * datatype.itemsize)
    values = np.empty(count, datatype)
    filled = 0
    for chunk in chunks:
        for piece in _varint_pieces(chunk):
            decoded = _decode_piece(piece)
            # Narrow integers are sent in wider fields; values that do not fit wrap around, as in C.
            values[filled : filled + len(decoded)] = decoded != 0 if datatype == np.bool_ else decoded.astype(datatype)
            filled += len(decoded)
    return values.data.cast("B")


def _read_few_varints(chunks: list[memoryview]) -> Iterator[int]:
    for chunk in chunks:
        at = 0
        while at < len(chunk):
            value, at = read_varint(chunk, at)
            yield value & _UINT64_MASK


def _varint_pieces(chunk: memoryview) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Split consecutive varints into pieces that end with the last byte of a varint."""
    whole = np.frombuffer(chunk, np.uint8)
    at = 0
    while at < len(whole):
        stop = min(at + PIECE, len(whole))
        last = np.flatnonzero(whole[max(at, stop - _MAX_VARINT_BYTES) : stop] < 0x80)
        if not len(last) or (stop == len(whole) and whole[-1] >= 0x80):
            raise MalformedMessage
        stop = max(at, stop - _MAX_VARINT_BYTES) + int(last[-1]) + 1
        yield whole[at:stop]
        at = stop


def _decode_piece(piece: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
    """Return the varints of a piece as unsigned integers."""
    ends = np.flatnonzero(piece < 0x80)
    if len(ends) == len(piece):
        return piece
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > _MAX_VARINT_BYTES:
        raise MalformedMessage
    low = piece & 0x7F
    values = low[starts].astype(np.uint64)
    for byte in range(1, longest):
        longer = np.flatnonzero(lengths > byte)
        values[longer] |= low[starts[longer] + byte].astype(np.uint64) << np.uint64(7 * byte)
    return values


def _read_strings(messages: Sequence[memoryview], take: Take, *, aside: bool) -> tuple[bytearray, set[int]]:
    """Return the strings in the wire form of a tensor, and the numbers of other fields that have contents."""
    joined = bytearray()
    others: set[int] = set()
    taken = count = 0
    for message in messages:
        at, end = 0, len(message)
        while at < end:
            count += 1
            if message[at] == _BYTES_TAG and at + 1 < end and (size := message[at + 1]) < 0x80:  # the usual case
                at += 2
                stop = at + size
                joined += _LENGTH_PREFIXES[size]
                if size:
                    joined += message[at:stop]
            else:
                tag, at, stop = read_field(message, at)
                number = tag >> 3
                if tag == _BYTES_TAG:
                    joined += (stop - at).to_bytes(4, "little")
                    joined += message[at:stop]
                elif 0 < number < _BYTES_FIELD and tag & 7 in (_PACKED, _WIRE_TYPES[number]) and stop > at:
                    others.add(number)
            if stop > end:
                raise MalformedMessage
            at = stop
            if not count % PAUSE_EVERY:
                take(len(joined) - taken)
                taken = len(joined)
                if aside:
                    time.sleep(_PAUSE_SECONDS)
    take(len(joined) - taken)
    return joined, others


Read: TypeAlias = tuple[RequestHeader, str, Sequence[Any]]
"""A parsed message: header, id, and the data of each input or its place in shared memory."""

_MAX_KNOWN_BYTES = 16 * 1024
_LARGE_CONTENTS = 32 * 1024
"""Size of typed contents from which they are decoded in a thread."""
_MAX_KNOWN_PER_SIZE = 4
_PLAN_BYTES = 512
_TENSOR_BYTES = 256
"""Memory of a plan or a known message, in bytes, apart from its header and text, and of each tensor in it."""
_UNKNOWN_DATATYPE = DataType("<invalid>", "TYPE_INVALID", 0, 1, dtypes.UINT8.numpy)


class GrpcInferPlan(NamedTuple):
    """Everything in a request apart from its id and tensor data."""

    header: RequestHeader
    typed: bool
    """The request has no raw contents: each input has typed contents or is in shared memory."""
    shared: dict[int, SharedMemoryInput]
    """Inputs in shared memory by their index in the header."""
    footprint: int
    """Approximate memory of the plan in bytes."""


class KnownMessage:
    """An earlier message: its header, and where in its framed form the tensors are."""

    __slots__ = ("beginning", "gaps", "header", "older", "places", "size")

    def __init__(self, header: RequestHeader, message: memoryview, raw: Sequence[Buffer]) -> None:
        """``raw`` are the contents at the end of ``message``, separated only by tags and lengths."""
        self.older: KnownMessage | None = None
        """Next older message of the same length."""
        framed = b"\0" + len(message).to_bytes(4) + message
        end = self.size = len(framed)
        self.header = header
        self.places: list[tuple[int, int]] = []
        for tensor in reversed(raw):
            self.places.insert(0, (end - len(tensor), end))
            end -= len(tensor) + len(wire.raw_input(len(tensor)))
        self.beginning = framed[: self.places[0][0]]
        self.gaps = [(end, start, framed[end:start]) for (_, end), (start, _) in itertools.pairwise(self.places)]
        """Start, end and bytes of each gap between tensors."""

    def data(self, framed: bytes) -> list[Buffer] | None:
        """Return the tensors of ``framed``, which has the same length; None if it differs elsewhere."""
        if not framed.startswith(self.beginning):
            return None
        if not self.gaps:  # one input, which extends to the end
            return [bytearray(framed[len(self.beginning) :])]
        for start, end, expected in self.gaps:
            if framed[start:end] != expected:
                return None
        # Copied, because models may modify their inputs in place.
        return [bytearray(framed[start:end]) for start, end in self.places]


class InferReader:
    """Parses the requests of all connections that send the same metadata.

    Plans are memoized by the serialized header of the request.
    """

    def __init__(self, sender: SenderHeaders) -> None:
        self._sender = sender
        self._plans: Memo[bytes, GrpcInferPlan] = Memo()
        self._headers: Memo[tuple[object, ...], tuple[RequestHeader, int]] = Memo()
        """Headers by identity, each with its memory in bytes."""
        self._known: Memo[int, KnownMessage] = Memo()
        """Most recent small message of each length, in which usually only the data changes; it links to older ones."""

    def known(self, framed: bytes | memoryview) -> tuple[RequestHeader, list[Buffer]] | None:
        """Return header and data of a message that differs from an earlier one only in its data; None otherwise."""
        known = self._known.get(len(framed))
        if known is not None:
            framed = bytes(framed)
            while known is not None:
                data = known.data(framed)
                if data is not None:
                    return known.header, data
                known = known.older
        return None

    def read(self, parts: wire.InferParts, message: memoryview, take: Take, *, aside: bool = False) -> Read:
        """Parse ``message``, which was split into ``parts``.

        ``aside``: this is a background thread. ``take`` reserves memory for tensors. Raises Triton's errors,
        ``Internal`` for malformed bytes including text that is not UTF-8, and ``InvalidArgument`` for text that is too
        long and for too many elements of any kind.
        """
        try:
            checked_name(parts.id, "'id'")
            plan = self._plans.get(parts.header)
            if plan is None or plan.typed is bool(parts.raw):
                plan = self._plan(parts)
            header = plan.header
            if plan.typed:
                data = [
                    plan.shared.get(at) or read_contents(spec, parts.typed[at], header.model_name, take, aside=aside)
                    for at, spec in enumerate(header.inputs)
                ]
                return header, parts.id, data
        except (wire.MalformedMessage, DecodeError):
            raise broken() from None
        if (count := len(header.inputs) - len(plan.shared)) != len(parts.raw):
            _check_count(header, plan.shared, count, len(parts.raw))
        if plan.shared:
            raw = iter(parts.raw)
            return header, parts.id, [plan.shared.get(at) or next(raw) for at in range(len(header.inputs))]
        if parts.plain and parts.raw and not header.shared and len(message) <= _MAX_KNOWN_BYTES:
            self._remember(KnownMessage(header, message, parts.raw), plan.footprint)
        return header, parts.id, parts.raw

    def _remember(self, known: KnownMessage, footprint: int) -> None:
        last = known.older = self._known.get(known.size)
        for _ in range(_MAX_KNOWN_PER_SIZE - 2):
            last = last and last.older
        if last is not None:
            last.older = None
        GRPC_PLANS.put(self._known, known.size, known, footprint + known.size + _TENSOR_BYTES * len(known.places))

    def _plan(self, parts: wire.InferParts) -> GrpcInferPlan:
        message = ModelInferRequest.FromString(parts.header)
        plan = self._read(message, bool(parts.raw))
        GRPC_PLANS.put(self._plans, parts.header, plan, plan.footprint + 2 * len(parts.header))
        return plan

    def _read(self, message: ModelInferRequest, raw: bool) -> GrpcInferPlan:
        for what, repeated in _repeated(message):
            if len(repeated) > wire.MAX_REPEATED:
                raise wire.too_many(what, len(repeated))
        fields, custom = _parameters(message.parameters)
        specs: list[TensorSpec] = []
        shared: dict[int, SharedMemoryInput] = {}
        checked_name(message.model_name, "'model_name'")
        checked_name(message.model_version, "'model_version'")
        for tensor in message.inputs:
            checked_name(tensor.name, "the name of an input")
            datatype = dtypes.BY_NAME.get(tensor.datatype) or _UNKNOWN_DATATYPE
            spec = TensorSpec(tensor.name, datatype, tuple(tensor.shape))
            specs.append(spec)
            if "shared_memory_region" in tensor.parameters:
                shared[len(specs) - 1] = _shared_place(tensor)
                continue
            if tensor.HasField("contents"):
                if raw:
                    raise InvalidArgument(
                        "contents field must not be specified when using raw_input_contents for "
                        f"'{tensor.name}' for model '{message.model_name}'"
                    )
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
            forwarded=self._sender.forwarded.keys(),
            caller=self._sender.caller,
            idempotency_key=self._sender.idempotency_key,
            sticky_fields=self._sender.sticky_fields,
            shared=any("shared_memory_region" in tensor.parameters for tensor in message.inputs),
            **fields,
        )
        identity = header.identity()
        known = self._headers.get(identity)
        if known is None:
            known = header, headers.request_header_bytes(header)
            GRPC_PLANS.put(self._headers, identity, known, known[1])
        return GrpcInferPlan(known[0], not raw, shared, known[1] + _PLAN_BYTES + _TENSOR_BYTES * len(shared))


def heavy(parts: wire.InferParts) -> bool:
    """Return whether parsing the request would block the event loop for too long."""
    if len(parts.header) > wire.LARGE_HEADER:
        return True
    return bool(parts.typed) and sum(len(each) for messages in parts.typed for each in messages) > _LARGE_CONTENTS


def broken() -> NeriteError:
    """Return the error for bytes that are not a message."""
    return Internal("Unable to parse request")


def _repeated(message: ModelInferRequest) -> Iterator[tuple[str, Any]]:
    """Yield the repeated fields of a message with their names."""
    yield "parameters", message.parameters
    yield "inputs", message.inputs
    yield "outputs", message.outputs
    for given in message.inputs:
        yield "shape", given.shape
        yield "parameters", given.parameters
    for wanted in message.outputs:
        yield "parameters", wanted.parameters


def _check_count(header: RequestHeader, shared: Mapping[int, SharedMemoryInput], expected: int, given: int) -> None:
    """Raise ``InvalidArgument`` for too few entries of raw_input_contents, and for too many.

    As in Triton there may be entries for inputs that are in shared memory, and then the last ones have no effect.
    """
    if given < expected:
        missing = [each.name for at, each in enumerate(header.inputs) if at not in shared][given]
        raise InvalidArgument(
            f"unable to find data for input tensor '{missing}' for model '{header.model_name}' in request."
        )
    if given > len(header.inputs):
        raise InvalidArgument(
            f"expected {expected} raw_input_contents entries for model '{header.model_name}', got {given}"
        )


def _output(output: Any) -> RequestedOutput:
    checked_name(output.name, "the name of an output")
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


def _shared_place(tensor: Any) -> SharedMemoryInput:
    """Return the place of a tensor in shared memory. Raises Triton's errors."""
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
    return SharedMemoryInput(checked_name(region.string_param, "'shared_memory_region'"), *numbers)


_FIELDS: Mapping[str, tuple[str, tuple[str, ...], str]] = {
    "sequence_id": ("sequence_id", ("int64_param", "string_param"), "int64_param or string_param"),
    "sequence_start": ("sequence_start", ("bool_param",), "bool_param"),
    "sequence_end": ("sequence_end", ("bool_param",), "bool_param"),
    "priority": ("priority", ("int64_param", "uint64_param"), "int64_param or uint64_param"),
    "timeout": ("timeout_us", ("int64_param",), "int64_param"),
}


def _parameters(parameters: Any) -> tuple[dict[str, Any], dict[str, Parameter]]:
    """Split request parameters into fields of the header and custom parameters."""
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
                value += 1 << 64  # an unsigned id, which has only a signed field
            if type(value) is str and len(value.encode()) > MAX_CORRELATION_ID:
                raise Unsupported("string correlation ID cannot be longer than 128 characters")
            fields[name] = checked_name(value, f"'{key}'") if type(value) is str else value
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
            checked_name(key, "the name of a parameter")
            custom[key] = checked(value, f"parameter '{key}'", MAX_VALUE) if choice == "string_param" else value
    return fields, custom
