"""The ports of a server: opens those that the flags enable, connects them to their services, and shuts them down."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol, TypeAlias

from nerite.config.options import ServerOptions
from nerite.observability import machine
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.observability.gpus import GpuMetrics
from nerite.observability.log import log
from nerite.server import InferenceServer
from nerite.transports import access, tcp
from nerite.transports.access import Callers, KeyFile
from nerite.transports.clouds import SagemakerModels, SagemakerRouter, SagemakerService, VertexRouter, default_model
from nerite.transports.http.handler import HttpHandler
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.listener import HttpListener
from nerite.transports.http.metrics_service import MetricsService
from nerite.transports.http.origins import BrowserGuard, Cors, CorsRouter, GuardedRouter
from nerite.transports.http.router import Router
from nerite.transports.http.service import HttpService
from nerite.transports.http.web_pages import Console
from nerite.transports.limits import CHECKS, TransportLimits, bytes_for, connections_for
from nerite.transports.tcp import tls_context

TargetOf: TypeAlias = Callable[[RequestHead], HttpTarget]
_MAX_METRICS_BODY: Final = 64 * 1024
_LINGER_SECONDS: Final = 0.15
"""Seconds that idle connections stay open after clients were notified of the shutdown, or after new connections
stopped."""
_LOOP_TURN: Final = 0.01
"""Seconds for the loop to read pending input: a timer that is due fires before that."""
_MAX_IDLE_INTERVAL: Final = 15.0
"""Maximum interval between checks for idle connections, in seconds."""


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


class ServerPorts:
    """All ports of a server. Only for the event loop's thread."""

    def __init__(
        self,
        server: InferenceServer,
        options: ServerOptions,
        key_files: Mapping[str, KeyFile],
        callers: Callers | None,
        gpus: GpuMetrics | None,
    ) -> None:
        """``callers`` identifies callers if a policy is in force; ``key_files`` are those named by restrictions."""
        self.opened: dict[str, int] = {}
        """Number of each open port by its name."""
        self._server = server
        self._options = options
        self._key_files = key_files
        self._locks = access.locks_of(options.http.restricted, key_files)
        """Locks of all ports that speak HTTP."""
        self._callers = callers
        self._gpus = gpus
        self._bounds = _bounds(options)
        self._listeners: dict[str, TransportListener] = {}
        """Listeners by name of the port."""
        self._check_timer: asyncio.TimerHandle | None = None

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
            page = MetricsService(self._server, metrics, self._locks, self._gpus, guard, self)
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
        self._check()

    @property
    def connections_by_port(self) -> dict[str, int]:
        """Number of open connections of each port."""
        return {name: each.open_connections for name, each in self._listeners.items()}

    def write_metrics(self, page: Page) -> None:
        """Write the metrics of connections and transport limits."""
        page.write(METRICS, [METRICS.row(self)])
        self._bounds.write_metrics(page)

    def _check(self) -> None:
        """Periodically close connections whose idle time has expired."""
        for connection in self._bounds.connections.idle(time.monotonic()):
            self._bounds.closed["idle"] += 1
            connection.retire()
        seconds = self._options.connections.idle_seconds
        every = min(seconds / CHECKS, _MAX_IDLE_INTERVAL) if seconds else _MAX_IDLE_INTERVAL
        self._check_timer = asyncio.get_running_loop().call_later(every, self._check)

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
        if self._check_timer is not None:
            self._check_timer.cancel()
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
        from nerite.transports.grpc.listener import GrpcListener
        from nerite.transports.grpc.service import GrpcService

        options = self._options.grpc
        service = GrpcService(
            self._server,
            self._bounds,
            max_message=options.max_message_size,
            locks=access.locks_of(options.restricted, self._key_files),
            forward_pattern=options.header_forward_pattern,
            compression=options.response_compression,
            callers=self._callers,
            delays=Delays(os.environ),
        )
        listener = GrpcListener(
            service, options.keepalive, self._bounds, options.upload_seconds, access_log=self._options.log.access
        )
        self._listeners["grpc"] = listener
        tls = tls_context(options.tls, ["h2"])
        port = await listener.open(options.address, options.port, reuse_port=options.reuse_port, tls=tls)
        self._note("gRPC", "GRPCInferenceService", options.address, port)

    async def _open_http(self, metrics: MetricsService | None) -> None:
        options = self._options.http
        target_of: TargetOf = self._router(options.header_forward_pattern).target
        if options.console:
            target_of = Console(self._server, metrics, self._locks, target_of).target
        if options.cors_origins:
            key_headers = [lock.header for lock in self._locks.values()]
            target_of = CorsRouter(Cors(options.cors_origins, key_headers), target_of).target
        target_of = self._guarded(target_of, options.address)
        service = HttpService(self._server, target_of, self._bounds, max_input_size=options.max_input_size)
        listener = self._listener("HTTP", service, options.max_input_size)
        tls = tls_context(options.tls, ["http/1.1"])
        port = await listener.open(options.address, options.port, reuse_port=options.reuse_port, tls=tls)
        self._note("HTTP", "HTTPService", options.address, port)

    async def _open_sagemaker(self) -> None:
        options, max_input_size = self._options.sagemaker, self._options.http.max_input_size
        models = SagemakerModels(self._server)
        router = SagemakerRouter(self._router(), options, models)
        target_of = self._guarded(router.target, options.address)
        service = SagemakerService(self._server, target_of, models, self._bounds, max_input_size=max_input_size)
        port = await self._listener("Sagemaker", service, max_input_size).open(options.address, options.port)
        self._note("SageMaker", "Sagemaker HTTPService", options.address, port)

    async def _open_vertex(self, metrics: MetricsService | None) -> None:
        options, max_input_size = self._options.vertex, self._options.http.max_input_size
        model = await default_model(self._server, options.default_model)
        router = VertexRouter(self._router(), options, model, metrics)
        target_of = self._guarded(router.target, options.address)
        service = HttpService(self._server, target_of, self._bounds, max_input_size=max_input_size)
        port = await self._listener("Vertex AI", service, max_input_size).open(options.address, options.port)
        self._note("Vertex AI", "Vertex AI HTTPService", options.address, port)

    def _guarded(self, target_of: TargetOf, address: str) -> TargetOf:
        """Wrap the routing of a port so that requests from pages of other sites are refused."""
        return GuardedRouter(BrowserGuard.of(self._options.http, address), target_of).target

    def _router(self, forward_pattern: re.Pattern[str] | None = None) -> Router:
        http = self._options.http
        return Router(
            self._server,
            max_input_size=http.max_input_size,
            locks=self._locks,
            forward_pattern=forward_pattern,
            half_precision=http.json_half_precision,
            callers=self._callers,
        )

    def _listener(self, name: str, handler: HttpHandler, max_body: int) -> HttpListener:
        # Scrapes come every few seconds and are not worth logging.
        access_log = self._options.log.access and name != "Metrics"
        http = self._options.http
        forwards = name == "HTTP" and http.header_forward_pattern is not None
        listener = HttpListener(
            name, handler, max_body, self._bounds, http.upload_seconds, access_log=access_log, whole_heads=forwards
        )
        self._listeners[name.lower().replace(" ", "_")] = listener
        return listener

    def _note(self, name: str, called: str, address: str, port: int) -> None:
        """Record and log an open port; ``called`` is Triton's name for it."""
        self.opened[name] = port
        log.info(f"Started {called} at {address}:{port}")


def _bounds(options: ServerOptions) -> TransportLimits:
    """Return the limits set by flags, or otherwise derived from the machine."""
    connections = options.connections
    most, most_bytes = connections.max_connections, connections.max_bytes_in_flight
    if most < 0:
        most = connections_for(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if most_bytes < 0:
        most_bytes = bytes_for(machine.usable_memory())
    return TransportLimits(max_bytes=most_bytes, max_connections=most, idle_seconds=connections.idle_seconds)


METRICS: Final = MetricTable[ServerPorts]((
    Metric("nerite_connections", "gauge", "Open connections, by port", lambda ports: ports.connections_by_port, "port"),
))  # fmt: skip
