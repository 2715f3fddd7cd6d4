"""Paths to endpoints: the table of what can be asked over HTTP."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from nerite.config.mistake import nearest


class Endpoint(NamedTuple):
    """A kind of question: its name, the methods it takes, and the category by which access is restricted."""

    name: str
    methods: tuple[str, ...]
    category: str
    path: str
    """With ``{argument}`` for what the client fills in, and ``[…]`` around a part that may be missing."""
    pattern: re.Pattern[str]
    """The same as an expression."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The path without the part that may be missing and, if there is one, with it."""
        shortest = _OPTIONAL.sub("", self.path)
        longest = _OPTIONAL.sub(r"\1", self.path)
        return (shortest,) if shortest == longest else (shortest, longest)


class Route(NamedTuple):
    """An endpoint, and what the path says: model, version, region."""

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
    _endpoint("index", "POST", "model-repository", _REPOSITORY + "/index"),
    _endpoint("load", "POST", "model-repository", _REPOSITORY + "/models/{model}/load"),
    _endpoint("logging", "GET POST", "logging", "/v2/logging"),
    _endpoint("trace", "GET POST", "trace", "/v2[/models/{model}]/trace/setting"),
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
    _endpoint("completions", "POST", "inference", "/v1/completions"),
    _endpoint("chat_completions", "POST", "inference", "/v1/chat/completions"),
    _endpoint("embeddings", "POST", "inference", "/v1/embeddings"),
    _endpoint("rerank", "POST", "inference", "/v1/rerank"),
)
_USUAL: Final = {
    ("v2", "models"): "models are listed by POST /v2/repository/index",
    ("metrics",): "the metrics are on a port of their own: --metrics-port, 8002 unless it is set",
    **dict.fromkeys(
        (("health",), ("healthz",), ("live",), ("livez",), ("ping",), ("ready",), ("readyz",), ("v2", "health")),
        "health is told under /v2/health/ready and /v2/health/live",
    ),
}
"""What there is instead of paths that are usual elsewhere."""
_FIRST: Final = {"/v2/models/stats": "all_statistics"}


def find_route(path: str) -> Route | None:
    """Return the route of a path, None if there is none. The method is not looked at."""
    special = _FIRST.get(path)
    for endpoint in ENDPOINTS:
        if special is not None and endpoint.name != special:
            continue
        match = endpoint.pattern.fullmatch(path)
        if match is not None:
            return Route(endpoint, {key: value or "" for key, value in match.groupdict().items()})
    return None


def route_remedy(path: str) -> str:
    """Return what to say to a client that asks for a path that there is not."""
    parts = tuple(part for part in path.split("/") if part)
    if parts in _USUAL:
        return _USUAL[parts]
    for given in (parts, ("v2", *parts)):
        known = (path.split("/")[1:] for endpoint in ENDPOINTS for path in endpoint.paths)
        meant = [path for each in known if (path := _meant(given, each))]
        if meant:
            return f"did you mean {nearest('/'.join(('', *given)), meant, 0.0) or meant[0]}?"
    return "what there is begins with /v2, and is described under /v2/docs"


def _meant(given: Sequence[str], known: Sequence[str]) -> str:
    """Return a known path with the arguments that were given, if one like it was given; else an empty string."""
    if len(given) != len(known):
        return ""
    filled = [there if _ARGUMENT.fullmatch(part) else part for there, part in zip(given, known, strict=True)]
    like = all(there == part or nearest(there.lower(), [part]) for there, part in zip(given, filled, strict=True))
    meant = "/" + "/".join(filled)
    return meant if like and find_route(meant) is not None else ""


# What each endpoint is for, takes and gives, in words.

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_EVENTS: Final = "text/event-stream"


class EndpointDescription(NamedTuple):
    """What is told of an endpoint. Schemas are named as in ``schemas.COMMON``."""

    summary: str
    takes: str = ""
    """The schema of the body; empty for none."""
    gives: str = ""
    """The schema of the answer; empty if the status says it all."""
    kinds: tuple[str, ...] = (_JSON,)
    """The content types of the answer."""
    tensors: bool = False
    """Tensors may stand behind the JSON, in both directions."""


