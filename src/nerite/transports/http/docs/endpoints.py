"""What each endpoint is for, takes and gives, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

_JSON: Final = "application/json"
_BINARY: Final = "application/octet-stream"
_EVENTS: Final = "text/event-stream"


class Told(NamedTuple):
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


ENDPOINTS: Final[Mapping[str, Told]] = {
    "infer": Told("Infer", "InferRequest", "InferResponse", (_JSON, _BINARY), tensors=True),
    "generate": Told("Infer, with inputs as the keys of one object", "GenerateRequest", "GenerateResponse"),
    "generate_stream": Told(
        "The same, with any number of responses as server-sent events",
        "GenerateRequest",
        "GenerateResponse",
        (_EVENTS,),
    ),
    "live": Told("Whether the server runs"),
    "ready": Told("Whether the server can serve requests"),
    "model_ready": Told("Whether a model can serve requests"),
    "server_metadata": Told("Describe the server", gives="ServerMetadata"),
    "docs": Told("Show the models and endpoints on a page", gives="Page", kinds=("text/html",)),
    "openapi": Told("Return this document", gives="OpenApi"),
    "model_metadata": Told("Describe a model", gives="ModelMetadata"),
    "config": Told("Return the configuration of a model", gives="ModelConfig"),
    "statistics": Told("Return the statistics of a model", gives="Statistics"),
    "all_statistics": Told("Return the statistics of all models", gives="Statistics"),
    "quota": Told("Return what tenants have used of which model, and what they have left", gives="Quota"),
    "index": Told("List the models of the repositories, and their states", "IndexRequest", "Index"),
    "load": Told("Load a model, or load it again", "LoadRequest"),
    "unload": Told("Unload a model", "UnloadRequest"),
    "logging": Told("Return what is logged, or change it", "LogSettings", "LogSettings"),
    "trace": Told("Return what is traced, or change it; null undoes a change", "TraceSettings", "TraceSettings"),
    "regions": Told("List the regions of shared memory", gives="Regions"),
    "register": Told("Register a region of shared memory", "RegisterRequest"),
    "unregister": Told("Forget a region of shared memory, or all"),
    "cuda_regions": Told("List the regions of CUDA memory", gives="Regions"),
    "register_cuda": Told("Register a region of CUDA memory", "RegisterCudaRequest"),
    "unregister_cuda": Told("Forget a region of CUDA memory, or all"),
    "openai_models": Told("List the models that OpenAI's API can ask", gives="OpenAiModels"),
    "openai_model": Told("Describe a model as OpenAI does", gives="OpenAiModel"),
    "openai_load": Told("Load a model, and describe it as OpenAI does", gives="OpenAiModel"),
    "openai_unload": Told("Unload a model", gives="OpenAiModel"),
    "completions": Told("Go on with a text, as in OpenAI's API", "CompletionRequest", "Completion", (_JSON, _EVENTS)),
    "chat_completions": Told(
        "Go on with a conversation, as in OpenAI's API", "ChatRequest", "Completion", (_JSON, _EVENTS)
    ),
    "embeddings": Told("Turn texts into vectors, as in OpenAI's API", "EmbeddingRequest", "Embeddings"),
    "rerank": Told("Say which of several texts answer a query best", "RerankRequest", "Ranking"),
}
"""By the names of ``routes.ENDPOINTS``."""

ARGUMENTS: Final[Mapping[str, str]] = {
    "model": "Name of the model",
    "version": "Version of the model",
    "repository": "Name of the repository",
    "region": "Name of the region",
}
"""What stands in a path."""
