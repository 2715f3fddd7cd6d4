"""JSON schemas of requests and responses, for each model and in general."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from nerite.core import tensor as dtypes
from nerite.core.signature import Signature, SignatureInput, SignatureOutput
from nerite.core.tensor import DataType
from nerite.transports.http.json_tensors import HALVES

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
    "OpenAiModel": _object(id=_TEXT, object=_TEXT, created=_NUMBER, owned_by=_TEXT, task=_TEXT),
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
    "MessagesRequest": _object(
        model=_TEXT,
        messages=_list(_object(role=_TEXT, content={}) | {"required": ["role", "content"]}),
        max_tokens=_NUMBER,
        system={},
        tools=_list({"type": "object"}),
        stream=_FLAG,
    )
    | {"required": ["model", "messages"]},
    "Message": _object(
        id=_TEXT, type=_TEXT, role=_TEXT, model=_TEXT, content=_list({"type": "object"}), usage={"type": "object"}
    )
    | {"description": "With `stream`: Anthropic's events."},
    "TokenCount": _object(input_tokens=_NUMBER),
    "ResponseRequest": _object(
        model=_TEXT, input={}, instructions=_TEXT, previous_response_id=_TEXT, store=_FLAG, stream=_FLAG
    )
    | {"required": ["model", "input"]},
    "Response": _object(
        id=_TEXT, object=_TEXT, created_at=_NUMBER, status=_TEXT, model=_TEXT, output=_list({"type": "object"})
    )
    | {"description": "With `stream`: OpenAI's events."},
    "ResponseItems": _object(object=_TEXT, data=_list({"type": "object"})),
    "TokenizeRequest": _object(model=_TEXT, prompt=_TEXT, messages=_list({"type": "object"})) | {"required": ["model"]},
    "Tokens": _object(model=_TEXT, count=_NUMBER, tokens=_list(_NUMBER)),
    "Detokenized": _object(prompt=_TEXT),
    "ScoreRequest": _object(model=_TEXT, text_1={}, text_2={}) | {"required": ["model"]},
    "Scores": _object(id=_TEXT, object=_TEXT, model=_TEXT, data=_list({"type": "object"})),
    "AdapterRequest": _object(lora_name=_TEXT, lora_path=_TEXT, model=_TEXT) | {"required": ["lora_name"]},
    "ClassifyRequest": _object(model=_TEXT, input={"anyOf": [_TEXT, _list(_TEXT)]}) | {"required": ["model", "input"]},
    "Classes": _object(id=_TEXT, object=_TEXT, model=_TEXT, data=_list({"type": "object"}), usage={"type": "object"}),
    "ImageRequest": _object(model=_TEXT, prompt=_TEXT, n=_NUMBER, size=_TEXT) | {"required": ["model", "prompt"]},
    "Images": _object(created=_NUMBER, data=_list({"type": "object"})),
    "SpeechRequest": _object(model=_TEXT, input=_TEXT, voice=_TEXT, response_format={"enum": ["wav", "pcm"]})
    | {"required": ["model", "input"]},
    "TranscriptionRequest": _object(
        file={"type": "string", "contentMediaType": "audio/wav"},
        model=_TEXT,
        language=_TEXT,
        prompt=_TEXT,
        response_format={"enum": ["json", "text", "srt", "vtt", "verbose_json"]},
        temperature={"type": "number", "minimum": 0, "maximum": 1},
        stream=_FLAG,
    )
    | {"required": ["file", "model"]},
    "Transcription": _object(text=_TEXT, usage={"type": "object"})
    | {"description": "With `stream`: OpenAI's events. Other formats are text."},
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
    "Background": _object(loops=_list(schema_reference("BackgroundLoop"))),
    "BackgroundLoop": _object(
        name=_TEXT,
        about=_TEXT,
        essential=_FLAG,
        state={"enum": ["ok", "failing", "stalled"]},
        problem=_TEXT,
        waiting=_NUMBER,
        failures=_NUMBER,
        restarts=_NUMBER,
        failing_units=_NUMBER,
        failing=_list(_object(unit=_TEXT, text=_TEXT)),
        set_aside=_NUMBER,
        dead_letters=_list(_object(unit=_TEXT, tenant=_TEXT, text=_TEXT, time=_TEXT)),
    ),
    "BackgroundUnit": _object(unit=_TEXT) | {"required": ["unit"]},
    "Links": {"type": "object", "description": "Paths by what is there."},
    "Release": _object(version=_TEXT),
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
    "RolloutOrder": {
        "type": "object",
        "description": "What a fleet command, or a router, sends to each replica.",
    },
    "FlaggerWebhook": _object(name=_TEXT, namespace=_TEXT, phase=_TEXT, metadata={"type": "object"}),
    "Analysis": _object(model=_TEXT, state=_TEXT, decision=_TEXT, reason=_TEXT),
    "RolloutHistory": _object(history=_list({"type": "object"})),
    "Force": _object(force=_FLAG),
    "RegisterRequest": _object(key=_TEXT, offset=_NUMBER, byte_size=_NUMBER) | {"required": ["key", "byte_size"]},
    "RegisterCudaRequest": _object(raw_handle=_object(b64=_TEXT), device_id=_NUMBER, byte_size=_NUMBER),
    "Regions": _list(_object(name=_TEXT, key=_TEXT, offset=_NUMBER, byte_size=_NUMBER)),
    "Page": _TEXT,
    "OpenApi": {"type": "object", "description": "This document."},
}
"""Schemas by name: the data of each tensor type, and the requests and responses that do not depend on a model."""
