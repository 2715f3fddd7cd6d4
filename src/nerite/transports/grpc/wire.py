"""The wire form of the two inference messages, read and written without making objects of the tensors.

A serialized ``ModelInferRequest`` from one client begins with the same bytes again and again: model, inputs, outputs.
Only the id in the middle and the contents of the tensors differ. ``split`` takes those apart, so that the rest can be
looked up, and the contents become views. It looks at a bounded number of fields, and only at those that there are.
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
"""Fields of a request, those of its inputs and outputs among them, but for the values of tensors."""
MAX_REPEATED: Final = 1_024
"""Inputs, outputs, parameters, raw contents, and dimensions of a shape."""
MAX_HEADER: Final = 4 * 1024 * 1024
"""Bytes of a request beside its tensors. A parameter may have a million characters."""
LARGE_HEADER: Final = 64 * 1024
"""From here on the fields of inputs and outputs are counted before protobuf reads them."""
_LONGEST_NAME: Final = 4 * MAX_NAME
"""Bytes of an id or a name, beyond which it has too many characters whatever they are."""
_MAX_PEEKED: Final = 64
"""Fields that are looked at in the first bytes of a message."""

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
_NAMES: Final = {
    MODEL_NAME: "model_name", MODEL_VERSION: "model_version", 0x22: "parameters", _INPUT: "inputs", _OUTPUT: "outputs",
}  # fmt: skip
"""The fields beside id and raw contents. All of them are messages or texts."""


class MalformedMessage(Exception):
    """The bytes are not a serialized message."""


class TooManyFields(InvalidArgument):
    """The message has more of something than is read."""


class InferParts(NamedTuple):
    """A request taken apart."""

    header: bytes
    """What is left of it without the id, the raw contents, the typed contents, and fields that there are not."""
    id: str
    raw: list[Buffer]
    plain: bool
    """``header`` is the beginning of the message, and the raw contents, with the shortest lengths, are the rest."""
    typed: list[list[memoryview]]
    """The typed contents of each input: messages, of which the fields are to be joined. Empty where there are raw ones,
    unless the header is large."""


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return a number and where it ends. Raises ``MalformedMessage``."""
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


def each_field(message: memoryview, most: int, what: str) -> Iterator[tuple[int, int, int, int]]:
    """Yield tag, start, start of the value and end of each field.

    Raises ``MalformedMessage``, or ``TooManyFields`` if there are more than ``most``; ``what`` it is then that has
    them.
    """
    end = len(message)
    at = 0
    for _ in range(most):
        if at >= end:
            return
        start = at
        tag, at, stop = read_field(message, at)
        yield tag, start, at, stop
        at = stop
    if at < end:
        raise _too_many_fields(what)


def _too_many_fields(what: str) -> TooManyFields:
    """Return the refusal of a request with more fields than are looked at, most of which are ``what``."""
    return TooManyFields(f"the request has more than the {MAX_FIELDS} fields that are allowed, most of them {what}")


def split(message: memoryview) -> InferParts:
    """Take a serialized ``ModelInferRequest`` apart.

    Raises ``MalformedMessage``, ``TooManyFields``, or ``InvalidArgument`` for an id that is too long.
    """
    end = len(message)
    at = 0
    kept: list[memoryview] = []
    raw: list[Buffer] = []
    request_id = ""
    plain = True
    header_size = 0
    # As ``read_field``, in line: this runs for each request.
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
        elif tag in _NAMES:
            kept.append(message[start:stop])
            header_size += stop - start
            plain = plain and not raw
        else:
            plain = False
            if tag == ID:
                request_id = _text(message[at:stop])
            elif not 8 <= tag < 1 << 32:
                raise MalformedMessage
        at = stop
    if at < end:
        raise _too_many_fields(_most_frequent(kept, raw))
    if len(raw) > MAX_REPEATED:
        raise too_many("raw_input_contents", len(raw))
    typed: list[list[memoryview]] = []
    if (not raw and header_size) or header_size > LARGE_HEADER:
        kept, typed = _without_contents(kept)
        header_size = sum(map(len, kept))
        plain = False
    if header_size > MAX_HEADER:
        raise TooManyFields(
            f"the request has {header_size} bytes beside its tensors, more than the {MAX_HEADER} that are allowed"
        )
    return InferParts(b"".join(kept), request_id, raw, plain, typed)


