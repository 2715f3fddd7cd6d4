"""The generate extension's form: tensors and parameters as the keys of one flat JSON object, both ways."""

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
    """What a body says: fill it in once with ``read``."""

    def __init__(
        self,
        signature: Signature,
        sender: SenderHeaders,
        half: bool = False,
    ) -> None:
        """``half``: FP16 and BF16 are taken."""
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
        """What is wrong with how many elements strings have, empty if nothing is; None: that was not looked at."""

    def read(self, body: bytes) -> None:
        """Take a body apart. Raises Triton's errors."""
        value = parse_json(body, self._text_of)
        if not isinstance(value, dict):
            raise Internal("attempt to get members for non-object")
        self.id = request_bodies.read_id(value)
        if _NESTED in value and _NESTED in self._inputs:
            raise InvalidArgument(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
        request_bodies.check_count("the body", value, self._most)
        self._check_twice(body, value)
        for key, item in value.items():
            if key != _NESTED:
                self._take(key, item)
            elif not isinstance(item, dict):
                raise Internal(
                    f"Expected JSON object for keyword: '{key}': attempt to access JSON non-object as object"
                )
            else:
                request_bodies.check_count(f"'{key}'", item, self._most)
                self._take_all(key, item)

    def _check_twice(self, body: bytes, value: Mapping[str, Any]) -> None:
        """Refuse a body in which the key of an input stands twice. Any other counts the last time it stands there."""
        for key in self._inputs.keys() & value.keys():
            if body.count(orjson.dumps(key)) > 1 and _keys(body).count(key) > 1:
                raise self._exists(key)

    def _exists(self, key: str) -> InvalidArgument:
        return InvalidArgument(f"[request id: {self.id or '<id_unknown>'}] input '{key}' already exists in request")

    def said(self) -> tuple[str, bool, dict[str, Parameter]]:
        """Return what a body says beside the inputs: ``fill`` takes it."""
        return self.id, self._base64, self._parameters

    def fill(self, said: Sequence[Any], specs: Iterable[TensorSpec], data: Sequence[Buffer], wrong: str) -> None:
        """Take what another form was told by ``read``, and what is wrong with how many elements there are."""
        self.id, self._base64, self._parameters = said
        self._specs = {spec.name: spec for spec in specs}
        self.data = list(data)
        self.wrong = wrong

    @property
    def specs(self) -> list[TensorSpec]:
        """The inputs."""
        return list(self._specs.values())

    def _most(self) -> int:
        return request_bodies.MOST + len(self._inputs)

    def _text_of(self, document: Any) -> Any:
        """Return a body without the inputs: the strings in those may be any bytes."""
        if not isinstance(document, dict):
            return document
        texts = {key: item for key, item in document.items() if key not in self._inputs}
        if isinstance(nested := texts.get(_NESTED), dict):
            texts[_NESTED] = {key: item for key, item in nested.items() if key not in self._inputs}
        return texts

    def header(self, model: str, version: str) -> RequestHeader:
        """Return the header of the request that the form makes."""
        parameters = {**self._parameters, **self._sender.forwarded}
        header = RequestHeader(
            model,
            version,
            self.specs,
            parameters=parameters,
            base64_by_default=self._base64,
            caller=self._sender.caller,
            idempotency_key=self._sender.idempotency_key,
        )
        if self.wrong == "":
            header.sizes = [*map(len, self.data)]
        return header

    def _take_all(self, keyword: str, nested: Mapping[str, Any]) -> None:
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
            raise self._exists(key)
        elements = item if isinstance(item, list) else [item]
        spec = TensorSpec(key, declared.datatype, json_tensors.shape_of(declared, self._batched, len(elements)))
        self.data.append(json_tensors.read_tensor(spec, elements, self._half))
        self._specs[key] = spec


def _keys(body: bytes) -> list[str]:
    """Return the keys of the object that ``body`` is, each as often as it stands there; none if that takes too much."""
    try:
        pairs = json.loads(body.decode(errors="surrogateescape"), object_pairs_hook=list)
    except (ValueError, RecursionError):  # what only Triton takes for JSON, or is nested a thousand levels deep
        return []
    return [key for key, _ in pairs]


def write_generate(request: InferenceRequest, response: InferenceResponse, half: bool = False) -> bytes:
    """Return a response as JSON: a single element is no list. Raises Triton's errors of formatting.

    ``half``: FP16 and BF16 are given.
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
    for spec, data in zip(header.outputs, response.data, strict=True):
        text = json_tensors.write_tensor(spec, data, half, request.header.base64_by_default)
        entries[spec.name] = text[1:-1] if spec.elements == 1 else text
    return b"{" + b",".join(orjson.dumps(key) + b":" + entries[key] for key in sorted(entries)) + b"}"


def write_generate_error(error: NeriteError) -> bytes:
    """Return an error as JSON."""
    return orjson.dumps({"error": error.message})
