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
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import uvloop

from nerite import welcome
from nerite.backends.python import installer
from nerite.cache.interface import ResponseCache
from nerite.cache.opening import open_cache
from nerite.config import exposure
from nerite.config.options import ServerOptions
from nerite.config.standing_file import watch
from nerite.core.errors import NeriteError
from nerite.core.internal_errors import report
from nerite.execution.auditor import Auditor
from nerite.execution.door import Door
from nerite.execution.guest_memory import GuestMemory
from nerite.execution.helper_pool import HelperPool
from nerite.execution.host_policy import HostPolicies
from nerite.execution.launcher import Launcher
from nerite.execution.nursery import Nursery
from nerite.execution.overseer import Overseer
from nerite.execution.reception import Reception
from nerite.execution.runner import Runner
from nerite.execution.running_version import RunningVersion
from nerite.execution.standing_policy import StandingPolicy, open_policy
from nerite.execution.surroundings import Surroundings
from nerite.execution.vigil import limit_of
from nerite.execution.watchdog import Watchdog
from nerite.observability import gpus
from nerite.observability.bridge import WorkerLines
from nerite.observability.gpu_gauges import gauges_of
from nerite.observability.log import log
from nerite.observability.record import Table
from nerite.repository.maker import VersionMaker
from nerite.repository.manager import ModelManager
from nerite.repository.placement import Placement
from nerite.repository.poller import Poller
from nerite.repository.remote import is_remote, repository_at
from nerite.repository.source import LocalRepository, Repository
from nerite.scheduling.rate_limiter import RateLimiter
from nerite.server import InferenceServer
from nerite.transports import keys
from nerite.transports.callers import Callers
from nerite.transports.http import recorded_request
from nerite.transports.keys import KeyFile
from nerite.transports.ports import Ports

_COLLECT_EVERY = 10_000
"""Objects made and not yet gone, before the collector looks for cycles. A batch of requests is some thousand."""

_BEGIN_AGAIN = 1.0
"""Seconds after which what goes on beside the serving begins again if it has failed."""

_SAID = {"INVALID_ARG": "Invalid argument", "INTERNAL": "Internal", "UNSUPPORTED": "Unsupported"}
"""How Triton says the codes of errors where it prints them."""


def run(options: ServerOptions) -> int:
    """Serve until a signal ends it; return the exit status."""
    _allow_many_files()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(ServerProcess(options).serve())


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
        self._policy: StandingPolicy | None = None
        self._reception: Reception
        self._ports: Ports
        self._stop_asked = asyncio.Event()

    async def serve(self) -> int:
        """Start, wait for a signal, stop."""
        try:
            self._repositories = self._open_repositories()
            cache = await self._open_cache()
            self._policy = open_policy(self._options.policy_file) if self._options.policy_file else None
            restricted = (*self._options.http.restricted.values(), *self._options.grpc.restricted.values())
            self._key_files = keys.open_files(restricted)
        except NeriteError as error:
            log.error(error.message)
            return 1
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(_unforeseen)
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._asked_to_stop)
        lines = WorkerLines(log)
        nursery = Nursery(loop, lambda worker, stream, text: lines(worker, "INFO", text, stream))
        guests = GuestMemory()
        helpers = HelperPool(nursery, loop, guests)
        device = self._options.device
        library = gpus.open_library()
        found = gpus.of_this_machine(library, os.environ, device.min_compute_capability)
        placement = Placement(library, found, device.min_compute_capability, device.load_gpu_limits)
        reception = self._reception = Reception(None if self._policy is None else self._policy.policy, loop)
        gauges = gauges_of(library, found, self._options.metrics, os.environ)
        loading = asyncio.Semaphore(max(self._options.repository.load_threads, 1))

        def manager(door: Door, on_change: Callable[[], None]) -> ModelManager:
            around = Surroundings(
                loop,
                self._loader,
                loading,
                nursery,
                guests,
                door,
                lines,
                limit_of(self._options.stay_awake_microseconds),
                self._options.queue,
                HostPolicies(device.host_policies),
                None if device.rate_limit == "off" else RateLimiter(device.rate_limit_resources),
                recorded_request.read,
                reception,
                self._options.metrics,
            )
            settings_of = self._options.settings_of
            repository = self._options.repository
            maker = VersionMaker(repository, settings_of, Launcher(around), self._loader, loading, cache, placement)
            return ModelManager(repository, self._repositories, maker, self._loader, on_change)

        server = InferenceServer(self._options, manager, cache, reception, helpers)
        callers = None if self._policy is None else Callers(lambda: reception.policy)
        self._ports = Ports(server, self._options, self._key_files, callers, gauges)
        watchdog: Watchdog | None = None
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
                watchdog = Watchdog(loop, self._options.stall_seconds)
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
            nursery.close()
            self._loader.shutdown(wait=False, cancel_futures=True)
            installer.stop()

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
        lines = welcome.lines(server, self._ports.opened, http.address, self._options.repository, console=http.console)
        if sys.stdout.isatty() and not log.file and log.format != "json":
            print("", *lines, "", sep="\n", file=sys.__stdout__, flush=True)
        else:
            for line in lines:
                log.info(line)

    def _watching(self, server: InferenceServer) -> Iterator[Callable[[], Coroutine[Any, Any, None]]]:
        """Yield what goes on beside the serving: looking at workers, and at files that may change."""
        yield Auditor(lambda: _versions(server)).run
        if self._options.stall_seconds:
            yield Overseer(lambda: _runners(server), self._options.stall_seconds).run
        if self._options.repository.control_mode == "poll":
            yield Poller(server.manager, self._options.repository.poll_secs).run
        for file in self._key_files.values():
            yield partial(watch, file, partial(self._changed, file))
        if self._policy is not None:
            yield partial(watch, self._policy, partial(self._changed, self._policy))

    def _changed(self, file: KeyFile | StandingPolicy) -> None:
        """Have what is new in a file count from the next request on."""
        (log.warning if file.problem else log.info)(file.news())
        if isinstance(file, StandingPolicy):
            self._reception.follow(file.policy)
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


def _model_table(index: list[dict[str, str]]) -> Table:
    """Return which models there are, and why some of them do not run."""
    rows = []
    for entry in index:
        state = entry.get("state", "")
        reason = entry.get("reason", "")
        rows.append((entry["name"], entry.get("version", "-"), f"{state}: {reason}" if reason else state))
    return Table(("Model", "Version", "Status"), rows)


def _versions(server: InferenceServer) -> Iterator[RunningVersion]:
    """Yield all model versions that run."""
    for record in server.manager.records:
        yield from record.running.values()


def _runners(server: InferenceServer) -> Iterator[Runner]:
    """Yield the instances of all models that run."""
    for running in _versions(server):
        yield from running.runners
