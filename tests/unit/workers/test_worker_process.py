"""The process of instances is started again when it ends, whatever fails meanwhile; nothing waits for one that left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nerite.core.errors import Unavailable
from nerite.core.failures import internal_errors
from nerite.workers.host.instance import RemoteInstance
from nerite.workers.host.process import WorkerProcess


class Channel:
    """A channel to a process that loads every model."""

    def __init__(self) -> None:
        self.metrics: Any = None
        self.on_end: Callable[[], None]

    def answer(self, *_: object) -> None:
        """Take a response to a call."""

    introduce = answer

    def attach(self, _loop: object, _result: object, _part: object, _report: object, on_end: Any, _bls: object) -> None:
        self.on_end = on_end

    def request(self, _kind: int, _value: object, answered: Callable[[Any, Any], None]) -> None:
        answered({"checks_readiness": False, "can_sleep": False}, None)

    def close(self) -> None:
        """Close the connection."""


class Plan:
    """Starts processes that end when they are told to."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.channels: list[Channel] = []
        self.server_context = SimpleNamespace(
            loop=loop, blocking=self.run, server=None, tenant_admission=SimpleNamespace(identifies=False), devices=None
        )

    async def run(self, start: Callable[[], Any]) -> Any:
        return start()

    def start(self, _name: str, _arena: object, _ask: object) -> tuple[Any, Channel]:
        self.channels.append(Channel())
        process = SimpleNamespace(
            name="model_0", pid=len(self.channels), exit_status=1, ending="it exited", on_exit=None, kill=lambda: None
        )
        return process, self.channels[-1]

    def order(self, _seat: int) -> dict[str, Any]:
        return {}


class Member:
    """An instance that may fail when it is told that its process has ended, or that its model is loaded again."""

    name = "model_0"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.usable = False
        self.checks_readiness = self.can_sleep = False
        self.faults = 0
        self.faults_of_death = 0
        self.resumed = asyncio.Event()

    def died(self, _pid: int, _ending: str) -> None:
        self.resumed.clear()
        if self.faults_of_death:
            self.faults_of_death -= 1
            raise ZeroDivisionError

    def restarted(self, _pid: int) -> None:
        if self.faults:
            self.faults -= 1
            raise ZeroDivisionError
        self.usable = True
        self.resumed.set()


def test_an_instance_comes_back_each_time_whatever_failed_when_it_was_told_of_that() -> None:
    async def main() -> None:
        plan = Plan(asyncio.get_running_loop())
        member = Member(plan)
        worker = WorkerProcess(plan, "model_0", None)  # type: ignore[arg-type]  # as far as it uses them
        await worker.admit(member)  # type: ignore[arg-type]
        member.usable, member.faults, member.faults_of_death = True, 1, 1
        for _ in range(2):
            plan.channels[-1].on_end()
            assert not member.usable
            await asyncio.wait_for(member.resumed.wait(), 10)
        worker.evict(0)

    before = internal_errors.counts["loop"]
    asyncio.run(main())
    assert internal_errors.counts["loop"] == before + 2


def test_a_change_ends_with_the_instance_that_was_to_make_it() -> None:
    async def main() -> None:
        plan: Any = SimpleNamespace(
            instance=SimpleNamespace(name="model_0"),
            server_context=SimpleNamespace(loop=asyncio.get_running_loop()),
            adapters={},
        )
        silent = SimpleNamespace(channel=SimpleNamespace(request=lambda *_: None))
        worker: Any = SimpleNamespace(metrics=None, running=silent, leave=lambda _seat, left: left())
        instance = RemoteInstance(plan, None, worker)
        instance.usable = True
        change = asyncio.create_task(instance.change_adapter("a", "/a"))
        await asyncio.sleep(0)
        closed = asyncio.Event()
        instance.close(closed.set)
        assert closed.is_set()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(change, 10)

    asyncio.run(main())
