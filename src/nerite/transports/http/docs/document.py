"""The OpenAPI document: every endpoint of the table of routes, and every model that is served with what it takes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from nerite import __version__
from nerite.transports.http.docs import schemas
from nerite.transports.http.docs.endpoints import ARGUMENTS, ENDPOINTS, Told
from nerite.transports.http.docs.sample import NO_SAMPLE, Sample, sample_of
from nerite.transports.http.docs.schemas import Schema, reference
from nerite.transports.http.docs.served import Served
from nerite.transports.http.routes import ENDPOINTS as ROUTES
from nerite.transports.http.routes import Endpoint

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_JSON_SIZE: Final[Schema] = {
    "name": "Inference-Header-Content-Length",
    "in": "header",
    "description": "Bytes of JSON, where the bytes of tensors stand behind it.",
    "schema": {"type": "integer", "minimum": 0},
}
_ERROR: Final[Schema] = {"default": {"$ref": "#/components/responses/Error"}}
_OPENAI_ERROR: Final[Schema] = {"default": {"$ref": "#/components/responses/OpenAiError"}}
_arguments_of = re.compile(r"\{(\w+)\}").findall


def document(served: Iterable[Served], key_headers: Mapping[str, str], url: str) -> Schema:
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
            "description": "What this server answers over HTTP, with a path for each model that it serves now. "
            "Models come and go: ask again.",
        },
        "servers": [{"url": url}],
        "tags": [{"name": category} for category in categories],
        "paths": paths,
        "components": {
            "schemas": schemas.COMMON,
            "responses": {
                name: {"description": "What is wrong", "content": {_JSON: {"schema": reference(name)}}}
                for name in ("Error", "OpenAiError")
            },
            "securitySchemes": {
                category: {"type": "apiKey", "in": "header", "name": header} for category, header in locked.items()
            },
        },
    }


def _endpoint(route: Endpoint, path: str, method: str, locked: Mapping[str, str]) -> Schema:
    """Return what is told of an endpoint, for one of its paths and methods."""
    told = ENDPOINTS[route.name]
    arguments = _arguments_of(path)
    words = [route.name, *(name for name in arguments if name not in _arguments_of(route.paths[0]))]
    if len(route.methods) > 1:
        words.append(method.lower())
    errors = _OPENAI_ERROR if path.startswith("/v1/") else _ERROR
    operation: Schema = {
        "operationId": "_".join(words),
        "summary": told.summary,
        "tags": [route.category],
        "parameters": [_argument(name) for name in arguments] + ([_JSON_SIZE] if told.tensors else []),
        "responses": {"200": _answer(told, reference(told.gives)), **errors},
    }
    if told.takes and method == "POST":
        operation["requestBody"] = _body(told, reference(told.takes))
    return operation | _security(route.category, locked)


def _inference(each: Served, sample: Sample | None, path: str, url: str, locked: Mapping[str, str]) -> Schema:
    """Return what is told of inferences by one version of a model."""
    told = ENDPOINTS[each.endpoint]
    takes = schemas.generate_request(each.signature) if each.decoupled else schemas.infer_request(each.signature)
    gives = reference(told.gives) if each.decoupled else schemas.infer_response(each.signature)
    body = _body(told, takes)
    operation: Schema = {
        "operationId": path.removeprefix("/v2/models/").replace("/", "."),
        "summary": f"Infer with {each.model}, version {each.version}",
        "description": _description(each, sample),
        "tags": ["inference"],
        "parameters": [_JSON_SIZE] if told.tensors else [],
        "requestBody": body,
        "responses": {"200": _answer(told, gives), **_ERROR},
    }
    if sample is not None:
        if not sample.zeros:
            body["content"][_JSON]["example"] = sample.body
        command = sample.curl(url + path, locked.get("inference", ""))
        operation["x-codeSamples"] = [{"lang": "Shell", "label": "curl", "source": command}]
    return operation | _security("inference", locked)


def _description(each: Served, sample: Sample | None) -> str:
    """Return what a model takes and gives, as Markdown."""
    signature = each.signature
    lines = ["| | name | type | shape |", "|---|---|---|---|"]
    for kind, declared in each.tensors():
        lines.append(f"| {kind} | `{declared.name}` | {declared.datatype.name} | {each.shape(declared)} |")
    if signature.max_batch_size:
        lines += ["", f"The first dimension is the batch, of up to {signature.max_batch_size}."]
    if sample is None:
        lines += [
            "",
            NO_SAMPLE,
        ]
    return "\n".join(lines)


def _argument(name: str) -> Schema:
    form: Schema = {"type": "string", "pattern": "^[0-9]+$"} if name == "version" else {"type": "string"}
    return {"name": name, "in": "path", "required": True, "description": ARGUMENTS[name], "schema": form}


def _body(told: Told, takes: Schema) -> Schema:
    content: Schema = {_JSON: {"schema": takes}}
    if told.tensors:
        content[_BINARY] = {}
    return {"required": told.tensors, "content": content}


def _answer(told: Told, gives: Schema) -> Schema:
    answer: Schema = {"description": "OK"}
    if told.gives:
        answer["content"] = {kind: {"schema": gives} if kind != _BINARY else {} for kind in told.kinds}
    return answer


def _security(category: str, locked: Mapping[str, str]) -> Schema:
    return {"security": [{category: []}]} if category in locked else {}
