"""The SageMaker and Vertex AI ports: health checks, inference by their paths and content types, and model management.

Both map their requests to the endpoints of the HTTP port.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from nerite.config.options import METRICS_CATEGORY, SagemakerOptions, VertexOptions
from nerite.core.client_text import checked_name
from nerite.core.errors import AlreadyExists, InvalidArgument, NeriteError, Restricted
from nerite.repository.repositories import RegisteredRepository
from nerite.transports.http import reply, routes
from nerite.transports.http.handler import HTTP, BackgroundCalls, HttpDialect, HttpExchange
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import Call, HttpTarget
from nerite.transports.http.json_text import parse_settings
from nerite.transports.http.metrics_service import MetricsService
from nerite.transports.http.reply import Reply
from nerite.transports.http.request_bodies import HttpInferPlan
from nerite.transports.http.router import Router
from nerite.transports.http.service import HttpService
from nerite.transports.limits import TransportLimits

if TYPE_CHECKING:
    from nerite.server import InferenceServer

# Layout of a model archive unpacked by SageMaker: which directory is the repository, and which the model.
#
# There are two layouts: a model directory with its configuration; or a directory of models, of which the only one, or
# the ensemble that contains the others, is meant.

_BLOCKED: Final = ("/dev/", "/proc/", "/sys/")
_ENSEMBLE: Final = re.compile(r'platform\s*:\s*"ensemble"')


class ModelArchive(NamedTuple):
    """Location of a model."""

    repository: Path
    directory: str
    """Directory of the model within the repository; empty if there is none."""


def find_archive(url: str) -> ModelArchive:
    """Locate the model in an unpacked archive. Raises ``InvalidArgument``."""
    root = Path(os.path.abspath(url)) if url else Path()
    if f"{root}/".startswith(_BLOCKED):
        raise InvalidArgument(
            f'Invalid URL: {url}. "url" property value cannot start with {", ".join(_BLOCKED[:-1])}, or {_BLOCKED[-1]}.'
        )
    # Not ``Path.is_dir``, which raises an error for invalid file names.
    if not url or not os.path.isdir(root):
        raise InvalidArgument(f"failed to register '{url}', repository not found")
    if (root / "config.pbtxt").is_file():
        return ModelArchive(root.parent, root.name)
    models = sorted(child.name for child in root.iterdir() if child.is_dir() and not child.name.startswith("."))
    ensembles = [name for name in models if _is_ensemble(root / name / "config.pbtxt")]
    candidates = ensembles or models
    if len(candidates) > 1:
        raise InvalidArgument(
            f"'{root}' has {len(candidates)} models: {', '.join(candidates)}. "
            "An archive must contain a single model, or an ensemble and its parts."
        )
    return ModelArchive(root, candidates[0] if candidates else "")


def _is_ensemble(config: Path) -> bool:
    return config.is_file() and _ENSEMBLE.search(config.read_text(errors="replace")) is not None


# Encoding of inferences: the content type contains the size of the JSON part.

_SAGEMAKER: Final = "application/vnd.sagemaker-triton.binary+json;json-header-size="
_VERTEX: Final = "application/vnd.vertex-ai-triton.binary+json;json-header-size="
_NUMBER: Final = re.compile(r"\s*([+-]?[0-9]+)")
_OUT_OF_MEMORY: Final = re.compile(
    "(?i:out[ _]?of[ _]?memory)|MemoryError|OOM|CNMEM_STATUS_OUT_OF_MEMORY|CU(?:DNN|BLAS)_STATUS_NOT_INITIALIZED"
    "|CUBLAS_STATUS_ALLOC_FAILED|(?:Dst|Src) tensor is not initialized|[Ff]ailed to allocate memory"
    "|No space left on device"
)
"""Out-of-memory messages of common frameworks."""


def _json_size_in(binary: str) -> Callable[[RequestHead], int]:
    """Return a function that reads the size from a content type starting with ``binary``; -1 means JSON only."""

    def json_size(head: RequestHead) -> int:
        content_type = head.headers.get("content-type", "")
        if binary not in content_type:
            return -1
        before, _, text = content_type.partition(binary)
        if before:
            raise InvalidArgument(f"expect MIME type for binary data starts with '{binary}', got: {content_type}")
        number = _NUMBER.match(text)
        try:
            size = int(number[1]) if number else None
        except ValueError:  # the number has too many digits for Python
            size = None
        if size is None:
            raise InvalidArgument(f"Unable to parse inference header size, got: {text}")
        if size < 0 or (size > head.content_length and not head.chunked):
            raise InvalidArgument(f"inference header size should be in range (0, {head.content_length}), got: {text}")
        return size

    return json_size


def status_of(error: NeriteError) -> int:
    """Return the HTTP status: 507 makes SageMaker unload other models and retry."""
    return 507 if _OUT_OF_MEMORY.search(error.message) else 400


SAGEMAKER: Final = HTTP._replace(
    json_size=_json_size_in(_SAGEMAKER),
    binary_headers=f"Content-Type: {_SAGEMAKER}%d\r\n".encode(),
    compresses=False,
)
SAGEMAKER_MODELS: Final = SAGEMAKER._replace(early_type="application/json", status_of=status_of)
"""Dialect of multi-model endpoints."""
VERTEX: Final[HttpDialect] = HTTP._replace(json_size=_json_size_in(_VERTEX), compresses=False)

# Models that SageMaker loads and unloads at run time, each from a repository of its own.

NOT_FOUND: Final = Reply(404, b"", reply.PLAIN)


class SagemakerModel(NamedTuple):
    """A model that SageMaker has loaded."""

    repository: RegisteredRepository
    model: str
    """Name of the model in the server: the archive's name if SageMaker sent it, otherwise SageMaker's own name."""


class SagemakerModels:
    """Models by SageMaker's names, which are hashes, with the handlers of its model API."""

    def __init__(self, server: InferenceServer) -> None:
        self._server = server
        self._models: dict[str, SagemakerModel] = {}
        self._background_calls = BackgroundCalls(_refusal)

    def __contains__(self, name: object) -> bool:
        return name in self._models

    def tell_all(self, connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
        """List the models that can be invoked."""
        listed = [_described(name, loaded) for name, loaded in self._models.items() if self._is_ready(loaded)]
        connection.send([reply.json_reply({"models": listed})._replace(content_type=reply.PLAIN).encode()])

    def _is_ready(self, loaded: SagemakerModel) -> bool:
        try:
            self._server.find(loaded.model, "", "")
        except NeriteError:
            return False
        return True

    def tell(self, name: str) -> Call:
        """Return a handler that describes a model."""

        def answer(connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
            loaded = self._models.get(name)
            answered = NOT_FOUND if loaded is None else reply.json_reply(_described(name, loaded))
            connection.send([answered._replace(content_type=reply.PLAIN).encode()])

        return answer

    def load(self, target_model: str | None) -> Call:
        """Return a handler that loads the model named in the body. ``target_model`` is the end user's name for it."""

        def answer(connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
            self._background_calls.start(connection, self._load(body, target_model))

        return answer

    async def _load(self, body: memoryview, target_model: str | None) -> Reply:
        document = parse_settings(body) if body else {}
        name, url = _text(document, "model_name"), _text(document, "url")
        model = target_model or name
        place = await asyncio.to_thread(find_archive, url)
        names = {place.directory: model} if place.directory else {}
        repository = RegisteredRepository(str(place.repository), names)
        await self._server.add_repository(repository, model)
        self._models[name] = SagemakerModel(repository, model)
        return reply.EMPTY

    def unload(self, name: str) -> Call:
        """Return a handler that unloads a model, and replies once its memory is free."""

        def answer(connection: HttpExchange, head: RequestHead, body: memoryview) -> None:
            loaded = self._models.pop(name, None)
            if loaded is None:
                connection.send([NOT_FOUND.encode()])
            else:
                self._background_calls.start(connection, self._unload(loaded))

        return answer

    async def _unload(self, loaded: SagemakerModel) -> Reply:
        await self._server.remove_repository(loaded.repository)
        return reply.EMPTY


def _described(name: str, loaded: SagemakerModel) -> dict[str, str]:
    return {"modelName": name, "modelUrl": loaded.repository.location}


def _refusal(error: NeriteError) -> Reply:
    status = 409 if isinstance(error, AlreadyExists) else status_of(error)
    return reply.error_reply(error, reply.PLAIN)._replace(status=status)


def _text(document: Any, key: str) -> str:
    value = document.get(key, "") if isinstance(document, dict) else ""
    if not isinstance(value, str):
        raise InvalidArgument(f"attempt to access JSON non-string as string\n    Write '{key}' as text.")
    return checked_name(value, f"'{key}'")


_TARGET: Final = "x-amzn-sagemaker-target-model"
_MODELS: Final = re.compile(r"/models(?:/(?P<name>[^/]*))?(?P<invoke>/invoke)?")


class SagemakerRouter:
    """Routes SageMaker's requests to HTTP endpoints and to its model API."""

    def __init__(self, router: Router, options: SagemakerOptions, models: SagemakerModels) -> None:
        self._router = router
        self._options = options
        self._models = models

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a request."""
        options = self._options
        if head.path == "/ping":
            return self._router.at(f"/v2/health/{options.ping_mode}", head)
        if head.path == "/invocations":
            return self._router.at(f"/v2/models/{options.default_model}/{options.inference_type}", head, SAGEMAKER)
        match = _MODELS.fullmatch(head.path)
        if match is None or head.method not in ("GET", "POST", "DELETE"):
            return HttpTarget(reply.BAD_REQUEST)
        name, target_model = match["name"] or "", head.headers.get(_TARGET)
        try:
            checked_name(name, "the model in the path")
            checked_name(target_model or "", f"header '{_TARGET}'")
        except NeriteError as error:
            return HttpTarget(refusal=reply.error_reply(error, reply.PLAIN))
        if head.method == "POST" and match["invoke"]:
            return self._router.inference(head, target_model or name, "", SAGEMAKER_MODELS)
        refusal = self._router.locked("model-repository", head)
        if head.method == "POST":
            return HttpTarget(refusal=refusal, call=self._models.load(target_model))
        if head.method == "DELETE":
            return HttpTarget(refusal=refusal, call=self._models.unload(name))
        return HttpTarget(refusal=refusal, call=self._models.tell(name) if name else self._models.tell_all)


class SagemakerService(HttpService):
    """Request handler of the SageMaker port, which also checks that an invoked model is still loaded."""

    def __init__(
        self,
        server: InferenceServer,
        target_of: Callable[[RequestHead], HttpTarget],
        models: SagemakerModels,
        bounds: TransportLimits,
        *,
        max_input_size: int,
    ) -> None:
        super().__init__(server, target_of, bounds, max_input_size=max_input_size)
        self._models = models

    def begin(self, head: RequestHead) -> Reply | None:
        """Also refuse to invoke a model that SageMaker has not loaded or has unloaded."""
        return super().begin(head) or self._unknown(head)

    def handle_again(self, connection: HttpExchange, plan: HttpInferPlan, data: bytearray) -> None:
        """Handle an inference with a known plan, unless its model was unloaded."""
        unknown = self._unknown(connection.head)
        if unknown is None:
            super().handle_again(connection, plan, data)
        else:
            connection.send([unknown.encode()])

    def _unknown(self, head: RequestHead) -> Reply | None:
        target: HttpTarget = head.route
        if target.dialect is not SAGEMAKER_MODELS:
            return None
        name = head.path.removeprefix("/models/").removesuffix("/invoke")
        return None if name in self._models else NOT_FOUND


# The Vertex AI port: one path for health, one for predictions, and a header that redirects to other endpoints.

REDIRECT: Final = "X-Vertex-Ai-Triton-Redirect"
_ALLOWED_ENDPOINTS: Final = {
    "infer",
    "live",
    "ready",
    "model_ready",
    "server_metadata",
    "model_metadata",
    "config",
    "statistics",
    "all_statistics",
    "index",
    "regions",
    "cuda_regions",
}
"""Endpoints that the header may redirect to."""
_FORBIDDEN_ENDPOINTS: Final = {"load", "unload", "route", "register", "unregister", "register_cuda", "unregister_cuda"}
"""Endpoints that change the server, which clients with access to predictions only must not reach."""


class VertexRouter:
    """Routes Vertex AI's requests to HTTP endpoints."""

    def __init__(
        self, router: Router, options: VertexOptions, default_model: str, metrics: MetricsService | None
    ) -> None:
        """``metrics`` is None if metrics are disabled."""
        self._router = router
        self._options = options
        self._default_model = default_model
        self._metrics = metrics

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a request."""
        if head.path == self._options.health_route:
            return self._router.at("/v2/health/ready", head)
        if head.path != self._options.predict_route:
            return HttpTarget(reply.BAD_REQUEST)
        to = head.headers.get(REDIRECT.lower())
        if to is None:
            return self._router.at(f"/v2/models/{self._default_model}/infer", head, VERTEX)
        return self._redirected(f"/{to}", head)

    def _redirected(self, path: str, head: RequestHead) -> HttpTarget:
        if head.method != "POST":
            return HttpTarget(Reply(405, b"", reply.PLAIN))
        if path == "/metrics" and self._metrics is not None:
            metrics = self._metrics
            return HttpTarget(
                refusal=self._router.locked(METRICS_CATEGORY, head),
                call=lambda connection, head, _body: metrics.send_page(connection, head, reply.PLAIN),
            )
        route = routes.find_route(path)
        if route is not None and route.endpoint.name in _ALLOWED_ENDPOINTS:
            return self._router.lead(route, head, VERTEX)
        if route is not None and route.endpoint.name in _FORBIDDEN_ENDPOINTS:
            error = Restricted(f"{path} cannot be reached by '{REDIRECT}', only on the HTTP port (--allow-http=true)")
            return HttpTarget(refusal=reply.error_reply(error, reply.PLAIN))
        return HttpTarget(reply.BAD_REQUEST)


async def default_model(server: InferenceServer, named: str) -> str:
    """Return the model that serves predictions: the one that is named, or else the only one.

    Raises ``InvalidArgument`` with Triton's texts.
    """
    ready = await server.repository_index(ready_only=True)
    if not named and len(ready) == 1:
        return ready[0]["name"]
    if not named:
        raise _not_started(
            "Expect the model repository contains only a single model if default model is not specified\n"
            f"    {len(ready)} model versions are ready. Name a model with --vertex-ai-default-model."
        )
    if all(entry["name"] != named for entry in ready):
        raise _not_started(f"Expect the default model '{named}' is loaded")
    return named


def _not_started(why: str) -> InvalidArgument:
    return InvalidArgument(f"failed to start Vertex AI service: Invalid argument - {why}")
