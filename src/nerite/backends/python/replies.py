"""From what a model returned for a request to the response that the server sends.

Response headers are shared: as long as a model answers with the same names, types and shapes, all its responses have
the same header object, and a transport encodes it once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from nerite.backends.python.failure import describe, printable
from nerite.backends.python.reshape import Reshape
from nerite.core import footprint
from nerite.core.byte_budget import RESPONSE_HEADERS, Memo
from nerite.core.errors import BY_CODE, NeriteError
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, Parameter, ResponseHeader
from nerite.core.tensor import Buffer, TensorSpec
from nerite.core.text import cut
from triton_python_backend_utils.arguments import INT64, UINT64
from triton_python_backend_utils.parameters import mistake_in_parameters
from triton_python_backend_utils.request import ServedRequest
from triton_python_backend_utils.response import InferenceResponse as ModelResponse
from triton_python_backend_utils.tensor import wire_form

_INTEGERS = (INT64[0], UINT64[1])
"""What HTTP and gRPC can carry in a parameter of a response."""


class Replies:
    """Makes the responses of one instance."""

    def __init__(
        self,
        model_name: str,
        model_version: str,
        declared_outputs: Sequence[str],
        failed: Callable[[str], NeriteError],
        *,
        decoupled: bool = False,
        reshape: Reshape | None = None,
    ) -> None:
        """``failed`` makes the error of a response that cannot be sent, given the reason."""
        self._failed = failed
        self.reshape = reshape
        self._model_name = model_name
        self._model_version = model_version
        self.declared = frozenset(declared_outputs)
        self.decoupled = decoupled
        self.again: set[ServedRequest] = set()
        self._headers: Memo[tuple[object, ...], ResponseHeader] = Memo()
        self._last_form: list[object] | None = None
        self._last_header: ResponseHeader

    def reply(self, request: InferenceRequest, returned: ModelResponse) -> InferenceResponse:
        """Return the response: the model's error, or the outputs that were asked for, in the model's order.

        An output that the configuration does not declare is left out; type and shape are what the model made them.
        A response that cannot be sent becomes an error.
        """
        try:
            if returned._error is not None:
                error = returned._error
                return InferenceResponse.failed(BY_CODE[error.code().name](printable(cut(error.message()))))
            wanted = request.header.wanted or self.declared
            form: list[object] = []
            data: list[Buffer] = []
            for tensor in returned._tensors:
                name = tensor._name
                if name in wanted:
                    form += (name, tensor._datatype, tensor._shape)
                    data.append(wire_form(tensor))
            if returned._parameters:
                mistake = mistake_in_parameters(returned._parameters, _INTEGERS)
                if mistake is not None:
                    return InferenceResponse.failed(self._failed(f"The response cannot be sent. {mistake}"))
                return InferenceResponse(self._made(form, returned._parameters), data)
            # Mostly it is the one of the last reply, and comparing is cheaper than looking up.
            if form != self._last_form:
                self._last_header = self._header(tuple(form))
                self._last_form = form
            return InferenceResponse(self._last_header, data)
        except Exception as error:  # a class of the model's own may be anything inside
            return InferenceResponse.failed(self._failed(f"The response cannot be sent. {describe(error)}"))

    def _header(self, form: tuple[object, ...]) -> ResponseHeader:
        """Return the header of replies with outputs of this form."""
        header = self._headers.get(form)
        if header is None:
            header = self._made(form, {})
            RESPONSE_HEADERS.put(self._headers, form, header, 2 * footprint.of_response_header(header))
        return header

    def _made(self, form: Sequence[Any], parameters: dict[str, Parameter]) -> ResponseHeader:
        """Return a new header; ``form`` is name, type and shape of one output after the other."""
        outputs = [TensorSpec(*output) for output in zip(*[iter(form)] * 3, strict=True)]
        if self.reshape is not None:
            outputs = list(map(self.reshape.output, outputs))
        return ResponseHeader(self._model_name, self._model_version, outputs, parameters)
