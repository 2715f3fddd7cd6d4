"""Composition root of the picker process: pools and their health as in the router, and the port for gateways."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Final, NamedTuple

import uvloop

from nerite import __version__
from nerite.cluster.settings import ClusterSettings
from nerite.config.options import HttpOptions, KeepaliveOptions
from nerite.core.errors import NeriteError
from nerite.core.failures import report
from nerite.observability.log import log
from nerite.picker.endpoints import EndpointTable
from nerite.picker.service import PickerConnection, PickerService
from nerite.picker.session import PickSession
from nerite.router.discovery import Discovery
from nerite.router.health import HealthChecks
from nerite.router.http_members import HttpMembers
from nerite.router.metrics import RouterMetrics
from nerite.router.pools import PoolTable, RouterPool
from nerite.transports.grpc.listener import GrpcListener
from nerite.transports.http.listener import HttpListener
from nerite.transports.http.origins import BrowserGuard
from nerite.transports.limits import TransportLimits

_UPLOAD_SECONDS: Final = 60.0
_MAX_METRICS_BODY: Final = 64 * 1024
_FRAMING: Final = 1024 * 1024
"""Bytes of a message besides the piece of a body in it: headers and metadata."""
_RESTART_DELAY: Final = 1.0
_UNUSED: Final = ("policy_file", "redis", "ledger", "batches", "access_log", "timeout")
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


class PickerProcess:
    """The parts of a picker."""

    def __init__(self, settings: ClusterSettings, ports: PickerPorts) -> None:
        self._settings = settings
        self._ports = ports
        self._stop_requested = asyncio.Event()
        self._draining = False
        self._pools = [RouterPool(pool, random.getrandbits(62)) for pool in settings.pools]
        table = PoolTable(self._pools)
        self._endpoints = EndpointTable(table)
        members = HttpMembers(settings.router.connect_timeout)
        self._health = HealthChecks(self._pools, members)
        self._discoveries = [Discovery(pool.settings, pool.set_members) for pool in self._pools]
        bounds = TransportLimits(max_connections=settings.router.max_connections)
        max_body = settings.router.max_body
        sessions = tuple(dict.fromkeys(pool.session_header for pool in settings.pools))
        service = PickerService(
            lambda: PickSession(self._endpoints, max_body, sessions, conformance=ports.conformance),
            lambda: self._endpoints.ready and not self._draining,
            max_body + _FRAMING,
        )
        self._listener = GrpcListener(
            service, KeepaliveOptions(max_ping_strikes=0), bounds, _UPLOAD_SECONDS, connection=PickerConnection
        )
        guard = BrowserGuard.of(HttpOptions(), ports.address)
        metrics = RouterMetrics(table, members, bounds, guard)
        self._metrics = HttpListener("Metrics", metrics, _MAX_METRICS_BODY, bounds, _UPLOAD_SECONDS)

    async def serve(self) -> int:
        """Start, wait for a signal, and stop; return the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop_requested.set)
        background: list[asyncio.Task[None]] = []
        try:
            await self._start()
            background = [loop.create_task(_keep_running(work)) for work in self._background_work()]
            await self._stop_requested.wait()
            await self._stop()
        except NeriteError as error:
            log.error(error.message)
            return 1
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
            self._listener.abort()
            self._metrics.abort()
        return 0

    async def _start(self) -> None:
        """Find the members, check them once, and open the ports. Raises ``NeriteError``."""
        for line in self._unused_settings():
            log.warning(line)
        for discovery in self._discoveries:
            await discovery.start()
        await self._health.check_all()
        address = self._ports.address
        port = await self._listener.open(address, self._ports.port)
        metrics_port = await self._metrics.open(address, self._ports.metrics_port)
        members = sum(len(list(pool.balancer.members)) for pool in self._pools)
        ready = sum(len(list(pool.ready_members)) for pool in self._pools)
        log.info(f"Started ExternalProcessor at {address}:{port}")
        log.info(f"Started Metrics Service at {address}:{metrics_port}")
        log.info(f"Nerite {__version__} picks endpoints for gateways among {members} members; {ready} are ready")
        log.info(f"Listening: ext_proc {address}:{port}, metrics {address}:{metrics_port}")

    def _unused_settings(self) -> Iterator[str]:
        """Yield what the log says of settings that stand in the file and have no effect."""
        for field in _UNUSED:
            if getattr(self._settings.router, field):
                key = field.replace("_", "-")
                yield f"{self._settings.path}: router.{key} has no effect in nerite pick: only nerite route uses it"

    def _background_work(self) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        for pool, discovery in zip(self._pools, self._discoveries, strict=True):
            yield partial(self._health.run, pool)
            yield discovery.run
        yield self._health.run_suspects

    async def _stop(self) -> None:
        """Be not ready any more, and wait for the requests in progress."""
        self._draining = True
        deadline = time.monotonic() + self._settings.router.exit_timeout
        self._listener.drain()
        await asyncio.sleep(0.15)
        self._listener.stop_accepting()
        while open_connections := self._listener.open_connections:
            if time.monotonic() >= deadline:
                log.error(f"{open_connections} connections of gateways are still open: closing them")
                break
            await asyncio.sleep(0.02)
        self._metrics.stop_accepting()


async def _keep_running(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run background work, and restart it after an unforeseen exception."""
    while True:
        try:
            await work()
            return
        except Exception as error:
            report("loop", error, "in a background task of the picker")
            await asyncio.sleep(_RESTART_DELAY)
