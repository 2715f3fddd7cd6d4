"""Makes listeners and the services behind them from the options, for whichever process serves the connections."""

from __future__ import annotations

import asyncio
import os
import re
import resource
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from nerite.core.failures import report
from nerite.observability import machine
from nerite.transports import access
from nerite.transports.http.head import RequestHead
from nerite.transports.http.infer_request import HttpTarget
from nerite.transports.http.listener import HttpListener
from nerite.transports.http.origins import BrowserGuard, Cors, CorsRouter, GuardedRouter
from nerite.transports.limits import CHECKS, TransportLimits, bytes_for, connections_for

if TYPE_CHECKING:
    from nerite.config.options import ServerOptions
    from nerite.inference_entry import TransportEntry
    from nerite.transports.access import AccessKeys, Callers
    from nerite.transports.engine_load import LoadSource
    from nerite.transports.grpc.listener import GrpcListener
    from nerite.transports.grpc.methods import Handler
    from nerite.transports.http.handler import HttpHandler

_MAX_IDLE_INTERVAL: Final = 15.0
"""Maximum interval between checks for idle connections, in seconds."""
TargetOf: TypeAlias = Callable[[RequestHead], HttpTarget]


class ListenerFactory:
    """What all ports of one process share: limits, the keys of restricted endpoints, and who the callers are."""

    def __init__(
        self, options: ServerOptions, bounds: TransportLimits, keys: Mapping[str, AccessKeys], callers: Callers | None
    ) -> None:
        """``callers`` identifies callers if a policy is in force; ``keys`` are those of the files in restrictions."""
        self._options = options
        self.bounds = bounds
        self._keys = keys
        self._callers = callers
        self.locks = access.locks_of(options.http.restricted, keys)
        """Locks of all ports that speak HTTP."""

    def routing(self, forward_pattern: re.Pattern[str] | None = None) -> dict[str, Any]:
        """Return the arguments of a router, apart from the server."""
        http = self._options.http
        return {
            "max_input_size": http.max_input_size,
            "locks": self.locks,
            "forward_pattern": forward_pattern,
            "half_precision": http.json_half_precision,
            "callers": self._callers,
        }

    def cross_origin(self, target_of: TargetOf) -> TargetOf:
        """Wrap the routing of the HTTP port so that pages of the allowed origins may call it."""
        if not self._options.http.cors_origins:
            return target_of
        key_headers = [lock.header for lock in self.locks.values()]
        return CorsRouter(Cors(self._options.http.cors_origins, key_headers), target_of).target

    def guarded(self, target_of: TargetOf, address: str) -> TargetOf:
        """Wrap the routing of a port so that requests from pages of other sites are refused."""
        return GuardedRouter(BrowserGuard.of(self._options.http, address), target_of).target

    def http(self, name: str, handler: HttpHandler, max_body: int) -> HttpListener:
        """Return the listener of a port that speaks HTTP."""
        # Scrapes come every few seconds and are not worth logging.
        access_log = self._options.log.access and name != "Metrics"
        http = self._options.http
        forwards = name == "HTTP" and http.header_forward_pattern is not None
        return HttpListener(
            name, handler, max_body, self.bounds, http.upload_seconds, access_log=access_log, whole_heads=forwards
        )

    def grpc(
        self,
        server: TransportEntry,
        administration: Callable[[str, str], Handler],
        load: LoadSource | None = None,
    ) -> GrpcListener:
        """Return the listener of the gRPC port; ``administration`` and ``load`` as in ``GrpcService``."""
        # Imported here, because a server without gRPC need not load its code.
        from nerite.transports.grpc.delays import Delays
        from nerite.transports.grpc.listener import GrpcListener
        from nerite.transports.grpc.service import GrpcService

        options = self._options.grpc
        service = GrpcService(
            server,
            administration,
            self.bounds,
            max_message=options.max_message_size,
            locks=access.locks_of(options.restricted, self._keys),
            forward_pattern=options.header_forward_pattern,
            compression=options.response_compression,
            callers=self._callers,
            delays=Delays(os.environ),
            load=load,
        )
        return GrpcListener(
            service, options.keepalive, self.bounds, options.upload_seconds, access_log=self._options.log.access
        )


class IdleCheck:
    """Periodically closes connections whose idle time has expired."""

    def __init__(self, bounds: TransportLimits, seconds: float) -> None:
        """``seconds`` is that time; 0 for no limit."""
        self._bounds = bounds
        self._every = min(seconds / CHECKS, _MAX_IDLE_INTERVAL) if seconds else _MAX_IDLE_INTERVAL
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Check now, and periodically from now on."""
        self._timer = asyncio.get_running_loop().call_later(self._every, self.start)
        for connection in self._bounds.connections.idle(time.monotonic()):
            try:
                self._bounds.closed["idle"] += 1
                connection.retire()
            except Exception as error:  # the other connections are closed all the same
                report("loop", error, "while an idle connection was closed")

    def stop(self) -> None:
        """Check no more."""
        if self._timer is not None:
            self._timer.cancel()


def limits_of(options: ServerOptions) -> TransportLimits:
    """Return the limits set by flags, or otherwise derived from the machine."""
    connections = options.connections
    most, most_bytes = connections.max_connections, connections.max_bytes_in_flight
    if most < 0:
        most = connections_for(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    if most_bytes < 0:
        most_bytes = bytes_for(machine.usable_memory())
    return TransportLimits(
        max_bytes=most_bytes,
        max_connections=most,
        idle_seconds=connections.idle_seconds,
        exit_keepalive=exit_keepalive(options.exit_keepalive_secs, options.exit_timeout_secs),
    )


def exit_keepalive(wanted: float, timeout: float) -> float:
    """Return how long idle connections stay open when a server stops that has so much time."""
    return min(wanted, timeout / 2)
