"""Builds the OpenAPI document, with every endpoint and every served model, and sample requests for models."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias
from urllib.parse import quote

from nerite import __version__
from nerite.core import tensor as dtypes
from nerite.core.signature import Signature, SignatureInput, SignatureOutput, shape_text
from nerite.core.tensor import DataType
from nerite.transports.http.json_tensors import HALVES
from nerite.transports.http.routes import ARGUMENTS, ENDPOINT_DESCRIPTIONS, Endpoint, EndpointDescription
from nerite.transports.http.routes import ENDPOINTS as ROUTES

if TYPE_CHECKING:
    from nerite.repository.catalogue import ModelRecord

# JSON schemas of requests and responses, for each model and in general.

Schema: TypeAlias = dict[str, Any]
"""A JSON schema in the dialect of OpenAPI 3.1, or a part of an OpenAPI document."""

_SCALAR: Final[Schema] = {"type": ["boolean", "number", "string"]}
_PARAMETERS: Final[Schema] = {"type": "object", "additionalProperties": _SCALAR}


def schema_reference(name: str) -> Schema:
    """Return a reference to a schema in ``COMMON``."""
    return {"$ref": f"#/components/schemas/{name}"}


def infer_request_schema(signature: Signature) -> Schema:
    """Return the schema of the body of an infer request."""
    batch = signature.max_batch_size
    inputs = [_tensor(declared, batch) for declared in signature.inputs.values()]
    listed: Schema = {"type": "array", "minItems": len(signature.required), "maxItems": len(inputs)}
    if inputs:
        listed["items"] = {"anyOf": inputs}
    return {
        "type": "object",
        "required": ["inputs"],
        "properties": {
            "id": {"type": "string"},
            "inputs": listed,
            "outputs": {"type": "array", "items": _wanted(list(signature.outputs))},
            "parameters": _PARAMETERS,
        },
    }


def infer_response_schema(signature: Signature) -> Schema:
    """Return the schema of the body of an infer response."""
    outputs = [_tensor(declared, signature.max_batch_size) for declared in signature.outputs.values()]
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string"},
            "model_name": {"type": "string"},
            "model_version": {"type": "string"},
            "parameters": _PARAMETERS,
            "outputs": {"type": "array", "items": {"anyOf": outputs}} if outputs else {"type": "array"},
        },
    }


def generate_request_schema(signature: Signature) -> Schema:
    """Return the schema of the body of a generate request: inputs are keys, and all other keys are parameters."""
    return {
        "type": "object",
        "required": sorted(signature.required),
        "properties": {
            name: {"anyOf": [_element(declared.datatype), schema_reference(declared.datatype.name)]}
            for name, declared in signature.inputs.items()
            if declared.datatype not in HALVES
        },
        "additionalProperties": {"type": ["boolean", "number", "string", "object"]},
    }


def _tensor(declared: SignatureInput | SignatureOutput, max_batch_size: int) -> Schema:
    """Return the schema of one tensor."""
    batch = [{"type": "integer", "minimum": 1, "maximum": max_batch_size, "title": "batch"}] if max_batch_size else []
    sizes = [*batch, *({"type": "integer", "minimum": 0} if size == -1 else {"const": size} for size in declared.dims)]
    shape: Schema = {"type": "array", "minItems": len(sizes), "maxItems": len(sizes)}
    if sizes:
        shape["prefixItems"] = sizes
    form: Schema = {
        "title": declared.name,
        "type": "object",
        "required": ["name", "datatype", "shape"],
        "properties": {
            "name": {"const": declared.name},
            "datatype": {"const": declared.datatype.name},
            "shape": shape,
            "parameters": _PARAMETERS,
        },
    }
    if declared.datatype not in HALVES:
        form["properties"]["data"] = schema_reference(declared.datatype.name)
    return form


def _wanted(names: Sequence[str]) -> Schema:
    return {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"enum": names} if names else {"type": "string"}, "parameters": _PARAMETERS},
    }


def _element(datatype: DataType) -> Schema:
    if datatype is dtypes.BYTES:
        return {"type": "string", "description": "An element of BYTES, as UTF-8 text."}
    if datatype is dtypes.BOOL:
        return {"type": "boolean"}
    if datatype.numpy.kind == "f":
        return {"type": "number"}
    bits = datatype.size * 8
    lowest, highest = (0, 2**bits - 1) if datatype.numpy.kind == "u" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return {"type": "integer", "minimum": lowest, "maximum": highest}


def _data(datatype: DataType) -> Schema:
    return {
        "type": "array",
        "description": f"Elements of {datatype.name}, as a flat list or nested like the shape.",
        "items": {"anyOf": [_element(datatype), schema_reference(datatype.name)]},
    }


def _object(**properties: Schema) -> Schema:
    return {"type": "object", "properties": properties}


_TEXT: Final[Schema] = {"type": "string"}
_FLAG: Final[Schema] = {"type": "boolean"}
_NUMBER: Final[Schema] = {"type": "integer", "minimum": 0}
_ANY_TENSOR: Final = _object(
    name=_TEXT,
    datatype={"enum": [datatype.name for datatype in dtypes.ALL]},
    shape={"type": "array", "items": _NUMBER},
    parameters=_PARAMETERS,
    data={"type": "array"},
)
_DECLARED: Final = _object(name=_TEXT, datatype=_TEXT, shape={"type": "array", "items": {"type": "integer"}})


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


COMMON: Final[dict[str, Schema]] = {
    **{datatype.name: _data(datatype) for datatype in dtypes.ALL if datatype not in HALVES},
    "Error": _object(error=_TEXT) | {"required": ["error"]},
    "OpenAiError": _object(
        error=_object(message=_TEXT, type=_TEXT, param={"type": ["string", "null"]}, code={"type": ["string", "null"]})
    )
    | {"required": ["error"]},
    "OpenAiModels": _object(object=_TEXT, data=_list(schema_reference("OpenAiModel"))),
    "OpenAiModel": _object(id=_TEXT, object=_TEXT, created=_NUMBER, owned_by=_TEXT),
    "CompletionRequest": _object(model=_TEXT, prompt={"anyOf": [_TEXT, _list(_TEXT)]}, max_tokens=_NUMBER, stream=_FLAG)
    | {"required": ["model", "prompt"]},
    "EmbeddingRequest": _object(
        model=_TEXT,
        input={"anyOf": [_TEXT, _list(_TEXT)]},
        encoding_format={"enum": ["float", "base64"]},
        dimensions=_NUMBER,
    )
    | {"required": ["model", "input"]},
    "RerankRequest": _object(
        model=_TEXT,
        query=_TEXT,
        documents=_list({"anyOf": [_TEXT, _object(text=_TEXT)]}),
        top_n=_NUMBER,
        return_documents=_FLAG,
    )
    | {"required": ["model", "query", "documents"]},
    "Ranking": _object(id=_TEXT, model=_TEXT, results=_list({"type": "object"}), usage={"type": "object"}),
    "Embeddings": _object(object=_TEXT, model=_TEXT, data=_list({"type": "object"}), usage={"type": "object"}),
    "File": _object(id=_TEXT, object=_TEXT, bytes=_NUMBER, created_at=_NUMBER, filename=_TEXT, purpose=_TEXT),
    "BatchRequest": _object(
        input_file_id=_TEXT, endpoint=_TEXT, completion_window=_TEXT, metadata={"type": ["object", "null"]}
    )
    | {"required": ["input_file_id", "endpoint", "completion_window"]},
    "Batch": _object(
        id=_TEXT,
        object=_TEXT,
        endpoint=_TEXT,
        input_file_id=_TEXT,
        completion_window=_TEXT,
        status=_TEXT,
        output_file_id={"type": ["string", "null"]},
        error_file_id={"type": ["string", "null"]},
        created_at=_NUMBER,
        expires_at=_NUMBER,
        request_counts=_object(total=_NUMBER, completed=_NUMBER, failed=_NUMBER),
    ),
    "ChatRequest": _object(
        model=_TEXT,
        messages=_list(_object(role=_TEXT, content={}) | {"required": ["role"]}),
        tools=_list({"type": "object"}),
        max_completion_tokens=_NUMBER,
        stream=_FLAG,
    )
    | {"required": ["model", "messages"]},
    "Completion": _object(
        id=_TEXT,
        object=_TEXT,
        created=_NUMBER,
        model=_TEXT,
        choices=_list({"type": "object"}),
        usage={"type": "object"},
    )
    | {"description": "With `stream`: events of the same form, then `[DONE]`."},
    "InferRequest": _object(id=_TEXT, inputs=_list(_ANY_TENSOR), outputs=_list(_wanted([])), parameters=_PARAMETERS)
    | {"required": ["inputs"]},
    "InferResponse": _object(
        id=_TEXT, model_name=_TEXT, model_version=_TEXT, parameters=_PARAMETERS, outputs=_list(_ANY_TENSOR)
    ),
    "GenerateRequest": {"type": "object", "description": "Inputs and parameters, by name."},
    "GenerateResponse": _object(id=_TEXT, model_name=_TEXT, model_version=_TEXT)
    | {"description": "Also contains the outputs and parameters, by name."},
    "ServerMetadata": _object(name=_TEXT, version=_TEXT, extensions=_list(_TEXT)),
    "ModelMetadata": _object(
        name=_TEXT, versions=_list(_TEXT), platform=_TEXT, inputs=_list(_DECLARED), outputs=_list(_DECLARED)
    ),
    "ModelConfig": {"type": "object", "description": "The complete config.pbtxt as JSON."},
    "Statistics": _object(model_stats=_list({"type": "object"})),
    "Quota": _object(
        tenants=_list({"type": "object"}), models=_list({"type": "object"}), use=_list({"type": "object"})
    ),
    "Usage": _object(
        object=_TEXT,
        start={"type": "number"},
        end={"type": "number"},
        group_by=_list(_TEXT),
        data=_list({"type": "object"}),
    ),
    "Route": _object(
        name=_TEXT,
        arm=_list(_object(model=_TEXT, version=_TEXT, weight={"type": "number", "minimum": 0})),
        sticky=_list(_TEXT),
        salt=_TEXT,
        shadow=_object(
            model=_TEXT,
            version=_TEXT,
            share=_TEXT | {"description": "Such as 10%."},
            tolerance={"type": "number", "minimum": 0},
            timeout={"type": "number", "minimum": 0},
            concurrency=_NUMBER,
            contents=_FLAG,
        ),
        shadow_results={"type": "object", "description": "What the shadow has shown; in answers."},
    ),
    "IndexRequest": _object(ready=_FLAG),
    "Index": _list(_object(name=_TEXT, version=_TEXT, state=_TEXT, reason=_TEXT, content_hash=_TEXT)),
    "LoadRequest": _object(parameters={"type": "object", "additionalProperties": _TEXT}),
    "UnloadRequest": _object(parameters=_object(unload_dependents=_FLAG)),
    "RolloutCheckRequest": _object(
        to=_TEXT,
        seconds=_NUMBER,
        answer_seconds=_NUMBER,
        cancel_seconds=_NUMBER,
        memory_limit=_NUMBER,
        **{"from": _TEXT},
    )
    | {"required": ["from", "to"]},
    "RolloutCheck": _object(
        differences=_list(
            _object(
                severity={"enum": ["blocks", "warns", "notes"]},
                subject=_TEXT,
                baseline=_TEXT,
                candidate=_TEXT,
                consequence=_TEXT,
            )
        )
    ),
    "LogSettings": _object(
        log_file=_TEXT, log_info=_FLAG, log_warning=_FLAG, log_error=_FLAG, log_verbose_level=_NUMBER, log_format=_TEXT
    ),
    "TraceSettings": _object(
        trace_level=_list(_TEXT),
        trace_rate=_TEXT,
        trace_count=_TEXT,
        log_frequency=_TEXT,
        trace_file=_TEXT,
        trace_mode=_TEXT,
    ),
    "RolloutSpec": {"type": "object", "required": ["to"], "description": "The keys of `rollout.toml`."},
    "Rollout": _object(model=_TEXT, state=_TEXT, text=_TEXT, arms={"type": "object"}, gates=_list({"type": "object"})),
    "Rollouts": _object(rollouts=_list(schema_reference("Rollout")), past=_list({"type": "object"})),
    "RolloutOrder": {"type": "object", "description": "What `nerite rollout start --fleet` sends to each replica."},
    "FlaggerWebhook": _object(name=_TEXT, namespace=_TEXT, phase=_TEXT, metadata={"type": "object"}),
    "Analysis": _object(model=_TEXT, state=_TEXT, decision=_TEXT, reason=_TEXT),
    "RolloutHistory": _object(history=_list({"type": "object"})),
    "Force": _object(force=_FLAG),
    "RegisterRequest": _object(key=_TEXT, offset=_NUMBER, byte_size=_NUMBER) | {"required": ["key", "byte_size"]},
    "RegisterCudaRequest": _object(raw_handle=_object(b64=_TEXT), device_id=_NUMBER, byte_size=_NUMBER),
    "Regions": _list(_object(name=_TEXT, key=_TEXT, offset=_NUMBER, byte_size=_NUMBER)),
    "Links": {"type": "object", "description": "Paths by what is there."},
    "Release": _object(version=_TEXT),
    "Page": _TEXT,
    "OpenApi": {"type": "object", "description": "This document."},
}
"""Schemas by name: the data of each tensor type, and the requests and responses that do not depend on a model."""

# Sample requests that a model's signature accepts, and the curl commands that send them.

_MAX_JSON_ELEMENTS: Final = 16
"""Larger tensors are sent as binary data, which keeps the command short enough to paste."""
_MAX_GENERATE_ELEMENTS: Final = 4096
"""Limit for the generate extension, which supports only JSON, as the length of a command line is limited."""
NO_SAMPLE: Final = "No sample command: the tensors are too large for one, or JSON lacks their type; use gRPC."
_EMPTY_STRING_SIZE: Final = 4
"""Size of an empty BYTES element: only its length field."""


class SampleRequest(NamedTuple):
    """A sample request: zeros, false and short texts, in the smallest allowed shapes."""

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
    wanted = [declared for declared in signature.inputs.values() if not declared.optional]
    batch = (1,) if signature.max_batch_size > 0 else ()
    shapes = {declared.name: (*batch, *(1 if size == -1 else size for size in declared.dims)) for declared in wanted}
    outside = any(declared.datatype in HALVES for declared in signature.outputs.values())
    if decoupled:
        counts = [math.prod(shape) for shape in shapes.values()]
        if outside or sum(counts) > _MAX_GENERATE_ELEMENTS or any(declared.datatype in HALVES for declared in wanted):
            return None
        body = {declared.name: _sample_data(declared, count) for declared, count in zip(wanted, counts, strict=True)}
        return SampleRequest(body, streams=True)
    inputs = [_input(declared, shapes[declared.name]) for declared in wanted]
    zeros = sum(each["parameters"]["binary_data_size"] for each in inputs if "parameters" in each)
    asked = {"parameters": {"binary_data_output": True}} if outside else {}
    return SampleRequest({"inputs": inputs, **asked}, zeros, outside)


def _input(declared: SignatureInput, shape: tuple[int, ...]) -> dict[str, Any]:
    tensor: dict[str, Any] = {"name": declared.name, "datatype": declared.datatype.name, "shape": list(shape)}
    count = math.prod(shape)
    if count > _MAX_JSON_ELEMENTS or declared.datatype in HALVES:
        return tensor | {"parameters": {"binary_data_size": count * (declared.datatype.size or _EMPTY_STRING_SIZE)}}
    return tensor | {"data": _sample_data(declared, count)}


def _sample_data(declared: SignatureInput, count: int) -> list[object]:
    return [_sample_element(declared.datatype)] * count


def _sample_element(datatype: DataType) -> object:
    if datatype is dtypes.BYTES:
        return "text"
    if datatype is dtypes.BOOL:
        return False
    return 0.0 if datatype in (dtypes.FP32, dtypes.FP64) else 0


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


_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
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
    content: Schema = {_JSON: {"schema": takes}}
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
