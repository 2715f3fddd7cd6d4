"""The front processes of a server: starts them, accepts connections for them, and keeps their state equal."""

from __future__ import annotations

import asyncio
import mmap
import os
import resource
import socket
import ssl
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

from google.protobuf.message import Message

from nerite.admission.policy import AdmissionPolicy
from nerite.backends.interface import InstanceContext
from nerite.config.options import ServerOptions
from nerite.core.byte_budget import BUDGETS
from nerite.core.errors import Internal, NeriteError
from nerite.core.failures import internal_errors, report
from nerite.core.memory import memory_file
from nerite.fronts import messages as kinds
from nerite.fronts.balancer import FrontBalancer, FrontLoad
from nerite.fronts.catalogue import CatalogueWriter
from nerite.fronts.front_connection import FrontConnection
from nerite.fronts.messages import DrainStep
from nerite.fronts.shared_state import PROGRAM, FrontStart, SharedState
from nerite.observability.exposition import Metric, MetricTable, Page
from nerite.observability.log import log
from nerite.observability.log_records import LogLevel, LogRecord
from nerite.scheduling.backoff import ExponentialBackoff
from nerite.server import InferenceServer
from nerite.transports import tcp
from nerite.transports.access import KeyFile
from nerite.transports.grpc.methods import Answer, Handler
from nerite.transports.http.handler import HttpHandler
from nerite.transports.limits import SharedBytesInFlight, TransportLimits, connections_for
from nerite.wire.schema import methods
from nerite.workers.host.fork_server import ForkedProcess, ForkServer
from nerite.workers.ipc.shared_memory import ForeignSegments

_START_TIMEOUT: Final = 60.0
"""Seconds until a front must serve connections."""
_MEASURE_EVERY: Final = 1.0
"""Seconds between two measurements of load."""
_STUCK: Final = 10
"""Number of measurements without an answer after which a front is killed.

Not a time: while all processes of the server are suspended, none is stuck."""
_FIGURES_TIMEOUT: Final = 0.5
_SHORT_LIFE: Final = 2.0
"""Seconds of life of a front from which its successor starts at once."""
_MAX_DELAY: Final = 10.0
"""Maximum number of seconds until a front is started again."""
_HELPERS: Final = 4
"""Maximum number of helper processes of all fronts together, unless there are more fronts."""
_EXIT_PATIENCE: Final = 1.0
"""Seconds for a front to end after its channel has ended."""


class FrontedPort:
    """A port whose connections fronts serve; implements ``OpenablePort``."""

    def __init__(self, pool: FrontPool, name: str, service: str) -> None:
        self._pool = pool
        self._number = kinds.PORTS.index(name)
        self._service = service
        self.port: tcp.AcceptingPort | None = None

    async def open(
        self, address: str, port: int, *, reuse_port: bool = False, tls: ssl.SSLContext | None = None
    ) -> int:
        """Listen, and return the port number. Fronts have TLS contexts of their own."""
        take = partial(self._pool.accepted, self._number)
        self.port = await tcp.AcceptingPort.open(self._service, address, port, take, reuse_port=reuse_port)
        return self.port.number

    def forget(self) -> None:
        """Discard what is known of heads, also in fronts, because access rules have changed."""
        self._pool.rules_changed()

    def drain(self) -> None:
        """Notify clients that their connections will end soon."""
        self._pool.drain(DrainStep.NOTIFY)

    def admit_no_more(self) -> None:
        """Let no more connections begin; those already begun are still accepted."""
        if self.port is not None:
            tcp.admit_no_more(self.port.sockets)

    def stop_accepting(self) -> None:
        """Close the port, and each connection as soon as it is idle."""
        self.abort()
        self._pool.drain(DrainStep.STOP_ACCEPTING)

    def abort(self) -> None:
        """Close the port. Connections end with their fronts."""
        if self.port is not None:
            self.port.close()
            self.port = None

    @property
    def open_connections(self) -> int:
        """Number of open connections."""
        return sum(front.connections[self._number] for front in self._pool.fronts if front is not None)


