"""Watches and workloads of Kubernetes with an exception planted in each step: what was lost comes again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nerite.cluster.kubernetes_names import ScaleTarget
from nerite.core.errors import Unavailable
from nerite.core.work_loop import WorkLoop
from nerite.kubernetes.api_client import ApiClient
from nerite.kubernetes.object_watch import ObjectWatch
from nerite.kubernetes.replicas import ReplicaActuator


class Fault(Exception):
    """What nothing foresaw."""


def item(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "resourceVersion": "7"}}


class Api(ApiClient):
    """An API server with objects, and with a workload."""

    def __init__(self) -> None:
        self.access = cast(Any, SimpleNamespace(namespace="n"))
        self.broken: Exception | None = None
        self.objects = ["a"]
        self.replicas = 1
        self.more = asyncio.Event()
        """An object "b" comes."""

    async def get(self, path: str, seconds: float = 15.0) -> dict[str, Any]:
        if self.broken is not None:
            raise self.broken
        if path.endswith("/scale"):
            return {"spec": {"replicas": self.replicas}}
        return {"items": list(map(item, self.objects)), "metadata": {"resourceVersion": "7"}}

    async def patch(self, path: str, change: Mapping[str, Any], seconds: float = 15.0) -> dict[str, Any]:
        self.replicas = change["spec"]["replicas"]
        return {}

    async def watch(self, path: str, silence: float) -> AsyncGenerator[dict[str, Any], None]:
        await self.more.wait()
        self.more.clear()
        self.objects.append("b")
        yield {"type": "ADDED", "object": item("b")}
        await asyncio.Event().wait()


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


def test_an_event_that_could_not_be_taken_comes_again_with_a_list() -> None:
    async def main() -> None:
        api, broken = Api(), False
        seen: list[list[str]] = []

        def changed(objects: Mapping[str, Any]) -> None:
            if broken:
                raise Fault
            seen.append(list(objects))

        loop = WorkLoop("discovery")
        running = asyncio.create_task(ObjectWatch(api, "/slices", "", changed).run(loop))
        async with asyncio.timeout(30):
            await until(lambda: seen == [["a"]])
            broken = True
            api.more.set()
            await until(lambda: bool(loop.failing))
            assert "incident" in loop.failing["/slices"]
            broken = False
            await until(lambda: seen == [["a"], ["a", "b"]])
        assert not loop.restarts
        running.cancel()

    asyncio.run(main())


@pytest.mark.parametrize("error", [Fault(), Unavailable("the API server cannot be reached")])
def test_a_workload_that_could_not_be_scaled_is_scaled_later(error: Exception) -> None:
    async def main() -> None:
        api = Api()
        actuator = ReplicaActuator(api, ScaleTarget("", "deployment", "web"))
        assert actuator.loop.waiting == 0
        running = asyncio.create_task(actuator.run())
        api.broken = error
        actuator.want(3)
        async with asyncio.timeout(30):
            await until(lambda: bool(actuator.loop.failing))
            assert actuator.loop.waiting == 1
            api.broken = None
            await until(lambda: api.replicas == 3)
            await until(lambda: not actuator.loop.failing)
        running.cancel()

    asyncio.run(main())
