"""Builds the OpenAPI document, with every endpoint and every served model, and sample requests for models."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from nerite import __version__
from nerite.core import tensor as dtypes
from nerite.core.sample_inputs import constant_value, sample_shapes
from nerite.core.signature import Signature, SignatureInput, SignatureOutput, shape_text
from nerite.llm.openai.text_model import is_embedding, is_text
from nerite.transports.http.json_tensors import HALVES
from nerite.transports.http.openapi_schemas import (
    COMMON,
    Schema,
    generate_request_schema,
    infer_request_schema,
    infer_response_schema,
    schema_reference,
)
from nerite.transports.http.routes import ARGUMENTS, ENDPOINT_DESCRIPTIONS, Endpoint, EndpointDescription
from nerite.transports.http.routes import ENDPOINTS as ROUTES

if TYPE_CHECKING:
    from nerite.repository.catalogue import ModelRecord

# Sample requests that a model's signature accepts, and the curl commands that send them.

_MAX_JSON_LENGTH: Final = 400
"""Longer tensors are sent as binary data, which keeps the command short enough to paste."""
_MAX_GENERATE_ELEMENTS: Final = 4096
"""Limit for the generate extension, which supports only JSON, as the length of a command line is limited."""
NO_SAMPLE: Final = "No sample command: the tensors are too large for one, or JSON lacks their type; use gRPC."
_EMPTY_STRING_SIZE: Final = 4
"""Size of an empty BYTES element: only its length field."""


class SampleRequest(NamedTuple):
    """A sample request: zeros, false and short texts, in plausible shapes."""

    body: dict[str, Any]
    zeros: int = 0
    """Number of zero bytes behind the JSON, for the tensors that are not in it."""
    binary: bool = False
    """The response has tensors behind its JSON."""
    streams: bool = False
    """The response is streamed."""

    @property
    def text(self) -> str:
        """The body as JSON."""
        return json.dumps(self.body)

    @property
    def brief(self) -> bool:
        """Whether the request and its response are only text."""
        return not self.zeros and not self.binary

    def curl(self, url: str, key_header: str = "") -> str:
        """Return a command for a POSIX shell. If a key is needed, it is expected in the variable ``KEY``."""
        words = ["curl", *(["-N"] if self.streams else []), shlex.quote(url)]
        if key_header:
            words.append(f'-H {shlex.quote(f"{key_header}: ")}"$KEY"')
        if self.binary:
            words.append("--output answer.bin")
        text = shlex.quote(self.text)
        if not self.zeros:
            return " ".join([*words, "-d", text])
        words += ["-H", f"'Inference-Header-Content-Length: {len(self.text)}'", "--data-binary @-"]
        return f"(printf %s {text}; head -c {self.zeros} /dev/zero) | {' '.join(words)}"


def sample_of(signature: Signature, *, decoupled: bool) -> SampleRequest | None:
    """Return a sample request for ``infer``, or for ``generate_stream`` if the model is ``decoupled``.

    None if ``generate_stream`` cannot carry the tensors.
    """
    return _sample_with(next(sample_shapes(signature, streams=decoupled)), signature, decoupled=decoupled)


def _sample_with(
    shapes: Mapping[str, tuple[int, ...]], signature: Signature, *, decoupled: bool
) -> SampleRequest | None:
    wanted = [declared for declared in signature.inputs.values() if not declared.optional]
    outside = any(declared.datatype in HALVES for declared in signature.outputs.values())
    if decoupled:
        counts = [math.prod(shapes[declared.name]) for declared in wanted]
        if outside or sum(counts) > _MAX_GENERATE_ELEMENTS or any(declared.datatype in HALVES for declared in wanted):
            return None
        pairs = zip(wanted, counts, strict=True)
        body = {declared.name: [_sample_element(declared)] * count for declared, count in pairs}
        return SampleRequest(body, streams=True)
    inputs = [_input(declared, shapes[declared.name]) for declared in wanted]
    zeros = sum(each["parameters"]["binary_data_size"] for each in inputs if "parameters" in each)
    asked = {"parameters": {"binary_data_output": True}} if outside else {}
    return SampleRequest({"inputs": inputs, **asked}, zeros, outside)


class SampleInput(NamedTuple):
    """An input of a sample request, as people enter it."""

    shape: tuple[int, ...]
    text: str
    """JSON, or a single text as it is; empty stands for zeros, or for an optional input that is left out."""


def sample_inputs(signature: Signature, *, decoupled: bool) -> dict[str, SampleInput]:
    """Return all inputs of the sample request of a model, by name."""
    shapes = next(sample_shapes(signature, streams=decoupled))
    found = {}
    for declared in signature.inputs.values():
        shape = shapes[declared.name]
        data = None if declared.optional else _sample_data(declared, math.prod(shape))
        text = "" if data is None else json.dumps(data)
        if data is not None and declared.datatype is dtypes.BYTES and len(data) == 1:
            text = str(data[0])
        found[declared.name] = SampleInput(shape, text)
    return found


def _input(declared: SignatureInput, shape: tuple[int, ...]) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": declared.name, "datatype": declared.datatype.name, "shape": list(shape)}
    count = math.prod(shape)
    if (data := _sample_data(declared, count)) is not None:
        return tensor | {"data": data}
    return tensor | {"parameters": {"binary_data_size": count * (declared.datatype.size or _EMPTY_STRING_SIZE)}}


def _sample_data(declared: SignatureInput, count: int) -> list[object] | None:
    """Return the values of an input; None if they are too long for a command, or JSON lacks their type."""
    if declared.datatype in HALVES or count > _MAX_JSON_LENGTH:
        return None
    data = [_sample_element(declared)] * count
    return data if len(json.dumps(data)) <= _MAX_JSON_LENGTH else None


def _sample_element(declared: SignatureInput) -> object:
    if declared.datatype is dtypes.BYTES:
        return "Hello"
    number = constant_value(declared.name, declared.datatype) or 0
    if declared.datatype is dtypes.BOOL:
        return bool(number)
    return float(number) if declared.datatype in (dtypes.FP32, dtypes.FP64) else number


# Served model versions, as the documentation needs them.

_PATH_CHARACTERS = "!$&'()*+,;=:@~"


class ServedModel(NamedTuple):
    """A model version that takes requests."""

    model: str
    version: str
    latest: bool
    """Requests without a version go to this one."""
    platform: str
    signature: Signature
    decoupled: bool
    """A request may have any number of responses."""

    @property
    def endpoint(self) -> str:
        """The endpoint for its inferences."""
        return "generate_stream" if self.decoupled else "infer"

    @property
    def paths(self) -> list[str]:
        """The paths of the endpoint, shortest first; none if the model's name is not valid in a URL."""
        if quote(self.model, safe=_PATH_CHARACTERS) != self.model:  # the server does not unquote names in paths
            return []
        model = f"/v2/models/{self.model}"
        shortest = [f"{model}/{self.endpoint}"] if self.latest else []
        return [*shortest, f"{model}/versions/{self.version}/{self.endpoint}"]

    def tensors(self) -> Iterator[tuple[str, SignatureInput | SignatureOutput]]:
        """Yield the inputs and outputs, each with its kind in words."""
        for declared in self.signature.inputs.values():
            yield "optional input" if declared.optional else "input", declared
        for output in self.signature.outputs.values():
            yield "output", output

    def shape(self, declared: SignatureInput | SignatureOutput) -> str:
        """Return a shape as in the model metadata: -1 is any size, and the batch dimension comes first, if any."""
        return shape_text((-1, *declared.dims) if self.signature.max_batch_size else declared.dims)


