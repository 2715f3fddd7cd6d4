"""Router of the HTTP port: finds the target of a request by its path, method and headers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from nerite.config.options import METRICS_CATEGORY, OpenAiOptions
from nerite.core.client_text import checked_name
from nerite.core.errors import NeriteError, NotFound
from nerite.core.request import owner_of
from nerite.ledger.usage import UsageQuery
from nerite.llm.openai.api import OpenAi
from nerite.llm.openai.batch_api import BatchApi
from nerite.llm.openai.model_control import ModelControl
from nerite.transports import access, engine_load
from nerite.transports.access import Callers, Lock
from nerite.transports.http import reply, routes
from nerite.transports.http.administration import HttpAdministration
from nerite.transports.http.background import BackgroundApi
from nerite.transports.http.handler import HTTP, HttpDialect
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.inference_router import INFERENCES, InferenceRouter
from nerite.transports.http.metrics_service import MetricsService
from nerite.transports.http.reply import Reply
from nerite.transports.http.routes import BACKGROUND, OF_TENANTS, QUERIED, Endpoint, Route
from nerite.transports.http.web_pages import Documentation

if TYPE_CHECKING:
    from nerite.batches.service import Batches
    from nerite.llm.openai.responses.store import ResponseStore
    from nerite.rollouts.controller import RolloutController
    from nerite.server import InferenceServer

_NO_METRICS: Final = reply.json_reply(
    {
        "error": "this port has no metrics: either --allow-metrics=false, or --metrics-address differs from "
        "--http-address, and only the metrics port (--metrics-port, 8002 by default) has them"
    },
    404,
)
_TENANTS_KEY: Final = "start the server with --http-restricted-api=statistics:admin-key=@FILE (docs/access.md)"


class Router(InferenceRouter):
    """Routes heads to targets. Ports with other paths (SageMaker, Vertex AI) map theirs to the same targets."""

    def __init__(
        self,
        server: InferenceServer,
        *,
        max_input_size: int,
        locks: Mapping[str, Lock],
        forward_pattern: re.Pattern[str] | None = None,
        half_precision: bool = False,
        callers: Callers | None = None,
        rollouts: RolloutController | None = None,
        batches: Batches | None = None,
        metrics: MetricsService | None = None,
        console: bool = False,
        openai: OpenAiOptions | None = None,
        responses: ResponseStore | None = None,
    ) -> None:
        """``locks`` has the key check of each restricted category of endpoints.

        ``metrics`` is None if this port has no metrics; ``console``: it has the console, too. ``half_precision``:
        FP16 and BF16 are allowed in JSON. Without ``callers`` requests are not identified.
        """
        super().__init__(
            server,
            max_input_size=max_input_size,
            locks=locks,
            forward_pattern=forward_pattern,
            half_precision=half_precision,
            callers=callers,
        )
        self._reporting_server = server
        self._administration = HttpAdministration(server, rollouts)
        self._background = BackgroundApi(server.loops)
        self._metrics = metrics
        self._documentation = Documentation(server, locks, metrics=metrics is not None, console=console)
        self._openai = OpenAi(
            server,
            ModelControl(server),
            locks=locks,
            max_input_size=max_input_size,
            sender_of=self.sender_of,
            batches=BatchApi(batches),
            usage_of=self._usage,
            options=openai,
            responses=responses,
        )

    def target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a head on the HTTP port."""
        if routes.is_openai(head.path):
            self._add_load_report(head, "")
            return self._openai.target(head)
        return self.at(head.path, head)

    def at(self, path: str, head: RequestHead, dialect: HttpDialect = HTTP) -> HttpTarget:
        """Return the target that a head would have on the HTTP port if its path were ``path``."""
        route = routes.find_route(path)
        if route is None:
            return HttpTarget(reply.error_reply(NotFound(f"Not Found ({routes.route_remedy(path)})"), reply.PLAIN))
        endpoint = route.endpoint
        if self.locked(endpoint.category, head) is None and head.method not in endpoint.methods:
            # For these endpoints Triton checks the method early, and its error has the type text/plain.
            early = endpoint.name in ("infer", "live", "ready", "model_ready")
            return HttpTarget(reply.NOT_ALLOWED if early else reply.NOT_ALLOWED_JSON)
        return self.lead(route, head, dialect)

    def lead(self, route: Route, head: RequestHead, dialect: HttpDialect = HTTP) -> HttpTarget:
        """Return the target of a route, without checking the method."""
        endpoint = route.endpoint
        if endpoint.name in INFERENCES:
            target = self.of_route(route, head, dialect)
            if endpoint.name != "infer" and target.refusal is None:
                self._add_load_report(head, route.arguments["model"])
            return target
        refusal = self._refusal(endpoint, head)
        try:
            for name, value in route.arguments.items():
                checked_name(value, f"the {name} in the path")
        except NeriteError as error:
            return HttpTarget(refusal=refusal or reply.error_reply(error))
        if endpoint.name == "metrics":
            return self._metrics_target(head)
        if endpoint.name in ("root", "docs", "openapi"):
            return HttpTarget(refusal=refusal, call=getattr(self._documentation, endpoint.name))
        arguments: dict[str, Any] = {"query": head.query} if endpoint.name in QUERIED else {**route.arguments}
        try:
            if endpoint.name in OF_TENANTS:
                refusal, arguments["tenant"] = access.figures_seen(
                    refusal,
                    has_key=refusal is None and endpoint.category in self._locks,
                    callers=self._callers,
                    caller=lambda: self.sender_of(head).caller,
                    remedy=_TENANTS_KEY,
                )
            elif endpoint.category == "shared-memory":
                arguments["owner"] = owner_of(self.sender_of(head).caller)
        except NeriteError as error:
            return HttpTarget(refusal=refusal or reply.error_reply(error))
        change = head.method == "POST" and len(endpoint.methods) > 1
        owner = self._background if endpoint.name in BACKGROUND else self._administration
        call = getattr(owner, f"change_{endpoint.name}" if change else endpoint.name)
        return HttpTarget(refusal=refusal, call=lambda connection, _head, body: call(connection, body, **arguments))

    def _refusal(self, endpoint: Endpoint, head: RequestHead) -> Reply | None:
        """Return the error reply if the request lacks the key that its endpoint needs; else None."""
        if endpoint.name not in BACKGROUND:
            return self.locked(endpoint.category, head)
        remedy = "" if self._callers is None else f"--http-restricted-api={endpoint.category}:HEADER=@KEYFILE"
        return access.operator_refusal(self._locks, endpoint.category, head, remedy)

    def _metrics_target(self, head: RequestHead) -> HttpTarget:
        """Return the target of a scrape. The page tells what the statistics tell, so it needs their key, too."""
        refusal = self.locked(METRICS_CATEGORY, head) or self.locked("statistics", head)
        if self._metrics is None:
            return HttpTarget(_NO_METRICS, refusal)
        return HttpTarget(refusal=refusal, call=self._metrics.scrape)

    async def _usage(self, query: UsageQuery) -> dict[str, Any]:
        return await self._reporting_server.usage(query)

    def _add_load_report(self, head: RequestHead, model: str) -> None:
        """If the client requests it, add the load of the model's engines, or of all engines, to replies."""
        form = head.headers.get(engine_load.FORMAT, "")
        head.load = engine_load.load_line_of(form, partial(self._reporting_server.engine_reports, model))
        head.special = head.special or head.load is not None
