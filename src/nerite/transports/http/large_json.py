"""What would hold up the event loop, done in a helper process while the connection waits: large JSON, both ways."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, TypeAlias

from nerite.core import headers
from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError
from nerite.core.failures import report
from nerite.core.request import (
    NOBODY,
    CancelReason,
    InferenceRequest,
    RequestedOutput,
    RequestHeader,
    SharedMemoryInput,
    SharedMemoryRequest,
)
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import Buffer, TensorSpec, WrongElementCount
from nerite.transports.access import SenderHeaders
from nerite.transports.http import content_coding, files, generate_form, infer_response, request_bodies
from nerite.transports.http.files import FormPart
from nerite.transports.http.generate_form import GenerateForm
from nerite.transports.http.handler import HTTP, HttpDialect, HttpExchange
from nerite.transports.http.json_text import parse_json
from nerite.transports.http.request_bodies import Asked, Place
from nerite.workers.helper_pool import Answered, HelperCall, HelperPool

_SECONDS: Final = 10.0
"""For any piece of work, and more for each byte of it."""
_SECONDS_PER_BYTE: Final = 1 / 1_000_000
"""Several times as long as it takes on a slow processor."""


class InferReading:
    """A request that a helper reads. To its connection it is what runs, though nothing is known of it yet."""

    id = ""
    header = RequestHeader("", "", ())

    def __init__(
        self,
        helpers: HelperPool,
        connection: HttpExchange,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        done: Callable[[list[Any]], None],
        refuse: Callable[[NeriteError], None],
    ) -> None:
        """Begin. ``done`` takes what ``function`` returns, ``refuse`` the refusals of both."""
        self._connection = connection
        self._done = done
        self._refuse = refuse
        connection.request = self
        self._call = _call(helpers, function, arguments, "reading the request", self._answered)

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Stop: nobody waits for it."""
        self._call.cancel()

    def pause(self, paused: bool) -> None:
        """Go on: there are no responses yet."""

    def _answered(self, values: list[Any], error: NeriteError | None) -> None:
        if error is not None:  # not raised: what knows its own traceback waits for the collector, and the body with it
            self._refuse(error)
            return
        try:
            self._done(values)
        except NeriteError as refusal:
            self._refuse(refusal)
        except Exception as failure:
            self._refuse(report("http", failure, "in a request that was read by a helper"))


def write_in_helper(
    helpers: HelperPool,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    done: Answered,
) -> None:
    """Have a function write an answer."""
    _call(helpers, function, arguments, "writing the answer", done)


def _call(
    helpers: HelperPool, function: Callable[..., Any], arguments: Sequence[Any], what: str, answered: Answered
) -> HelperCall:
    name = f"{function.__module__}:{function.__name__}"
    size = sum(len(each) for each in arguments if isinstance(each, bytes | bytearray | memoryview))
    return helpers.call(name, arguments, answered, what, seconds=_SECONDS + size * _SECONDS_PER_BYTE)


# What a helper process is called for (``outside``): each function does there what is done on the event loop
# elsewhere.
#
# Requests and answers cross as JSON that is short, and the bytes of their tensors. ``…_of`` is the other side of it.

Json: TypeAlias = Any
_END_OF_HEAD: Final = b"\r\n\r\n"

# Reading


def read_infer(body: memoryview, model: str, max_size: int, half: bool, most: int) -> tuple[Any, ...]:
    """Read the JSON part of an infer request."""
    asked = request_bodies.read_infer_document(bytes(body), max_size, half, lambda: most)
    request_id, fields, custom, specs, places, size, outputs = asked
    here = [
        (spec, place)
        for spec, place in zip(specs, places, strict=True)
        if not isinstance(place, tuple | SharedMemoryInput)
    ]
    described = request_id, fields, custom, _specs(specs), [*map(_place, places)], size, _outputs(outputs)
    return described, _miscounted(model, request_id, here), *(data for _, data in here)


def asked_of(values: Sequence[Any]) -> tuple[Asked, str]:
    """Return what ``read_infer`` has read, and what is wrong with it if the model takes such a request at all."""
    described, wrong, *data = values
    request_id, fields, custom, specs, places, size, outputs = described
    arrived = iter(data)
    found: list[Place] = [next(arrived) if place is None else _place_of(place) for place in places]
    return (request_id, fields, custom, _specs_of(specs), found, size, _outputs_of(outputs)), wrong


def read_form(body: memoryview, model: str, inputs: Json, batched: bool, half: bool) -> tuple[Any, ...]:
    """Read the body of a request to ``generate``, given the inputs of the model."""
    form = GenerateForm(Signature(model, int(batched), tensors_from_json(inputs), []), SenderHeaders({}), half)
    form.read(bytes(body))
    wrong = _miscounted(model, form.id, zip(form.specs, form.data, strict=True))
    return form.said(), _specs(form.specs), wrong, *form.data


def fill(form: GenerateForm, values: Sequence[Any]) -> None:
    """Fill in a form with what ``read_form`` has read."""
    said, specs, wrong, *data = values
    form.fill(said, _specs_of(specs), data, wrong)


def read_parts(inputs: Json, types: Sequence[str], batched: bool, max_size: int, half: bool, *data: memoryview) -> Any:
    """Read the parts of an upload, each for one of the inputs and of one of the types."""
    tensors = [
        files.read_file(declared, batched, FormPart(declared.name, media_type, part), max_size, half)
        for declared, media_type, part in zip(tensors_from_json(inputs), types, data, strict=True)
    ]
    return _specs(spec for spec, _ in tensors), *(tensor for _, tensor in tensors)


def tensors_of(values: Sequence[Any]) -> list[tuple[TensorSpec, Buffer]]:
    """Return what ``read_parts`` has read."""
    specs, *data = values
    return list(zip(_specs_of(specs), data, strict=True))


