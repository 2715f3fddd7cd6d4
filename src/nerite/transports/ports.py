"""The ports of a server: opens those that the flags enable, connects them to their services, and shuts them down."""

from __future__ import annotations

import asyncio
import os
import re
import ssl
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final, Protocol

from nerite.batches.metrics import write_batch_metrics
from nerite.config.options import ServerOptions
from nerite.core.work_loop import WorkLoops
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.observability.gpus import GpuMetrics
from nerite.observability.log import log
from nerite.observability.recent_log import RecentLog
from nerite.server import InferenceServer
from nerite.transports import tcp
from nerite.transports.access import Callers, KeyFile
from nerite.transports.clouds import SagemakerModels, SagemakerRouter, SagemakerService, VertexRouter, default_model
from nerite.transports.engine_load import LoadSource
from nerite.transports.http.background import write_background_metrics
from nerite.transports.http.console import Console, HistorySampler, log_refusal
from nerite.transports.http.handler import HttpHandler
from nerite.transports.http.item_submission import ItemSubmission
from nerite.transports.http.listener import HttpListener
from nerite.transports.http.metrics_service import MetricsService
from nerite.transports.http.origins import BrowserGuard
from nerite.transports.http.router import Router
from nerite.transports.http.service import HttpService
from nerite.transports.limits import TransportLimits
from nerite.transports.listeners import IdleCheck, ListenerFactory, TargetOf, limits_of
from nerite.transports.tcp import tls_context

if TYPE_CHECKING:
    from nerite.batches.service import Batches
    from nerite.llm.openai.responses.store import ResponseStore
    from nerite.rollouts.controller import RolloutController
    from nerite.transports.grpc.methods import Handler

_MAX_METRICS_BODY: Final = 64 * 1024
_LINGER_SECONDS: Final = 0.15
"""Seconds that idle connections stay open after clients were notified of the shutdown, or after new connections
stopped."""
_LOOP_TURN: Final = 0.01
"""Seconds for the loop to read pending input: a timer that is due fires before that."""


class TransportListener(Protocol):
    """An open port."""

    def forget(self) -> None:
        """Re-evaluate all headers, also on open connections, because access rules have changed."""

    def drain(self) -> None:
        """Notify clients that their connections will end soon. Requests are still answered."""

    def admit_no_more(self) -> None:
        """Let no more connections begin; those already begun are still accepted."""

    def stop_accepting(self) -> None:
        """Close the port, and each connection as soon as it is idle."""

    def abort(self) -> None:
        """Close all remaining connections immediately."""

    @property
    def open_connections(self) -> int:
        """Number of open connections."""


