"""Composition root of the server process: builds the server from options, opens ports, handles signals and shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import uvloop

from nerite.admission.tenants import TenantAdmission, WatchedPolicy, open_policy
from nerite.backends.python import environments
from nerite.batches.service import Batches, BatchLimits
from nerite.cache.interface import ResponseCache
from nerite.cache.local import open_cache
from nerite.config import open_ports as exposure
from nerite.config.flag import AUTO, RestrictedKey
from nerite.config.options import ServerOptions
from nerite.config.watched_file import watch_files
from nerite.core.errors import NeriteError
from nerite.core.failures import report
from nerite.core.request import Caller
from nerite.dispatch.busy_poll import limit_of
from nerite.dispatch.interface import ServerEntry
from nerite.instances.instance import ModelInstance
from nerite.instances.placement import HostPolicies
from nerite.ledger.ledger import Ledger
from nerite.llm.openai.response_store import ResponseStore
from nerite.models.launcher import Launcher
from nerite.models.loop_watchdog import LoopWatchdog
from nerite.models.running_version import Auditor, RunningVersion
from nerite.observability import gpus
from nerite.observability.gpus import start_gpu_metrics
from nerite.observability.log import log
from nerite.observability.log_records import LogTable
from nerite.repository.demand_survey import DemandSurvey
from nerite.repository.manager import ModelManager
from nerite.repository.memory_use import MeasuredLoads, MemoryGauge, measurements_file
from nerite.repository.on_demand import OnDemandModels
from nerite.repository.polling import Poller
from nerite.repository.remote import is_remote, repository_at
from nerite.repository.repositories import LocalRepository, Repository
from nerite.repository.standby import Standby, prepare_models
from nerite.repository.version_maker import GpuPlacement, VersionMaker
from nerite.rollouts.controller import RolloutController
from nerite.rollouts.declarations import declared_in
from nerite.rollouts.state_directory import StateDirectory, StateWriter, state_directory
from nerite.rollouts.webhook import Webhooks
from nerite.routes.table import RouteTable
from nerite.scheduling.rate_limiter import RateLimiter
from nerite.server import InferenceServer
from nerite.transports import access
from nerite.transports.access import Callers, KeyFile
from nerite.transports.http import infer_request
from nerite.transports.ports import ServerPorts
from nerite.transports.start_message import counted, welcome_lines
from nerite.workers.helper_pool import HelperPool
from nerite.workers.host.fork_server import ForkServer
from nerite.workers.host.instance import SlowBatchMonitor
from nerite.workers.host.server_context import ServerContext
from nerite.workers.ipc.shared_memory import ForeignSegments

if TYPE_CHECKING:
    from nerite.fronts.pool import FrontPool


_GC_THRESHOLD = 10_000
"""Allocations minus deallocations that trigger the cycle collector. A batch of requests takes some thousand objects."""

_RESTART_DELAY = 1.0
"""Seconds before a background task that failed restarts."""

_PROCESSORS_PER_FRONT = 3
_MAX_AUTOMATIC_FRONTS = 8
_CODE_TEXTS = {"INVALID_ARG": "Invalid argument", "INTERNAL": "Internal", "UNSUPPORTED": "Unsupported"}
"""Triton's printed forms of error codes."""


def run(options: ServerOptions) -> int:
    """Serve until a signal arrives; return the exit status."""
    _raise_open_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ServerProcess(options).serve())


