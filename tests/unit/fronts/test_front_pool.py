"""The pool of a server whose fronts are in this process: state that they share, connections, and fronts that end."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from front_channel import FakeFront, FakeServer, Process, TimedLoop

from doubles import samples
from nerite.config.options import ServerOptions
from nerite.core.errors import NeriteError
from nerite.fronts import pool as pool_module
from nerite.fronts.core_connection import CoreConnection
from nerite.fronts.messages import DrainStep
from nerite.fronts.pool import FrontPool
from nerite.regions import SharedMemoryRegions
from nerite.repository.catalogue import ModelRecord
from nerite.repository.version_state import ModelState, VersionState
from nerite.scheduling.weighted_route import WeightedRoute
from nerite.transports.limits import TransportLimits
from nerite.workers.ipc.shared_memory import ForeignSegments


class Inline(Executor):
    """Does everything at once, in the same thread."""

    def submit(self, function: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments, **named))
        return done


class Server(FakeServer):
    """As much of a server as the pool uses."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[ModelRecord] = []
        self.manager = SimpleNamespace(records=self.records)
        self.regions = SharedMemoryRegions(allowed=True)
        self.routes: list[WeightedRoute] = []
        self.on_models_changed: Callable[[], None] = lambda: None
        self.on_load_failed: Callable[[str, NeriteError], None] = lambda model, error: None
        self.version_directory = lambda running: None

    def change(self, reason: str) -> None:
        """Change the state of a model."""
        if not self.records:
            self.records.append(ModelRecord("m"))
        self.records[0].states = {1: VersionState(ModelState.UNAVAILABLE, reason)}
        self.on_models_changed()


class Front(FakeFront):
    """A front of the pool. It acknowledges as long as ``acknowledges`` is true."""

    acknowledges = True

    def __init__(self, channel: socket.socket, descriptors: socket.socket) -> None:
        super().__init__()
        self.channel = channel
        self.core = CoreConnection(channel, descriptors, ForeignSegments(), self)
        self.changes: list[tuple[int, Any]] = []
        self.begun: Any = None

    def start(self, state: bytes, bytes_file: int) -> None:
        super().start(state, bytes_file)
        self.begun = self.told[-1][1]  # type: ignore[index]
        self.core.acknowledge(self.begun.number)
        self.core.ready()

    def change(self, state: bytes) -> None:
        super().change(state)
        _, number, change = self.told[-1]  # type: ignore[misc]
        self.changes.append((number, change))
        if self.acknowledges:
            self.core.acknowledge(number)

    def figures(self) -> dict[str, Any]:
        return {"bytes_refused": 2, "refused": {"stalled": 3}, "closed": {"idle": 4}, "internal_errors": {}}

    def stand_still(self) -> None:
        """Read nothing from now on."""
        asyncio.get_running_loop().remove_reader(self.channel)

    def die(self) -> None:
        self.channel.shutdown(socket.SHUT_RDWR)


class Fixture:
    """A pool and its fronts."""

    def __init__(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TimedLoop)
        self.loop = loop
        self.server = Server()
        self.started: list[Front] = []
        """All fronts, in the order of their start."""
        fork_server: Any = SimpleNamespace(spawn=self._spawn)
        server: Any = self.server
        self.pool = FrontPool(count, ServerOptions(), server, fork_server, ForeignSegments(), Inline(), {}, None)
        self.bounds = TransportLimits(max_bytes=1000, max_connections=4)
        self.pool.share(self.bounds)

    def _spawn(self, context: Any, *_arguments: Any, **_named: Any) -> Process:
        here, there = socket.socketpair()
        descriptors, others = socket.socketpair()
        front = Front(there, others)
        self.started.append(front)
        front.core.begin(self.loop)
        return Process(context.name if hasattr(context, "name") else str(context), here, descriptors)

    async def settle(self) -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    async def pass_time(self, seconds: float) -> None:
        """Let time pass in small steps, so that what is due happens in order."""
        end = self.loop.now + seconds
        while self.loop.now < end:
            self.loop.now = min(end, self.loop.now + 0.25)
            await self.settle()

    def reply(self) -> list[str]:
        """Have a reply wait for acknowledgements; return a list that tells whether it was sent."""
        sent: list[str] = []
        self.pool.after_acknowledgement(lambda: sent.append("sent"))
        return sent

    def close(self) -> None:
        self.pool.close()
        for front in self.started:
            front.core.close()
            for connection, _, _ in front.adopted:
                connection.close()


