"""Reading a ``ModelInferRequest``: bytes to an ``InferenceRequest``'s header, id and data."""

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
from nerite.core.client_text import checked
from nerite.core.errors import Internal, InvalidArgument, NeriteError, Unsupported
from nerite.core.request import MAX_CORRELATION_ID, RequestedOutput, RequestHeader, SharedMemoryInput
from nerite.core.response import Parameter
from nerite.core.tensor import Buffer, DataType, TensorSpec
from nerite.core.text import MAX_VALUE
from nerite.transports.access import SenderHeaders
from nerite.transports.grpc import wire
from nerite.transports.grpc.wire import MAX_FIELDS, MalformedMessage, each_field, read_field, read_varint
from nerite.wire.grpc_service import ModelInferRequest

# Typed contents of tensors: what protobuf's encoding of numbers and strings means, as the bytes of a tensor.
#
# Floats are encoded as the bytes that they are, so these are not copied. Numbers of variable length are decoded in
# numpy, a piece at a time. Protobuf's own parser would make a Python object of each element, and release nothing
# meanwhile.

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
"""The field of each datatype."""
_NAMES: Final = (
    "", "bool_contents", "int_contents", "int64_contents", "uint_contents", "uint64_contents", "fp32_contents",
    "fp64_contents", "bytes_contents",
)  # fmt: skip
"""By number."""
_KINDS: Final = (-1, 0, 0, 0, 0, 0, 5, 1, 2)
"""The wire type of one element of each."""
_STRINGS: Final = 8
_STRING_TAG: Final = _STRINGS << 3 | 2
_PACKED: Final = 2
_LONGEST: Final = 10
"""Bytes of a number of 64 bits."""
_PIECE: Final = 256 * 1024
_FEW: Final = 128
"""Bytes of numbers up to which Python is faster than numpy."""
_MASK: Final = (1 << 64) - 1
_PAUSE_EVERY: Final = 4096
"""Strings after which a thread sleeps, so that the event loop need not wait for the interpreter's lock to be taken."""
_PAUSE: Final = 0.0002
_SHORT: Final = tuple(size.to_bytes(4, "little") for size in range(0x80))
"""What stands before a short string in the wire form of a tensor."""

Take = Callable[[int], None]
"""Is told of the size of a tensor before there is memory for it; what it raises ends the work."""


def read_contents(spec: TensorSpec, messages: Sequence[memoryview], model: str, take: Take, *, aside: bool) -> Buffer:
    """Return the bytes of a tensor whose typed contents are ``messages``, joined.

    ``aside``: this is not the event loop's thread, which is let go on now and then. Raises ``MalformedMessage`` for
    what is no message, ``InvalidArgument`` with Triton's text for contents of another type.
    """
    expected = CONTENTS.get(spec.datatype.name)
    if expected == _NAMES[_STRINGS]:
        found, others = _strings(messages, take, aside=aside)
        _check(spec, model, expected, others | {_STRINGS} if found else others)
        return found
    given: dict[int, list[memoryview]] = {}
    for message in messages:
        for tag, _, at, stop in each_field(message, MAX_FIELDS, f"in the contents of '{spec.name}'"):
            number, kind = tag >> 3, tag & 7
            if 0 < number <= _STRINGS and kind in (_PACKED, _KINDS[number]) and (stop > at or number == _STRINGS):
                # Elements that are not packed are together what a packed field has.
                given.setdefault(number, []).append(message[at:stop])
    _check(spec, model, expected, given.keys())
    if not given:
        return b""
    ((number, chunks),) = given.items()
    if _KINDS[number]:
        return _fixed(chunks, spec.datatype.size, take)
    return _varints(chunks, spec.datatype.numpy, take)


def _check(spec: TensorSpec, model: str, expected: str | None, given: Any) -> None:
    """Raise Triton's errors unless all that is given is what is expected. ``given`` are numbers of fields."""
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


def _fixed(chunks: list[memoryview], size: int, take: Take) -> Buffer:
    if any(len(chunk) % size for chunk in chunks):
        raise MalformedMessage
    if len(chunks) == 1:
        return chunks[0]
    take(sum(map(len, chunks)))
    return bytearray().join(chunks)


