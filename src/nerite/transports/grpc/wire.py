"""Reads and writes the wire form of the two inference messages without creating objects for tensors.

A serialized ``ModelInferRequest`` from one client repeatedly begins with the same bytes: model, inputs, outputs. Only
the id in the middle and the tensor contents differ. ``split`` separates these, so that the rest can be looked up in a
memo and the contents become views. It visits a bounded number of fields, and only known ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Final, NamedTuple

from nerite.core.errors import InvalidArgument
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec
from nerite.core.text import MAX_NAME
from nerite.transports import output_parameters
from nerite.wire import fields
from nerite.wire.grpc_service import InferParameter, ModelInferResponse

MAX_FIELDS: Final = 5_000
"""Maximum number of fields of a request, including those of its inputs and outputs, but not tensor values."""
MAX_REPEATED: Final = 1_024
"""Maximum number of inputs, outputs, parameters, raw contents, and dimensions of a shape."""
MAX_HEADER: Final = 4 * 1024 * 1024
"""Maximum size of a request without its tensors, in bytes. A parameter may have a million characters."""
LARGE_HEADER: Final = 64 * 1024
"""Size from which the fields of inputs and outputs are counted before protobuf parses them."""
_LONGEST_NAME: Final = 4 * MAX_NAME
"""Bytes of an id or a name above which it exceeds ``MAX_NAME`` characters in any case."""
_MAX_PEEKED: Final = 64
"""Fields that ``peek`` visits at the start of a message."""

MODEL_NAME = 0x0A  # field 1, length-delimited
MODEL_VERSION = 0x12
ID = 0x1A
RAW_INPUT = 0x3A  # field 7
RAW_OUTPUT = 0x32  # field 6 of the response
_INPUT = 0x2A
_OUTPUT = 0x32
_CONTENTS = 0x2A  # of an input
_NO_CONTENTS = bytes((_CONTENTS, 0))
_RESPONSE_ID = 3
_HEADER_FIELDS: Final = {
    MODEL_NAME: "model_name", MODEL_VERSION: "model_version", 0x22: "parameters", _INPUT: "inputs", _OUTPUT: "outputs",
}  # fmt: skip
"""Fields other than the id and raw contents. All of them are length-delimited."""


class MalformedMessage(Exception):
    """The bytes are not a serialized message."""


class TooManyFields(InvalidArgument):
    """The message has more elements of some kind than are allowed."""


class InferParts(NamedTuple):
    """A request split into header, id and tensor contents."""

    header: bytes
    """Serialized request without its id, raw contents, typed contents and unknown fields."""
    id: str
    raw: list[Buffer]
    plain: bool
    """``header`` is the start of the message, and raw contents with minimal length encodings are the rest."""
    typed: list[list[memoryview]]
    """Typed contents of each input: messages whose fields are to be concatenated. Empty if the request has raw
    contents, unless the header is large."""


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a varint and its end. Raises ``MalformedMessage``."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise MalformedMessage
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def read_field(message: memoryview, at: int) -> tuple[int, int, int]:
    """Return tag, start of the value and end of a field. Raises ``MalformedMessage``."""
    tag, at = read_varint(message, at)
    kind = tag & 7
    if kind == 2:
        size, at = read_varint(message, at)
        stop = at + size
    elif kind == 0:
        _, stop = read_varint(message, at)
    elif kind in (1, 5):
        stop = at + (8 if kind == 1 else 4)
    else:
        raise MalformedMessage
    if stop > len(message):
        raise MalformedMessage
    return tag, at, stop


def each_field(message: memoryview, limit: int, what: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield tag, start, start of the value and end of each field.

    Raises ``MalformedMessage``, or ``TooManyFields`` if there are more than ``limit``; ``what`` then names their
    location.
    """
    end = len(message)
    at = 0
    for _ in range(limit):
        if at >= end:
            return
        start = at
        tag, at, stop = read_field(message, at)
        yield tag, start, at, stop
        at = stop
    if at < end:
        raise _too_many_fields(what)


def _too_many_fields(what: str) -> TooManyFields:
    """Return the error for a request with too many fields, most of which are ``what``."""
    return TooManyFields(f"the request has more than the {MAX_FIELDS} fields that are allowed, most of them {what}")


