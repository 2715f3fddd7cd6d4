"""The Vertex AI port: one path for health, one for predictions, and a header that leads to other endpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nerite.config.options import METRICS_CATEGORY, VertexOptions
from nerite.core.errors import InvalidArgument, Restricted
from nerite.transports.clouds.dialects import VERTEX
from nerite.transports.http import reply, routes
from nerite.transports.http.head import RequestHead
from nerite.transports.http.metrics_service import MetricsService
from nerite.transports.http.reply import Reply
from nerite.transports.http.router import Router
from nerite.transports.http.target import Target

if TYPE_CHECKING:
    from nerite.server import InferenceServer

REDIRECT: Final = "X-Vertex-Ai-Triton-Redirect"
_OPEN: Final = {
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
"""The endpoints that a header may lead to."""
_SHUT: Final = {"load", "unload", "register", "unregister", "register_cuda", "unregister_cuda"}
"""Those that change the server, which is not for whoever may ask for a prediction."""


class VertexRouter:
    """Leads Vertex AI's requests to what HTTP answers."""

    def __init__(
        self, router: Router, options: VertexOptions, default_model: str, metrics: MetricsService | None
    ) -> None:
        """``metrics`` is None where they are switched off."""
        self._router = router
        self._options = options
        self._default_model = default_model
        self._metrics = metrics

    def target(self, head: RequestHead) -> Target:
        """Return what a head asks for."""
        if head.path == self._options.health_route:
            return self._router.at("/v2/health/ready", head)
        if head.path != self._options.predict_route:
            return Target(reply.BAD_REQUEST)
        to = head.headers.get(REDIRECT.lower())
        if to is None:
            return self._router.at(f"/v2/models/{self._default_model}/infer", head, VERTEX)
        return self._redirected(f"/{to}", head)

    def _redirected(self, path: str, head: RequestHead) -> Target:
        if head.method != "POST":
            return Target(Reply(405, b"", reply.PLAIN))
        if path == "/metrics" and self._metrics is not None:
            metrics = self._metrics
            return Target(
                refusal=self._router.locked(METRICS_CATEGORY, head),
                call=lambda connection, head, _body: metrics.send_page(connection, head, reply.PLAIN),
            )
        route = routes.find(path)
        if route is not None and route.endpoint.name in _OPEN:
            return self._router.lead(route, head, VERTEX)
        if route is not None and route.endpoint.name in _SHUT:
            error = Restricted(f"{path} cannot be reached by '{REDIRECT}', only on the HTTP port (--allow-http=true)")
            return Target(refusal=reply.error_reply(error, reply.PLAIN))
        return Target(reply.BAD_REQUEST)


async def default_model(server: InferenceServer, named: str) -> str:
    """Return the model that predictions are asked of: the one that is named, or the only one there is.

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
