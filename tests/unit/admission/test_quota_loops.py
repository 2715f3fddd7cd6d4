"""The exchange of leases with an exception planted in each step: it goes on, and all who wait are offered again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from nerite.admission.policy import SharedQuotaSettings
from nerite.admission.shared_quotas import SharedQuotas
from nerite.redis import client as redis_client
from nerite.redis.settings import settings_of_address


class Fault(Exception):
    """What nothing foresaw."""


class Client:
    """A connection to Redis that is there, and answers what it is told to."""

    def __init__(self, *_: object, **__: object) -> None:
        self.connection = SimpleNamespace(ask=self._ask)
        self.dropped: list[str] = []
        self.asked: list[Callable[[Any], None]] = []

    def _ask(self, command: Any, take: Callable[[Any], None]) -> None:
        self.asked.append(take)

    async def open(self) -> None:
        return

    def drop(self, reason: Exception) -> None:
        self.dropped.append(str(reason))

    def close(self) -> None:
        self.connection = None


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


class Exchange:
    """Shared quotas, of which a step fails until it is mended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[Client] = []

        def client(*_: object, **__: object) -> Client:
            made.append(Client())
            return made[0]

        monkeypatch.setattr(redis_client, "RedisClient", client)
        settings = SharedQuotaSettings(settings_of_address("redis://h"))
        self.quotas = SharedQuotas(settings, asyncio.get_running_loop())
        (self.client,) = made
        self.broken = ""

    def plant(self, method: str) -> None:
        whole = getattr(self.quotas.book, method)

        def planted(*arguments: Any) -> Any:
            if self.broken == method:
                raise Fault
            return whole(*arguments)

        setattr(self.quotas.book, method, planted)


@pytest.mark.parametrize("step", ["tick", "exchange"])
def test_the_timer_rings_again_whatever_fails(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        made = Exchange(monkeypatch)
        made.plant(step)
        made.broken = step
        loop = made.quotas.loop
        assert loop.waiting == 0
        await made.quotas.start()
        async with asyncio.timeout(30):
            await until(lambda: "incident" in loop.failing.get("leases", ""))
            assert loop.waiting == 1
            made.broken = ""
            await until(lambda: not loop.failing)
        await made.quotas.close()
        assert loop.waiting == 0

    asyncio.run(main())


def test_a_reply_that_cannot_be_taken_costs_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        made = Exchange(monkeypatch)
        made.plant("answered")
        monkeypatch.setattr(made.quotas.book, "exchange", lambda now: [b"EVAL"])
        made.broken = "answered"
        await made.quotas.start()
        async with asyncio.timeout(30):
            await until(lambda: bool(made.client.asked))
        made.client.asked[0]([1, 1])
        assert made.client.dropped == ["its reply could not be taken"]
        assert "the reply of Redis" in made.quotas.loop.failing
        monkeypatch.setattr(made.quotas.book, "answered", lambda reply, now: None)
        made.client.asked[0]([1, 1])
        assert not made.quotas.loop.failing
        made.client.connection = None
        await made.quotas.close()

    asyncio.run(main())


def test_a_queue_that_fails_keeps_no_other_from_being_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        made = Exchange(monkeypatch)
        offered: list[str] = []

        def fails() -> None:
            if made.broken:
                raise Fault
            offered.append("a")

        made.quotas.on_answer += [fails, lambda: offered.append("b")]
        monkeypatch.setattr(made.quotas.book, "exchange", lambda now: [b"EVAL"])
        monkeypatch.setattr(made.quotas.book, "answered", lambda reply, now: None)
        made.broken = "offer"
        await made.quotas.start()
        async with asyncio.timeout(30):
            await until(lambda: bool(made.client.asked))
        made.client.asked[0]([1, 1])
        assert offered == ["b"] and made.quotas.loop.failing
        made.broken = ""
        made.client.asked[0]([1, 1])
        assert offered == ["b", "a", "b"] and not made.quotas.loop.failing
        made.client.connection = None
        await made.quotas.close()

    asyncio.run(main())
