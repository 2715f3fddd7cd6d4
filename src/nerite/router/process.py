"""Composition root of the router process: builds its parts from a cluster file, opens ports, handles shutdown."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import resource
import ssl
import time
from collections.abc import Iterator
from functools import partial
from typing import Final, NamedTuple

import uvloop

from nerite import __version__
from nerite.admission.policy import AdmissionPolicy, SharedQuotaSettings
from nerite.admission.policy_file import WatchedPolicy, open_policy
from nerite.batches.metrics import write_batch_metrics
from nerite.batches.service import Batches, BatchLimits
from nerite.cluster.settings import ClusterSettings, RouterSettings
from nerite.config.open_ports import is_loopback
from nerite.config.options import TlsOptions
from nerite.config.watched_file import watched
from nerite.core.background import BackgroundWork
from nerite.core.errors import InvalidArgument, NeriteError, Unavailable
from nerite.ledger.ledger import Ledger
from nerite.llm.openai.batch_api import BatchApi
from nerite.observability.log import log
from nerite.observability.machine import raise_open_file_limit
from nerite.redis.settings import settings_of_address
from nerite.rollouts.webhook import WebhookClient, Webhooks
from nerite.router.accounting import RouterLedger
from nerite.router.admission import RouterAdmission
from nerite.router.grpc_port import RouterGrpcPort
from nerite.router.http_service import OF_ALL_TENANTS, RouterService
from nerite.router.http_targets import HttpTargets
from nerite.router.member_tls import GRPC, MemberContexts
from nerite.router.metrics import RouterMetrics
from nerite.router.placement import PoolPlacement
from nerite.router.placement_lease import LeaseRedis, PlacementLease
from nerite.router.pool_process import BYTES_SETTING, PoolProcess, most_bytes, open_lock
from nerite.router.pool_rollouts import PoolRollout
from nerite.router.pools import RouterPool
from nerite.router.replica_scaling import ReplicaScaling
from nerite.router.routed_items import RoutedItems
from nerite.router.scaling import RouterScaling
from nerite.router.silence import SilenceWatch
from nerite.transports import tcp
from nerite.transports.access import KeyFile, check_key_files
from nerite.transports.http.background import BackgroundApi
from nerite.transports.http.head import header_text_of
from nerite.transports.http.listener import HttpListener
from nerite.transports.http.origins import BrowserGuard, Cors
from nerite.transports.limits import TransportLimits, connections_for
from nerite.transports.listeners import IdleCheck, exit_keepalive

_IDLE_SECONDS: Final = 600.0
"""Time after which idle connections of clients are closed."""
_UPLOAD_SECONDS: Final = 60.0
"""Maximum time without progress while a request arrives."""
_MAX_METRICS_BODY: Final = 64 * 1024
_GC_THRESHOLD: Final = 10_000
_HOST_REMEDY: Final = "add {} to allowed-hosts in [router] of the cluster file"
_ORIGIN_REMEDY: Final = "To let pages of that origin use it, add '{}' to cors-origins in [router] of the cluster file"


def run(settings: ClusterSettings) -> int:
    """Route until a signal arrives; return the exit status."""
    gc.freeze()  # what is imported stays
    raise_open_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_serve(settings))


async def _serve(settings: ClusterSettings) -> int:
    try:
        process = RouterProcess(settings)
    except NeriteError as error:  # the policy file has mistakes, or needs what is not installed
        log.error(error.message)
        return 1
    return await process.serve()


def _admission(settings: ClusterSettings) -> tuple[WatchedPolicy | None, RouterAdmission | None]:
    """Return the policy file and admission control by it; nothing without one. Raises ``NeriteError``."""
    router = settings.router
    if not router.policy_file:
        if router.redis and not any(pool.placement for pool in settings.pools):
            raise InvalidArgument(
                "router.redis has an effect with policy-file, whose quotas it shares, or with [pool.placement] only: "
                "add one of them"
            )
        return None, None
    watched = open_policy(router.policy_file)
    return watched, RouterAdmission(_with_redis(watched.policy, router), asyncio.get_running_loop())


def first_key(path: str) -> str:
    """Return the first key in a file; empty without one. Raises ``InvalidArgument``."""
    if not path:
        return ""
    found = check_key_files(path)
    if found.problem:
        raise InvalidArgument(f"the key file '{path}' {found.problem}")
    return header_text_of(found.keys[0])


def _with_redis(policy: AdmissionPolicy, router: RouterSettings) -> AdmissionPolicy:
    """Return a policy whose quotas are shared over the Redis of the cluster file, unless it names one itself."""
    if not router.redis or policy.shared is not None:
        return policy
    return dataclasses.replace(policy, shared=SharedQuotaSettings(settings_of_address(router.redis)))


class PortContexts(NamedTuple):
    """TLS contexts of the router's own ports; None: plain."""

    http: ssl.SSLContext | None
    grpc: ssl.SSLContext | None