def automatic_fronts(processors: int) -> int:
    """Return the number of front processes for a machine; 1 for none, which is best with few processors."""
    return max(1, min(processors // _PROCESSORS_PER_FRONT, _MAX_AUTOMATIC_FRONTS))


def _raise_open_file_limit() -> None:
    """Raise the soft limit of open files to the hard limit: each connection needs one, and 1,024 is common."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS rejects the hard limit that it reports as unlimited
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


StartedServer = Callable[[InferenceServer, Mapping[str, int]], None]
"""Called on the loop when the models are loaded and the ports are open, with the numbers of the ports."""


class ServerProcess:
    """Creates, connects and closes the components of a server."""

    def __init__(self, options: ServerOptions, started: StartedServer | None = None) -> None:
        """With ``started``, the server is embedded in a program.

        It leaves signals and the collector alone, never ends the process, and ``serve`` raises why it cannot start.
        """
        self._options = options
        self._started = started
        self._loader = ThreadPoolExecutor(max(options.repository.load_threads, 1) * 2, "load")
        self._repositories: list[Repository] = []
        self._key_files: dict[str, KeyFile] = {}
        self._policy: WatchedPolicy | None = None
        self._tenant_admission: TenantAdmission
        self._ledger: Ledger | None = None
        self._maker: VersionMaker
        self._ports: ServerPorts
        self._fronts: FrontPool | None = None
        self._rollouts: RolloutController
        self._batches: Batches | None = None
        self._responses: ResponseStore | None = None
        self._stop_requested = asyncio.Event()

    async def serve(self) -> int:
        """Start, wait for a signal, and stop; return the exit status."""
        try:
            self._repositories = self._open_repositories()
            cache = await self._open_cache()
            if self._options.policy_file:
                self._policy = open_policy(self._options.policy_file, self._options.quota_redis)
            loop = asyncio.get_running_loop()
            tenant_admission = self._tenant_admission = TenantAdmission(
                None if self._policy is None else self._policy.policy, loop
            )
            restricted = [*self._options.http.restricted.values(), *self._options.grpc.restricted.values()]
            if self._options.router_key_file:
                restricted.append(RestrictedKey(access.ROUTER_KEY, f"@{self._options.router_key_file}"))
            self._key_files = access.open_files(restricted)
            self._ledger = Ledger(self._options.ledger, self._level_of) if self._options.ledger else None
        except NeriteError as error:
            if self._started is not None:
                raise
            log.error(error.message)
            return 1
        loop.set_exception_handler(_report_unhandled)
        for number in (signal.SIGINT, signal.SIGTERM) if self._started is None else ():
            loop.add_signal_handler(number, self._signalled)
        fork_server = ForkServer(loop, lambda worker, stream, text: log.worker_line(worker, "INFO", text, stream))
        foreign_segments = ForeignSegments()
        helpers = HelperPool(fork_server, loop, foreign_segments)
        device = self._options.device
        library = gpus.open_library()
        found = gpus.of_this_machine(library, os.environ, device.min_compute_capability)
        placement = GpuPlacement(library, found, device.min_compute_capability, device.load_gpu_limits)
        gpu_metrics = start_gpu_metrics(library, found, self._options.metrics, os.environ)
        front_count = self._options.front_processes
        if front_count == AUTO:
            front_count = automatic_fronts(os.cpu_count() or 1)
        loading = asyncio.Semaphore(max(self._options.repository.load_threads, 1))
        routes = RouteTable()

        def manager(server: ServerEntry, on_change: Callable[[], None]) -> ModelManager:
            server_context = ServerContext(
                loop,
                self._loader,
                loading,
                fork_server,
                foreign_segments,
                server,
                log.worker_line,
                limit_of(self._options.stay_awake_microseconds, 1 if front_count == 1 else front_count + 1),
                self._options.queue,
                HostPolicies(device.host_policies),
                None if device.rate_limit == "off" else RateLimiter(device.rate_limit_resources),
                infer_request.read_recorded_request,
                tenant_admission,
                cache,
                self._options.metrics,
                self._ledger,
            )
            settings_of = self._options.settings_of
            repository = self._options.repository
            launcher = Launcher(server_context)
            self._maker = VersionMaker(repository, settings_of, launcher, self._loader, loading, placement)
            return ModelManager(repository, self._repositories, self._maker, self._loader, on_change, routes)

        server = InferenceServer(self._options, manager, cache, tenant_admission, helpers, routes, self._ledger)
        if self._options.repository.control_mode in ("explicit", "demand"):
            server.load_on_demand(self._on_demand(server, MemoryGauge(library, found), [gpu.number for gpu in found]))
        router_keys = self._key_files.get(self._options.router_key_file)
        identified = self._policy is not None or router_keys is not None
        callers = Callers(lambda: tenant_admission.policy, router_keys) if identified else None
        fronts = None if front_count == 1 else self._front_pool(front_count, server, fork_server, foreign_segments)
        self._fronts = fronts
        self._rollouts = self._rollout_controller(server)
        self._ports = ServerPorts(server, self._options, self._key_files, callers, gpu_metrics, fronts, self._rollouts)
        server.on_header_names_changed = self._ports.forget
        watchdog: LoopWatchdog | None = None
        try:
            start = loop.create_task(self._start(server))
            stop = loop.create_task(self._stop_requested.wait())
            await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                start.cancel()
                return 0
            if not start.result():
                return 1
            if self._options.stall_seconds:
                watchdog = LoopWatchdog(loop, self._options.stall_seconds)
            background = [loop.create_task(_keep_running(work)) for work in self._background_work(server)]
            await stop
            for task in background:
                task.cancel()
            await self._stop(server)
            return 0
        finally:
            if watchdog is not None:
                watchdog.stop()
            self._ports.abort()
            if fronts is not None:
                fronts.close()
            for repository in self._repositories:
                repository.close()
            await _cancel_other_tasks()
            if self._batches is not None:
                await self._batches.close()
            if self._responses is not None:
                await self._responses.close()
            self._rollouts.close()
            if server.demand is not None:
                await server.demand.close()
            await server.manager.close()
            if self._ledger is not None:
                await self._ledger.close()
            server.tracing.close()
            if cache is not None:
                cache.close()
            if tenant_admission.shared is not None:
                await tenant_admission.shared.close()
            if gpu_metrics is not None:
                gpu_metrics.close()
            helpers.close()
            fork_server.close()
            self._loader.shutdown(wait=False, cancel_futures=True)
            environments.stop_installer()

    def _on_demand(self, server: InferenceServer, gauge: MemoryGauge, gpus: Sequence[int]) -> OnDemandModels:
        """Return what loads models when requests ask for them."""
        options = self._options.repository
        survey = DemandSurvey(self._repositories, options, gpus)
        measured = MeasuredLoads(measurements_file(options.paths, os.environ))
        return OnDemandModels(server.manager, survey, gauge, measured, options, self._loader)

    def _open_repositories(self) -> list[Repository]:
        """Return the repositories that the options name. Raises ``NeriteError`` for an invalid one."""
        options = self._options.repository
        return [
            repository_at(path, os.environ, options.cache_directory) if is_remote(path) else LocalRepository(path)
            for path in options.paths
        ]

    def _level_of(self, caller: Caller) -> str:
        """Return the class of a caller, as the policy has it now."""
        policy = self._tenant_admission.policy
        tenant = policy.tenant(caller.tenant)
        level = policy.class_of(tenant, caller.wanted_class)
        return tenant.level if level is None else level.name

    async def _open_cache(self) -> ResponseCache | None:
        """Return the response cache that the options configure. Raises ``NeriteError`` with Triton's text."""
        try:
            return await open_cache(self._options.cache, os.environ)
        except NeriteError as error:
            raise error.prefixed(f"error: creating server: {_CODE_TEXTS.get(error.code, error.code)} - ") from None

    def _rollout_controller(self, server: InferenceServer) -> RolloutController:
        options = self._options
        identity = f"{options.id}:{options.http.port}:{options.grpc.port}"
        path = state_directory(options.rollout_state, options.repository.paths, identity, os.environ)
        writer = StateWriter(StateDirectory(path), self._loader)
        return RolloutController(server, server.routes, writer, Webhooks(), self._loader)

    def _front_pool(
        self, count: int, server: InferenceServer, fork_server: ForkServer, foreign_segments: ForeignSegments
    ) -> FrontPool:
        """Return the processes that serve the connections in place of this one."""
        # Imported here, because a server without fronts need not load their code.
        from nerite.fronts.pool import FrontPool

        tenants = self._tenant_admission
        # Fronts identify tenants and share no quotas, so they are not told the password of Redis.
        policy = None if self._policy is None else lambda: dataclasses.replace(tenants.policy, shared=None)
        return FrontPool(
            count, self._options, server, fork_server, foreign_segments, self._loader, self._key_files, policy
        )

    def _signalled(self) -> None:
        """Begin a graceful shutdown; on the second signal, exit immediately."""
        if self._stop_requested.is_set():
            os._exit(1)
        self.request_stop()

    def request_stop(self) -> None:
        """Begin a graceful shutdown."""
        self._stop_requested.set()

    async def _start(self, server: InferenceServer) -> bool:
        """Load the models and open the ports; on failure, log the reason and return False."""
        try:
            await self._ports.check()
            if self._tenant_admission.shared is not None:
                await self._tenant_admission.shared.start()
            self._rollouts.restore(declared_in(self._options.repository.paths))
            if self._options.repository.standby:
                await self._open_databases()
                await self._open_ports()
                await self._stand_by(server)
            if not await self._load_and_open(server):
                return False
        except NeriteError as error:
            if self._started is not None:
                raise
            log.error(error.message)
            return False
        exposed = exposure.open_ports(self._options)
        if exposed:
            log.warning(f"{exposure.rights(exposed)}. {exposure.remedy(exposed)}")
        if not (server.manager.unread and self._options.repository.control_mode == "none"):
            server.started()  # otherwise the server stays not ready: in mode "none" the repository is not read again
        if server.standby is not None:
            server.standby.ended()
        if self._options.trace.levels and not server.tracing.wants(""):
            if self._options.trace.mode == "opentelemetry":
                reason = "spans contain timestamps, not tensors. Use --trace-config=level=TIMESTAMPS"
            else:
                reason = "no trace file is set. Use --trace-config=triton,file=<path>"
            log.warning(f"nothing is traced: {reason}")
        if self._started is not None:
            self._started(server, self._ports.opened)
            return True
        self._print_welcome(server)
        # Objects created so far live long, so the collector need not scan them again. Requests create no cycles.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)
        return True

    async def _open_ports(self) -> None:
        """Accept requests. Raises ``NeriteError``."""
        if self._fronts is not None:
            await self._fronts.start()
        await self._ports.open()

    async def _load_and_open(self, server: InferenceServer) -> bool:
        """Load the initial models, then open the ports; return False if the server must exit on errors.

        If something is made for a model that may take minutes, the ports are opened at once: the server is live and not
        ready, and the index says how far it is.
        """
        is_open = self._options.repository.standby
        loop = asyncio.get_running_loop()
        load = loop.create_task(self._load_initial_models(server))
        preparing = loop.create_task(self._maker.preparing.wait())
        await asyncio.wait((load, preparing), return_when=asyncio.FIRST_COMPLETED)
        preparing.cancel()
        if not (load.done() or is_open):
            await self._open_databases()
            await self._open_ports()
            is_open = True
            log.info(
                "The ports are open before the models are ready, as this may take minutes. POST /v2/repository/index "
                "tells how far it is"
            )
        if not await load:
            return False
        await self._rollouts.start()
        if not is_open:
            await self._open_databases()
            await self._open_ports()
        return True

    async def _stand_by(self, server: InferenceServer) -> None:
        """Prepare the load of the models, and return when it is asked for."""
        server.standby = standby = Standby()
        options = self._options.repository
        chosen = options.control_mode in ("explicit", "demand") and options.startup_models != ("*",)
        wanted = options.startup_models if chosen else None
        loop = asyncio.get_running_loop()
        preparing = loop.run_in_executor(self._loader, prepare_models, self._repositories, wanted, self._maker.prepare)
        asked = loop.create_task(standby.until_asked())
        await asyncio.wait((preparing, asked), return_when=asyncio.FIRST_COMPLETED)
        if preparing.done():
            names = preparing.result()
            log.info(f"Stands by to load {counted(len(names), 'model')}: POST /v2/repository/wake loads them")
        await asked

    async def _open_databases(self) -> None:
        """Open the files, batches and responses that the options configure. Raises ``NeriteError``."""
        options = self._options.batches
        if location := self._options.openai.responses or self._options.ledger:
            self._responses = self._ports.responses = await asyncio.to_thread(ResponseStore, location)
        if not options.database:
            return
        limits = BatchLimits(options.concurrency, options.storage_bytes)
        tenants = self._tenant_admission
        executor = self._ports.item_executor()

        def weight_of(tenant: str) -> float:
            return tenants.policy.tenant(tenant).weight

        self._batches = self._ports.batches = await asyncio.to_thread(
            Batches, options.database, options.directory, executor, limits, weight_of
        )

    async def _load_initial_models(self, server: InferenceServer) -> bool:
        """Load and log the initial models; False if that failed and the server must exit on errors."""
        exits = self._options.repository.exit_on_error
        try:
            failures = await self._load_models(server)
            log.table(_model_table(await server.repository_index(False)))
        except NeriteError as error:  # a repository cannot be read
            log.error(error.message)
            return not exits
        if failures and exits and self._started is not None:
            raise failures[0][1]
        if failures and exits:
            log.error("error: creating server: Internal - failed to load all models")
        return not (failures and exits)

    async def _load_models(self, server: InferenceServer) -> list[tuple[str, NeriteError]]:
        """Load the models that the control mode loads at start; return the failures."""
        options = self._options.repository
        failures = [] if server.demand is None else await server.demand.start()
        if options.control_mode == "demand":
            return failures
        names = sorted({name for offered in (await server.manager.offered()).values() for name in offered})
        if options.control_mode == "explicit" and options.startup_models != ("*",):
            names = list(options.startup_models)
        return failures + await server.manager.load_all(names)

    def _print_welcome(self, server: InferenceServer) -> None:
        """Print the start-up message: without log prefixes to a terminal, so that it can be pasted; else to the log."""
        http = self._options.http
        lines = welcome_lines(server, self._ports.opened, http.address, self._options.repository, console=http.console)
        if sys.stdout.isatty() and not log.file and log.format != "json":
            print("", *lines, "", sep="\n", file=sys.__stdout__, flush=True)
        else:
            for line in lines:
                log.info(line)

    def _background_work(self, server: InferenceServer) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        """Yield the background tasks: audits, and monitors of slow batches, repositories and watched files."""
        yield Auditor(lambda: _versions(server)).run
        yield self._rollouts.run
        if self._batches is not None:
            yield self._batches.run
        if self._ledger is not None:
            yield self._ledger.run
        if self._options.stall_seconds:
            yield SlowBatchMonitor(lambda: _instances(server), self._options.stall_seconds).run
        if server.demand is not None and any(server.demand.residency):
            yield server.demand.run
        if self._options.repository.control_mode == "poll":
            yield Poller(server.manager, self._options.repository.poll_secs).run
        for file in self._key_files.values():
            yield partial(watch_files, file, partial(self._file_changed, file))
        if self._policy is not None:
            yield partial(watch_files, self._policy, partial(self._file_changed, self._policy))

    def _file_changed(self, file: KeyFile | WatchedPolicy) -> None:
        """Apply the new content of a file from the next request on."""
        (log.warning if file.problem else log.info)(file.news())
        if isinstance(file, WatchedPolicy):
            self._tenant_admission.follow(file.policy)
        self._ports.forget()

    async def _stop(self, server: InferenceServer) -> None:
        """Shut down gracefully: stop accepting connections, wait for requests in flight, and log them each second.

        Exits the process if the exit timeout expires, or fails what is in flight if it is embedded.
        """
        timeout = self._options.exit_timeout_secs
        deadline = time.monotonic() + timeout
        log.info("Waiting for in-flight requests to complete.")
        server.announce_stop()
        if self._batches is not None:
            self._batches.runner.stop()
        await self._ports.drain(timeout)
        self._ports.stop_accepting()
        last_logged = timeout + 1
        while True:
            in_flight = server.in_flight
            if not in_flight and not self._ports.open_connections:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                log.error("Exit timeout expired. Exiting immediately.")
                if self._started is not None:
                    break
                server.tracing.close()
                logging.shutdown()
                os._exit(1)
            if int(left) < last_logged:
                last_logged = int(left)
                log.info(f"Timeout {last_logged}: Found {len(in_flight)} model versions that have in-flight inferences")
                for model, version, count in in_flight:
                    log.info(f"Model '{model}' (version {version}) has {count} in-flight inferences")
            await asyncio.sleep(min(0.02, left))
        server.stop_accepting()


def _report_unhandled(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an exception that no callback or task has caught, as an incident."""
    message = context.get("message", "")
    report("loop", context.get("exception") or RuntimeError(message), f"({message})")


async def _keep_running(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run background work, and restart it after an unforeseen exception."""
    while True:
        try:
            await work()
        except Exception as error:
            report("loop", error, "in a background task")
            await asyncio.sleep(_RESTART_DELAY)


async def _cancel_other_tasks() -> None:
    """Cancel all other tasks, including loads in progress, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _model_table(index: list[dict[str, str]]) -> LogTable:
    """Return a table of all models with their state, and the reason for those that are not ready."""
    rows = []
    for entry in index:
        state = entry.get("state", "")
        reason = entry.get("reason", "")
        rows.append((entry["name"], entry.get("version", "-"), f"{state}: {reason}" if reason else state))
    return LogTable(("Model", "Version", "Status"), rows)


def _versions(server: InferenceServer) -> Iterator[RunningVersion]:
    """Yield all running model versions."""
    for record in server.manager.records:
        yield from record.running.values()


def _instances(server: InferenceServer) -> Iterator[ModelInstance]:
    """Yield the instances of all running model versions."""
    for running in _versions(server):
        yield from running.instances
