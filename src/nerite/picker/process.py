"""Composition root of the picker process: pools and their health as in the router, and the port for gateways."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import uvloop

from nerite import __version__
from nerite.cluster.settings import ClusterSettings
from nerite.config.options import HttpOptions, KeepaliveOptions
from nerite.observability.log import log
from nerite.picker.endpoints import EndpointTable
from nerite.picker.service import PickerConnection, PickerService
from nerite.picker.session import PickSession
from nerite.router.metrics import RouterMetrics
from nerite.router.pool_process import BYTES_SETTING, PoolProcess, most_bytes
from nerite.transports.grpc.listener import GrpcListener
from nerite.transports.http.listener import HttpListener
from nerite.transports.http.origins import BrowserGuard
from nerite.transports.limits import TransportLimits

_UPLOAD_SECONDS: Final = 60.0
_MAX_METRICS_BODY: Final = 64 * 1024
_FRAMING: Final = 1024 * 1024
"""Bytes of a message besides the piece of a body in it: headers and metadata."""
_UNUSED: Final = (
    "policy_file", "admin_key", "redis", "ledger", "member_key_file", "batches", "batch_files", "batch_concurrency",
    "batch_storage_bytes", "batch_lease", "access_log", "timeout", "tls", "cors_origins",
)  # fmt: skip
"""Settings of the router that a picker has no use for: the gateway carries the requests."""


class PickerPorts(NamedTuple):
    """Where a picker listens."""

    address: str
    port: int
    metrics_port: int
    conformance: bool = False
    """Gateways are tests of the protocol, whose requests say which endpoint they want."""


def run(settings: ClusterSettings, ports: PickerPorts) -> int:
    """Pick until a signal arrives; return the exit status."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(PickerProcess(settings, ports).serve())


class PickerProcess(PoolProcess):
    """The parts of a picker."""

    def __init__(self, settings: ClusterSettings, ports: PickerPorts) -> None:
        super().__init__(settings)
        self._ports = ports
        self._draining = False
        self._endpoints = EndpointTable(self.table)
        router = settings.router
        bounds = TransportLimits(
            max_connections=router.max_connections, max_bytes=most_bytes(router), bytes_setting=BYTES_SETTING
        )
        max_body = router.max_body
        service = PickerService(
            lambda: PickSession(self._endpoints, max_body, self.session_headers, conformance=ports.conformance),
            lambda: self._endpoints.ready and not self._draining,
            max_body + _FRAMING,
        )
        self._listener = GrpcListener(
            service, KeepaliveOptions(max_ping_strikes=0), bounds, _UPLOAD_SECONDS, connection=PickerConnection
        )
        guard = BrowserGuard.of(HttpOptions(), ports.address)
        metrics = RouterMetrics(self.table, self.members, bounds, guard, self.loops)
        self._metrics = HttpListener("Metrics", metrics, _MAX_METRICS_BODY, bounds, _UPLOAD_SECONDS)

    async def start(self) -> None:
        """Find the members, check them once, and open the ports. Raises ``NeriteError``."""
        for line in self._unused_settings():
            log.warning(line)
        await self.find_members()
        address = self._ports.address
        port = await self._listener.open(address, self._ports.port)
        metrics_port = await self._metrics.open(address, self._ports.metrics_port)
        log.info(f"Started ExternalProcessor at {address}:{port}")
        log.info(f"Started Metrics Service at {address}:{metrics_port}")
        counts = f"{self.members_known} members; {self.members_ready} are ready"
        log.info(f"Nerite {__version__} picks endpoints for gateways among {counts}")
        log.info(f"Listening: ext_proc {address}:{port}, metrics {address}:{metrics_port}")

    def _unused_settings(self) -> Iterator[str]:
        """Yield what the log says of settings that stand in the file and have no effect."""
        for field in _UNUSED:
            if getattr(self.settings.router, field):
                key = field.replace("_", "-")
                yield f"{self.settings.path}: router.{key} has no effect in nerite pick: only nerite route uses it"
        for pool in self.settings.pools:
            for field in ("placement", "hold_requests", "rollout", "scaling"):
                if getattr(pool, field) is not None:
                    where = f"{self.settings.path}: {field.replace('_', '-')} of pool '{pool.name}'"
                    yield f"{where} has no effect in nerite pick: only nerite route uses it"

    async def stop(self) -> None:
        """Be not ready any more, and wait for the requests in progress."""
        self._draining = True
        deadline = time.monotonic() + self.settings.router.exit_timeout
        self._listener.drain()
        await asyncio.sleep(0.15)
        self._listener.stop_accepting()
        while open_connections := self._listener.open_connections:
            if time.monotonic() >= deadline:
                log.error(f"{open_connections} connections of gateways are still open: closing them")
                break
            await asyncio.sleep(0.02)
        self._metrics.stop_accepting()

    async def close(self) -> None:
        """Close connections that are still open."""
        self._listener.abort()
        self._metrics.abort()