class FrontPool:
    """All fronts of a server. Only for the loop's thread."""

    def __init__(
        self,
        count: int,
        options: ServerOptions,
        server: InferenceServer,
        fork_server: ForkServer,
        foreign_segments: ForeignSegments,
        executor: Executor,
        key_files: Mapping[str, KeyFile],
        policy: Callable[[], AdmissionPolicy] | None,
    ) -> None:
        """``policy`` returns the admission policy, if one is in force. ``executor`` runs what blocks."""
        self._loop = asyncio.get_running_loop()
        self._options = options
        self._server = server
        self._fork_server = fork_server
        self._foreign_segments = foreign_segments
        self._executor = executor
        self._key_files = key_files
        self._policy = policy
        self.fronts: list[FrontConnection | None] = [None] * count
        """By index; None while a front is being started."""
        for budget in BUDGETS:
            budget.processes += count
        self._began = [0.0] * count
        self._backoffs = [ExponentialBackoff(limit=_MAX_DELAY) for _ in range(count)]
        self._balancer = FrontBalancer(count)
        self._most_connections = connections_for(resource.getrlimit(resource.RLIMIT_NOFILE)[0], sys.maxsize)
        """Maximum number of connections of a front, which has as many descriptors as this process."""
        self._http: HttpHandler
        self._grpc: Callable[[str, str], Handler]
        self._methods = methods()
        self._bounds: TransportLimits
        self._bytes: SharedBytesInFlight
        self._bytes_file: int = -1
        """Descriptor of the memory in which all processes count their bytes in flight."""
        self._writer = CatalogueWriter()
        self._number = 0
        """Number of the last change that was published."""
        self._published = SharedState()
        """The state that fronts have, apart from models."""
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        """Replies that wait until all fronts have taken over a change, with its number."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_ready = asyncio.Event()
        self._stopping = False
        """No front is started any more."""
        self.restarts = 0
        """Number of fronts that have ended and were started again."""

    # Ports.

    def share(self, bounds: TransportLimits) -> None:
        """Apply the limits of this process to all processes together."""
        size = kinds.BYTES_SLOT * (len(self.fronts) + 1)
        self._bytes_file = memory_file(size, "bytes in flight")
        slots = memoryview(mmap.mmap(self._bytes_file, size)).cast("Q")
        self._bounds = bounds
        self._bytes = bounds.bytes = SharedBytesInFlight(bounds.bytes.limit, slots, len(self.fronts))

    def http(self, handler: HttpHandler) -> FrontedPort:
        """Return the HTTP port, whose other requests ``handler`` answers."""
        self._http = handler
        return FrontedPort(self, "http", "HTTP")

    def grpc(self, administration: Callable[[str, str], Handler]) -> FrontedPort:
        """Return the gRPC port; ``administration`` returns the handler of each method but those of inference."""
        self._grpc = administration
        return FrontedPort(self, "grpc", "GRPC")

    def accepted(self, port: int, client: socket.socket) -> bool:
        """Hand an accepted connection to the front with the least to do; return False if none can take it yet."""
        loads = [_load(front) if front is not None and front.accepts else None for front in self.fronts]
        limit = self._bounds.connections.limit
        full = 0 < limit <= sum(sum(front.connections) for front in self.fronts if front is not None)
        while (chosen := self._balancer.choose(loads)) is not None:
            front = self.fronts[chosen]
            assert front is not None
            if front.hand_over(client.fileno(), port, limit if full else 0):
                client.close()
                return True
            loads[chosen] = None
        return False

    # Processes.

    async def start(self) -> None:
        """Start all fronts, and return when they can serve. Raises ``Internal`` if one cannot."""
        self._server.on_models_changed = self.publish
        self._server.on_load_failed = self._not_loaded
        if (demand := self._server.demand) is not None:
            waits = self._server.waits
            demand.figures.waiting = lambda: len(waits) + self._counted("waiting_for_models")
            demand.figures.waits = lambda: waits.begun + self._counted("waits_begun")
            demand.figures.refused = lambda: waits.refused + self._counted("waits_refused")
        self.publish()
        for index in range(len(self.fronts)):
            self._run(self._spawn(index))
        self._timers["measure"] = self._loop.call_later(_MEASURE_EVERY, self._measure)
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await self._all_ready.wait()
        except TimeoutError:
            raise Internal(f"the front processes could not serve within {_START_TIMEOUT:g} s, see the log") from None

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _spawn(self, index: int) -> None:
        spawn = partial(self._fork_server.spawn, InstanceContext(f"front_{index}"), None, {}, program=PROGRAM)
        try:
            process: ForkedProcess = await self._loop.run_in_executor(self._executor, spawn)
        except Exception as error:
            failure = error if isinstance(error, NeriteError) else report("channel", error, f"of front {index}")
            log.error(failure.message)
            self._spawn_later(index)
            return
        if self._stopping:
            process.kill()
            process.channel.close()
            process.descriptors.close()
            return
        front = FrontConnection(process, self._foreign_segments, self._server, self, self._most_connections)
        self.fronts[index] = front
        self._began[index] = self._loop.time()
        self._balancer.restarted(index)
        start = FrontStart(
            self._options,
            max(1, _HELPERS // len(self.fronts)),
            self._bytes.limit,
            index,
            len(self.fronts),
            tuple(name for name, options in self._named_ports() if options),
            self._number,
            self._whole_state(),
        )
        front.start(self._loop, start, self._bytes_file)

    def _named_ports(self) -> tuple[tuple[str, bool], ...]:
        return ("http", self._options.http.enabled), ("grpc", self._options.grpc.enabled)

    def _spawn_later(self, index: int) -> None:
        delay = self._backoffs[index].failed(self._loop.time())
        self._timers[f"spawn {index}"] = self._loop.call_later(delay, lambda: self._run(self._spawn(index)))

    def ready(self, front: FrontConnection) -> None:
        """Take note that a front can serve."""
        if all(each is not None and each.ready for each in self.fronts):
            self._all_ready.set()

    def lost(self, front: FrontConnection) -> None:
        """Replace a front whose channel has ended."""
        index = self.fronts.index(front)
        self.fronts[index] = None
        front.close()
        process = front.process
        what = f"the front process '{process.name}' is gone, and with it {sum(front.connections)} connections"
        if process.exit_status is not None:
            log.warning(f"{what}: {process.ending}")
        else:
            process.on_exit = lambda: log.warning(f"{what}: {process.ending}")
            self._loop.call_later(_EXIT_PATIENCE, process.kill, "its channel broke")
        self._bytes.ended(index)
        self._hold(front.figures, -1)
        self._settle()
        if self._stopping:
            return
        self.restarts += 1
        if front.ready and self._loop.time() - self._began[index] >= _SHORT_LIFE:
            self._backoffs[index] = ExponentialBackoff(limit=_MAX_DELAY)
        self._spawn_later(index)

    def close(self) -> None:
        """End all fronts."""
        self._stopping = True
        for timer in self._timers.values():
            timer.cancel()
        for front in self.fronts:
            if front is not None:
                front.process.kill()
                front.close()
        self.fronts = [None] * len(self.fronts)
        if self._bytes_file >= 0:
            os.close(self._bytes_file)

    def _measure(self) -> None:
        """Measure the load of the fronts, have connections moved if it is uneven, and kill fronts that are stuck."""
        self._timers["measure"] = self._loop.call_later(_MEASURE_EVERY, self._measure)
        for each in self.fronts:
            if each is not None:
                each.measure()
                if each.silent >= (_STUCK if each.ready else _START_TIMEOUT):
                    each.process.kill(f"it has not answered for {each.silent * _MEASURE_EVERY:g} s")
        self._settle()
        loads = [_load(front) if front is not None and front.ready else None for front in self.fronts]
        move = self._balancer.measured(loads, _MEASURE_EVERY)
        if move is not None and (front := self.fronts[move.front]) is not None:
            front.retire(move)

    def drain(self, step: DrainStep) -> None:
        """Have all fronts take a step of a graceful shutdown."""
        self._stopping = True
        for front in self.fronts:
            if front is not None:
                front.drain(step)

    # State that all fronts share.

    def publish(self) -> None:
        """Send what has changed to all fronts."""
        try:
            self._publish()
        except Exception as error:  # a load must not fail because of it
            report("channel", error, "while a change was sent to the fronts")

    def _publish(self) -> None:
        change = SharedState(models=self._writer.changes(self._server.manager.records))
        now = self._current_state()
        for name in ("regions", "keys", "policy", "log", "routes"):
            value = getattr(now, name)
            if value is not None and value != getattr(self._published, name):
                setattr(change, name, value)
        self._published = now
        if change == SharedState():
            return
        self._number += 1
        for front in self.fronts:
            if front is not None:
                front.send_change(self._number, change)

    def _current_state(self) -> SharedState:
        return SharedState(
            regions=self._server.regions.registered,
            keys={path: file.values for path, file in self._key_files.items()},
            policy=None if self._policy is None else self._policy(),
            log={name: value for name, value in log.settings.items() if name != "log_file"},
            routes=list(self._server.routes),
        )

    def _whole_state(self) -> SharedState:
        """Return the state as of the last change that was published."""
        published = self._published
        return SharedState(
            self._writer.everything(),
            published.regions,
            published.keys,
            published.policy,
            published.log,
            published.routes,
        )

    def _not_loaded(self, model: str, error: NeriteError) -> None:
        for front in self.fronts:
            if front is not None and front.ready:
                front.not_loaded(model, error)

    def _counted(self, figure: str) -> int:
        return sum(front.figures.get(figure, 0) for front in self.fronts if front is not None)

    def rules_changed(self) -> None:
        """Send new keys or a new policy to all fronts."""
        self.publish()
        for front in self.fronts:
            if front is not None:
                front.forget_heads()

    def after_acknowledgement(self, send: Callable[[], None]) -> None:
        """Send a reply once all fronts that answer know what has changed: its client may then ask any of them."""
        if self._settled(self._number):
            send()
            return
        self._waiting.append((self._number, send))

    def _settled(self, number: int) -> bool:
        return all(front is None or not front.responsive or front.acknowledged >= number for front in self.fronts)

    def acknowledged(self) -> None:
        """Send the replies that waited for fronts to take over a change."""
        self._settle()

    def _settle(self) -> None:
        while self._waiting and self._settled(self._waiting[0][0]):
            _, send = self._waiting.popleft()
            try:
                send()
            except Exception as error:  # the replies behind it wait for nothing else
                report("channel", error, "while a reply was sent that had waited for the fronts")

    # What fronts relay.

    @property
    def http_handler(self) -> HttpHandler:
        """Answers relayed HTTP requests."""
        return self._http

    def administer(self, path: str, owner: str, content: bytes, answer: Answer) -> None:
        """Answer a relayed gRPC message of an owner of shared memory."""
        try:
            request: Message = self._methods[path].request.FromString(content)
            work = self._grpc(path, owner)(request, answer)
        except NeriteError as error:
            answer(error)
        except Exception as error:
            answer(report("grpc", error, "in a relayed call"))
        else:
            if work is not None:
                self._run(self._administered(work, answer))

    async def _administered(self, work: Awaitable[None], answer: Answer) -> None:
        try:
            await work
        except NeriteError as error:
            answer(error)
        except Exception as error:
            answer(report("grpc", error, "in a relayed call"))

    def log(self, record: list[Any]) -> None:
        """Log a record of a front."""
        level, message, file, line, pid, time_ns, extras = record
        log.relay(LogRecord(LogLevel[level], message, file, line, pid, time_ns, None, extras))

    # Metrics.

    async def refresh(self) -> None:
        """Bring what fronts have counted into this process."""
        answered = [front.ask_figures() for front in self.fronts if front is not None and front.responsive]
        if answered:
            await asyncio.wait(answered, timeout=_FIGURES_TIMEOUT)

    def counted(self, front: FrontConnection, figures: Mapping[str, Any]) -> None:
        """Add what a front has counted since its last report."""
        before = front.figures
        self._hold(before, -1)
        self._hold(figures, 1)
        bounds = self._bounds
        bounds.bytes.refused += figures["bytes_refused"] - before.get("bytes_refused", 0)
        for name, counter in (("refused", bounds.refused), ("closed", bounds.closed)):
            for why, count in figures[name].items():
                counter[why] += count - before.get(name, {}).get(why, 0)
        for budget in BUDGETS:
            budget.evictions += _evictions(figures, budget.name) - _evictions(before, budget.name)
        for where, count in figures["internal_errors"].items():
            internal_errors.counts[where] += count - before.get("internal_errors", {}).get(where, 0)

    def _hold(self, figures: Mapping[str, Any], sign: int) -> None:
        """Add what a front holds, or remove it with a ``sign`` of -1."""
        caches = figures.get("caches", {})
        for budget in BUDGETS:
            if budget.name in caches:
                budget.elsewhere += sign * caches[budget.name][0]

    def write_metrics(self, page: Page) -> None:
        """Write the metrics of the fronts."""
        page.write(METRICS, [METRICS.row(self)])


def _evictions(figures: Mapping[str, Any], cache: str) -> int:
    found: list[int] = figures.get("caches", {}).get(cache, (0, 0))
    return found[1]


def _load(front: FrontConnection) -> FrontLoad:
    return FrontLoad(front.calls_begun, len(front.calls), sum(front.connections))


METRICS: Final = MetricTable[FrontPool]((
    Metric("nerite_front_processes", "gauge", "Front processes that serve connections",
           lambda pool: sum(front is not None and front.ready for front in pool.fronts)),
    Metric("nerite_front_restarts_total", "counter", "Front processes that ended and were started again",
           lambda pool: pool.restarts),
    Metric("nerite_front_connections", "gauge", "Open connections of each front process",
           lambda pool: {str(index): sum(front.connections)
                         for index, front in enumerate(pool.fronts) if front is not None}, "front"),
    Metric("nerite_front_requests_total", "counter", "Inferences of each front process since it was started",
           lambda pool: {str(index): front.calls_begun
                         for index, front in enumerate(pool.fronts) if front is not None}, "front"),
))  # fmt: skip
