"""Composition root of the server process: creates the components of a server from options, and connects them."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING

from nerite.admission.policy import AdmissionPolicy
from nerite.admission.policy_file import WatchedPolicy, open_policy
from nerite.admission.tenants import TenantAdmission
from nerite.backends.python import environments
from nerite.batches.service import Batches, BatchLimits
from nerite.cache.interface import ResponseCache
from nerite.cache.local import open_cache
from nerite.config.flag import AUTO, RestrictedKey
from nerite.config.options import ServerOptions
from nerite.config.watched_file import watched
from nerite.core.background import BackgroundWork
from nerite.core.request import Caller
from nerite.core.work_loop import WorkLoops
from nerite.devices.devices import Devices
from nerite.dispatch.busy_poll import limit_of
from nerite.dispatch.interface import ServerEntry
from nerite.instances.instance import ModelInstance
from nerite.instances.placement import HostPolicies
from nerite.ledger.ledger import Ledger
from nerite.llm.checkpoint import task_of
from nerite.llm.openai.responses.store import ResponseShare, ResponseStore, ResponseUse
from nerite.models.launcher import Launcher
from nerite.models.running_version import Auditor, RunningVersion
from nerite.observability import gpus
from nerite.observability.gpus import GpuMetrics, start_gpu_metrics
from nerite.observability.log import log
from nerite.repository.demand_survey import DemandSurvey
from nerite.repository.manager import ModelManager
from nerite.repository.memory_use import MeasuredLoads, MemoryGauge, measurements_file
from nerite.repository.on_demand import OnDemandModels
from nerite.repository.polling import Poller
from nerite.repository.remote import is_remote, repository_at
from nerite.repository.repositories import LocalRepository, Repository
from nerite.repository.version_maker import GpuPlacement, VersionMaker
from nerite.rollouts.controller import RolloutController
from nerite.rollouts.state_directory import StateDirectory, StateWriter, state_directory
from nerite.rollouts.webhook import WebhookClient, Webhooks
from nerite.routes.table import RouteTable
from nerite.scheduling.rate_limiter import RateLimiter
from nerite.server import InferenceServer
from nerite.transports import access
from nerite.transports.access import Callers, KeyFile
from nerite.transports.http import infer_request
from nerite.transports.ports import ServerPorts
from nerite.workers.helper_pool import HelperPool
from nerite.workers.host.fork_server import ForkServer
from nerite.workers.host.instance import SlowBatchMonitor
from nerite.workers.host.server_context import ServerContext
from nerite.workers.ipc.shared_memory import ForeignSegments

if TYPE_CHECKING:
    from nerite.fronts.pool import FrontPool

_PROCESSORS_PER_FRONT = 3
_MAX_AUTOMATIC_FRONTS = 8


def automatic_fronts(processors: int) -> int:
    """Return the number of front processes for a machine; 1 for none, which is best with few processors."""
    return max(1, min(processors // _PROCESSORS_PER_FRONT, _MAX_AUTOMATIC_FRONTS))


class ServerComponents:
    """Creates, connects and closes the components of a server: ``open``, then ``create``, then the ports."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self.loader = ThreadPoolExecutor(max(options.repository.load_threads, 1) * 2, "load")
        self.repositories: list[Repository] = []
        self._cache: ResponseCache | None = None
        self._key_files: dict[str, KeyFile] = {}
        self._policy: WatchedPolicy | None = None
        self.tenant_admission: TenantAdmission
        self.loops = WorkLoops()
        """What runs beside the requests."""
        self._ledger: Ledger | None = None
        self._fork_server: ForkServer
        self._foreign_segments: ForeignSegments
        self._helpers: HelperPool
        self._gpu_metrics: GpuMetrics | None = None
        self._devices: Devices | None = None
        self.maker: VersionMaker
        self.ports: ServerPorts
        self._fronts: FrontPool | None = None
        self.rollouts: RolloutController
        self.batches: Batches | None = None
        self._responses: ResponseStore | None = None

    async def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read and open what the options name. Raises ``NeriteError``."""
        options = self._options
        environments.permit_installers()
        self.repositories = self._open_repositories()
        self._cache = await self._open_cache()
        if options.policy_file:
            self._policy = open_policy(options.policy_file, options.quota_redis)
        self.tenant_admission = TenantAdmission(
            None if self._policy is None else self._policy.policy, loop, routers=bool(options.router_key_file)
        )
        restricted = [*options.http.restricted.values(), *options.grpc.restricted.values()]
        if options.router_key_file:
            restricted.append(RestrictedKey(access.ROUTER_KEY, f"@{options.router_key_file}"))
        self._key_files = access.open_files(restricted)
        self._ledger = Ledger(options.ledger, self._tenant_of) if options.ledger else None

    def create(self, loop: asyncio.AbstractEventLoop) -> InferenceServer:
        """Create and connect the components; return the server. Nothing is loaded, and no port is open."""
        options, device = self._options, self._options.device
        self._fork_server = ForkServer(loop, lambda worker, stream, text: log.worker_line(worker, "INFO", text, stream))
        self._foreign_segments = ForeignSegments()
        self._helpers = HelperPool(self._fork_server, loop, self._foreign_segments)
        library = gpus.open_library()
        found = gpus.of_this_machine(library, os.environ, device.min_compute_capability)
        placement = GpuPlacement(library, found, device.min_compute_capability, device.load_gpu_limits)
        self._gpu_metrics = start_gpu_metrics(library, found, options.metrics, os.environ)
        if found:
            numbers = [gpu.number for gpu in found]
            self._devices = Devices(numbers, loop, device.pinned_pool_bytes, device.cuda_pool_bytes)
        front_count = options.front_processes
        if front_count == AUTO:
            front_count = automatic_fronts(os.cpu_count() or 1)
        routes = RouteTable()
        manager = partial(self._create_manager, loop, front_count, placement, routes)
        tenants = self.tenant_admission
        server = InferenceServer(
            *(options, manager, self._cache, tenants, self._helpers, routes),
            *(self._ledger, self._devices, self.loops),
        )
        if options.repository.control_mode in ("explicit", "demand"):
            server.load_on_demand(self._on_demand(server, MemoryGauge(library, found), [gpu.number for gpu in found]))
        router_keys = self._key_files.get(options.router_key_file)
        callers = Callers(lambda: tenants.policy, router_keys) if tenants.identifies else None
        self._fronts = None if front_count == 1 else self._front_pool(front_count, server)
        self.rollouts = self._rollout_controller(server)
        self.ports = ServerPorts(
            *(server, options, self._key_files, callers, self._gpu_metrics, self._fronts, self.rollouts)
        )
        self.ports.loops = self.loops
        if server.demand is not None:
            self.loops.add(server.demand.decisions)
        if tenants.shared is not None:
            self.loops.add(tenants.shared.loop)
        server.on_header_names_changed = self.ports.forget
        return server

    def _create_manager(
        self,
        loop: asyncio.AbstractEventLoop,
        front_count: int,
        placement: GpuPlacement,
        routes: RouteTable,
        server: ServerEntry,
        on_change: Callable[[], None],
    ) -> ModelManager:
        options, device = self._options, self._options.device
        loading = asyncio.Semaphore(max(options.repository.load_threads, 1))
        server_context = ServerContext(
            loop,
            self.loader,
            loading,
            self._fork_server,
            self._foreign_segments,
            server,
            log.worker_line,
            limit_of(options.stay_awake_microseconds, 1 if front_count == 1 else front_count + 1),
            options.queue,
            HostPolicies(device.host_policies),
            None if device.rate_limit == "off" else RateLimiter(device.rate_limit_resources),
            infer_request.read_recorded_request,
            self.tenant_admission,
            self._cache,
            options.metrics,
            self._ledger,
            self._devices,
        )
        launcher = Launcher(server_context)
        self.maker = VersionMaker(options.repository, options.settings_of, launcher, self.loader, loading, placement)
        return ModelManager(options.repository, self.repositories, self.maker, self.loader, on_change, routes)

    async def open_ports(self) -> None:
        """Open what requests are answered from, and accept them. Raises ``NeriteError``."""
        await self._open_databases()
        if self._fronts is not None:
            await self._fronts.start()
        await self.ports.open()

    async def _open_databases(self) -> None:
        """Open the files, batches and responses that the options configure. Raises ``NeriteError``."""
        options = self._options.batches
        if location := self._options.openai.responses or self._options.ledger:
            most = ResponseUse(self._options.openai.responses_number, self._options.openai.responses_bytes)
            self._responses = self.ports.responses = await asyncio.to_thread(
                ResponseStore, location, most, self._response_share
            )
        if not options.database:
            return
        limits = BatchLimits(options.concurrency, options.storage_bytes)
        tenants = self.tenant_admission
        executor = self.ports.item_executor()

        def policy() -> AdmissionPolicy | None:
            return tenants.policy if tenants.in_force else None

        self.batches = self.ports.batches = await asyncio.to_thread(
            Batches, options.database, options.directory, executor, limits, policy
        )

    def _response_share(self, name: str) -> ResponseShare | None:
        """Return what a tenant may store of responses; None without a policy."""
        if not self.tenant_admission.in_force:
            return None
        tenant = self.tenant_admission.policy.tenant(name)
        return ResponseShare(tenant.stored_responses, tenant.response_bytes)

    def background_work(self, server: InferenceServer) -> Iterator[BackgroundWork]:
        """Yield the background tasks: audits, and monitors of slow batches, repositories and watched files."""
        auditor = Auditor(lambda: _versions(server))
        yield BackgroundWork(auditor.loop, auditor.run)
        yield BackgroundWork(self.rollouts.loop, self.rollouts.run)
        if self.batches is not None:
            yield BackgroundWork(self.batches.loop, self.batches.run)
        if self._ledger is not None:
            yield BackgroundWork(self._ledger.loop, self._ledger.run)
        if self._options.stall_seconds:
            monitor = SlowBatchMonitor(lambda: _instances(server), self._options.stall_seconds)
            yield BackgroundWork(monitor.loop, monitor.run)
            if self._devices is not None:
                yield self._devices.watch(self._options.stall_seconds)
        if server.demand is not None and any(server.demand.residency):
            yield BackgroundWork(server.demand.loop, server.demand.run)
        if self._options.repository.control_mode == "poll":
            poller = Poller(server.manager, self._options.repository.poll_secs)
            yield BackgroundWork(poller.loop, poller.run)
        for file in self._key_files.values():
            yield watched(file, partial(self._file_changed, file))
        if self._policy is not None:
            yield watched(self._policy, partial(self._file_changed, self._policy))

    def _file_changed(self, file: KeyFile | WatchedPolicy) -> None:
        """Apply the new content of a file from the next request on."""
        (log.warning if file.problem else log.info)(file.news())
        if isinstance(file, WatchedPolicy):
            self.tenant_admission.follow(file.policy)
        self.ports.forget()

    async def close(self, server: InferenceServer) -> None:
        """Release everything: first what brings requests, then what answers them, and the processes last."""
        self.ports.abort()
        if self._fronts is not None:
            self._fronts.close()
        for repository in self.repositories:
            repository.close()
        await _cancel_other_tasks()
        if self.batches is not None:
            await self.batches.close()
        if self._responses is not None:
            await self._responses.close()
        self.rollouts.close()
        if server.demand is not None:
            await server.demand.close()
        await server.manager.close()
        if self._ledger is not None:
            await self._ledger.close()
        server.tracing.close()
        if self._cache is not None:
            self._cache.close()
        if self.tenant_admission.shared is not None:
            await self.tenant_admission.shared.close()
        if self._gpu_metrics is not None:
            self._gpu_metrics.close()
        self._helpers.close()
        self._fork_server.close()
        if self._devices is not None:
            self._devices.close()
        self.loader.shutdown(wait=False, cancel_futures=True)
        environments.stop_installer()

    def _on_demand(self, server: InferenceServer, gauge: MemoryGauge, gpus: Sequence[int]) -> OnDemandModels:
        """Return what loads models when requests ask for them."""
        options = self._options.repository
        survey = DemandSurvey(self.repositories, options, gpus, task_of)
        measured = MeasuredLoads(measurements_file(options.paths, os.environ))
        return OnDemandModels(server.manager, survey, gauge, measured, options, self.loader)

    def _open_repositories(self) -> list[Repository]:
        """Return the repositories that the options name. Raises ``NeriteError`` for an invalid one."""
        options = self._options.repository
        return [
            repository_at(path, os.environ, options.cache_directory) if is_remote(path) else LocalRepository(path)
            for path in options.paths
        ]

    def _tenant_of(self, caller: Caller) -> tuple[str, str]:
        """Return tenant and class of a caller, as the policy has them now. Without a policy, there are no tenants."""
        policy = self.tenant_admission.policy
        tenant = policy.tenant(caller.tenant)
        level = policy.class_of(tenant, caller.wanted_class)
        name = caller.tenant if self.tenant_admission.identifies else ""
        return name, tenant.level if level is None else level.name

    async def _open_cache(self) -> ResponseCache | None:
        """Return the response cache that the options configure. Raises ``NeriteError``."""
        return await open_cache(self._options.cache, os.environ)

    def _rollout_controller(self, server: InferenceServer) -> RolloutController:
        options = self._options
        identity = f"{options.id}:{options.http.port}:{options.grpc.port}"
        path = state_directory(options.rollout_state, options.repository.paths, identity, os.environ)
        writer = StateWriter(StateDirectory(path), self.loader)
        webhooks = Webhooks(WebhookClient(options.webhook_allowed_hosts))
        self.loops.add(webhooks.loop)
        return RolloutController(server, server.routes, writer, webhooks, self.loader)

    def _front_pool(self, count: int, server: InferenceServer) -> FrontPool:
        """Return the processes that serve the connections in place of this one."""
        # Imported here, because a server without fronts need not load their code.
        from nerite.fronts.pool import FrontPool

        tenants = self.tenant_admission
        # Fronts identify tenants and share no quotas, so they are not told the password of Redis.
        policy = None if self._policy is None else lambda: dataclasses.replace(tenants.policy, shared=None)
        return FrontPool(
            *(count, self._options, server, self._fork_server, self._foreign_segments),
            *(self.loader, self._key_files, policy),
        )


def _versions(server: InferenceServer) -> Iterator[RunningVersion]:
    """Yield all running model versions."""
    for record in server.manager.records:
        yield from record.running.values()


def _instances(server: InferenceServer) -> Iterator[ModelInstance]:
    """Yield the instances of all running model versions."""
    for running in _versions(server):
        yield from running.instances


async def _cancel_other_tasks() -> None:
    """Cancel all other tasks, including loads in progress, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
