"""The headers of a model's responses: equal ones are the same object, and are encoded once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from nerite.core import footprint
from nerite.core.byte_budget import RESPONSE_HEADERS, Memo
from nerite.core.request import InferenceRequest
from nerite.core.response import InferenceResponse, ResponseHeader
from nerite.core.tensor import Array, TensorSpec, from_array


class Headers:
    """Those of one model."""

    def __init__(self, model: str, version: str, declared: Sequence[str]) -> None:
        """``declared`` are the outputs of the configuration; others are left out."""
        self._model = model
        self._version = version
        self._declared = frozenset(declared)
        self._made: Memo[tuple[TensorSpec, ...], ResponseHeader] = Memo()

    def of(self, request: InferenceRequest, outputs: Iterable[TensorSpec]) -> ResponseHeader:
        """Return the header of those of ``outputs`` that the request wants and the model declares."""
        wanted = request.header.wanted or self._declared
        form = tuple(spec for spec in outputs if spec.name in wanted and spec.name in self._declared)
        header = self._made.get(form)
        if header is None:
            header = ResponseHeader(self._model, self._version, form)
            RESPONSE_HEADERS.put(self._made, form, header, 2 * footprint.of_response_header(header))
        return header

    def response(self, request: InferenceRequest, outputs: Mapping[str, Array]) -> InferenceResponse:
        """Return those of ``outputs`` that the request wants and the model declares."""
        tensors = {name: from_array(name, array) for name, array in outputs.items()}
        header = self.of(request, [spec for spec, _ in tensors.values()])
        return InferenceResponse(header, [tensors[spec.name][1] for spec in header.outputs])
