"""Composition root of the router process: builds its parts from a cluster file, opens ports, handles shutdown."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import resource
import time
from collections.abc import Iterator
from functools import partial
from typing import Final

import uvloop

from nerite import __version__
from nerite.admission.policy import AdmissionPolicy, SharedQuotaSettings
from nerite.admission.tenants import WatchedPolicy, open_policy
from nerite.cluster.settings import ClusterSettings, RouterSettings
from nerite.config.open_ports import is_loopback
from nerite.config.watched_file import watch_files
from nerite.core.errors import InvalidArgument, NeriteError, Unsupported
from nerite.observability.log import log
from nerite.observability.machine import usable_memory
from nerite.redis.settings import settings_of_address
from nerite.router.admission import RouterAdmission
from nerite.router.grpc_port import RouterGrpcPort
from nerite.router.http_service import RouterService
from nerite.router.http_targets import HttpTargets
from nerite.router.metrics import RouterMetrics
from nerite.router.pool_process import BackgroundWork, PoolProcess
from nerite.router.replica_scaling import ReplicaScaling
from nerite.router.scaling import RouterScaling
from nerite.transports.http.listener import HttpListener
from nerite.transports.http.origins import BrowserGuard
from nerite.transports.limits import TransportLimits, bytes_for, connections_for
from nerite.transports.listeners import IdleCheck

_IDLE_SECONDS: Final = 600.0
"""Time after which idle connections of clients are closed."""
_UPLOAD_SECONDS: Final = 60.0
"""Maximum time without progress while a request arrives."""
_MAX_METRICS_BODY: Final = 64 * 1024
_GC_THRESHOLD: Final = 10_000
_RESTART_DELAY: Final = 1.0
_HOST_REMEDY: Final = "add {} to allowed-hosts in [router] of the cluster file"
_ORIGIN_REMEDY: Final = "Send such requests from the server of the page"
_NOT_YET: Final = ("ledger", "batches")
"""Settings that other commands use, but not yet this one."""


def run(settings: ClusterSettings) -> int:
    """Route until a signal arrives; return the exit status."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: ClusterSettings) -> int:
    try:
        process = RouterProcess(settings)
    except NeriteError as error:  # the policy file has mistakes, or needs what is not installed
        log.error(error.message)
        return 1
    return await process.serve()


def _admission(router: RouterSettings) -> tuple[WatchedPolicy | None, RouterAdmission | None]:
    """Return the policy file and admission control by it; nothing without one. Raises ``NeriteError``."""
    if not router.policy_file:
        if router.redis:
            raise InvalidArgument("router.redis has an effect with policy-file only, whose quotas it shares: add that")
        return None, None
    watched = open_policy(router.policy_file)
    return watched, RouterAdmission(_with_redis(watched.policy, router), asyncio.get_running_loop())


def _with_redis(policy: AdmissionPolicy, router: RouterSettings) -> AdmissionPolicy:
    """Return a policy whose quotas are shared over the Redis of the cluster file, unless it names one itself."""
    if not router.redis or policy.shared is not None:
        return policy
    return dataclasses.replace(policy, shared=SharedQuotaSettings(settings_of_address(router.redis)))