def served_models(records: Iterable[ModelRecord]) -> list[ServedModel]:
    """Return every running version, by model and version number.

    Models with the same name in several namespaces are left out: over HTTP, the name does not identify them.
    """
    running = [record for record in records if record.running]
    names = Counter(record.name for record in running)
    return [
        ServedModel(
            record.name,
            version.label,
            number == record.latest,
            version.config.platform or version.config.backend,
            version.signature,
            version.decoupled,
        )
        for record in running
        if names[record.name] == 1
        for number, version in sorted(record.running.items())
    ]


def example_command(records: Sequence[ModelRecord], url: str) -> str:
    """Return a working curl command: a chat with the first language model, else a short request to the first model.

    Models of images and embeddings come last, as their answers tell nothing. Without a short request: model metadata.
    """
    served = [each for each in served_models(records) if each.latest and each.paths]
    talks = next((each for each in served if is_text(each.signature)), None)
    if talks is not None:
        body = {"model": talks.model, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100}
        return f"curl {shlex.quote(f'{url}/v1/chat/completions')} -d {shlex.quote(json.dumps(body))}"
    for each in sorted(served, key=_is_unreadable):
        for shapes in sample_shapes(each.signature, streams=each.decoupled):
            sample = _sample_with(shapes, each.signature, decoupled=each.decoupled)
            if sample is not None and sample.brief:
                return sample.curl(url + each.paths[0])
    return f"curl {url}/v2/models/{records[0].name}"


def _is_unreadable(each: ServedModel) -> bool:
    """Return whether people can tell little from the answers of a model: it embeds, or takes images."""
    inputs = each.signature.inputs.values()
    images = any(len(declared.dims) == 3 and {declared.dims[0], declared.dims[2]} & {1, 3} for declared in inputs)
    return images or is_embedding(each.signature)


_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_FORM: Final = "multipart/form-data"
_JSON_SIZE: Final[Schema] = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "Size of the JSON part in bytes, if binary tensors follow it.",
    "schema": {"type": "integer", "minimum": 0},
}
_ERROR: Final[Schema] = {"default": {"$ref": "#/components/responses/Error"}}
_OPENAI_ERROR: Final[Schema] = {"default": {"$ref": "#/components/responses/OpenAiError"}}
_arguments_of = re.compile(r"\{(\w+)\}").findall