def split(message: memoryview) -> InferParts:
    """Split a serialized ``ModelInferRequest`` into its parts.

    Raises ``MalformedMessage``, ``TooManyFields``, or ``InvalidArgument`` for an id that is too long.
    """
    end = len(message)
    at = 0
    kept: list[memoryview] = []
    raw: list[Buffer] = []
    request_id = ""
    plain = True
    header_size = 0
    # ``read_field`` is inlined, as this runs for each request.
    for _ in range(MAX_FIELDS):
        if at >= end:
            break
        start = at
        tag = message[at]
        at += 1
        if tag > 0x7F:
            tag, at = read_varint(message, start)
        kind = tag & 7
        if kind == 2:
            size, at = read_varint(message, at)
            stop = at + size
        elif kind == 0:
            _, stop = read_varint(message, at)
        elif kind in (1, 5):
            stop = at + (8 if kind == 1 else 4)
        else:
            raise MalformedMessage
        if stop > end:
            raise MalformedMessage
        if tag == RAW_INPUT:
            raw.append(message[at:stop])
            plain = plain and at - start == len(raw_input(stop - at))
        elif tag in _HEADER_FIELDS:
            kept.append(message[start:stop])
            header_size += stop - start
            plain = plain and not raw
        else:
            plain = False
            if tag == ID:
                request_id = _decode_id(message[at:stop])
            elif not 8 <= tag < 1 << 32:
                raise MalformedMessage
        at = stop
    if at < end:
        raise _too_many_fields(_most_frequent(kept, raw))
    if len(raw) > MAX_REPEATED:
        raise too_many("raw_input_contents", len(raw))
    typed: list[list[memoryview]] = []
    if (not raw and header_size) or header_size > LARGE_HEADER:
        kept, typed = _split_contents(kept)
        header_size = sum(map(len, kept))
        plain = False
    if header_size > MAX_HEADER:
        raise TooManyFields(
            f"the request has {header_size} bytes besides its tensors, more than the {MAX_HEADER} that are allowed"
        )
    return InferParts(b"".join(kept), request_id, raw, plain, typed)


def too_many(what: str, count: int) -> TooManyFields:
    """Return the error for more than ``MAX_REPEATED`` elements of one kind."""
    return TooManyFields(f"'{what}' has {count} elements, more than the {MAX_REPEATED} that are allowed")


def _decode_id(raw: memoryview) -> str:
    """Decode an id.

    Raises ``MalformedMessage`` if it is not UTF-8, ``InvalidArgument`` if it is far too long to decode.
    """
    if len(raw) > _LONGEST_NAME:
        raise InvalidArgument(f"'id' is {len(raw)} bytes long, more than the {MAX_NAME} characters that are allowed")
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise MalformedMessage from None


def _most_frequent(kept: list[memoryview], raw: list[Buffer]) -> str:
    """Return the most frequent kind of field."""
    counts = Counter(f"'{_HEADER_FIELDS[read_varint(field, 0)[0]]}'" for field in kept)
    counts["'raw_input_contents'"] = len(raw)
    counts["unknown"] = MAX_FIELDS - len(kept) - len(raw)
    return counts.most_common(1)[0][0]


def _split_contents(kept: list[memoryview]) -> tuple[list[memoryview], list[list[memoryview]]]:
    """Separate the typed contents of each input from the header fields.

    Empty contents take their place, so that the header still says which inputs have some.
    """
    left = MAX_FIELDS - len(kept)
    rest: list[memoryview] = []
    typed: list[list[memoryview]] = []
    for field in kept:
        tag, at = read_varint(field, 0)
        if tag not in (_INPUT, _OUTPUT):
            rest.append(field)
            continue
        _, at = read_varint(field, at)
        value = field[at:]
        parts: list[memoryview] = []
        contents: list[memoryview] = []
        for inner, start, at, stop in each_field(value, left, f"in '{_HEADER_FIELDS[tag]}'"):
            left -= 1
            if tag == _INPUT and inner == _CONTENTS:
                contents.append(value[at:stop])
            else:
                parts.append(value[start:stop])
        if contents:
            text = b"".join(parts) + _NO_CONTENTS
            rest.append(memoryview(fields.nested_field(_INPUT >> 3, text)))
        else:
            rest.append(field)
        if tag == _INPUT:
            typed.append(contents)
    return rest, typed