def port_contexts(router: RouterSettings) -> PortContexts:
    """Return the TLS contexts of the ports. Raises ``InvalidArgument`` for a file that cannot be used."""
    tls = router.tls
    if tls is None:
        return PortContexts(None, None)
    options = TlsOptions(True, bool(tls.client_ca), tls.certificate, tls.key, tls.client_ca)
    return PortContexts(tcp.tls_context(options, ["http/1.1"]), tcp.tls_context(options, ["h2"]))


def _limits_of(router: RouterSettings) -> TransportLimits:
    """Return what the clients of a router may take of its memory and connections."""
    return TransportLimits(
        max_bytes=most_bytes(router),
        max_connections=router.max_connections or connections_for(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2),
        idle_seconds=_IDLE_SECONDS,
        exit_keepalive=exit_keepalive(router.exit_keepalive, router.exit_timeout),
        bytes_setting=BYTES_SETTING,
        connections_setting="max-connections in [router] of the cluster file",
    )


def _webhooks_of(settings: ClusterSettings) -> Webhooks:
    """Return what posts decisions of rollouts. Raises ``InvalidArgument`` for a webhook that is not allowed."""
    client = WebhookClient(
        settings.router.webhook_allowed_hosts, "webhook-allowed-hosts in [router] of the cluster file"
    )
    for pool in settings.pools:
        for spec in pool.rollout.models.values() if pool.rollout is not None else ():
            client.check(spec.webhook)
    return Webhooks(client)


