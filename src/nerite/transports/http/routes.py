"""Table of the endpoints on the HTTP port: their paths and methods, and the descriptions that the docs page shows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from nerite.config.mistake import nearest
from nerite.config.options import METRICS_CATEGORY


class Endpoint(NamedTuple):
    """An endpoint: its name, allowed methods, and the category that access rules refer to."""

    name: str
    methods: tuple[str, ...]
    category: str
    path: str
    """Path template: ``{argument}`` is a placeholder, ``[…]`` encloses an optional part."""
    pattern: re.Pattern[str]
    """The path template as a regular expression."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The path without its optional part and, if it has one, also with it."""
        shortest = _OPTIONAL.sub("", self.path)
        longest = _OPTIONAL.sub(r"\1", self.path)
        return (shortest,) if shortest == longest else (shortest, longest)


class Route(NamedTuple):
    """An endpoint, and the arguments in the path: model, version, region."""

    endpoint: Endpoint
    arguments: dict[str, str]


_OPTIONAL: Final = re.compile(r"\[(.*?)\]")
_ARGUMENT: Final = re.compile(r"\{(\w+)\}")
_MODEL: Final = "/v2/models/{model}"
_VERSION: Final = "[/versions/{version}]"
_REPOSITORY: Final = "/v2/repository[/{repository}]"
_SYSTEM: Final = "/v2/systemsharedmemory"
_CUDA: Final = "/v2/cudasharedmemory"
_REGION: Final = "[/region/{region}]"


def _argument(match: re.Match[str]) -> str:
    return f"(?P<{match[1]}>{'[0-9]+' if match[1] == 'version' else '[^/]+'})"


def _endpoint(name: str, methods: str, category: str, path: str) -> Endpoint:
    expression = _ARGUMENT.sub(_argument, _OPTIONAL.sub(r"(?:\1)?", path.replace(".", r"\.")))
    return Endpoint(name, tuple(methods.split()), category, path, re.compile(expression))