class OpenablePort(TransportListener, Protocol):
    """A port that can be opened."""

    async def open(
        self, address: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen, and return the port number. Raises ``Unavailable`` on failure."""


class ConnectionFronts(Protocol):
    """Processes that serve the connections of ports, and relay to this one what they cannot answer."""

    def share(self, bounds: TransportLimits) -> None:
        """Apply the limits of this process to all processes together."""

    def http(self, handler: HttpHandler) -> OpenablePort:
        """Return the HTTP port, whose other requests ``handler`` answers."""

    def grpc(self, administration: Callable[[str, str], Handler]) -> OpenablePort:
        """Return the gRPC port; ``administration`` returns the handler of each method but those of inference."""

    async def refresh(self) -> None:
        """Bring what the processes have counted into this one."""

    def write_metrics(self, page: Page) -> None:
        """Write the metrics of the processes."""


class ServerPorts:
    """All ports of a server. Only for the event loop's thread."""

    def __init__(
        self,
        server: InferenceServer,
        options: ServerOptions,
        key_files: Mapping[str, KeyFile],
        callers: Callers | None,
        gpus: GpuMetrics | None,
        fronts: ConnectionFronts | None = None,
        rollouts: RolloutController | None = None,
    ) -> None:
        """``callers`` identifies callers if a policy is in force; ``key_files`` are those named by restrictions.

        With ``fronts``, other processes serve the connections of the HTTP and gRPC ports.
        """
        self.opened: dict[str, int] = {}
        """Number of each open port by its name."""
        self._server = server
        self._options = options
        self._gpus = gpus
        self._fronts = fronts
        self._rollouts = rollouts
        self._bounds = limits_of(options)
        if fronts is not None:
            fronts.share(self._bounds)
        self.batches: Batches | None = None
        """Files and batches; to be set before ``open``."""
        self.responses: ResponseStore | None = None
        """Responses that are kept; to be set before ``open``."""
        self._factory = ListenerFactory(options, self._bounds, key_files, callers)
        self._listeners: dict[str, TransportListener] = {}
        """Listeners by name of the port."""
        self._idle_check = IdleCheck(self._bounds, options.connections.idle_seconds)
        self.loops = WorkLoops()
        """Where the loops of the ports are added; to be set before ``open``."""
        self._sampling: asyncio.Task[None] | None = None
        """Takes samples for the console."""
        if options.http.enabled and options.http.console and log.recent is None:
            log.recent = RecentLog()  # before the models are loaded, so that the console tells how that went

    async def check(self) -> None:
        """Raise ``NeriteError`` for an unavailable port early: the steps before ``open`` may take long."""
        http, grpc, metrics = self._options.http, self._options.grpc, self._options.metrics
        sagemaker, vertex = self._options.sagemaker, self._options.vertex
        if grpc.enabled:
            await tcp.check("GRPC", grpc.address, grpc.port, reuse_port=grpc.reuse_port)
        if http.enabled:
            await tcp.check("HTTP", http.address, http.port, reuse_port=http.reuse_port)
        for name, port in (("Sagemaker", sagemaker), ("Vertex AI", vertex), ("Metrics", metrics)):
            if port.enabled:
                await tcp.check(name, port.address, port.port, reuse_port=False)

    async def open(self) -> None:
        """Open all enabled ports. Raises ``NeriteError`` for a port that cannot be opened."""
        options = self._options
        metrics = options.metrics
        guard = BrowserGuard.of(options.http, metrics.address)
        page = None
        if metrics.enabled:
            page = MetricsService(self._server, metrics, self._factory.locks, self._gpus, guard, self)
        if options.grpc.enabled:
            await self._open_grpc()
        if options.http.enabled:
            await self._open_http(page)
        if options.sagemaker.enabled:
            await self._open_sagemaker()
        if options.vertex.enabled:
            await self._open_vertex(page)
        if page is not None:
            port = await self._listener("Metrics", page, _MAX_METRICS_BODY).open(metrics.address, metrics.port)
            self._note("metrics", "Metrics Service", metrics.address, port)
        self._idle_check.start()

    def item_executor(self) -> ItemSubmission:
        """Return what executes items of batches: in this process, and without the keys that clients need."""
        routing = {**self._factory.routing(), "locks": {}, "openai": self._options.openai}
        router = Router(self._server, **routing)
        size = self._options.http.max_input_size
        service = HttpService(self._server, router.target, self._bounds, max_input_size=size)
        return ItemSubmission(self._server, service)

    @property
    def connections_by_port(self) -> dict[str, int]:
        """Number of open connections of each port."""
        return {name: each.open_connections for name, each in self._listeners.items()}

    def write_metrics(self, page: Page) -> None:
        """Write the metrics of connections, transport limits, and what runs beside the requests."""
        page.write(METRICS, [METRICS.row(self)])
        write_background_metrics(self._server.loops, page)
        self._bounds.write_metrics(page)
        if self._fronts is not None:
            self._fronts.write_metrics(page)
        if self._rollouts is not None:
            self._rollouts.write_metrics(page)
        if self.batches is not None:
            write_batch_metrics(self.batches.runner, page)

    async def refresh(self) -> None:
        """Bring what other processes have counted into this one."""
        if self._fronts is not None:
            await self._fronts.refresh()

    def forget(self) -> None:
        """Re-evaluate all headers, also on open connections, because access rules have changed."""
        for listener in self._listeners.values():
            listener.forget()

    async def drain(self, patience: float) -> None:
        """Notify clients that their connections will end soon, and answer what they send until then.

        A client may be sending a request at this moment on a seemingly idle connection, or on one that is being opened.
        """
        for listener in self._listeners.values():
            listener.drain()
        await self._linger(patience)
        for listener in self._listeners.values():
            listener.admit_no_more()
        await asyncio.sleep(_LOOP_TURN)
        await self._linger(patience)

    async def _linger(self, patience: float) -> None:
        """Keep connections open for a moment, and handle requests that have arrived by then."""
        if self.open_connections:
            await asyncio.sleep(min(_LINGER_SECONDS, patience / 4))
            await asyncio.sleep(_LOOP_TURN)

    def stop_accepting(self) -> None:
        """Close the ports, and each connection as soon as it is idle."""
        for listener in self._listeners.values():
            listener.stop_accepting()

    def abort(self) -> None:
        """Close all remaining connections immediately."""
        self._idle_check.stop()
        if self._sampling is not None:
            self._sampling.cancel()
        for listener in self._listeners.values():
            listener.abort()
        self._bounds.aside.close()

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return sum(self.connections_by_port.values())

    async def _open_grpc(self) -> None:
        # Imported here, because a server without gRPC need not load its code.
        from nerite.transports.grpc.delays import Delays
        from nerite.transports.grpc.methods import GrpcAdministration

        Delays(os.environ).report()
        options = self._options.grpc
        administration = GrpcAdministration(self._server).handler
        tls = tls_context(options.tls, ["h2"])
        listener: OpenablePort
        if self._fronts is not None:
            listener = self._fronts.grpc(administration)
        else:
            listener = self._factory.grpc(self._server, administration, self._load_source())
        self._listeners["grpc"] = listener
        port = await listener.open(options.address, options.port, reuse_port=options.reuse_port, tls=tls)
        self._note("gRPC", "GRPCInferenceService", options.address, port)

    def _load_source(self) -> LoadSource:
        server = self._server
        return LoadSource(
            server.engine_reports, lambda: sum(version.statistics.success.count for version in server.metrics())
        )

    async def _open_http(self, metrics: MetricsService | None) -> None:
        options = self._options.http
        # Whoever moved the metrics to another address does not want them here.
        scraped = metrics if self._options.metrics.address == options.address else None
        router = self._router(options.header_forward_pattern, metrics=scraped, console=options.console)
        target_of: TargetOf = router.target
        if options.console:
            target_of = self._console(metrics, target_of).target
        target_of = self._factory.guarded(self._factory.cross_origin(target_of), options.address)
        service = HttpService(self._server, target_of, self._bounds, max_input_size=options.max_input_size)
        tls = tls_context(options.tls, ["http/1.1"])
        listener: OpenablePort
        if self._fronts is not None:
            listener = self._listeners["http"] = self._fronts.http(service)
        else:
            listener = self._listener("HTTP", service, options.max_input_size)
        port = await listener.open(options.address, options.port, reuse_port=options.reuse_port, tls=tls)
        self._note("HTTP", "HTTPService", options.address, port)

    def _console(self, metrics: MetricsService | None, target_of: TargetOf) -> Console:
        """Return the console, for which samples of the metrics are taken from now on."""
        history = None
        if metrics is not None:
            sampler = HistorySampler(self._server, self.refresh)
            self.loops.add(sampler.loop)
            self._sampling = asyncio.get_running_loop().create_task(sampler.run())
            history = sampler.history
        assert log.recent is not None
        refusal = log_refusal(self._options)
        return Console(self._server, metrics, self._factory.locks, target_of, history, log.recent, refusal)

    async def _open_sagemaker(self) -> None:
        options, max_input_size = self._options.sagemaker, self._options.http.max_input_size
        models = SagemakerModels(self._server)
        router = SagemakerRouter(self._router(), options, models)
        target_of = self._factory.guarded(router.target, options.address)
        service = SagemakerService(self._server, target_of, models, self._bounds, max_input_size=max_input_size)
        port = await self._listener("Sagemaker", service, max_input_size).open(options.address, options.port)
        self._note("SageMaker", "Sagemaker HTTPService", options.address, port)

    async def _open_vertex(self, metrics: MetricsService | None) -> None:
        options, max_input_size = self._options.vertex, self._options.http.max_input_size
        model = await default_model(self._server, options.default_model)
        router = VertexRouter(self._router(), options, model, metrics)
        target_of = self._factory.guarded(router.target, options.address)
        service = HttpService(self._server, target_of, self._bounds, max_input_size=max_input_size)
        port = await self._listener("Vertex AI", service, max_input_size).open(options.address, options.port)
        self._note("Vertex AI", "Vertex AI HTTPService", options.address, port)

    def _router(
        self,
        forward_pattern: re.Pattern[str] | None = None,
        metrics: MetricsService | None = None,
        *,
        console: bool = False,
    ) -> Router:
        routing = {**self._factory.routing(forward_pattern), "metrics": metrics, "console": console}
        routing |= {"openai": self._options.openai, "responses": self.responses}
        return Router(self._server, rollouts=self._rollouts, batches=self.batches, **routing)

    def _listener(self, name: str, handler: HttpHandler, max_body: int) -> HttpListener:
        listener = self._listeners[name.lower().replace(" ", "_")] = self._factory.http(name, handler, max_body)
        return listener

    def _note(self, name: str, called: str, address: str, port: int) -> None:
        """Record and log an open port; ``called`` is Triton's name for it."""
        self.opened[name] = port
        log.info(f"Started {called} at {address}:{port}")


METRICS: Final = MetricTable[ServerPorts]((
    Metric("nerite_connections", "gauge", "Open connections, by port", lambda ports: ports.connections_by_port, "port"),
))  # fmt: skip