def peek(beginning: memoryview) -> tuple[str, str, int]:
    """Return model name, version and offset of the first tensor's bytes, from the first bytes of a request.

    A value that is missing or not in the usual order is empty or 0.
    """
    name = version = ""
    at = 0
    end = len(beginning)
    try:
        for _ in range(_MAX_PEEKED):
            if at >= end:
                break
            tag, at = read_varint(beginning, at)
            size, at = read_varint(beginning, at)
            if tag == RAW_INPUT:
                return name, version, at
            if tag & 7 != 2 or at + size > end:
                break
            if tag <= MODEL_VERSION and size > _LONGEST_NAME:
                return "", "", 0
            if tag == MODEL_NAME:
                name = str(beginning[at : at + size], "utf-8")
            elif tag == MODEL_VERSION:
                version = str(beginning[at : at + size], "utf-8")
            at += size
    except (MalformedMessage, UnicodeDecodeError):
        return "", "", 0
    return name, version, 0


def id_of(message: memoryview) -> str:
    """Return the id of a possibly invalid request; empty if it cannot be found."""
    try:
        return split(message).id
    except (MalformedMessage, InvalidArgument):
        return ""


def response_id(request_id: str) -> bytes:
    """Return the serialized id field of a response."""
    return fields.nested_field(_RESPONSE_ID, request_id.encode())


def raw_input(size: int) -> bytes:
    """Return the tag and length before ``size`` bytes of raw contents in a request, in their minimal encoding."""
    return bytes((RAW_INPUT,)) + fields.varint(size)


def raw_output(size: int) -> bytes:
    """Return the tag and length before ``size`` bytes of raw contents in a response."""
    return bytes((RAW_OUTPUT, size)) if size < 0x80 else bytes((RAW_OUTPUT,)) + fields.varint(size)


# Serializing a ``ModelInferResponse``: headers once per distinct header, tensors without copying.


class EncodedHeader(NamedTuple):
    """Encoded response header, cut where the tensors go: everything except their bytes."""

    first: bytes
    """Message prefix and everything before the first tensor."""
    rest: tuple[bytes, ...]
    """Bytes before each further tensor."""


def write_infer_response(
    request: InferenceRequest, response: InferenceResponse, signature_of: Callable[[InferenceRequest], Signature]
) -> list[Buffer]:
    """Return the framed response in pieces. Raises Triton's formatting errors."""
    header = response.header
    assert header is not None
    data = given = response.buffers
    encoded: EncodedHeader | None = header.encoded
    if encoded is None or request.id or request.header.classifies or request.header.shared:
        if request.header.classifies:
            header, data = _classified(request, response, header, signature_of(request))
        if request.header.shared:
            data = _write_shared(request, response, header, data)
        encoded = _encode(header, [len(buffer) for buffer in data], request.id)
        plain = header is response.header and data is given and not request.id
        if plain and all(spec.byte_size >= 0 for spec in header.outputs):
            header.encoded = encoded
    parts: list[Buffer] = [encoded.first, *data[:1]]
    for before, buffer in zip(encoded.rest, data[1:], strict=True):
        parts += (before, buffer)
    return parts


def _encode(header: ResponseHeader, sizes: Sequence[int], request_id: str) -> EncodedHeader:
    message = _serialize_header(header)
    if request_id:
        # Fields may come in any order.
        message += response_id(request_id)
    before = [raw_output(size) for size in sizes]
    whole = len(message) + sum(map(len, before)) + sum(sizes)
    first = b"\0" + whole.to_bytes(4) + message + b"".join(before[:1])
    return EncodedHeader(first, tuple(before[1:]))


def _serialize_header(header: ResponseHeader) -> bytes:
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


def _write_shared(
    request: InferenceRequest, response: InferenceResponse, header: ResponseHeader, data: Sequence[Buffer]
) -> list[Buffer]:
    """Write outputs requested in shared memory, and return the data of the others."""
    placed = {output.name for output in request.header.outputs if output.place}
    left: list[Buffer] = []
    for spec, buffer in zip(header.outputs, data, strict=True):
        if spec.name in placed:
            output_parameters.write_to_region(request, spec, buffer)
        left.append(b"" if spec.name in placed else buffer)
    return left


def _classified(
    request: InferenceRequest, response: InferenceResponse, header: ResponseHeader, signature: Signature
) -> tuple[ResponseHeader, list[Buffer]]:
    wanted = {output.name: output.classification for output in request.header.outputs}
    specs: list[TensorSpec] = []
    data: list[Buffer] = []
    for spec, buffer in zip(header.outputs, response.buffers, strict=True):
        count = wanted.get(spec.name, 0)
        if count:
            labels = signature.outputs[spec.name].labels
            spec, buffer = output_parameters.top_classes(spec, buffer, count, labels, signature.max_batch_size > 0)
        specs.append(spec)
        data.append(buffer)
    return ResponseHeader(header.model_name, header.model_version, specs, header.parameters), data