ENDPOINTS: Final = (
    _endpoint("infer", "POST", "inference", _MODEL + _VERSION + "/infer"),
    _endpoint("generate", "POST", "inference", _MODEL + _VERSION + "/generate"),
    _endpoint("generate_stream", "POST", "inference", _MODEL + _VERSION + "/generate_stream"),
    _endpoint("live", "GET", "health", "/v2/health/live"),
    _endpoint("ready", "GET", "health", "/v2/health/ready"),
    _endpoint("model_ready", "GET", "health", _MODEL + _VERSION + "/ready"),
    _endpoint("server_metadata", "GET", "metadata", "/v2"),
    _endpoint("docs", "GET", "metadata", "/v2/docs"),
    _endpoint("openapi", "GET", "metadata", "/v2/docs/openapi.json"),
    _endpoint("model_metadata", "GET", "metadata", _MODEL + _VERSION),
    _endpoint("config", "GET", "model-config", _MODEL + _VERSION + "/config"),
    _endpoint("statistics", "GET", "statistics", _MODEL + _VERSION + "/stats"),
    _endpoint("all_statistics", "GET", "statistics", "/v2/models/stats"),
    _endpoint("quota", "GET", "statistics", "/v2/quota"),
    _endpoint("usage", "GET", "statistics", "/v2/usage"),
    _endpoint("background", "GET", "statistics", "/v2/background"),
    _endpoint("background_retry", "POST", "model-repository", "/v2/background/{loop}/retry"),
    _endpoint("background_discard", "POST", "model-repository", "/v2/background/{loop}/discard"),
    _endpoint("index", "POST", "model-repository", _REPOSITORY + "/index"),
    _endpoint("wake", "POST", "model-repository", "/v2/repository/wake"),
    _endpoint("load", "POST", "model-repository", _REPOSITORY + "/models/{model}/load"),
    _endpoint("route", "GET POST", "model-repository", _MODEL + "/route"),
    _endpoint("logging", "GET POST", "logging", "/v2/logging"),
    _endpoint("trace", "GET POST", "trace", "/v2[/models/{model}]/trace/setting"),
    _endpoint("rollouts", "GET", "model-repository", "/v2/rollouts"),
    _endpoint("rollout", "GET POST", "model-repository", _MODEL + "/rollout"),
    _endpoint("rollout_history", "GET", "model-repository", _MODEL + "/rollout/history"),
    _endpoint("rollout_check", "POST", "model-repository", _MODEL + "/rollout/check"),
    _endpoint("rollout_follow", "POST", "model-repository", _MODEL + "/rollout/follow"),
    _endpoint("rollout_analysis", "GET POST", "statistics", _MODEL + "/rollout/analysis"),
    _endpoint("rollout_command", "POST", "model-repository", _MODEL + "/rollout/{command}"),
    _endpoint("regions", "GET", "shared-memory", _SYSTEM + _REGION + "/status"),
    _endpoint("register", "POST", "shared-memory", _SYSTEM + _REGION + "/register"),
    _endpoint("unregister", "POST", "shared-memory", _SYSTEM + _REGION + "/unregister"),
    _endpoint("cuda_regions", "GET", "shared-memory", _CUDA + _REGION + "/status"),
    _endpoint("register_cuda", "POST", "shared-memory", _CUDA + _REGION + "/register"),
    _endpoint("unregister_cuda", "POST", "shared-memory", _CUDA + _REGION + "/unregister"),
    _endpoint("unload", "POST", "model-repository", _REPOSITORY + "/models/{model}/unload"),
    _endpoint("openai_models", "GET", "metadata", "/v1/models"),
    _endpoint("openai_model", "GET", "metadata", "/v1/models/{model}"),
    _endpoint("openai_load", "POST", "model-repository", "/v1/models/{model}/load"),
    _endpoint("openai_unload", "POST", "model-repository", "/v1/models/{model}/unload"),
    _endpoint("load_adapter", "POST", "model-repository", "/v1/load_lora_adapter"),
    _endpoint("unload_adapter", "POST", "model-repository", "/v1/unload_lora_adapter"),
    _endpoint("own_usage", "GET", "inference", "/v1/usage"),
    _endpoint("completions", "POST", "inference", "/v1/completions"),
    _endpoint("chat_completions", "POST", "inference", "/v1/chat/completions"),
    _endpoint("messages", "POST", "inference", "/v1/messages"),
    _endpoint("count_tokens", "POST", "inference", "/v1/messages/count_tokens"),
    _endpoint("responses", "POST", "inference", "/v1/responses"),
    _endpoint("response", "GET DELETE", "inference", "/v1/responses/{response}"),
    _endpoint("response_items", "GET", "inference", "/v1/responses/{response}/input_items"),
    _endpoint("tokenize", "POST", "inference", "/tokenize"),
    _endpoint("detokenize", "POST", "inference", "/detokenize"),
    _endpoint("embeddings", "POST", "inference", "/v1/embeddings"),
    _endpoint("rerank", "POST", "inference", "/v1/rerank"),
    _endpoint("score", "POST", "inference", "/v1/score"),
    _endpoint("classify", "POST", "inference", "/v1/classify"),
    _endpoint("classify_texts", "POST", "inference", "/classify"),
    _endpoint("images", "POST", "inference", "/v1/images/generations"),
    _endpoint("speech", "POST", "inference", "/v1/audio/speech"),
    _endpoint("transcriptions", "POST", "inference", "/v1/audio/transcriptions"),
    _endpoint("translations", "POST", "inference", "/v1/audio/translations"),
    _endpoint("files", "GET POST", "inference", "/v1/files"),
    _endpoint("file", "GET DELETE", "inference", "/v1/files/{file}"),
    _endpoint("file_content", "GET", "inference", "/v1/files/{file}/content"),
    _endpoint("batches", "GET POST", "inference", "/v1/batches"),
    _endpoint("batch", "GET", "inference", "/v1/batches/{batch}"),
    _endpoint("cancel_batch", "POST", "inference", "/v1/batches/{batch}/cancel"),
    _endpoint("root", "GET", "metadata", "/"),
    _endpoint("health", "GET", "health", "/health"),
    _endpoint("ping", "GET POST", "health", "/ping"),
    _endpoint("release", "GET", "metadata", "/version"),
    _endpoint("metrics", "GET", METRICS_CATEGORY, "/metrics"),
)
_OPENAI: Final = "/v1/"
_MESSAGES: Final = "/v1/messages"
_OPENAI_PATHS: Final = frozenset(("/tokenize", "/detokenize", "/classify"))
"""Paths beside those under ``/v1`` that belong to the same API."""
ANTHROPIC: Final = frozenset(("messages", "count_tokens"))
"""Names of the endpoints of Anthropic's API."""
BATCH_ENDPOINTS: Final = frozenset(("files", "file", "file_content", "batches", "batch", "cancel_batch"))
"""Names of the endpoints of files and batches."""
OF_DATABASES: Final = BATCH_ENDPOINTS | {"responses", "response", "response_items"}
"""Names of the endpoints that need what the server keeps in a database."""
BACKGROUND: Final = frozenset(("background", "background_retry", "background_discard"))
"""Names of the endpoints of the loops beside the requests, which show and change what is of all tenants."""
QUERIED: Final = frozenset(("usage", "own_usage"))
"""Names of endpoints that take the query of the URL."""
_REMEDIES: Final = {
    ("v2", "models"): "POST /v2/repository/index lists the models",
    **dict.fromkeys(
        (("healthz",), ("live",), ("livez",), ("ready",), ("readyz",), ("v2", "health")),
        "the health endpoints are /v2/health/ready and /v2/health/live",
    ),
}
"""Hints for paths that are common on other servers, by path."""
_LITERAL_PATHS: Final = {"/v2/models/stats": "all_statistics"}