def _varints(chunks: list[memoryview], datatype: np.dtype[Any], take: Take) -> Buffer:
    if sum(map(len, chunks)) <= _FEW:
        return np.array([*_few(chunks)], np.uint64).astype(datatype).data.cast("B")
    count = sum(int(np.count_nonzero(piece < 0x80)) for chunk in chunks for piece in _pieces(chunk))
    take(count * datatype.itemsize)
    values = np.empty(count, datatype)
    filled = 0
    for chunk in chunks:
        for piece in _pieces(chunk):
            decoded = _decoded(piece)
            # Narrow integers travel in wider fields; what does not fit wraps, as it does in C.
            values[filled : filled + len(decoded)] = decoded != 0 if datatype == np.bool_ else decoded.astype(datatype)
            filled += len(decoded)
    return values.data.cast("B")


def _few(chunks: list[memoryview]) -> Iterator[int]:
    for chunk in chunks:
        at = 0
        while at < len(chunk):
            value, at = read_varint(chunk, at)
            yield value & _MASK


def _pieces(chunk: memoryview) -> Iterator[np.ndarray[Any, np.dtype[np.uint8]]]:
    """Yield numbers that follow each other, in pieces that end with the last byte of a number."""
    whole = np.frombuffer(chunk, np.uint8)
    at = 0
    while at < len(whole):
        stop = min(at + _PIECE, len(whole))
        last = np.flatnonzero(whole[max(at, stop - _LONGEST) : stop] < 0x80)
        if not len(last) or (stop == len(whole) and whole[-1] >= 0x80):
            raise MalformedMessage
        stop = max(at, stop - _LONGEST) + int(last[-1]) + 1
        yield whole[at:stop]
        at = stop


def _decoded(piece: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any]:
    """Return the numbers in a piece, all without a sign."""
    ends = np.flatnonzero(piece < 0x80)
    if len(ends) == len(piece):
        return piece
    starts = np.empty_like(ends)
    starts[0] = 0
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts + 1
    longest = int(lengths.max())
    if longest > _LONGEST:
        raise MalformedMessage
    low = piece & 0x7F
    values = low[starts].astype(np.uint64)
    for byte in range(1, longest):
        longer = np.flatnonzero(lengths > byte)
        values[longer] |= low[starts[longer] + byte].astype(np.uint64) << np.uint64(7 * byte)
    return values


def _strings(messages: Sequence[memoryview], take: Take, *, aside: bool) -> tuple[bytearray, set[int]]:
    """Return the wire form of the strings, and the numbers of the other fields that have contents."""
    joined = bytearray()
    others: set[int] = set()
    taken = count = 0
    for message in messages:
        at, end = 0, len(message)
        while at < end:
            count += 1
            if message[at] == _STRING_TAG and at + 1 < end and (size := message[at + 1]) < 0x80:  # mostly
                at += 2
                stop = at + size
                joined += _SHORT[size]
                if size:
                    joined += message[at:stop]
            else:
                tag, at, stop = read_field(message, at)
                number = tag >> 3
                if tag == _STRING_TAG:
                    joined += (stop - at).to_bytes(4, "little")
                    joined += message[at:stop]
                elif 0 < number < _STRINGS and tag & 7 in (_PACKED, _KINDS[number]) and stop > at:
                    others.add(number)
            if stop > end:
                raise MalformedMessage
            at = stop
            if not count % _PAUSE_EVERY:
                take(len(joined) - taken)
                taken = len(joined)
                if aside:
                    time.sleep(_PAUSE)
    take(len(joined) - taken)
    return joined, others


Read: TypeAlias = tuple[RequestHeader, str, Sequence[Any]]
"""What a message says: header, id, and the data of each input, or where in shared memory it is."""

_MAX_KNOWN = 16 * 1024
_LARGE_CONTENTS = 32 * 1024
"""Bytes of typed contents from which on they are decoded in a thread."""
_MAX_SAME = 4
_PLAN = 512
_TENSOR = 256
"""Bytes that a plan, or a known message, takes in memory beside its header and text, and each tensor in it."""
_UNKNOWN = DataType("<invalid>", "TYPE_INVALID", 0, 1, dtypes.UINT8.numpy)


class GrpcInferPlan(NamedTuple):
    """What a request says besides its id and its tensors."""

    header: RequestHeader
    typed: bool
    """There are no raw contents: all inputs come as typed contents, or are in shared memory."""
    shared: dict[int, SharedMemoryInput]
    """Inputs in shared memory, by their place in the header."""
    footprint: int
    """Bytes that it takes in memory, about."""


