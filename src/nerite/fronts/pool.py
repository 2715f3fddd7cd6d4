"""The front processes of a server: starts them, accepts connections for them, and keeps their state equal."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import ssl
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import Executor
from functools import partial
from typing import Any, Final

from google.protobuf.message import Message

from nerite.admission.policy import AdmissionPolicy
from nerite.backends.interface import InstanceContext
from nerite.config.options import ServerOptions
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
from nerite.server import InferenceServer
from nerite.transports import tcp
from nerite.transports.access import KeyFile
from nerite.transports.grpc.methods import Answer, Handler
from nerite.transports.http.handler import HttpHandler
from nerite.transports.limits import SharedBytesInFlight, TransportLimits
from nerite.wire.schema import methods
from nerite.workers.host.fork_server import ForkedProcess, ForkServer
from nerite.workers.ipc.shared_memory import ForeignSegments

_START_TIMEOUT: Final = 60.0
"""Seconds until a front must serve connections."""
_MEASURE_EVERY: Final = 1.0
"""Seconds between two measurements of load."""
_ACKNOWLEDGE_TIMEOUT: Final = 2.0
"""Seconds for which replies wait for a front that does not take over a change."""
_STUCK: Final = 10.0
"""Seconds after which such a front is killed."""
_FIGURES_TIMEOUT: Final = 0.5
_HAND_OVER_EVERY: Final = 0.02
"""Seconds between attempts to hand over a connection that no front has taken."""
_SHORT_LIFE: Final = 5.0
"""Seconds of life of a front from which its successor starts at once."""
_MAX_DELAY: Final = 10.0
"""Maximum number of seconds until a front is started again."""


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
        """Have all heads evaluated anew, because access rules have changed."""
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
        self._began = [0.0] * count
        self._delays = [0.0] * count
        self._balancer = FrontBalancer(count)
        self._http: HttpHandler
        self._grpc: Callable[[str], Handler]
        self._methods = methods()
        self._ports: list[FrontedPort] = []
        self._bounds: TransportLimits
        self._bytes: SharedBytesInFlight
        self._bytes_file: int = -1
        """Descriptor of the memory in which all processes count their bytes in flight."""
        self._writer = CatalogueWriter()
        self._number = 0
        """Number of the last change that was published."""
        self._published = SharedState()
        """The state that fronts have, apart from models."""
        self._waiting: deque[tuple[int, float, Callable[[], None]]] = deque()
        """Replies that wait until all fronts have taken over a change, with its number and the time."""
        self._unserved: deque[tuple[int, socket.socket]] = deque()
        """Accepted connections that no front has taken, with their ports."""
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._all_ready = asyncio.Event()
        self._closed = False
        self.restarts = 0
        """Number of fronts that have ended and were started again."""

    # Ports.

    def share(self, bounds: TransportLimits) -> None:
        """Apply the limits of this process to all processes together."""
        size = kinds.BYTES_SLOT * (len(self.fronts) + 1)
        self._bytes_file = memory_file(size)
        slots = memoryview(mmap.mmap(self._bytes_file, size)).cast("Q")
        self._bounds = bounds
        self._bytes = bounds.bytes = SharedBytesInFlight(bounds.bytes.limit, slots, len(self.fronts))

    def http(self, handler: HttpHandler) -> FrontedPort:
        """Return the HTTP port, whose other requests ``handler`` answers."""
        self._http = handler
        return self._port("http", "HTTP")

    def grpc(self, administration: Callable[[str], Handler]) -> FrontedPort:
        """Return the gRPC port; ``administration`` returns the handler of each method but those of inference."""
        self._grpc = administration
        return self._port("grpc", "GRPC")

    def _port(self, name: str, service: str) -> FrontedPort:
        port = FrontedPort(self, name, service)
        self._ports.append(port)
        return port

    def accepted(self, port: int, client: socket.socket) -> bool:
        """Hand an accepted connection to a front, now or later; return False if no front takes one at the moment."""
        self._unserved.append((port, client))
        return self._hand_over()

    def _hand_over(self) -> bool:
        """Hand the accepted connections over; return whether fronts have taken all of them."""
        while self._unserved:
            port, client = self._unserved[0]
            if not self._taken(port, client):
                if "hand over" not in self._timers:
                    self._timers["hand over"] = self._loop.call_later(_HAND_OVER_EVERY, self._hand_over_late)
                return False
            self._unserved.popleft()
            client.close()
        return True

    def _hand_over_late(self) -> None:
        del self._timers["hand over"]
        self._hand_over()

    def _taken(self, port: int, client: socket.socket) -> bool:
        """Hand a connection to the front with the least to do; return False if no front takes it."""
        loads = self._loads()
        limit = self._bounds.connections.limit
        full = 0 < limit <= sum(load.connections for load in loads if load is not None)
        while (chosen := self._balancer.choose(loads)) is not None:
            front = self.fronts[chosen]
            assert front is not None
            if front.hand_over(client.fileno(), port, limit if full else 0):
                return True
            loads[chosen] = None
        return False

    def _loads(self) -> list[FrontLoad | None]:
        return [
            FrontLoad(front.calls_begun, len(front.calls), sum(front.connections))
            if front is not None and front.ready
            else None
            for front in self.fronts
        ]

    # Processes.

    async def start(self) -> None:
        """Start all fronts, and return when they can serve. Raises ``Internal`` if one cannot."""
        self._server.on_models_changed = self.publish
        self.publish()
        for index in range(len(self.fronts)):
            self._run(self._spawn(index))
        try:
            async with asyncio.timeout(_START_TIMEOUT):
                await self._all_ready.wait()
        except TimeoutError:
            raise Internal(f"the front processes could not serve within {_START_TIMEOUT:g} s, see the log") from None
        self._measure()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _spawn(self, index: int) -> None:
        spawn = partial(self._fork_server.spawn, InstanceContext(f"front_{index}"), None, {}, program=PROGRAM)
        try:
            process: ForkedProcess = await self._loop.run_in_executor(self._executor, spawn)
        except NeriteError as error:
            log.error(error.message)
            self._spawn_later(index)
            return
        if self._closed:
            process.kill()
            return
        front = FrontConnection(process, self._foreign_segments, self._server, self)
        self.fronts[index] = front
        self._began[index] = time.monotonic()
        self._balancer.restarted(index)
        start = FrontStart(
            self._options,
            max(1, 4 // len(self.fronts)),
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
        short = time.monotonic() - self._began[index] < _SHORT_LIFE
        self._delays[index] = min(max(2 * self._delays[index], 0.1), _MAX_DELAY) if short else 0.0
        self._timers[f"spawn {index}"] = self._loop.call_later(
            self._delays[index], lambda: self._run(self._spawn(index))
        )

    def ready(self, front: FrontConnection) -> None:
        """Take note that a front can serve."""
        if all(each is not None and each.ready for each in self.fronts):
            self._all_ready.set()

    def lost(self, front: FrontConnection) -> None:
        """Replace a front whose channel has ended."""
        index = self.fronts.index(front)
        self.fronts[index] = None
        front.process.kill()
        front.close()
        if self._closed:
            return
        self.restarts += 1
        self._bytes.ended(index)
        connections = sum(front.connections)
        log.warning(f"the front process '{front.process.name}' is gone, and with it {connections} connections")
        self._settle()
        self._spawn_later(index)

    def close(self) -> None:
        """End all fronts."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for front in self.fronts:
            if front is not None:
                front.process.kill()
                front.close()
        self.fronts = [None] * len(self.fronts)
        for _, client in self._unserved:
            client.close()
        if self._bytes_file >= 0:
            os.close(self._bytes_file)

    def _measure(self) -> None:
        """Measure the load of the fronts, and have connections moved if it is uneven."""
        move = self._balancer.measured(self._loads(), _MEASURE_EVERY)
        if move is not None and (front := self.fronts[move.front]) is not None:
            front.retire(move)
        self._timers["measure"] = self._loop.call_later(_MEASURE_EVERY, self._measure)

    def drain(self, step: DrainStep) -> None:
        """Have all fronts take a step of a graceful shutdown."""
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
        for name in ("regions", "keys", "policy", "log"):
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
        )

    def _whole_state(self) -> SharedState:
        """Return the state as of the last change that was published."""
        published = self._published
        return SharedState(
            self._writer.everything(), published.regions, published.keys, published.policy, published.log
        )

    def rules_changed(self) -> None:
        """Send new keys or a new policy to all fronts."""
        self.publish()
        for front in self.fronts:
            if front is not None:
                front.forget_heads()

    def after_acknowledgement(self, send: Callable[[], None]) -> None:
        """Send a reply once all fronts know what has changed until now: its client may then ask any of them."""
        if self._settled(self._number):
            send()
            return
        now = time.monotonic()
        self._waiting.append((self._number, now, send))
        if "acknowledge" not in self._timers:
            self._timers["acknowledge"] = self._loop.call_later(_ACKNOWLEDGE_TIMEOUT, self._give_up_waiting)

    def _settled(self, number: int) -> bool:
        return all(front is None or not front.ready or front.acknowledged >= number for front in self.fronts)

    def acknowledged(self) -> None:
        """Send the replies that waited for fronts to take over a change."""
        self._settle()

    def _settle(self) -> None:
        while self._waiting and self._settled(self._waiting[0][0]):
            self._waiting.popleft()[2]()

    def _give_up_waiting(self) -> None:
        """Send replies that have waited too long, and kill fronts that are stuck."""
        del self._timers["acknowledge"]
        now = time.monotonic()
        for front in self.fronts:
            if front is not None and front.ready and front.acknowledged < self._number and front.stuck_since is None:
                front.stuck_since = now
            if front is not None and front.acknowledged >= self._number:
                front.stuck_since = None
            if front is not None and front.stuck_since is not None and now - front.stuck_since > _STUCK:
                front.process.kill(f"it has not taken over a change for {_STUCK:g} s")
        while self._waiting and now - self._waiting[0][1] >= _ACKNOWLEDGE_TIMEOUT:
            self._waiting.popleft()[2]()
        if not self._settled(self._number):
            self._timers["acknowledge"] = self._loop.call_later(_ACKNOWLEDGE_TIMEOUT, self._give_up_waiting)

    # What fronts relay.

    @property
    def http_handler(self) -> HttpHandler:
        """Answers relayed HTTP requests."""
        return self._http

    def administer(self, path: str, content: bytes, answer: Answer) -> None:
        """Answer a relayed gRPC message."""
        try:
            request: Message = self._methods[path].request.FromString(content)
            work = self._grpc(path)(request, answer)
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
        asked = [front.ask_figures() for front in self.fronts if front is not None and front.ready]
        if asked:
            await asyncio.wait(asked, timeout=_FIGURES_TIMEOUT)

    def counted(self, front: FrontConnection, figures: Mapping[str, Any]) -> None:
        """Add what a front has counted since its last report."""
        before = front.figures
        bounds = self._bounds
        bounds.bytes.refused += figures["bytes_refused"] - before.get("bytes_refused", 0)
        for name, counter in (("refused", bounds.refused), ("closed", bounds.closed)):
            for why, count in figures[name].items():
                counter[why] += count - before.get(name, {}).get(why, 0)
        for where, count in figures["internal_errors"].items():
            internal_errors.counts[where] += count - before.get("internal_errors", {}).get(where, 0)

    def write_metrics(self, page: Page) -> None:
        """Write the metrics of the fronts."""
        page.write(METRICS, [METRICS.row(self)])


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
