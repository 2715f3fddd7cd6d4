"""The program of a front process: serves the connections that the core hands over, without models or frameworks."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import pickle
import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import uvloop

from nerite.admission.policy import AdmissionPolicy
from nerite.core.background import report_unhandled
from nerite.core.byte_budget import BUDGETS
from nerite.core.errors import NeriteError
from nerite.core.failures import internal_errors
from nerite.core.servable_version import ServableVersion
from nerite.fronts import messages as kinds
from nerite.fronts.catalogue import Description, FrontVersion, follow
from nerite.fronts.connection_retirement import ConnectionRetirement
from nerite.fronts.core_connection import CoreConnection
from nerite.fronts.relay import FrontRouting, GrpcRelay
from nerite.fronts.shared_state import FrontStart, SharedState
from nerite.inference_entry import InferenceEntry
from nerite.llm.openai.api import OpenAi
from nerite.models.loop_watchdog import LoopWatchdog
from nerite.observability.log import install_logging, log
from nerite.observability.log_records import LogRecord
from nerite.regions import SharedMemoryRegions
from nerite.repository.catalogue import Catalogue, loadable_text_models
from nerite.repository.load_waits import LoadWaits
from nerite.routes.table import RouteTable
from nerite.scheduling.weighted_route import WeightedRoute
from nerite.transports.access import AccessKeys, Callers
from nerite.transports.http.inference_router import InferenceRouter
from nerite.transports.http.service import HttpService
from nerite.transports.limits import SharedBytesInFlight, TransportLimits
from nerite.transports.listeners import IdleCheck, ListenerFactory, exit_keepalive
from nerite.transports.ports import TransportListener
from nerite.transports.tcp import AdoptedPort, tls_context
from nerite.workers.helper_pool import HelperPool
from nerite.workers.host.fork_server import ForkServer
from nerite.workers.ipc.shared_memory import ForeignSegments

_GC_THRESHOLD = 10_000


class FrontEntry(InferenceEntry[FrontVersion]):
    """Entry of a front's requests: validates them, and hands them to the core."""

    def __init__(self, core: CoreConnection, start: FrontStart, helpers: HelperPool) -> None:
        options = start.options
        regions = SharedMemoryRegions(allowed=options.device.allow_client_shared_memory)
        waits = LoadWaits(options.repository.demand_wait_seconds, options.repository.demand_max_waiting)
        super().__init__(regions, helpers, RouteTable(), waits, owns_routes=False)
        waits.on_wanted = core.wanted
        self._core = core
        self._catalogue = Catalogue(self.routes, namespacing=options.repository.namespacing)

    def _running(self, model: str, version: str, namespace: str) -> FrontVersion:
        return cast(FrontVersion, self._catalogue.find(model, version, namespace))

    def running_versions(self) -> Iterator[FrontVersion]:
        """Return all versions that take requests, by the names of their models."""
        for record in self._catalogue:
            yield from cast(dict[int, FrontVersion], record.running).values()

    def version_directory(self, running: ServableVersion) -> Path | None:
        """Return the directory of a version's files, or None if it no longer has one."""
        assert isinstance(running, FrontVersion)
        return Path(running.directory) if running.directory else None

    def follow(self, models: list[Description], routes: Sequence[WeightedRoute] | None) -> None:
        """Take over changes of models and routes."""
        follow(self._catalogue, models, self._core)
        if routes is not None:
            self.routes.replace_all(routes)
        self.renew_routes()
        self.offer_loaded()

    @property
    def loadable(self) -> dict[str, str]:
        """The models of language that are not loaded and that a request would have loaded, and what each does."""
        return loadable_text_models(self._catalogue)


