"""From what a model returned for a request to the response that the server sends.

Response headers are shared: as long as a model answers with the same names, types and shapes, all its responses have
the same header object, and a transport encodes it once.
"""

from __future__ import annotations

from collections.abc import Sequence

from nerite.backends.python.failure import printable
from nerite.core.errors import BY_CODE
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Buffer, TensorSpec
from triton_python_backend_utils.response import InferenceResponse as ModelResponse
from triton_python_backend_utils.tensor import wire_form

_MOST_HEADERS = 1024
"""Enough for every mix of shapes that comes back; a model with ever new shapes starts over from time to time."""


class Replies:
    """Makes the responses of one instance."""

    def __init__(self, model_name: str, model_version: str, declared_outputs: Sequence[str]) -> None:
        self._model_name = model_name
        self._model_version = model_version
        self._declared = frozenset(declared_outputs)
        self._headers: dict[tuple[object, ...], ResponseHeader] = {}

    def reply(self, request: InferenceRequest, returned: ModelResponse) -> InferenceResponse:
        """Return the response: the model's error, or the outputs that were asked for, in the model's order.

        An output that the configuration does not declare is left out; type and shape are what the model made them.
        """
        if returned._error is not None:
            error = returned._error
            return InferenceResponse.failed(BY_CODE[error.code().name](printable(error.message())))
        requested = request.header.outputs
        wanted = {output.name for output in requested} if requested else self._declared
        shapes: list[object] = []
        data: list[Buffer] = []
        for tensor in returned._tensors:
            name, datatype, shape, buffer = wire_form(tensor)
            if name in wanted:
                shapes += (name, datatype.name, shape)
                data.append(buffer)
        key = tuple(shapes)
        header = self._headers.get(key)
        if header is None or returned._parameters:
            header = self._header(key, returned, wanted)
        return InferenceResponse(header, data)

    def _header(
        self, key: tuple[object, ...], returned: ModelResponse, wanted: frozenset[str] | set[str]
    ) -> ResponseHeader:
        forms = (wire_form(tensor) for tensor in returned._tensors)
        outputs = [TensorSpec(name, datatype, shape) for name, datatype, shape, _ in forms if name in wanted]
        header = ResponseHeader(self._model_name, self._model_version, outputs, returned._parameters)
        if not returned._parameters:
            if len(self._headers) >= _MOST_HEADERS:
                self._headers.clear()
            self._headers[key] = header
        return header