def is_openai(path: str) -> bool:
    """Return whether a path belongs to the APIs of OpenAI and Anthropic."""
    return path.startswith(_OPENAI) or path.partition("?")[0] in _OPENAI_PATHS


def is_anthropic(path: str) -> bool:
    """Return whether a path belongs to Anthropic's Messages API."""
    return path.startswith(_MESSAGES)


def find_route(path: str) -> Route | None:
    """Return the route of a path, or None if no endpoint matches. The method is not checked."""
    special = _LITERAL_PATHS.get(path)
    for endpoint in ENDPOINTS:
        if special is not None and endpoint.name != special:
            continue
        match = endpoint.pattern.fullmatch(path)
        if match is not None:
            return Route(endpoint, {key: value or "" for key, value in match.groupdict().items()})
    return None


def route_remedy(path: str) -> str:
    """Return a hint for a client that requests an unknown path."""
    parts = tuple(part for part in path.split("/") if part)
    if parts in _REMEDIES:
        return _REMEDIES[parts]
    for given in (parts, ("v2", *parts)):
        known = (path.split("/")[1:] for endpoint in ENDPOINTS for path in endpoint.paths)
        meant = [path for each in known if (path := _corrected(given, each))]
        if meant:
            return f"did you mean {nearest('/'.join(('', *given)), meant, 0.0) or meant[0]}?"
    return "endpoints begin with /v2; /v2/docs lists them"


def _corrected(given: Sequence[str], known: Sequence[str]) -> str:
    """Return ``known`` with the arguments of ``given`` filled in if the two are similar; else an empty string."""
    if len(given) != len(known):
        return ""
    filled = [there if _ARGUMENT.fullmatch(part) else part for there, part in zip(given, known, strict=True)]
    similar = all(there == part or nearest(there.lower(), [part]) for there, part in zip(given, filled, strict=True))
    meant = "/" + "/".join(filled)
    return meant if similar and find_route(meant) is not None else ""


# Descriptions of the endpoints, for the docs page and the OpenAPI document.

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_EVENTS: Final = "text/event-stream"


class EndpointDescription(NamedTuple):
    """Documentation of an endpoint. Schemas are named as in ``openapi.COMMON``."""

    summary: str
    takes: str = ""
    """The schema of the request body; empty if it has none."""
    gives: str = ""
    """The schema of the response body; empty if the status is the whole response."""
    kinds: tuple[str, ...] = (_JSON,)
    """The content types of the response."""
    tensors: bool = False
    """Binary tensors may follow the JSON in requests and responses."""
    form: bool = False
    """The request body is a form."""