def read_load(body: memoryview) -> tuple[Any, ...]:
    """Read the body of a load: the names of its parameters, and their values."""
    document = parse_json(bytes(body))
    parameters = request_bodies.read_load_parameters(document if isinstance(document, dict) else {})
    return list(parameters), *parameters.values()


def load_of(read: Sequence[Any]) -> dict[str, str | bytes]:
    """Return the parameters that ``read_load`` has read."""
    names, *found = read
    values = [bytes(each) if isinstance(each, memoryview) else each for each in found]
    return dict(zip(names, values, strict=True))


def _miscounted(model: str, request_id: str, tensors: Iterable[tuple[TensorSpec, Buffer]]) -> str:
    """Return what is wrong with tensors of strings that have other numbers of elements than their shapes say."""
    wrong = [(spec, data) for spec, data in tensors if type(data) is WrongElementCount]
    header = RequestHeader(model, "", [spec for spec, _ in wrong])
    request = InferenceRequest(header, [data for _, data in wrong], NOBODY, 0, request_id)
    refusal = Signature(model, 0, [], []).check_data(request)
    return "" if refusal is None else refusal.message


# Writing


def write_infer(
    request: Json,
    response: Json,
    labels: Json,
    batched: bool,
    binary_headers: str,
    half: bool,
    accepts: str,
    *data: memoryview,
) -> tuple[Buffer, ...]:
    """Write the whole reply to an infer request: its head, and what follows."""
    outputs = [SignatureOutput(name, dtypes.BYTES, (), tuple(classes)) for name, classes in labels.items()]
    signature = Signature("", int(batched), [], outputs)
    dialect = HTTP._replace(binary_headers=binary_headers.encode())
    answer = InferenceResponse(headers.response_header_from_json(response), data)
    parts = infer_response.write_infer_response(_request_of(request), answer, lambda _: signature, dialect, half)
    if accepts:
        parts = content_coding.compress_reply(accepts, parts)
    first = bytes(parts[0])
    body_at = first.index(_END_OF_HEAD) + len(_END_OF_HEAD)
    return first[:body_at], memoryview(first)[body_at:], *parts[1:]


def infer_arguments(
    request: InferenceRequest,
    response: InferenceResponse,
    signature: Signature,
    dialect: HttpDialect,
    half: bool,
    accepts: str,
) -> list[Any]:
    """Return what ``write_infer`` needs to know."""
    assert response.header is not None
    outputs = request.header.outputs
    return [
        _request(request),
        headers.header_to_json(response.header),
        {each.name: signature.outputs[each.name].labels for each in outputs if each.classification},
        signature.max_batch_size > 0,
        dialect.binary_headers.decode(),
        half,
        accepts,
        *response.data,
    ]


def write_generate(request: Json, response: Json, half: bool, *data: memoryview) -> bytes:
    """Write a response to ``generate``."""
    answer = InferenceResponse(headers.response_header_from_json(response), data)
    return generate_form.write_generate(_request_of(request), answer, half)


def generate_arguments(request: InferenceRequest, response: InferenceResponse, half: bool) -> list[Any]:
    """Return what ``write_generate`` needs to know."""
    assert response.header is not None
    return [_request(request), headers.header_to_json(response.header), half, *response.data]


# How it crosses


def tensors_json(declared: Iterable[SignatureInput]) -> Json:
    """Return declared inputs as JSON."""
    return [(each.name, each.datatype.name, each.dims) for each in declared]


def tensors_from_json(described: Json) -> list[SignatureInput]:
    """Return what ``inputs`` has described."""
    return [SignatureInput(name, dtypes.BY_NAME[datatype], tuple(dims)) for name, datatype, dims in described]


def _specs(specs: Iterable[TensorSpec]) -> Json:
    return [(spec.name, spec.datatype.name, spec.shape) for spec in specs]


def _specs_of(described: Json) -> list[TensorSpec]:
    return [TensorSpec(name, dtypes.BY_NAME[datatype], tuple(shape)) for name, datatype, shape in described]


def _place(place: Place | None) -> Json:
    """Return a place as JSON; None for bytes, which cross by themselves."""
    if isinstance(place, SharedMemoryInput):
        return place.region, place.offset, place.byte_size
    return place if isinstance(place, tuple) else None


def _place_of(described: Json) -> tuple[int, int] | SharedMemoryInput:
    return SharedMemoryInput(*described) if len(described) == 3 else (described[0], described[1])


def _outputs(outputs: Iterable[RequestedOutput]) -> Json:
    return [(each.name, each.binary, each.base64, each.classification, _place(each.place)) for each in outputs]


def _outputs_of(described: Json) -> list[RequestedOutput]:
    return [
        RequestedOutput(
            name,
            binary=binary,
            base64=base64,
            classification=classification,
            place=None if place is None else SharedMemoryInput(*place),
        )
        for name, binary, base64, classification, place in described
    ]


def _request(request: InferenceRequest) -> Json:
    """Return what a request says of its answer."""
    header = request.header
    return request.id, _outputs(header.outputs), header.binary_by_default, header.base64_by_default


def _request_of(described: Json) -> InferenceRequest:
    request_id, outputs, binary, base64 = described
    header = RequestHeader("", "", (), _outputs_of(outputs), binary_by_default=binary, base64_by_default=base64)
    request = SharedMemoryRequest(header, (), NOBODY, 0, request_id)
    request.places = {output.name: _WRITTEN for output in header.outputs if output.place is not None}
    return request


class _Written:
    """The place of an output that the server has written itself."""

    size = sys.maxsize

    def write(self, data: Buffer) -> None:
        """Do nothing."""


_WRITTEN: Final = _Written()