def too_many(what: str, count: int) -> TooManyFields:
    """Return the refusal of a request with more than ``MAX_REPEATED`` of something."""
    return TooManyFields(f"'{what}' has {count} elements, more than the {MAX_REPEATED} that are allowed")


def _text(raw: memoryview) -> str:
    """Return an id.

    Raises ``MalformedMessage`` for one that is not UTF-8, ``InvalidArgument`` for one of any length.
    """
    if len(raw) > _LONGEST_NAME:
        raise InvalidArgument(f"'id' is {len(raw)} bytes long, more than the {MAX_NAME} characters that are allowed")
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError:
        raise MalformedMessage from None


def _most_frequent(kept: list[memoryview], raw: list[Buffer]) -> str:
    """Return what most of the fields are."""
    counts = Counter(f"'{_NAMES[read_varint(field, 0)[0]]}'" for field in kept)
    counts["'raw_input_contents'"] = len(raw)
    counts["unknown"] = MAX_FIELDS - len(kept) - len(raw)
    return counts.most_common(1)[0][0]


def _without_contents(kept: list[memoryview]) -> tuple[list[memoryview], list[list[memoryview]]]:
    """Return the fields of a header without the values of tensors, and those of each input.

    Where there were typed contents are empty ones: that there are any is said by the header.
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
        for inner, start, at, stop in each_field(value, left, f"in '{_NAMES[tag]}'"):
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
    """Return model name, version, and where the first tensor's bytes begin, from the first bytes of a request.

    What is not there, or not in the usual order, is empty or 0.
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
    """Return the id of a request that may be wrong, empty where it cannot be found."""
    try:
        return split(message).id
    except (MalformedMessage, InvalidArgument):
        return ""


def response_id(request_id: str) -> bytes:
    """Return the id field of a response."""
    return fields.nested_field(_RESPONSE_ID, request_id.encode())


def raw_input(size: int) -> bytes:
    """Return what stands before ``size`` bytes of raw contents in a request, as every encoder writes it."""
    return bytes((RAW_INPUT,)) + fields.varint(size)


def raw_output(size: int) -> bytes:
    """Return what stands before ``size`` bytes of raw contents in a response."""
    return bytes((RAW_OUTPUT, size)) if size < 0x80 else bytes((RAW_OUTPUT,)) + fields.varint(size)


# Writing a ``ModelInferResponse``: headers once for each shape of answer, tensors as they are.


class EncodedHeader(NamedTuple):
    """The reply that a response header means, cut where the tensors go: everything is known but their bytes."""

    first: bytes
    """The message's prefix and all that stands before the first tensor."""
    rest: tuple[bytes, ...]
    """What stands before each of the others."""


def write_infer_response(
    request: InferenceRequest, response: InferenceResponse, signature_of: Callable[[InferenceRequest], Signature]
) -> list[Buffer]:
    """Return the serialized response with its length in front, in pieces. Raises Triton's errors of formatting."""
    header = response.header
    assert header is not None
    data = response.data
    encoded: EncodedHeader | None = header.encoded
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


def _encode(header: ResponseHeader, sizes: Sequence[int], request_id: str) -> EncodedHeader:
    message = _beginning(header)
    if request_id:
        # Fields may come in any order.
        message += response_id(request_id)
    before = [raw_output(size) for size in sizes]
    whole = len(message) + sum(map(len, before)) + sum(sizes)
    first = b"\0" + whole.to_bytes(4) + message + b"".join(before[:1])
    return EncodedHeader(first, tuple(before[1:]))


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
            output_parameters.write_to_region(request, spec, buffer)
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
            spec, buffer = output_parameters.top_classes(spec, buffer, count, labels, signature.max_batch_size > 0)
        specs.append(spec)
        data.append(buffer)
    return ResponseHeader(header.model_name, header.model_version, specs, header.parameters), data
