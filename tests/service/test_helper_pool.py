"""Calls in processes beside the server: their answers, and what becomes of those that take too long or all down."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from nerite.backends.interface import InstanceContext
from nerite.core.errors import Internal, NeriteError, Overloaded
from nerite.core.tensor import address_of
from nerite.workers import helper_pool
from nerite.workers.helper_pool import HelperCall, HelperPool, HelperTimeout
from nerite.workers.host.fork_server import ForkServer
from nerite.workers.ipc.shared_memory import ForeignSegments
from process_family import name_of, processes_of
from serving import eventually

WHAT = "trying it"
Scenario = Callable[["Caller"], Awaitable[None]]


class Caller:
    """Calls, and waits for answers."""

    def __init__(self, pool: HelperPool, foreign_segments: ForeignSegments) -> None:
        self.pool = pool
        self.foreign_segments = foreign_segments
        self.call: HelperCall

    def begin(self, function: str, *arguments: Any, seconds: float = 60) -> asyncio.Future[list[Any]]:
        answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()

        def answered(values: list[Any], error: NeriteError | None) -> None:
            if error is None:
                answer.set_result(values)
            else:
                answer.set_exception(error)

        self.call = self.pool.call(function, arguments, answered, WHAT, seconds=seconds)
        return answer

    async def ask(self, function: str, *arguments: Any, seconds: float = 60) -> Any:
        return (await self.begin(function, *arguments, seconds=seconds))[0]


@asynccontextmanager
async def calling(most: int) -> AsyncIterator[Caller]:
    loop = asyncio.get_running_loop()
    fork_server = ForkServer(loop, lambda *said: None)
    foreign_segments = ForeignSegments()
    pool = HelperPool(fork_server, loop, foreign_segments, most)
    try:
        yield Caller(pool, foreign_segments)
    finally:
        pool.close()
        fork_server.close()


def run(scenario: Scenario, most: int = 1) -> None:
    async def main() -> None:
        async with calling(most) as caller:
            await scenario(caller)

    asyncio.run(main())


def is_gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


def test_values_cross_as_they_are() -> None:
    async def scenario(caller: Caller) -> None:
        value = {"a": [1, 2**70, -1.5, float("inf"), None, True, "\udcff€"]}
        assert await caller.ask("json:dumps", value) == json.dumps(value)
        assert await caller.ask("json:loads", json.dumps(value)) == value
        large = os.urandom(20_000_000)
        assert bytes(await caller.ask("builtins:bytes", large)) == large
        assert bytes(await caller.ask("builtins:bytes", b"")) == b""
        assert await caller.begin("builtins:divmod", 7, 2) == [3, 1]

    run(scenario)


def test_what_a_function_returns_may_be_written_to() -> None:
    async def scenario(caller: Caller) -> None:
        answer = await caller.ask("builtins:bytes", b"abc")
        answer[0] = 65
        assert bytes(answer) == b"Abc"

    run(scenario)


def test_workers_can_map_a_large_answer_as_long_as_somebody_has_it() -> None:
    async def scenario(caller: Caller) -> None:
        small, large = (
            await caller.ask("builtins:bytes", b"x" * 1000),
            await caller.ask("builtins:bytes", b"x" * (1 << 20)),
        )
        assert caller.foreign_segments.find(address_of(small), 1000) is None
        address = address_of(large)
        found = caller.foreign_segments.find(address, 1 << 20)
        assert found is not None
        foreign_segment, place = found
        assert os.pread(foreign_segment.descriptor, 1 << 20, place) == b"x" * (1 << 20)
        part = large[10:20]
        del large
        await asyncio.sleep(0)
        assert caller.foreign_segments.find(address, 1 << 20) == found
        del part
        await asyncio.to_thread(eventually, lambda: caller.foreign_segments.find(address, 1) is None)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(foreign_segment.descriptor)

    run(scenario)


def test_a_refusal_keeps_its_class_and_any_other_error_is_an_incident() -> None:
    async def scenario(caller: Caller) -> None:
        with pytest.raises(Internal, match="internal error, incident"):
            await caller.ask("json:loads", "{")
        with pytest.raises(Internal, match="internal error, incident"):
            await caller.ask("nowhere:nothing")
        with pytest.raises(NeriteError, match="'x' is 2000 characters long") as refusal:
            await caller.ask("nerite.core.client_text:checked_name", "a" * 2000, "'x'")
        assert refusal.value.code == "INVALID_ARG"
        assert await caller.ask("os:getpid") > 0

    run(scenario)


def test_one_that_takes_too_long_ends_and_the_next_is_answered() -> None:
    async def scenario(caller: Caller) -> None:
        first = await caller.ask("os:getpid")
        began = time.monotonic()
        with pytest.raises(HelperTimeout, match=r"trying it took more than 0\.3 s"):
            await caller.ask("time:sleep", 600, seconds=0.3)
        assert time.monotonic() - began < 30
        assert await caller.ask("os:getpid") != first
        assert is_gone(first)

    run(scenario)


def test_a_process_that_is_stopped_is_replaced_when_the_time_is_up() -> None:
    async def scenario(caller: Caller) -> None:
        first = await caller.ask("os:getpid")
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(HelperTimeout):
            await caller.ask("os:getpid", seconds=0.3)
        assert await caller.ask("os:getpid") != first

    run(scenario)


@pytest.mark.parametrize(
    ("function", "ending"), [("os:abort", "ended by SIGABRT"), ("os:_exit", "exited with status 3")]
)
def test_a_process_that_dies_fails_its_own_call(function: str, ending: str) -> None:
    async def scenario(caller: Caller) -> None:
        other = caller.begin("time:sleep", 0.5)
        with pytest.raises(Internal, match=f"trying it failed, because its helper process is gone: it .*{ending}"):
            await caller.ask(function, *([3] if function == "os:_exit" else []))
        assert await other == [None]
        assert await caller.ask("os:getpid") > 0

    run(scenario, most=2)


def test_a_process_that_dies_while_it_is_idle_is_not_missed() -> None:
    async def scenario(caller: Caller) -> None:
        first = await caller.ask("os:getpid")
        os.kill(first, signal.SIGKILL)
        await asyncio.to_thread(eventually, lambda: is_gone(first))
        assert await caller.ask("os:getpid") != first

    run(scenario)


def test_a_call_that_is_cancelled_is_not_answered_and_does_not_run_on() -> None:
    async def scenario(caller: Caller) -> None:
        first = await caller.ask("os:getpid")
        dropped = caller.begin("time:sleep", 600)
        running = caller.call
        waited = caller.begin("os:getpid")
        waiting = caller.call
        last = caller.begin("os:getpid")
        waiting.cancel()
        running.cancel()
        running.cancel()
        assert (await last)[0] != first
        assert is_gone(first)
        assert not dropped.done() and not waited.done()

    run(scenario)


def test_there_are_no_more_processes_than_are_needed_or_allowed() -> None:
    async def scenario(caller: Caller) -> None:
        assert not caller.pool.helpers
        for _ in range(3):
            await caller.ask("os:getpid")
        assert len(caller.pool.helpers) == 1
        calls = [caller.begin("time:sleep", 0.2) for _ in range(6)]
        await asyncio.gather(*calls)
        assert len(caller.pool.helpers) == 2

    run(scenario, most=2)


def test_one_process_is_left_for_calls_that_are_not_long(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(helper_pool, "LONG_CALL", 1000)
    go = tmp_path / "go"
    waits = f"import os, time\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\n" + "#" * 1000

    async def scenario(caller: Caller) -> None:
        long = [caller.begin("builtins:exec", waits) for _ in range(3)]
        for _ in range(3):
            assert await caller.ask("os:getpid") > 0
        assert not any(each.done() for each in long)
        await asyncio.to_thread(go.touch)
        await asyncio.gather(*long)

    run(scenario, most=2)


def test_too_many_calls_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helper_pool, "MAX_WAITING", 2)

    async def scenario(caller: Caller) -> None:
        calls = [caller.begin("os:getpid") for _ in range(3)]
        with pytest.raises(Overloaded, match="trying it has to wait for 2 others") as refusal:
            await calls[2]
        assert refusal.value.retry_after
        await asyncio.gather(*calls[:2])

    run(scenario)


def test_a_process_that_keeps_much_memory_ends_after_its_answer() -> None:
    async def scenario(caller: Caller) -> None:
        first = await caller.ask("os:getpid")
        assert await caller.ask("os:getpid") == first
        await caller.ask("builtins:exec", "import sys; sys.kept = bytes(range(256)) * 1_000_000")
        assert await caller.ask("os:getpid") != first
        await asyncio.to_thread(eventually, lambda: is_gone(first))

    run(scenario)


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(caller: Caller) -> None:
        def refused(*_arguments: object, **_more: object) -> None:
            raise Internal("could not start a worker process")

        with monkeypatch.context() as without:
            without.setattr(ForkServer, "spawn", refused)
            with pytest.raises(Internal, match="could not start a worker process"):
                await caller.ask("os:getpid")
        assert await caller.ask("os:getpid") > 0

    run(scenario)


def test_a_process_that_has_not_started_when_the_server_ends() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        before = set(processes_of(os.getpid()))
        fork_server = ForkServer(loop, lambda *said: None)
        await loop.run_in_executor(None, spawn, fork_server)

        def named() -> list[int]:  # with those that have just been forked and not renamed yet
            started = set(processes_of(os.getpid())) - before
            return [pid for pid in started if name_of(pid) == "nerite forksrv"]

        await asyncio.to_thread(eventually, lambda: len(named()) == 1)
        os.kill(*named(), signal.SIGSTOP)
        spawned = loop.run_in_executor(None, spawn, fork_server)
        await asyncio.sleep(0.2)
        began = time.monotonic()
        fork_server.close()
        with pytest.raises(Internal, match="the server is shutting down"):
            await spawned
        assert time.monotonic() - began < 15, "it was waited for in vain"

    def spawn(fork_server: ForkServer) -> None:
        process = fork_server.spawn(InstanceContext("helper"), None, {}, program="helper")
        process.channel.close()
        process.descriptors.close()

    asyncio.run(main())