def openapi_document(served: Iterable[ServedModel], key_headers: Mapping[str, str], url: str) -> Schema:
    """Return the document of a server at ``url``; ``key_headers`` has the header that a restricted category needs."""
    categories = dict.fromkeys(route.category for route in ROUTES)
    locked = {category: key_headers[category] for category in categories if category in key_headers}
    paths: Schema = {}
    for route in ROUTES:
        for path in route.paths:
            paths[path] = {method.lower(): _endpoint(route, path, method, locked) for method in route.methods}
    for each in served:
        sample = sample_of(each.signature, decoupled=each.decoupled)
        for path in each.paths:
            paths[path] = {"post": _inference(each, sample, path, url, locked)}
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Nerite",
            "version": __version__,
            "description": "The HTTP API of this server, with a path for each model that is served now. Models may be "
            "loaded and unloaded at any time, so fetch this document again when needed.",
        },
        "servers": [{"url": url}],
        "tags": [{"name": category} for category in categories],
        "paths": paths,
        "components": {
            "schemas": COMMON,
            "responses": {
                name: {"description": "Error", "content": {_JSON: {"schema": schema_reference(name)}}}
                for name in ("Error", "OpenAiError")
            },
            "securitySchemes": {
                category: {"type": "apiKey", "in": "header", "name": header} for category, header in locked.items()
            },
        },
    }


def _endpoint(route: Endpoint, path: str, method: str, locked: Mapping[str, str]) -> Schema:
    """Return the operation of an endpoint, for one of its paths and methods."""
    described = ENDPOINT_DESCRIPTIONS[route.name]
    arguments = _arguments_of(path)
    words = [route.name, *(name for name in arguments if name not in _arguments_of(route.paths[0]))]
    if len(route.methods) > 1:
        words.append(method.lower())
    errors = _OPENAI_ERROR if path.startswith("/v1/") else _ERROR
    operation: Schema = {
        "operationId": "_".join(words),
        "summary": described.summary,
        "tags": [route.category],
        "parameters": [_argument(name) for name in arguments] + ([_JSON_SIZE] if described.tensors else []),
        "responses": {"200": _answer(described, schema_reference(described.gives)), **errors},
    }
    if described.takes and method == "POST":
        operation["requestBody"] = _body(described, schema_reference(described.takes))
    return operation | _security(route.category, locked)


def _inference(
    each: ServedModel, sample: SampleRequest | None, path: str, url: str, locked: Mapping[str, str]
) -> Schema:
    """Return the operation of an inference by one version of a model."""
    described = ENDPOINT_DESCRIPTIONS[each.endpoint]
    takes = generate_request_schema(each.signature) if each.decoupled else infer_request_schema(each.signature)
    gives = schema_reference(described.gives) if each.decoupled else infer_response_schema(each.signature)
    body = _body(described, takes)
    operation: Schema = {
        "operationId": path.removeprefix("/v2/models/").replace("/", "."),
        "summary": f"Infer with {each.model}, version {each.version}",
        "description": _description(each, sample),
        "tags": ["inference"],
        "parameters": [_JSON_SIZE] if described.tensors else [],
        "requestBody": body,
        "responses": {"200": _answer(described, gives), **_ERROR},
    }
    if sample is not None:
        if not sample.zeros:
            body["content"][_JSON]["example"] = sample.body
        command = sample.curl(url + path, locked.get("inference", ""))
        operation["x-codeSamples"] = [{"lang": "Shell", "label": "curl", "source": command}]
    return operation | _security("inference", locked)


def _description(each: ServedModel, sample: SampleRequest | None) -> str:
    """Return the inputs and outputs of a model as Markdown."""
    signature = each.signature
    lines = ["| | name | type | shape |", "|---|---|---|---|"]
    for kind, declared in each.tensors():
        lines.append(f"| {kind} | `{declared.name}` | {declared.datatype.name} | {each.shape(declared)} |")
    if signature.max_batch_size:
        lines += ["", f"The first dimension is the batch, of up to {signature.max_batch_size}."]
    if sample is None:
        lines += ["", NO_SAMPLE]
    return "\n".join(lines)


def _argument(name: str) -> Schema:
    form: Schema = {"type": "string", "pattern": "^[0-9]+$"} if name == "version" else {"type": "string"}
    return {"name": name, "in": "path", "required": True, "description": ARGUMENTS[name], "schema": form}


def _body(described: EndpointDescription, takes: Schema) -> Schema:
    content: Schema = {_FORM if described.form else _JSON: {"schema": takes}}
    if described.tensors:
        content[_BINARY] = {}
    return {"required": described.tensors, "content": content}


def _answer(described: EndpointDescription, gives: Schema) -> Schema:
    answer: Schema = {"description": "OK"}
    if described.gives:
        answer["content"] = {kind: {"schema": gives} if kind != _BINARY else {} for kind in described.kinds}
    return answer


def _security(category: str, locked: Mapping[str, str]) -> Schema:
    return {"security": [{category: []}]} if category in locked else {}