ENDPOINT_DESCRIPTIONS: Final[Mapping[str, EndpointDescription]] = {
    "infer": EndpointDescription("Infer", "InferRequest", "InferResponse", (_JSON, _BINARY), tensors=True),
    "generate": EndpointDescription(
        "Infer, with inputs as the keys of one object", "GenerateRequest", "GenerateResponse"
    ),
    "generate_stream": EndpointDescription(
        "The same, with any number of responses as server-sent events",
        "GenerateRequest",
        "GenerateResponse",
        (_EVENTS,),
    ),
    "live": EndpointDescription("Whether the server runs"),
    "ready": EndpointDescription("Whether the server can serve requests"),
    "model_ready": EndpointDescription("Whether a model can serve requests"),
    "server_metadata": EndpointDescription("Describe the server", gives="ServerMetadata"),
    "docs": EndpointDescription("Show the models and endpoints on a page", gives="Page", kinds=("text/html",)),
    "openapi": EndpointDescription("Return this document", gives="OpenApi"),
    "model_metadata": EndpointDescription("Describe a model", gives="ModelMetadata"),
    "config": EndpointDescription("Return the configuration of a model", gives="ModelConfig"),
    "statistics": EndpointDescription("Return the statistics of a model", gives="Statistics"),
    "all_statistics": EndpointDescription("Return the statistics of all models", gives="Statistics"),
    "quota": EndpointDescription(
        "Return what tenants have used of which model, and what they have left", gives="Quota"
    ),
    "index": EndpointDescription("List the models of the repositories, and their states", "IndexRequest", "Index"),
    "load": EndpointDescription("Load a model, or load it again", "LoadRequest"),
    "unload": EndpointDescription("Unload a model", "UnloadRequest"),
    "logging": EndpointDescription("Return what is logged, or change it", "LogSettings", "LogSettings"),
    "trace": EndpointDescription(
        "Return what is traced, or change it; null undoes a change", "TraceSettings", "TraceSettings"
    ),
    "regions": EndpointDescription("List the regions of shared memory", gives="Regions"),
    "register": EndpointDescription("Register a region of shared memory", "RegisterRequest"),
    "unregister": EndpointDescription("Forget a region of shared memory, or all"),
    "cuda_regions": EndpointDescription("List the regions of CUDA memory", gives="Regions"),
    "register_cuda": EndpointDescription("Register a region of CUDA memory", "RegisterCudaRequest"),
    "unregister_cuda": EndpointDescription("Forget a region of CUDA memory, or all"),
    "openai_models": EndpointDescription("List the models that OpenAI's API can ask", gives="OpenAiModels"),
    "openai_model": EndpointDescription("Describe a model as OpenAI does", gives="OpenAiModel"),
    "openai_load": EndpointDescription("Load a model, and describe it as OpenAI does", gives="OpenAiModel"),
    "openai_unload": EndpointDescription("Unload a model", gives="OpenAiModel"),
    "completions": EndpointDescription(
        "Go on with a text, as in OpenAI's API", "CompletionRequest", "Completion", (_JSON, _EVENTS)
    ),
    "chat_completions": EndpointDescription(
        "Go on with a conversation, as in OpenAI's API", "ChatRequest", "Completion", (_JSON, _EVENTS)
    ),
    "embeddings": EndpointDescription("Turn texts into vectors, as in OpenAI's API", "EmbeddingRequest", "Embeddings"),
    "rerank": EndpointDescription("Say which of several texts answer a query best", "RerankRequest", "Ranking"),
}
"""By the names of ``routes.ENDPOINTS``."""

ARGUMENTS: Final[Mapping[str, str]] = {
    "model": "Name of the model",
    "version": "Version of the model",
    "repository": "Name of the repository",
    "region": "Name of the region",
}
"""What stands in a path."""
