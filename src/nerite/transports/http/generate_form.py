"""The generate extension's form: tensors and parameters as the keys of one flat JSON object, both ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from nerite.core.errors import Internal, InvalidArgument, NeriteError
from nerite.core.request import InferenceRequest, Parameter, RequestHeader
from nerite.core.response import InferenceResponse
from nerite.core.signature import Signature
from nerite.core.tensor import Buffer, TensorSpec
from nerite.transports.callers import Sender
from nerite.transports.http import json_tensors
from nerite.transports.http.infer_document import BASE64_OUTPUT, boolean
from nerite.transports.http.json_text import parse

_NESTED: Final = "parameters"


class Form:
    """What a body says: fill it in once with ``read``."""

    def __init__(
        self,
        signature: Signature,
        sender: Sender,
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

    def read(self, body: bytes) -> None:
        """Take a body apart. Raises Triton's errors."""
        value = parse(body)
        if not isinstance(value, dict):
            raise Internal("attempt to get members for non-object")
        if "id" in value:
            if not isinstance(value["id"], str):
                raise Internal("Unable to parse 'id': attempt to access JSON non-string as string")
            self.id = value["id"]
        if _NESTED in value and _NESTED in self._inputs:
            raise InvalidArgument(f"Keyword '{_NESTED}' for nested schema also given as input tensor name")
        for key, item in value.items():
            if key != _NESTED:
                self._take(key, item)
            elif not isinstance(item, dict):
                raise Internal(
                    f"Expected JSON object for keyword: '{key}': attempt to access JSON non-object as object"
                )
            else:
                self._take_all(key, item)

    def header(self, model: str, version: str) -> RequestHeader:
        """Return the header of the request that the form makes."""
        parameters = {**self._parameters, **self._sender.forwarded}
        return RequestHeader(
            model,
            version,
            list(self._specs.values()),
            parameters=parameters,
            base64_by_default=self._base64,
            caller=self._sender.caller,
            idempotency_key=self._sender.idempotency_key,
        )

    def _take_all(self, keyword: str, nested: Mapping[str, Any]) -> None:
        for key, item in nested.items():
            try:
                self._take(key, item)
            except NeriteError as error:
                raise error.prefixed(f"Converting keyword: '{keyword}': ") from None

    def _take(self, key: str, item: Any) -> None:
        declared = self._inputs.get(key)
        if declared is None and key == BASE64_OUTPUT:
            self._base64 = boolean(key, item)
            return
        if declared is None:
            # Not ``isinstance``: of these all but null, lists and objects can be a parameter.
            if type(item) not in (bool, int, float, str):
                raise InvalidArgument(
                    f"parameter '{key}' has invalid type. It should be either 'int', 'bool', or 'string'."
                )
            self._parameters[key] = item
            return
        if key in self._specs:
            raise InvalidArgument(f"[request id: {self.id or '<id_unknown>'}] input '{key}' already exists in request")
        elements = item if isinstance(item, list) else [item]
        spec = TensorSpec(key, declared.datatype, json_tensors.shape_of(declared, self._batched, len(elements)))
        self.data.append(json_tensors.read(spec, elements, self._half))
        self._specs[key] = spec


def write(request: InferenceRequest, response: InferenceResponse, half: bool = False) -> bytes:
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
        text = json_tensors.write(spec, data, half, request.header.base64_by_default)
        entries[spec.name] = text[1:-1] if spec.elements == 1 else text
    return b"{" + b",".join(orjson.dumps(key) + b":" + entries[key] for key in sorted(entries)) + b"}"


def write_error(error: NeriteError) -> bytes:
    """Return an error as JSON."""
    return orjson.dumps({"error": error.message.encode(errors="replace").decode()})