ENDPOINT_DESCRIPTIONS: Final[Mapping[str, EndpointDescription]] = {
    "infer": EndpointDescription("Infer", "InferRequest", "InferResponse", (_JSON, _BINARY), tensors=True),
    "generate": EndpointDescription(
        "Infer, with the inputs as keys of one JSON object", "GenerateRequest", "GenerateResponse"
    ),
    "generate_stream": EndpointDescription(
        "Like generate, with any number of responses as server-sent events",
        "GenerateRequest",
        "GenerateResponse",
        (_EVENTS,),
    ),
    "live": EndpointDescription("Check that the server is running"),
    "ready": EndpointDescription("Check that the server can serve requests"),
    "model_ready": EndpointDescription("Check that a model can serve requests"),
    "server_metadata": EndpointDescription("Describe the server", gives="ServerMetadata"),
    "docs": EndpointDescription("Show the models and endpoints as a web page", gives="Page", kinds=("text/html",)),
    "openapi": EndpointDescription("Return this document", gives="OpenApi"),
    "model_metadata": EndpointDescription("Describe a model", gives="ModelMetadata"),
    "config": EndpointDescription("Return the configuration of a model", gives="ModelConfig"),
    "statistics": EndpointDescription("Return the statistics of a model", gives="Statistics"),
    "all_statistics": EndpointDescription("Return the statistics of all models", gives="Statistics"),
    "quota": EndpointDescription("Return the usage of each tenant by model, and its remaining quota", gives="Quota"),
    "usage": EndpointDescription("Return what requests of all tenants used, from the ledger", gives="Usage"),
    "background": EndpointDescription(
        "List the loops that run beside the requests, what they fail with, and what was set aside", gives="Background"
    ),
    "background_retry": EndpointDescription(
        "Have what a loop has set aside tried again", "BackgroundUnit", "BackgroundLoop"
    ),
    "background_discard": EndpointDescription("Give up what a loop has set aside", "BackgroundUnit", "BackgroundLoop"),
    "index": EndpointDescription("List the models of the repositories, and their states", "IndexRequest", "Index"),
    "wake": EndpointDescription("Load the models of a server that stands by"),
    "load": EndpointDescription("Load or reload a model", "LoadRequest"),
    "unload": EndpointDescription("Unload a model", "UnloadRequest"),
    "route": EndpointDescription(
        "Return or change how requests to a name are divided among versions or models; {} ends that", "Route", "Route"
    ),
    "logging": EndpointDescription("Return or change the log settings", "LogSettings", "LogSettings"),
    "trace": EndpointDescription(
        "Return or change the trace settings; null resets a setting", "TraceSettings", "TraceSettings"
    ),
    "rollouts": EndpointDescription("Return the status of the last rollout of each model", gives="Rollouts"),
    "rollout": EndpointDescription("Return the status of a model's rollout, or start one", "RolloutSpec", "Rollout"),
    "rollout_history": EndpointDescription(
        "Return the decisions of a model's rollouts with their evidence", gives="RolloutHistory"
    ),
    "rollout_follow": EndpointDescription("Take an order of a fleet command", "RolloutOrder", "Rollout"),
    "rollout_analysis": EndpointDescription(
        "Return what the judge says, for Argo Rollouts, or answer a webhook of Flagger", "FlaggerWebhook", "Analysis"
    ),
    "rollout_command": EndpointDescription("Pause, resume, promote, abort or clear a rollout", "Force", "Rollout"),
    "regions": EndpointDescription("List the system shared memory regions", gives="Regions"),
    "register": EndpointDescription("Register a system shared memory region", "RegisterRequest"),
    "unregister": EndpointDescription("Unregister one or all system shared memory regions"),
    "cuda_regions": EndpointDescription("List the CUDA shared memory regions", gives="Regions"),
    "register_cuda": EndpointDescription("Register a CUDA shared memory region", "RegisterCudaRequest"),
    "unregister_cuda": EndpointDescription("Unregister one or all CUDA shared memory regions"),
    "rollout_check": EndpointDescription(
        "Compare two versions of a model, and try the new one, before a rollout", "RolloutCheckRequest", "RolloutCheck"
    ),
    "openai_models": EndpointDescription("List the models available through the OpenAI API", gives="OpenAiModels"),
    "openai_model": EndpointDescription("Describe a model in OpenAI's format", gives="OpenAiModel"),
    "openai_load": EndpointDescription("Load a model, and describe it in OpenAI's format", gives="OpenAiModel"),
    "openai_unload": EndpointDescription("Unload a model", gives="OpenAiModel"),
    "load_adapter": EndpointDescription(
        "Load a LoRA adapter into a running model, as vLLM does", "AdapterRequest", "Page", ("text/plain",)
    ),
    "unload_adapter": EndpointDescription(
        "Unload a LoRA adapter that was loaded so", "AdapterRequest", "Page", ("text/plain",)
    ),
    "own_usage": EndpointDescription("Return what the tenant's requests used, from the ledger", gives="Usage"),
    "completions": EndpointDescription(
        "Complete a text (OpenAI API)", "CompletionRequest", "Completion", (_JSON, _EVENTS)
    ),
    "chat_completions": EndpointDescription(
        "Continue a conversation (OpenAI API)", "ChatRequest", "Completion", (_JSON, _EVENTS)
    ),
    "messages": EndpointDescription(
        "Continue a conversation (Anthropic API)", "MessagesRequest", "Message", (_JSON, _EVENTS)
    ),
    "count_tokens": EndpointDescription(
        "Count the tokens of a conversation (Anthropic API)", "MessagesRequest", "TokenCount"
    ),
    "responses": EndpointDescription(
        "Continue a conversation (OpenAI's Responses API)", "ResponseRequest", "Response", (_JSON, _EVENTS)
    ),
    "response": EndpointDescription("Return or delete a stored response (OpenAI API)", gives="Response"),
    "response_items": EndpointDescription(
        "Return the conversation before a stored response (OpenAI API)", gives="ResponseItems"
    ),
    "tokenize": EndpointDescription("Return the tokens of a prompt or of a chat", "TokenizeRequest", "Tokens"),
    "detokenize": EndpointDescription("Return the text of tokens", "Tokens", "Detokenized"),
    "embeddings": EndpointDescription("Compute embeddings of texts (OpenAI API)", "EmbeddingRequest", "Embeddings"),
    "rerank": EndpointDescription("Rank documents by their relevance to a query", "RerankRequest", "Ranking"),
    "score": EndpointDescription("Score pairs of texts by their relevance", "ScoreRequest", "Scores"),
    "classify": EndpointDescription("Return the class of each text", "ClassifyRequest", "Classes"),
    "classify_texts": EndpointDescription("The same, at vLLM's path", "ClassifyRequest", "Classes"),
    "images": EndpointDescription("Generate images (OpenAI API)", "ImageRequest", "Images"),
    "speech": EndpointDescription("Synthesize speech (OpenAI API)", "SpeechRequest", "", ("audio/wav",)),
    "transcriptions": EndpointDescription(
        "Transcribe a recording (OpenAI API)", "TranscriptionRequest", "Transcription", (_JSON, _EVENTS), form=True
    ),
    "translations": EndpointDescription(
        "Translate a recording to English (OpenAI API)",
        "TranscriptionRequest",
        "Transcription",
        (_JSON, _EVENTS),
        form=True,
    ),
    "files": EndpointDescription("List the files of batches, or upload one as a form (OpenAI API)", "", "File"),
    "file": EndpointDescription("Describe or delete a file (OpenAI API)", gives="File"),
    "file_content": EndpointDescription("Return the content of a file (OpenAI API)", kinds=(_BINARY,)),
    "batches": EndpointDescription("List the batches, or create one (OpenAI API)", "BatchRequest", "Batch"),
    "batch": EndpointDescription("Describe a batch (OpenAI API)", gives="Batch"),
    "cancel_batch": EndpointDescription("Cancel a batch and keep what is done (OpenAI API)", gives="Batch"),
    "root": EndpointDescription("List where documentation, health and metrics are", gives="Links"),
    "health": EndpointDescription("Check that the server can serve requests, as vLLM's servers are asked; 503 if not"),
    "ping": EndpointDescription("The same, as SageMaker asks"),
    "release": EndpointDescription("Return the version of the server", gives="Release"),
    "metrics": EndpointDescription(
        "Return the page of the metrics port, if both ports have the same address", gives="Page", kinds=("text/plain",)
    ),
}
"""Descriptions by endpoint name."""

ARGUMENTS: Final[Mapping[str, str]] = {
    "model": "Name of the model",
    "version": "Version of the model",
    "repository": "Name of the repository",
    "command": "pause, resume, promote, abort or clear",
    "loop": "Name of the loop",
    "region": "Name of the region",
    "file": "Id of the file",
    "batch": "Id of the batch",
    "response": "Id of the response",
}
"""Descriptions of the path arguments."""