@contextmanager
def time_of(patch: pytest.MonkeyPatch, loop: TimedLoop) -> Iterator[None]:
    """Have the pool's time be that of a loop."""
    with patch.context() as patched:
        if hasattr(pool_module, "time"):
            patched.setattr(pool_module, "time", SimpleNamespace(monotonic=loop.time))
        yield


def tell_pool(patch: pytest.MonkeyPatch, count: int, story: Callable[[Fixture], Coroutine[Any, Any, None]]) -> None:
    """Run a test with a pool that has started."""

    async def told() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, TimedLoop)
        with time_of(patch, loop):
            fixture = Fixture(count)
            try:
                await fixture.pool.start()
                await fixture.settle()
                await story(fixture)
            finally:
                fixture.close()
                await fixture.settle()

    with asyncio.Runner(loop_factory=TimedLoop) as runner:
        runner.run(told())


def test_all_fronts_begin_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        starts = [front.begun for front in fixture.started]
        assert [(start.index, start.fronts, start.max_bytes) for start in starts] == [
            (0, 3, 1000),
            (1, 3, 1000),
            (2, 3, 1000),
        ]
        assert all(front is not None and front.ready for front in fixture.pool.fronts)
        assert {start.ports for start in starts} == {("http", "grpc")}

    tell_pool(monkeypatch, 3, story)


def test_a_change_goes_to_all_fronts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        fixture.server.change("broken")
        fixture.pool.publish()  # nothing has changed since
        await fixture.settle()
        for front in fixture.started:
            ((_, change),) = front.changes
            assert change.models[0]["states"] == {1: ["UNAVAILABLE", "broken"]}
            assert change.regions is change.keys is change.policy is change.log is change.routes is None

    tell_pool(monkeypatch, 2, story)