class RouterProcess(PoolProcess):
    """The parts of a router."""

    def __init__(self, settings: ClusterSettings) -> None:
        super().__init__(settings)
        router = settings.router
        limit = router.max_connections or connections_for(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)
        self._bounds = TransportLimits(
            max_bytes=bytes_for(usable_memory()), max_connections=limit, idle_seconds=_IDLE_SECONDS
        )
        checks_names = bool(router.allowed_hosts) or is_loopback(router.address)
        guard = BrowserGuard((), router.allowed_hosts if checks_names else None, _HOST_REMEDY, _ORIGIN_REMEDY)
        self._policy, self._admission = _admission(router)
        callers = None if self._admission is None else self._admission.callers
        targets = HttpTargets(guard, self.session_headers, router.max_body, callers)
        self._service = RouterService(self.table, self.members, targets, router, self._admission)
        self._http = HttpListener(
            "HTTP",
            self._service,
            router.max_body,
            self._bounds,
            _UPLOAD_SECONDS,
            access_log=router.access_log,
            size_setting="max-body in [router] of the cluster file",
        )
        self._scaling = RouterScaling(self.pools)
        self._replicas = ReplicaScaling(settings.pools, self._scaling)
        self._grpc = RouterGrpcPort(
            self.table, self.members, router, self.session_headers, self._bounds, self._scaling, self._admission
        )
        metrics = RouterMetrics(self.table, self.members, self._bounds, guard, self._scaling, self._admission)
        self._metrics = HttpListener("Metrics", metrics, _MAX_METRICS_BODY, self._bounds, _UPLOAD_SECONDS)
        self._idle_check = IdleCheck(self._bounds, _IDLE_SECONDS)

    async def start(self) -> None:
        """Find the members, check them once, and open the ports. Raises ``NeriteError``."""
        router = self.settings.router
        for field in _NOT_YET:
            if getattr(router, field):
                key = field.replace("_", "-")
                raise Unsupported(f"{self.settings.path}: router.{key}: nerite route does not use it yet: remove it")
        if self._admission is not None and self._admission.tenants.shared is not None:
            await self._admission.tenants.shared.start()
        await self.find_members()
        await self._replicas.start()
        ports = {
            "HTTP": await self._http.open(router.address, router.http_port),
            "gRPC": await self._grpc.open(router.address, router.grpc_port),
            "metrics": await self._metrics.open(router.address, router.metrics_port),
        }
        log.info(f"Started HTTPService at {router.address}:{ports['HTTP']}")
        log.info(f"Started GRPCInferenceService at {router.address}:{ports['gRPC']}")
        log.info(f"Started Metrics Service at {router.address}:{ports['metrics']}")
        self._idle_check.start()
        for line in self._welcome_lines(ports):
            log.info(line)
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)

    def _welcome_lines(self, ports: dict[str, int]) -> Iterator[str]:
        names = ", ".join(pool.name for pool in self.pools)
        counts = f"{self.members_known} members of {names}; {self.members_ready} of them are ready"
        yield f"Nerite {__version__} routes to {counts}"
        address = self.settings.router.address
        yield f"Listening: {', '.join(f'{name} {address}:{port}' for name, port in ports.items())}"

    def background_work(self) -> Iterator[BackgroundWork]:
        """Yield the work for members, and the watch of the policy file."""
        yield from super().background_work()
        yield self._scaling.run
        yield from self._replicas.background_work()
        if self._policy is not None:
            yield partial(watch_files, self._policy, self._policy_changed)

    def _policy_changed(self) -> None:
        """Apply the new content of the policy file from the next request on."""
        assert self._policy is not None and self._admission is not None
        (log.warning if self._policy.problem else log.info)(self._policy.news())
        self._admission.follow(_with_redis(self._policy.policy, self.settings.router))
        self._http.forget()
        self._grpc.forget()

    async def stop(self) -> None:
        """Announce the end, stop accepting, and wait for requests in progress."""
        timeout = self.settings.router.exit_timeout
        log.info("Waiting for requests in progress to complete.")
        deadline = time.monotonic() + timeout
        self._service.draining = True
        self._http.drain()
        self._grpc.drain()
        await asyncio.sleep(min(0.15, timeout / 4))
        self._http.admit_no_more()
        self._grpc.admit_no_more()
        await asyncio.sleep(0.01)
        self._http.stop_accepting()
        self._grpc.stop_accepting()
        while open_connections := self._http.open_connections + self._grpc.open_connections:
            if time.monotonic() >= deadline:
                log.error(f"after {timeout:g} s, {open_connections} connections are still open: closing them")
                break
            await asyncio.sleep(0.02)
        self._metrics.stop_accepting()

    async def close(self) -> None:
        """Release connections, ports and threads that are still open."""
        if self._admission is not None and self._admission.tenants.shared is not None:
            await self._admission.tenants.shared.close()
        self._idle_check.stop()
        for listener in (self._http, self._metrics, self._grpc):
            listener.abort()
        self._bounds.aside.close()