class KnownMessage:
    """A message that was read before: what it said, and where in its framed form the tensors are."""

    __slots__ = ("beginning", "gaps", "header", "older", "places", "size")

    def __init__(self, header: RequestHeader, message: memoryview, raw: Sequence[Buffer]) -> None:
        """``raw`` are the contents at the end of ``message``, with nothing between them but tags and lengths."""
        self.older: KnownMessage | None = None
        """Another one of the same length."""
        framed = b"\0" + len(message).to_bytes(4) + message
        end = self.size = len(framed)
        self.header = header
        self.places: list[tuple[int, int]] = []
        for tensor in reversed(raw):
            self.places.insert(0, (end - len(tensor), end))
            end -= len(tensor) + len(wire.raw_input(len(tensor)))
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

    def __init__(self, sender: SenderHeaders) -> None:
        self._sender = sender
        self._plans: Memo[bytes, GrpcInferPlan] = Memo()
        self._headers: Memo[tuple[object, ...], tuple[RequestHeader, int]] = Memo()
        """By what they say; each with the bytes that it takes in memory."""
        self._known: Memo[int, KnownMessage] = Memo()
        """By length: small messages of which only the data changes. Of several the last one, which has the others."""

    def known(self, framed: bytes | memoryview) -> tuple[RequestHeader, list[Buffer]] | None:
        """Return header and data of a message that says what one before said; None if it does not."""
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
        """Return what ``message`` says, of which ``parts`` are the parts.

        ``aside``: this is not the event loop's thread. ``take`` is told of memory for tensors. Raises Triton's errors,
        ``Internal`` for broken bytes, to which text that is not UTF-8 belongs, and ``InvalidArgument`` for text that
        is too long and for too many of anything.
        """
        try:
            checked(parts.id, "'id'")
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
        if len(parts.raw) + len(plan.shared) != len(header.inputs):
            raise _count_error(header, len(parts.raw) + len(plan.shared))
        if plan.shared:
            raw = iter(parts.raw)
            return header, parts.id, [plan.shared.get(at) or next(raw) for at in range(len(header.inputs))]
        if parts.plain and parts.raw and not header.shared and len(message) <= _MAX_KNOWN:
            self._remember(KnownMessage(header, message, parts.raw), plan.footprint)
        return header, parts.id, parts.raw

    def _remember(self, known: KnownMessage, footprint: int) -> None:
        last = known.older = self._known.get(known.size)
        for _ in range(_MAX_SAME - 2):
            last = last and last.older
        if last is not None:
            last.older = None
        GRPC_PLANS.put(self._known, known.size, known, footprint + known.size + _TENSOR * len(known.places))

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
        checked(message.model_name, "'model_name'")
        checked(message.model_version, "'model_version'")
        for tensor in message.inputs:
            checked(tensor.name, "the name of an input")
            datatype = dtypes.BY_NAME.get(tensor.datatype) or _UNKNOWN
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
            caller=self._sender.caller,
            idempotency_key=self._sender.idempotency_key,
            shared=any("shared_memory_region" in tensor.parameters for tensor in message.inputs),
            **fields,
        )
        identity = header.identity()
        known = self._headers.get(identity)
        if known is None:
            known = header, headers.request_header_bytes(header)
            GRPC_PLANS.put(self._headers, identity, known, known[1])
        return GrpcInferPlan(known[0], not raw, shared, known[1] + _PLAN + _TENSOR * len(shared))


def heavy(parts: wire.InferParts) -> bool:
    """Return whether reading the rest of a request would hold up the event loop."""
    if len(parts.header) > wire.LARGE_HEADER:
        return True
    return bool(parts.typed) and sum(len(each) for messages in parts.typed for each in messages) > _LARGE_CONTENTS


def broken() -> NeriteError:
    """Return the refusal of bytes that are no message."""
    return Internal("Unable to parse request")


def _repeated(message: ModelInferRequest) -> Iterator[tuple[str, Any]]:
    """Yield what there may be many of, with its name."""
    yield "parameters", message.parameters
    yield "inputs", message.inputs
    yield "outputs", message.outputs
    for given in message.inputs:
        yield "shape", given.shape
        yield "parameters", given.parameters
    for wanted in message.outputs:
        yield "parameters", wanted.parameters


def _count_error(header: RequestHeader, given: int) -> NeriteError:
    if given > len(header.inputs):
        return InvalidArgument(
            f"expected {len(header.inputs)} raw_input_contents entries for model '{header.model_name}', got {given}"
        )
    missing = header.inputs[given]
    return InvalidArgument(
        f"unable to find data for input tensor '{missing.name}' for model '{header.model_name}' in request."
    )


def _output(output: Any) -> RequestedOutput:
    checked(output.name, "the name of an output")
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
    return SharedMemoryInput(checked(region.string_param, "'shared_memory_region'"), *numbers)


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
            checked(key, "the name of a parameter")
            custom[key] = checked(value, f"parameter '{key}'", MAX_VALUE) if choice == "string_param" else value
    return fields, custom