def test_a_reply_waits_until_all_fronts_know(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        assert fixture.reply() == ["sent"]
        slow = fixture.started[1]
        slow.acknowledges = False
        fixture.server.change("first")
        first = fixture.reply()
        fixture.server.change("second")
        second = fixture.reply()
        await fixture.settle()
        assert (first, second) == ([], [])
        slow.core.acknowledge(slow.changes[0][0])
        await fixture.settle()
        assert (first, second) == (["sent"], [])
        slow.core.acknowledge(slow.changes[1][0])
        await fixture.settle()
        assert (first, second) == (["sent"], ["sent"])

    tell_pool(monkeypatch, 2, story)


def test_a_reply_that_cannot_be_sent_keeps_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    async def story(fixture: Fixture) -> None:
        slow = fixture.started[1]
        slow.acknowledges = False
        fixture.server.change("broken")
        fixture.pool.after_acknowledgement(broken)
        sent = fixture.reply()
        await fixture.settle()
        assert sent == []
        slow.core.acknowledge(slow.changes[0][0])
        await fixture.settle()
        assert sent == ["sent"]
        assert fixture.pool.fronts[1] is not None and fixture.pool.fronts[1].acknowledged

    tell_pool(monkeypatch, 2, story)


def test_a_reply_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        fixture.started[1].stand_still()
        fixture.server.change("broken")
        sent = fixture.reply()
        await fixture.pass_time(0.5)
        assert sent == []
        await fixture.pass_time(4.0)
        assert sent == ["sent"]

    tell_pool(monkeypatch, 2, story)


def test_a_front_that_stands_still_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        fixture.started[1].stand_still()
        fixture.server.change("broken")
        fixture.reply()
        await fixture.pass_time(5.0)
        killed = [front.process for front in fixture.pool.fronts if front is not None]
        assert [getattr(each, "killed", None) for each in killed] == [None, None]
        await fixture.pass_time(20.0)
        assert getattr(killed[0], "killed", None) is None
        assert getattr(killed[1], "killed", None)

    tell_pool(monkeypatch, 2, story)


def test_a_reply_does_not_wait_for_a_front_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        fixture.started[1].acknowledges = False
        fixture.server.change("broken")
        sent = fixture.reply()
        fixture.started[1].die()
        await fixture.settle()
        assert sent == ["sent"]

    tell_pool(monkeypatch, 2, story)


def test_a_front_that_is_gone_is_replaced(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    async def story(fixture: Fixture) -> None:
        fixture.server.change("broken")
        await fixture.pass_time(6.0)  # a front that has lived is replaced at once
        fixture.started[0].die()
        await fixture.pass_time(3.0)
        assert len(fixture.started) == 3
        assert fixture.pool.restarts == 1
        new = fixture.started[2].begun
        assert new.index == 0
        assert new.state.models[0]["states"] == {1: ["UNAVAILABLE", "broken"]}, "it knows what the others know"
        found = samples(fixture.pool.write_metrics)
        assert found["nerite_front_processes"] == {"": 2}
        assert found["nerite_front_restarts_total"] == {"": 1}

    tell_pool(monkeypatch, 2, story)


def test_a_front_that_dies_again_and_again_is_started_less_and_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        for _ in range(60):
            fixture.started[-1].die()
            await fixture.pass_time(0.5)
        assert 4 <= fixture.pool.restarts <= 20

    tell_pool(monkeypatch, 1, story)


def test_connections_are_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        clients = []
        for _ in range(6):
            client, accepted = socket.socketpair()
            clients.append(client)
            assert fixture.pool.accepted(1, accepted)
        await fixture.settle()
        assert [len(front.adopted) for front in fixture.started] == [3, 3]
        limits = sorted(limit for front in fixture.started for _, _, limit in front.adopted)
        assert limits == [0, 0, 0, 0, 4, 4], "those over the limit are told so"
        assert samples(fixture.pool.write_metrics)["nerite_front_connections"] == {'front="0"': 3, 'front="1"': 3}
        for client in clients:
            client.close()

    tell_pool(monkeypatch, 2, story)


def test_a_connection_that_no_front_can_take_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        client, accepted = socket.socketpair()
        with client, accepted:
            for front in fixture.started:
                front.stand_still()
            await fixture.pass_time(4.0)
            assert not fixture.pool.accepted(1, accepted)
            assert accepted.fileno() >= 0
            assert [sum(front.connections) for front in fixture.pool.fronts if front is not None] == [0, 0]

    tell_pool(monkeypatch, 2, story)


def test_a_front_that_does_not_answer_gets_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        fixture.started[0].stand_still()
        await fixture.pass_time(4.0)
        clients = []
        for _ in range(4):
            client, accepted = socket.socketpair()
            clients.append(client)
            assert fixture.pool.accepted(1, accepted)
        await fixture.settle()
        assert [len(front.adopted) for front in fixture.started] == [0, 4]
        for client in clients:
            client.close()

    tell_pool(monkeypatch, 2, story)


def test_steps_of_a_shutdown_go_to_all_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        fixture.pool.drain(DrainStep.NOTIFY)
        await fixture.settle()
        assert [front.told[-1] for front in fixture.started] == [DrainStep.NOTIFY] * 2

    tell_pool(monkeypatch, 2, story)


def test_what_fronts_count_is_added_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        bounds = fixture.bounds
        for _ in range(2):
            await fixture.pool.refresh()
            assert (bounds.refused["stalled"], bounds.closed["idle"], bounds.bytes.refused) == (6, 8, 4)

    tell_pool(monkeypatch, 2, story)


def test_metrics_do_not_wait_long_for_a_front(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(fixture: Fixture) -> None:
        fixture.started[0].stand_still()
        refresh = fixture.loop.create_task(fixture.pool.refresh())
        await fixture.settle()
        assert not refresh.done()
        await fixture.pass_time(1.0)
        assert refresh.done()
        assert fixture.bounds.refused["stalled"] == 3

    tell_pool(monkeypatch, 2, story)


def test_nothing_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    before = len(os.listdir("/proc/self/fd"))

    async def story(fixture: Fixture) -> None:
        fixture.started[0].die()
        await fixture.pass_time(1.0)

    for _ in range(3):
        tell_pool(monkeypatch, 2, story)
    assert len(os.listdir("/proc/self/fd")) <= before + 8
