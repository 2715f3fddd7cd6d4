"""Large JSON, parsed and written in helper processes so that it does not block the event loop.

The functions that run in a helper (``read_...``, ``write_...``) do there what the event loop does itself for small
JSON. Arguments and results cross as short JSON and the bytes of tensors; ``..._of`` and ``..._arguments`` are their
counterparts in the server.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nerite.core import headers
from nerite.core import tensor as dtypes
from nerite.core.errors import NeriteError
from nerite.core.failures import report
from nerite.core.request import (
    NOBODY,
    WRITTEN,
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

if TYPE_CHECKING:
    from nerite.transports.http.request_bodies import Asked, Place
    from nerite.workers.helper_pool import Answered, HelperCall, HelperPool

_BASE_SECONDS: Final = 10.0
"""Base timeout of a call; ``_SECONDS_PER_BYTE`` is added for each byte of its arguments."""
_SECONDS_PER_BYTE: Final = 1 / 1_000_000
"""Several times the duration on a slow processor."""


class InferReading:
    """A request that a helper is parsing. It stands in as the work of its exchange until the real work is known."""

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
        """Start the call. ``done`` gets the result of ``function``; ``refuse`` gets the error of either."""
        self._connection = connection
        self._done = done
        self._refuse = refuse
        connection.request = self
        self._call = _call(helpers, function, arguments, "reading the request", self._finished)

    def cancel(self, why: CancelReason = CancelReason.CANCELLED) -> None:
        """Cancel the call."""
        self._call.cancel()

    def pause(self, paused: bool) -> None:
        """Do nothing, as no responses exist yet."""

    def _finished(self, values: list[Any], error: NeriteError | None) -> None:
        if error is not None:  # not raised: the reference cycle through its traceback would keep the body alive
            self._refuse(error)
            return
        try:
            self._done(values)
        except NeriteError as refusal:
            self._refuse(refusal)
        except Exception as failure:
            self._refuse(report("http", failure, "in a request that a helper has parsed"))


def write_in_helper(
    helpers: HelperPool,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    done: Answered,
) -> None:
    """Call ``function`` in a helper to write a reply."""
    _call(helpers, function, arguments, "writing the answer", done)


def _call(
    helpers: HelperPool, function: Callable[..., Any], arguments: Sequence[Any], what: str, answered: Answered
) -> HelperCall:
    name = f"{function.__module__}:{function.__name__}"
    size = sum(len(each) for each in arguments if isinstance(each, bytes | bytearray | memoryview))
    return helpers.call(name, arguments, answered, what, seconds=_BASE_SECONDS + size * _SECONDS_PER_BYTE)


Json: TypeAlias = Any
_END_OF_HEAD: Final = b"\r\n\r\n"

# Reading requests.


def read_infer(body: memoryview, model: str, max_size: int, half: bool, most: int) -> tuple[Any, ...]:
    """Parse the JSON part of an infer request."""
    asked = request_bodies.read_infer_document(bytes(body), max_size, half, lambda: most)
    request_id, fields, custom, specs, places, size, outputs = asked
    here = [
        (spec, place)
        for spec, place in zip(specs, places, strict=True)
        if not isinstance(place, tuple | SharedMemoryInput)
    ]
    described = request_id, fields, custom, _specs(specs), [*map(_place, places)], size, _outputs(outputs)
    return described, _count_error(model, request_id, here), *(data for _, data in here)


def asked_of(values: Sequence[Any]) -> tuple[Asked, str]:
    """Return the request that ``read_infer`` has parsed, and the error in its strings, if any.

    The error is reported only if the request passes the model's other checks.
    """
    described, wrong, *data = values
    request_id, fields, custom, specs, places, size, outputs = described
    arrived = iter(data)
    found: list[Place] = [next(arrived) if place is None else _place_of(place) for place in places]
    return (request_id, fields, custom, _specs_of(specs), found, size, _outputs_of(outputs)), wrong


def read_form(body: memoryview, model: str, inputs: Json, batched: bool, half: bool) -> tuple[Any, ...]:
    """Parse the body of a generate request, given the inputs of the model."""
    form = GenerateForm(Signature(model, int(batched), tensors_from_json(inputs), []), SenderHeaders({}), half)
    form.read(bytes(body))
    wrong = _count_error(model, form.id, zip(form.specs, form.data, strict=True))
    return form.said(), _specs(form.specs), wrong, *form.data


def fill(form: GenerateForm, values: Sequence[Any]) -> None:
    """Fill in a form with the result of ``read_form``."""
    said, specs, wrong, *data = values
    form.fill(said, _specs_of(specs), data, wrong)


def read_parts(inputs: Json, types: Sequence[str], batched: bool, max_size: int, half: bool, *data: memoryview) -> Any:
    """Convert the parts of an upload to tensors, given the input and the media type of each part."""
    tensors = [
        files.read_file(declared, batched, FormPart(declared.name, media_type, part), max_size, half)
        for declared, media_type, part in zip(tensors_from_json(inputs), types, data, strict=True)
    ]
    return _specs(spec for spec, _ in tensors), *(tensor for _, tensor in tensors)


def tensors_of(values: Sequence[Any]) -> list[tuple[TensorSpec, Buffer]]:
    """Return the tensors that ``read_parts`` has made."""
    specs, *data = values
    return list(zip(_specs_of(specs), data, strict=True))


def read_load(body: memoryview) -> tuple[Any, ...]:
    """Parse the body of a load request; return the names of its parameters, then their values."""
    document = parse_json(bytes(body))
    parameters = request_bodies.read_load_parameters(document if isinstance(document, dict) else {})
    return list(parameters), *parameters.values()


def load_of(read: Sequence[Any]) -> dict[str, str | bytes]:
    """Return the parameters that ``read_load`` has parsed."""
    names, *found = read
    values = [bytes(each) if isinstance(each, memoryview) else each for each in found]
    return dict(zip(names, values, strict=True))


def _count_error(model: str, request_id: str, tensors: Iterable[tuple[TensorSpec, Buffer]]) -> str:
    """Return the error for string tensors whose number of elements does not match their shape; empty if none."""
    wrong = [(spec, data) for spec, data in tensors if type(data) is WrongElementCount]
    header = RequestHeader(model, "", [spec for spec, _ in wrong])
    request = InferenceRequest(header, [data for _, data in wrong], NOBODY, 0, request_id)
    refusal = Signature(model, 0, [], []).check_data(request)
    return "" if refusal is None else refusal.message


# Writing responses.


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
    """Write the whole reply to an infer request: its head, then the parts of its body."""
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
    """Return the arguments for ``write_infer``."""
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
    """Write a generate response."""
    answer = InferenceResponse(headers.response_header_from_json(response), data)
    return generate_form.write_generate(_request_of(request), answer, half)


def generate_arguments(request: InferenceRequest, response: InferenceResponse, half: bool) -> list[Any]:
    """Return the arguments for ``write_generate``."""
    assert response.header is not None
    return [_request(request), headers.header_to_json(response.header), half, *response.data]


# Conversion to JSON and back.


def tensors_json(declared: Iterable[SignatureInput]) -> Json:
    """Return declared inputs as JSON."""
    return [(each.name, each.datatype.name, each.dims) for each in declared]


def tensors_from_json(described: Json) -> list[SignatureInput]:
    """Return the inputs that ``tensors_json`` has described."""
    return [SignatureInput(name, dtypes.BY_NAME[datatype], tuple(dims)) for name, datatype, dims in described]


def _specs(specs: Iterable[TensorSpec]) -> Json:
    return [(spec.name, spec.datatype.name, spec.shape) for spec in specs]


def _specs_of(described: Json) -> list[TensorSpec]:
    return [TensorSpec(name, dtypes.BY_NAME[datatype], tuple(shape)) for name, datatype, shape in described]


def _place(place: Place | None) -> Json:
    """Return a place as JSON; None for bytes, which cross separately."""
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
    """Return the part of a request that its reply depends on, as JSON."""
    header = request.header
    return request.id, _outputs(header.outputs), header.binary_by_default, header.base64_by_default


def _request_of(described: Json) -> InferenceRequest:
    request_id, outputs, binary, base64 = described
    header = RequestHeader("", "", (), _outputs_of(outputs), binary_by_default=binary, base64_by_default=base64)
    request = SharedMemoryRequest(header, (), NOBODY, 0, request_id)
    request.places = {output.name: WRITTEN for output in header.outputs if output.place is not None}
    return request
