"""The ports of a server: which the flags ask for, what answers at each, and closing them in good order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Protocol

from nerite.config.options import ServerOptions
from nerite.observability.gpu_gauges import GpuGauges
from nerite.observability.log import log
from nerite.server import InferenceServer
from nerite.transports import keys
from nerite.transports.callers import Callers
from nerite.transports.clouds.sagemaker import SagemakerRouter, SagemakerService
from nerite.transports.clouds.sagemaker_models import SagemakerModels
from nerite.transports.clouds.vertex import VertexRouter, default_model
from nerite.transports.http.console.console import Console
from nerite.transports.http.cors import Cors, CorsRouter
from nerite.transports.http.handler import Handler
from nerite.transports.http.listener import HttpListener
from nerite.transports.http.metrics_service import MetricsService
from nerite.transports.http.router import Router
from nerite.transports.http.service import HttpService
from nerite.transports.keys import KeyFile
from nerite.transports.tls import context_of

_MAX_METRICS_BODY: Final = 64 * 1024


class Listener(Protocol):
    """A port that is open."""

    def forget(self) -> None:
        """Look at every head anew, also on connections that are open: what is allowed has changed."""

    def stop_accepting(self) -> None:
        """Close the port, and every connection as soon as it has nothing under way."""

    def abort(self) -> None:
        """Close what is left, at once."""

    @property
    def open_connections(self) -> int:
        """Connections that are open."""


class Ports:
    """All of them. For the loop's thread only."""

    def __init__(
        self,
        server: InferenceServer,
        options: ServerOptions,
        key_files: Mapping[str, KeyFile],
        callers: Callers | None,
        gauges: GpuGauges | None,
    ) -> None:
        """``callers`` says who asks, where that matters; ``key_files`` are those that restrictions name."""
        self.opened: dict[str, int] = {}
        """The number of each port that is open."""
        self._server = server
        self._options = options
        self._key_files = key_files
        self._locks = keys.locks(options.http.restricted, key_files)
        """Of what speaks HTTP."""
        self._callers = callers
        self._gauges = gauges
        self._listeners: list[Listener] = []

    async def open(self) -> None:
        """Open what the flags ask for. Raises ``NeriteError`` for a port that cannot be opened."""
        options = self._options
        metrics = options.metrics
        page = MetricsService(self._server, metrics, self._locks, self._gauges) if metrics.enabled else None
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

    def forget(self) -> None:
        """Look at every head anew, also on connections that are open: what is allowed has changed."""
        for listener in self._listeners:
            listener.forget()

    def stop_accepting(self) -> None:
        """Close the ports, and every connection as soon as it has nothing under way."""
        for listener in self._listeners:
            listener.stop_accepting()

    def abort(self) -> None:
        """Close what is left, at once."""
        for listener in self._listeners:
            listener.abort()

    @property
    def open_connections(self) -> int:
        """Connections that are open."""
        return sum(listener.open_connections for listener in self._listeners)

    async def _open_grpc(self) -> None:
        # Here, because a server without gRPC need not load protobuf.
        from nerite.transports.grpc.listener import GrpcListener
        from nerite.transports.grpc.service import GrpcService

        options = self._options.grpc
        service = GrpcService(
            self._server,
            locks=keys.locks(options.restricted, self._key_files),
            forward_pattern=options.header_forward_pattern,
            compression=options.response_compression,
            callers=self._callers,
        )
        listener = GrpcListener(service, options.keepalive, access_log=self._options.log.access)
        self._listeners.append(listener)
        tls = context_of(options.tls, ["h2"])
        port = await listener.open(options.address, options.port, reuse_port=options.reuse_port, tls=tls)
        self._note("gRPC", "GRPCInferenceService", options.address, port)

    async def _open_http(self, metrics: MetricsService | None) -> None:
        options = self._options.http
        target_of = self._router(options.header_forward_pattern).target
        if options.console:
            target_of = Console(self._server, metrics, self._locks, target_of).target
        if options.cors_origins:
            key_headers = [lock.header for lock in self._locks.values()]
            target_of = CorsRouter(Cors(options.cors_origins, key_headers), target_of).target
        service = HttpService(self._server, target_of, max_input_size=options.max_input_size)
        listener = self._listener("HTTP", service, options.max_input_size)
        tls = context_of(options.tls, ["http/1.1"])
        port = await listener.open(options.address, options.port, reuse_port=options.reuse_port, tls=tls)
        self._note("HTTP", "HTTPService", options.address, port)

    async def _open_sagemaker(self) -> None:
        options, max_input_size = self._options.sagemaker, self._options.http.max_input_size
        models = SagemakerModels(self._server)
        router = SagemakerRouter(self._router(), options, models)
        service = SagemakerService(self._server, router, models, max_input_size=max_input_size)
        port = await self._listener("Sagemaker", service, max_input_size).open(options.address, options.port)
        self._note("SageMaker", "Sagemaker HTTPService", options.address, port)

    async def _open_vertex(self, metrics: MetricsService | None) -> None:
        options, max_input_size = self._options.vertex, self._options.http.max_input_size
        model = await default_model(self._server, options.default_model)
        router = VertexRouter(self._router(), options, model, metrics)
        service = HttpService(self._server, router.target, max_input_size=max_input_size)
        port = await self._listener("Vertex AI", service, max_input_size).open(options.address, options.port)
        self._note("Vertex AI", "Vertex AI HTTPService", options.address, port)

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

    def _listener(self, name: str, handler: Handler, max_body: int) -> HttpListener:
        # Scrapes come every few seconds, and tell nothing.
        access_log = self._options.log.access and name != "Metrics"
        http = self._options.http
        forwards = name == "HTTP" and http.header_forward_pattern is not None
        listener = HttpListener(
            name, handler, max_body, http.upload_seconds, access_log=access_log, whole_heads=forwards
        )
        self._listeners.append(listener)
        return listener

    def _note(self, name: str, called: str, address: str, port: int) -> None:
        """Note that a port is open, under its own name and under the one that the log has for it."""
        self.opened[name] = port
        log.info(f"Started {called} at {address}:{port}")
