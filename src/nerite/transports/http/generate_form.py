"""JSON form of the generate extension: tensors and parameters as keys of one flat object, in requests and responses."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import orjson

from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest, RequestHeader
from nerite.core.response import InferenceResponse, Parameter
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec
from nerite.transports.access import SenderHeaders
from nerite.transports.http import json_tensors, request_bodies
from nerite.transports.http.json_text import parse_json
from nerite.transports.http.request_bodies import BASE64_OUTPUT, boolean_value

_NESTED: Final = "parameters"


class GenerateForm:
    """Parsed body of a generate request. Filled in once, by ``read`` or by ``fill``."""

    def __init__(
        self,
        signature: Signature,
        sender: SenderHeaders,
        half: bool = False,
    ) -> None:
        """``half``: FP16 and BF16 are allowed."""
        self._inputs = signature.inputs
        self._batched = signature.max_batch_size > 0
        self._specs: dict[str, TensorSpec] = {}
        self._parameters: dict[str, Parameter] = {}
        self._sender = sender
        self._half = half
        self._base64 = False
        self.data: list[Buffer] = []
        """The tensors, in the order of the header's inputs."""
        self.id = ""
        self.wrong: str | None = None
        """Error in the number of elements of string tensors; empty if there is none, None if it was not checked."""

    def read(self, body: bytes) -> None:
        """Parse a body. Raises Triton's errors."""
        value = parse_json(body, self._without_inputs)
        if not isinstance(value, dict):
            raise Internal("attempt to get members for non-object")
        self.id = request_bodies.read_id(value)
        if _NESTED in value and _NESTED in self._inputs:
            raise InvalidArgument(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
        request_bodies.check_count("the body", value, self._max_entries)
        self._reject_duplicates(body, value)
        for key, item in value.items():
            if key != _NESTED:
                self._take(key, item)
            elif not isinstance(item, dict):
                raise Internal(
                    f"Expected JSON object for keyword: '{key}': attempt to access JSON non-object as object"
                )
            else:
                request_bodies.check_count(f"'{key}'", item, self._max_entries)
                self._take_nested(key, item)

    def _reject_duplicates(self, body: bytes, value: Mapping[str, Any]) -> None:
        """Reject a body in which the key of an input occurs twice. For any other key the last occurrence counts."""
        for key in self._inputs.keys() & value.keys():
            if body.count(orjson.dumps(key)) > 1 and _keys(body).count(key) > 1:
                raise self._duplicate(key)

    def _duplicate(self, key: str) -> InvalidArgument:
        return InvalidArgument(f"[request id: {self.id or '<id_unknown>'}] input '{key}' already exists in request")

    def said(self) -> tuple[str, bool, dict[str, Parameter]]:
        """Return everything that was parsed except the inputs, for ``fill``."""
        return self.id, self._base64, self._parameters

    def fill(self, said: Sequence[Any], specs: Iterable[TensorSpec], data: Sequence[Buffer], wrong: str) -> None:
        """Take over what ``read`` has parsed in another form; ``wrong`` is the error in the element counts, if any."""
        self.id, self._base64, self._parameters = said
        self._specs = {spec.name: spec for spec in specs}
        self.data = list(data)
        self.wrong = wrong

    @property
    def specs(self) -> list[TensorSpec]:
        """The specs of the inputs."""
        return list(self._specs.values())

    def _max_entries(self) -> int:
        return request_bodies.MAX_ENTRIES + len(self._inputs)

    def _without_inputs(self, document: Any) -> Any:
        """Return a body without the inputs, whose strings need not be valid UTF-8."""
        if not isinstance(document, dict):
            return document
        texts = {key: item for key, item in document.items() if key not in self._inputs}
        if isinstance(nested := texts.get(_NESTED), dict):
            texts[_NESTED] = {key: item for key, item in nested.items() if key not in self._inputs}
        return texts

    def header(self, model: str, version: str) -> RequestHeader:
        """Return the header of the request."""
        parameters = {**self._parameters, **self._sender.forwarded}
        header = RequestHeader(
            model,
            version,
            self.specs,
            parameters=parameters,
            forwarded=self._sender.forwarded.keys(),
            base64_by_default=self._base64,
            caller=self._sender.caller,
            idempotency_key=self._sender.idempotency_key,
            sticky_fields=self._sender.sticky_fields,
        )
        if self.wrong == "":
            header.sizes = [*map(len, self.data)]
        return header

    def _take_nested(self, keyword: str, nested: Mapping[str, Any]) -> None:
        for key, item in nested.items():
            try:
                self._take(key, item)
            except NeriteError as error:
                raise error.prefixed(f"Converting keyword: '{keyword}': ") from None

    def _take(self, key: str, item: Any) -> None:
        declared = self._inputs.get(key)
        if declared is None and key == BASE64_OUTPUT:
            self._base64 = boolean_value(key, item)
            return
        if declared is None:
            self._parameters[key] = request_bodies.read_parameter(key, item)
            return
        if key in self._specs:
            raise self._duplicate(key)
        elements = item if isinstance(item, list) else [item]
        spec = TensorSpec(key, declared.datatype, json_tensors.shape_of(declared, self._batched, len(elements)))
        self.data.append(json_tensors.read_tensor(spec, elements, self._half))
        self._specs[key] = spec


def _keys(body: bytes) -> list[str]:
    """Return the keys of the JSON object in ``body``, with duplicates; an empty list if it cannot be parsed here."""
    try:
        pairs = json.loads(body.decode(errors="surrogateescape"), object_pairs_hook=list)
    except (ValueError, RecursionError):  # only Triton accepts it as JSON, or it is nested a thousand levels deep
        return []
    return [key for key, _ in pairs]


def write_generate(request: InferenceRequest, response: InferenceResponse, half: bool = False) -> bytes:
    """Return a response as JSON, with single elements not in a list. Raises Triton's formatting errors.

    ``half``: FP16 and BF16 are allowed.
    """
    header = response.header
    assert header is not None
    entries = {
        "model_name": orjson.dumps(header.model_name),
        "model_version": orjson.dumps(header.model_version),
    }
    if request.id:
        entries["id"] = orjson.dumps(request.id)
    for key, value in header.parameters.items():
        entries[key] = orjson.dumps(value)
    for spec, data in zip(header.outputs, response.buffers, strict=True):
        text = json_tensors.write_tensor(spec, data, half, request.header.base64_by_default)
        entries[spec.name] = text[1:-1] if spec.elements == 1 else text
    return b"{" + b",".join(orjson.dumps(key) + b":" + entries[key] for key in sorted(entries)) + b"}"


def write_generate_error(error: NeriteError) -> bytes:
    """Return an error as JSON."""
    return orjson.dumps({"error": error.message})
