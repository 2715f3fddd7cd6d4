"""A server as a process: the loop, the ports, the signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
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
from typing import Any

import uvloop

from nerite import __version__
from nerite.admission.tenants import TenantAdmission, WatchedPolicy, open_policy
from nerite.backends.python import environments
from nerite.cache.interface import ResponseCache
from nerite.cache.local import open_cache
from nerite.config import options as exposure
from nerite.config.options import RepositoryOptions, ServerOptions, is_loopback
from nerite.config.watched_file import watch_files
from nerite.core.errors import NeriteError
from nerite.core.failures import report
from nerite.dispatch.busy_poll import limit_of
from nerite.dispatch.interface import ServerEntry
from nerite.instances.instance import ModelInstance
from nerite.instances.placement import HostPolicies
from nerite.models.launcher import Launcher
from nerite.models.loop_watchdog import LoopWatchdog
from nerite.models.running_version import Auditor, RunningVersion
from nerite.observability import gpus
from nerite.observability.gpus import gauges_of
from nerite.observability.log import WorkerLines, log
from nerite.observability.log_records import LogTable
from nerite.repository.catalogue import ModelRecord
from nerite.repository.manager import ModelManager
from nerite.repository.polling import Poller
from nerite.repository.remote import is_remote, repository_at
from nerite.repository.repositories import LocalRepository, Repository
from nerite.repository.version_maker import GpuPlacement, VersionMaker
from nerite.scheduling.rate_limiter import RateLimiter
from nerite.server import InferenceServer
from nerite.transports import access
from nerite.transports.access import Callers, KeyFile
from nerite.transports.http import infer_request
from nerite.transports.http.openapi import sample_of, served_models
from nerite.transports.ports import ServerPorts
from nerite.workers.helper_pool import HelperPool
from nerite.workers.host.fork_server import ForkServer
from nerite.workers.host.instance import SlowBatchMonitor
from nerite.workers.host.server_context import ServerContext
from nerite.workers.ipc.shared_memory import ForeignSegments

# What a server says when it is up: what it serves, where, and a command that tries it.


def welcome_lines(
    server: InferenceServer, ports: Mapping[str, int], address: str, repository: RepositoryOptions, *, console: bool
) -> list[str]:
    """Return the lines, given the port of each service that is open, and whether there is a console."""
    host = "localhost" if address in ("0.0.0.0", "::", "") else address
    ready = [record for record in server.manager.records if record.running]
    failed = [record.name for record in server.manager.records if record.states and not record.running]
    said = [f"Nerite {__version__} serves {_count(len(ready), 'model')}" + _failures(failed)]
    where = [f"{name} {host}:{port}" for name, port in ports.items()]
    said.append(f"Listening: {', '.join(where)}")
    if is_loopback(address):
        said.append("Only this machine gets in. For others, start it with --address=0.0.0.0 (docs/access.md)")
    if "HTTP" not in ports:
        return said
    url = f"http://{host}:{ports['HTTP']}"
    if ready:
        said.append(f"Try it: {_command(ready, url)}")
        said.append(f"A command for each model: {url}/v2/docs")
    elif repository.control_mode == "explicit":
        said.append(f"Load a model: curl -X POST {url}/v2/repository/models/NAME/load")
    else:
        when = "it is loaded then" if repository.control_mode == "poll" else "start the server again"
        said.append(f"Put a model into {repository.paths[0]}, and {when}. {server.control_note}")
    if console:
        said.append(f"Watch it: {url}/ui")
    return said


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _failures(names: list[str]) -> str:
    return f"; {_count(len(names), 'model')} failed to load: {', '.join(names)} (why: see above)" if names else ""


def _command(records: Sequence[ModelRecord], url: str) -> str:
    """Return a curl command that works: an inference by the first model for which that is short, else a look at one."""
    served = [each for each in served_models(records) if each.latest and each.paths]
    for each in served:
        sample = sample_of(each.signature, decoupled=each.decoupled)
        if sample is not None and sample.brief:
            return sample.curl(url + each.paths[0])
    return f"curl {url}/v2/models/{records[0].name}"


_COLLECT_EVERY = 10_000
"""Objects made and not yet gone, before the collector looks for cycles. A batch of requests is some thousand."""

_BEGIN_AGAIN = 1.0
"""Seconds after which what goes on beside the serving begins again if it has failed."""

_SAID = {"INVALID_ARG": "Invalid argument", "INTERNAL": "Internal", "UNSUPPORTED": "Unsupported"}
"""How Triton says the codes of errors where it prints them."""


def run(options: ServerOptions) -> int:
    """Serve until a signal ends it; return the exit status."""
    _allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as instance:
        return instance.run(ServerProcess(options).serve())


def _allow_many_files() -> None:
    """Raise the limit of open files as far as we may: each connection is one, and the usual limit is 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses what it calls unlimited
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class ServerProcess:
    """Puts the rooms together, and takes them apart again."""

    def __init__(self, options: ServerOptions) -> None:
        self._options = options
        self._loader = ThreadPoolExecutor(max(options.repository.load_threads, 1) * 2, "load")
        self._repositories: list[Repository] = []
        self._key_files: dict[str, KeyFile] = {}
        self._policy: WatchedPolicy | None = None
        self._tenant_admission: TenantAdmission
        self._ports: ServerPorts
        self._stop_asked = asyncio.Event()

    async def serve(self) -> int:
        """Start, wait for a signal, stop."""
        try:
            self._repositories = self._open_repositories()
            cache = await self._open_cache()
            self._policy = open_policy(self._options.policy_file) if self._options.policy_file else None
            restricted = (*self._options.http.restricted.values(), *self._options.grpc.restricted.values())
            self._key_files = access.open_files(restricted)
        except NeriteError as error:
            log.error(error.message)
            return 1
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_unforeseen)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_stop)
        lines = WorkerLines(log)
        fork_server = ForkServer(loop, lambda worker, stream, text: lines(worker, "INFO", text, stream))
        foreign_segments = ForeignSegments()
        helpers = HelperPool(fork_server, loop, foreign_segments)
        device = self._options.device
        library = gpus.open_library()
        found = gpus.of_this_machine(library, os.environ, device.min_compute_capability)
        placement = GpuPlacement(library, found, device.min_compute_capability, device.load_gpu_limits)
        tenant_admission = self._tenant_admission = TenantAdmission(
            None if self._policy is None else self._policy.policy, loop
        )
        gauges = gauges_of(library, found, self._options.metrics, os.environ)
        loading = asyncio.Semaphore(max(self._options.repository.load_threads, 1))

        def manager(server: ServerEntry, on_change: Callable[[], None]) -> ModelManager:
            server_context = ServerContext(
                loop,
                self._loader,
                loading,
                fork_server,
                foreign_segments,
                server,
                lines,
                limit_of(self._options.stay_awake_microseconds),
                self._options.queue,
                HostPolicies(device.host_policies),
                None if device.rate_limit == "off" else RateLimiter(device.rate_limit_resources),
                infer_request.read_recorded_request,
                tenant_admission,
                self._options.metrics,
            )
            settings_of = self._options.settings_of
            repository = self._options.repository
            maker = VersionMaker(
                repository, settings_of, Launcher(server_context), self._loader, loading, cache, placement
            )
            return ModelManager(repository, self._repositories, maker, self._loader, on_change)

        server = InferenceServer(self._options, manager, cache, tenant_admission, helpers)
        callers = None if self._policy is None else Callers(lambda: tenant_admission.policy)
        self._ports = ServerPorts(server, self._options, self._key_files, callers, gauges)
        watchdog: LoopWatchdog | None = None
        try:
            start = loop.create_task(self._start(server))
            stop = loop.create_task(self._stop_asked.wait())
            await asyncio.wait((start, stop), return_when=asyncio.FIRST_COMPLETED)
            if not start.done():
                start.cancel()
                return 0
            if not start.result():
                return 1
            if self._options.stall_seconds:
                watchdog = LoopWatchdog(loop, self._options.stall_seconds)
            watching = [loop.create_task(_lasting(work)) for work in self._watching(server)]
            await stop
            for task in watching:
                task.cancel()
            await self._stop(server)
            return 0
        finally:
            if watchdog is not None:
                watchdog.stop()
            self._ports.abort()
            for repository in self._repositories:
                repository.close()
            await _give_up_others()
            await server.manager.close()
            server.tracing.close()
            if cache is not None:
                cache.close()
            if gauges is not None:
                gauges.close()
            helpers.close()
            fork_server.close()
            self._loader.shutdown(wait=False, cancel_futures=True)
            environments.stop_installer()

    def _open_repositories(self) -> list[Repository]:
        """Return the places that the flags name. Raises ``NeriteError`` for one that cannot be right."""
        options = self._options.repository
        return [
            repository_at(path, os.environ, options.cache_directory) if is_remote(path) else LocalRepository(path)
            for path in options.paths
        ]

    async def _open_cache(self) -> ResponseCache | None:
        """Return the response cache that the flags ask for. Raises ``NeriteError`` with Triton's text."""
        try:
            return await open_cache(self._options.cache, os.environ)
        except NeriteError as error:
            raise error.prefixed(f"error: creating server: {_SAID.get(error.code, error.code)} - ") from None

    def _asked_to_stop(self) -> None:
        """Stop in good order; asked again, stop at once."""
        if self._stop_asked.is_set():
            os._exit(1)
        self._stop_asked.set()

    async def _start(self, server: InferenceServer) -> bool:
        """Load the models and open the ports; False, and the reason in the log, if that failed."""
        try:
            await self._ports.check()
            if not await self._have_models(server):
                return False
            await self._ports.open()
        except NeriteError as error:
            log.error(error.message)
            return False
        exposed = exposure.open_ports(self._options)
        if exposed:
            log.warning(f"{exposure.rights(exposed)}. {exposure.remedy(exposed)}")
        if not (server.manager.unread and self._options.repository.control_mode == "none"):
            server.started()  # else there is nothing to wait for that could make it ready
        if self._options.trace.levels and not server.tracing.wants(""):
            spans = self._options.trace.mode == "opentelemetry"
            remedy = "spans have times, no tensors. Use --trace-config=level=TIMESTAMPS"
            log.warning(f"nothing is traced: {remedy if spans else 'it needs --trace-config=triton,file=<path>'}")
        self._welcome(server)
        # What lives from here on lives long: the collector need not look at it again. And requests make no cycles.
        gc.collect()
        gc.freeze()
        gc.set_threshold(_COLLECT_EVERY)
        return True

    async def _have_models(self, server: InferenceServer) -> bool:
        """Load what is to be served from the start; False if that failed, and the server is to end then."""
        exits = self._options.repository.exit_on_error
        try:
            failures = await self._load_models(server)
            log.table(_model_table(await server.repository_index(False)))
        except NeriteError as error:  # there is a repository that cannot be read
            log.error(error.message)
            return not exits
        if failures and exits:
            log.error("error: creating server: Internal - failed to load all models")
        return not (failures and exits)

    async def _load_models(self, server: InferenceServer) -> list[tuple[str, NeriteError]]:
        """Load what is to be served from the start; return the failures."""
        options = self._options.repository
        names = sorted({name for offered in (await server.manager.offered()).values() for name in offered})
        if options.control_mode == "explicit" and options.startup_models != ("*",):
            names = list(options.startup_models)
        return await server.manager.load_all(names)

    def _welcome(self, server: InferenceServer) -> None:
        """Say what is served and how to try it: to a person as it is, so that it can be pasted; else as log lines."""
        http = self._options.http
        lines = welcome_lines(server, self._ports.opened, http.address, self._options.repository, console=http.console)
        if sys.stdout.isatty() and not log.file and log.format != "json":
            print("", *lines, "", sep="\n", file=sys.__stdout__, flush=True)
        else:
            for line in lines:
                log.info(line)

    def _watching(self, server: InferenceServer) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        """Yield what goes on beside the serving: looking at workers, and at files that may change."""
        yield Auditor(lambda: _versions(server)).run
        if self._options.stall_seconds:
            yield SlowBatchMonitor(lambda: _instances(server), self._options.stall_seconds).run
        if self._options.repository.control_mode == "poll":
            yield Poller(server.manager, self._options.repository.poll_secs).run
        for file in self._key_files.values():
            yield partial(watch_files, file, partial(self._changed, file))
        if self._policy is not None:
            yield partial(watch_files, self._policy, partial(self._changed, self._policy))

    def _changed(self, file: KeyFile | WatchedPolicy) -> None:
        """Have what is new in a file count from the next request on."""
        (log.warning if file.problem else log.info)(file.news())
        if isinstance(file, WatchedPolicy):
            self._tenant_admission.follow(file.policy)
        self._ports.forget()

    async def _stop(self, server: InferenceServer) -> None:
        """Stop accepting, wait for what is in flight, and say what it is that is waited for."""
        patience = self._options.exit_timeout_secs
        deadline = time.monotonic() + patience
        log.info("Waiting for in-flight requests to complete.")
        server.announce_stop()
        await self._ports.drain(patience)
        self._ports.stop_accepting()
        said = patience + 1
        while True:
            held = server.in_flight
            if not held and not self._ports.open_connections:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                log.error("Exit timeout expired. Exiting immediately.")
                server.tracing.close()
                logging.shutdown()
                os._exit(1)
            if int(left) < said:
                said = int(left)
                log.info(f"Timeout {said}: Found {len(held)} model versions that have in-flight inferences")
                for model, version, count in held:
                    log.info(f"Model '{model}' (version {version}) has {count} in-flight inferences")
            await asyncio.sleep(min(0.02, left))
        server.stop_accepting()


def _unforeseen(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Report an exception that a callback of the loop did not catch."""
    message = context.get("message", "")
    report("loop", context.get("exception") or RuntimeError(message), f"({message})")


async def _lasting(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Do what is to go on as long as the server does. What it did not foresee does not end it."""
    while True:
        try:
            await work()
        except Exception as error:
            report("loop", error, "in what goes on beside the serving")
            await asyncio.sleep(_BEGIN_AGAIN)


async def _give_up_others() -> None:
    """Cancel every other task, a load that is under way among them, and wait until all have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def _model_table(index: list[dict[str, str]]) -> LogTable:
    """Return which models there are, and why some of them do not run."""
    rows = []
    for entry in index:
        state = entry.get("state", "")
        reason = entry.get("reason", "")
        rows.append((entry["name"], entry.get("version", "-"), f"{state}: {reason}" if reason else state))
    return LogTable(("Model", "Version", "Status"), rows)


def _versions(server: InferenceServer) -> Iterator[RunningVersion]:
    """Yield all model versions that run."""
    for record in server.manager.records:
        yield from record.running.values()


def _instances(server: InferenceServer) -> Iterator[ModelInstance]:
    """Yield the instances of all models that run."""
    for running in _versions(server):
        yield from running.instances