class FrontProcess:
    """Creates and connects the parts of a front; handles what the core sends."""

    def __init__(self, channel: int, descriptors: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._thread = threading.get_ident()
        self._foreign_segments = ForeignSegments()
        self._core = CoreConnection(
            socket.socket(fileno=channel), socket.socket(fileno=descriptors), self._foreign_segments, self
        )
        self._listeners: dict[int, TransportListener] = {}
        self._adopted: dict[int, AdoptedPort] = {}
        self._keys: dict[str, AccessKeys] = {}
        self._policy: AdmissionPolicy | None = None
        self._entry: FrontEntry
        self._bounds: TransportLimits
        self._retirement: ConnectionRetirement

    async def serve(self) -> None:
        """Serve until the core is gone."""
        log.forward = self._forward
        self._core.begin(self._loop)
        await self._ended.wait()

    def start(self, state: bytes, bytes_file: int) -> None:
        """Begin to serve. ``bytes_file`` is memory in which all processes count their bytes in flight."""
        start: FrontStart = pickle.loads(state)  # the core made it
        options = start.options
        fork_server = ForkServer(self._loop, lambda worker, stream, text: log.worker_line(worker, "INFO", text, stream))
        helpers = HelperPool(fork_server, self._loop, self._foreign_segments, start.helpers)
        self._entry = FrontEntry(self._core, start, helpers)
        self._bounds = TransportLimits(
            idle_seconds=options.connections.idle_seconds,
            exit_keepalive=exit_keepalive(options.exit_keepalive_secs, options.exit_timeout_secs),
        )
        slots = memoryview(mmap.mmap(bytes_file, kinds.BYTES_SLOT * (start.fronts + 1))).cast("Q")
        os.close(bytes_file)
        self._bounds.bytes = SharedBytesInFlight(start.max_bytes, slots, start.index)
        self._keys = {path: AccessKeys(keys) for path, keys in (start.state.keys or {}).items()}
        self._policy = start.state.policy
        router_keys = self._keys.get(options.router_key_file)
        identified = self._policy is not None or router_keys is not None
        callers = Callers(self._current_policy, router_keys) if identified else None
        factory = ListenerFactory(options, self._bounds, self._keys, callers)
        if "grpc" in start.ports:
            grpc = factory.grpc(self._entry, GrpcRelay(self._core).handler)
            self._serve("grpc", grpc, grpc.adopt(tls_context(options.grpc.tls, ["h2"]), self._closed("grpc")))
        if "http" in start.ports:
            router = InferenceRouter(self._entry, **factory.routing(options.http.header_forward_pattern))
            openai = OpenAi(
                self._entry,
                None,
                locks=factory.locks,
                max_input_size=options.http.max_input_size,
                sender_of=router.sender_of,
                options=options.openai,
            )
            routing = FrontRouting(router, openai, self._core, factory.cross_origin)
            target_of = factory.guarded(routing.target, options.http.address)
            service = HttpService(self._entry, target_of, self._bounds, max_input_size=options.http.max_input_size)
            http = factory.http("HTTP", service, options.http.max_input_size)
            self._serve("http", http, http.adopt(tls_context(options.http.tls, ["http/1.1"]), self._closed("http")))
        self._retirement = ConnectionRetirement(self._bounds.connections, self._loop)
        if options.stall_seconds:
            LoopWatchdog(self._loop, options.stall_seconds)
        IdleCheck(self._bounds, options.connections.idle_seconds).start()
        self._entry.waits.order_of = lambda caller: self._current_policy().order_of(caller)
        self._take_over(start.state)
        self._core.acknowledge(start.number)
        self._core.ready()
        gc.collect()
        gc.freeze()
        gc.set_threshold(_GC_THRESHOLD)

    def _current_policy(self) -> AdmissionPolicy:
        return self._policy or AdmissionPolicy()

    def _serve(self, name: str, listener: TransportListener, port: AdoptedPort) -> None:
        number = kinds.PORTS.index(name)
        self._listeners[number] = listener
        self._adopted[number] = port

    def _closed(self, name: str) -> Any:
        number = kinds.PORTS.index(name)
        return lambda: self._core.closed(number)

    def change(self, state: bytes) -> None:
        """Take over a change of the state that all fronts share."""
        number, change = pickle.loads(state)  # the core made it
        self._take_over(change)
        self._core.acknowledge(number)

    def _take_over(self, change: SharedState) -> None:
        rules = change.policy is not None or change.keys is not None
        if change.models or change.routes is not None:
            before = self._entry.routes.header_names
            self._entry.follow(change.models, change.routes)
            rules = rules or before != self._entry.routes.header_names
        if change.regions is not None:
            self._entry.regions.follow(change.regions)
        if change.log is not None:
            log.change(change.log)
        if change.policy is not None:
            self._policy = change.policy
        if change.keys is not None:
            for path, keys in change.keys.items():
                self._keys[path].replace(keys)
        if rules:
            for listener in self._listeners.values():
                listener.forget()

    def adopt(self, connection: socket.socket, port: int, limit: int) -> None:
        """Serve an accepted connection."""
        self._adopted[port].adopt(connection, limit)

    def drain(self, step: kinds.DrainStep) -> None:
        """Take a step of a graceful shutdown."""
        for listener in self._listeners.values():
            if step is kinds.DrainStep.NOTIFY:
                listener.drain()
            else:
                listener.stop_accepting()

    def figures(self) -> dict[str, Any]:
        """Return what this front has counted."""
        bounds = self._bounds
        return {
            "bytes_refused": bounds.bytes.refused,
            "waiting_for_models": len(self._entry.waits),
            "waits_begun": self._entry.waits.begun,
            "waits_refused": self._entry.waits.refused,
            "refused": dict(bounds.refused),
            "closed": dict(bounds.closed),
            "caches": {budget.name: [budget.used, budget.evictions] for budget in BUDGETS if budget.used},
            "internal_errors": {where: count for where, count in internal_errors.counts.items() if count},
        }

    def retire(self, share: float, most: float) -> None:
        """Have clients reconnect that send about ``share`` of the requests, and not more than ``most``."""
        self._retirement.begin(share, most)

    def not_loaded(self, model: str, error: NeriteError) -> None:
        """End the requests that wait for a model."""
        self._entry.waits.fail(model, error)

    def lost(self) -> None:
        """End: the core is gone."""
        self._ended.set()

    def _forward(self, record: LogRecord) -> None:
        """Have the core log a record. Thread-safe."""
        value = [record.level.name, record.message, record.file, record.line, record.pid, record.time_ns]
        extras = {name: _plain(each) for name, each in record.extras.items()}
        if threading.get_ident() == self._thread:
            self._core.log([*value, extras])
        else:
            self._loop.call_soon_threadsafe(self._core.log, [*value, extras])


def _plain(value: object) -> object:
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)


async def _run(channel: int, descriptors: int) -> None:
    asyncio.get_running_loop().set_exception_handler(report_unhandled)
    await FrontProcess(channel, descriptors).serve()


def main(channel: int, descriptors: int) -> None:
    """Run a front on its two sockets."""
    gc.freeze()  # what is imported stays
    install_logging(log)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(channel, descriptors))
    os._exit(0)
