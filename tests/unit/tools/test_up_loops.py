"""``nerite up`` follows the router with an exception planted in each step: other pools go on, and nothing is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nerite.autoscaling.policy import ScalingPolicy
from nerite.cluster.settings import ClusterSettings, MemberSource, PoolSettings, RouterSettings
from nerite.tools.up import follower
from nerite.tools.up.follower import PoolFollower
from nerite.tools.up.local_plan import LocalProcess


class Fault(Exception):
    """What nothing foresaw."""


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("place", ["start", "file"])
def test_a_pool_that_fails_is_followed_later_and_others_go_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = ScalingPolicy(least=0, most=3, concurrency=1.0)
    pools = tuple(PoolSettings(name, MemberSource(models="m"), scaling=policy) for name in ("a", "b"))
    report = [{"name": name, "wanted": 1, "warm": 0, "members": [], "reason": ""} for name in ("a", "b")]
    monkeypatch.setattr(follower, "ask", lambda *_: {"pools": report})
    broken = True
    started: dict[str, LocalProcess] = {}

    def make(pool: PoolSettings, name: str, standby: bool) -> LocalProcess:
        if broken and place == "start" and pool.name == "a":
            raise Fault
        return LocalProcess(name, "p", (), "h:1", pool=pool.name, member=f"{pool.name}:80")

    def members_file(pool: str) -> Path:
        if broken and place == "file" and pool == "a":
            raise Fault
        return tmp_path / pool

    def lines(pool: str) -> str:
        file = tmp_path / pool
        return file.read_text() if file.exists() else ""

    async def main() -> None:
        nonlocal broken
        supervisor = SimpleNamespace(ready=started.keys(), add=lambda each: started.update({each.name: each}))
        settings = ClusterSettings(RouterSettings(), pools)
        made = PoolFollower(settings, (), cast(Any, supervisor), make, members_file, lambda text: None)
        running = asyncio.create_task(made.run())
        async with asyncio.timeout(30):
            await until(lambda: lines("b") == "b:80\n")
            assert not lines("a")
            broken = False
            await until(lambda: lines("a") == "a:80\n")
        assert set(started) == {"a/1", "b/1"}
        running.cancel()

    asyncio.run(main())