class RouterProcess(PoolProcess):
    """The parts of a router."""

    def __init__(self, settings: ClusterSettings) -> None:
        super().__init__(settings)
        router = settings.router
        self._bounds = _limits_of(router)
        self._contexts = port_contexts(router)
        checks_names = bool(router.allowed_hosts) or is_loopback(router.address)
        hosts = router.allowed_hosts if checks_names else None
        guard = BrowserGuard(router.cors_origins, hosts, _HOST_REMEDY, _ORIGIN_REMEDY)
        cors = Cors(router.cors_origins, ()) if router.cors_origins else None
        self._policy, self._admission = _admission(settings)
        if self._admission is not None and self._admission.tenants.shared is not None:
            self.loops.add(self._admission.tenants.shared.loop)
        self._member_key = first_key(router.member_key_file)
        self._ledger = Ledger(router.ledger, lambda _: ("", "")) if router.ledger else None
        self._accounting = None
        if self._ledger is not None:
            self._accounting = RouterLedger(self._ledger, self.table, tenants=self._admission is not None)
            self.health.metering = bool(self._member_key)
        self._service = self._routing(guard, cors)
        self._service.ledger = self._ledger
        self._service.background = BackgroundApi(self.loops)
        if router.admin_key:
            lock = open_lock(router.admin_key)
            self._service.locks = {OF_ALL_TENANTS: lock}
            if isinstance(lock.keys, KeyFile):
                self.key_files.append(lock.keys)
        self._batches: Batches | None = None
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
        self._silence = SilenceWatch(self.pools)
        self._webhooks = _webhooks_of(settings)
        self.loops.add(self._webhooks.loop)
        self._rollouts = [
            PoolRollout(pool, pool.settings.rollout, model, self.members, self._webhooks)
            for pool in self.pools
            if pool.settings.rollout is not None
            for model in pool.settings.rollout.models
        ]
        self._replicas = ReplicaScaling(settings.pools, self._scaling)
        self._grpc = RouterGrpcPort(
            self.table,
            self.members,
            router,
            self.session_headers,
            self._bounds,
            self._scaling,
            self._admission,
            MemberContexts(settings.pools, GRPC),
            self._member_key,
        )
        self._grpc.ledger = self._accounting
        placed = [pool for pool in self.pools if pool.settings.placement is not None]
        self._leases = LeaseRedis(settings_of_address(router.redis)) if router.redis and placed else None
        self._placements = [self._placement_in(pool) for pool in placed]
        self._figures = RouterMetrics(
            self.table, self.members, self._bounds, guard, self.loops, self._scaling, self._admission, self._placements
        )
        self._figures.rollouts = self._rollouts
        if self._ledger is not None:
            self._figures.more.append(self._ledger.write_metrics)
        self._metrics = HttpListener("Metrics", self._figures, _MAX_METRICS_BODY, self._bounds, _UPLOAD_SECONDS)
        self._idle_check = IdleCheck(self._bounds, _IDLE_SECONDS)

    def _routing(self, guard: BrowserGuard, cors: Cors | None = None) -> RouterService:
        """Return a handler that routes requests which ``guard`` allows. ``cors``: rules for pages of other origins."""
        router, admission = self.settings.router, self._admission
        callers = None if admission is None else admission.callers
        counts = admission is not None or self._ledger is not None
        targets = HttpTargets(
            guard,
            self.session_headers,
            router.max_body,
            callers,
            cors,
            self._member_key,
            counts=counts,
            paths=router.paths,
        )
        return RouterService(self.table, self.members, targets, router, admission, self._accounting)

    def _placement_in(self, pool: RouterPool) -> PoolPlacement:
        """Return what places the models of a pool."""
        lease = None if self._leases is None else PlacementLease(pool.name, self._leases)
        return PoolPlacement(pool, self.table.held, self.members, self.health, lease)

    async def start(self) -> None:
        """Find the members, check them once, and open the ports. Raises ``NeriteError``."""
        router = self.settings.router
        if self._admission is not None and self._admission.tenants.shared is not None:
            await self._admission.tenants.shared.start()
        if self._leases is not None:
            await self._leases.start()
        await self.find_members()
        await self._replicas.start()
        if router.batches:
            await self._open_batches(router)
        tls = self._contexts
        ports = {
            "HTTP": await self._http.open(router.address, router.http_port, tls=tls.http),
            "gRPC": await self._grpc.open(router.address, router.grpc_port, tls.grpc),
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

    async def _open_batches(self, router: RouterSettings) -> None:
        """Open the files and batches. Raises ``NeriteError``."""
        service = self._routing(BrowserGuard((), None))  # no browser sends items
        limits = BatchLimits(router.batch_concurrency, router.batch_storage_bytes, router.batch_lease)
        self._batches = await asyncio.to_thread(
            Batches,
            router.batches,
            router.batch_files,
            RoutedItems(self.table, service, router.max_body),
            limits,
            self._policy_in_force,
        )
        self._service.batch_api = BatchApi(self._batches)
        self._figures.more.append(partial(write_batch_metrics, self._batches.runner))

    def _policy_in_force(self) -> AdmissionPolicy | None:
        return None if self._admission is None else self._admission.tenants.policy

    def _welcome_lines(self, ports: dict[str, int]) -> Iterator[str]:
        names = ", ".join(pool.name for pool in self.pools)
        counts = f"{self.members_known} members of {names}; {self.members_ready} of them are ready"
        yield f"Nerite {__version__} routes to {counts}"
        address = self.settings.router.address
        yield f"Listening: {', '.join(f'{name} {address}:{port}' for name, port in ports.items())}"

    def background_work(self) -> Iterator[BackgroundWork]:
        """Yield the work for members, and the watch of the policy file."""
        yield from super().background_work()
        for placement in self._placements:
            yield BackgroundWork(placement.loop, placement.run)
            yield BackgroundWork(placement.reports.loop, placement.reports.run)
        yield BackgroundWork(self._scaling.loop, self._scaling.run)
        yield BackgroundWork(self._silence.loop, self._silence.run)
        for rollout in self._rollouts:
            yield BackgroundWork(rollout.loop, rollout.run)
        yield from self._replicas.background_work()
        if self._batches is not None:
            yield BackgroundWork(self._batches.loop, self._batches.run)
        if self._ledger is not None:
            yield BackgroundWork(self._ledger.loop, self._ledger.run)
        if self._policy is not None:
            yield watched(self._policy, self._policy_changed)

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
        self.table.held.stop(Unavailable("the router stops: send the request to another one, or later", 1))
        if self._batches is not None:
            self._batches.runner.stop()
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
        self._webhooks.close()
        if self._batches is not None:
            await self._batches.close()
        if self._ledger is not None:
            await self._ledger.close()
        if self._admission is not None and self._admission.tenants.shared is not None:
            await self._admission.tenants.shared.close()
        if self._leases is not None:
            self._leases.close()
        self._idle_check.stop()
        for listener in (self._http, self._metrics, self._grpc):
            listener.abort()
        self._bounds.aside.close()
