"""The loop of a server's rollouts with an exception planted in each step: other models go on, and nothing is lost.

There are rollouts of the models "a" and "b", of which "a" fails until it is mended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from nerite.config.rollout_spec import RolloutSpec
from nerite.core.errors import NotFound
from nerite.rollouts import controller
from nerite.rollouts.controller import RolloutController
from nerite.rollouts.record import RolloutRecord
from nerite.rollouts.run import RolloutRun
from nerite.rollouts.state_directory import StateDirectory, StateWriter
from nerite.rollouts.webhook import WebhookClient, Webhooks
from nerite.routes.table import RouteTable

SPEC = RolloutSpec("2", "1", steps=(10.0, 50.0, 100.0), hold=0.0, requests=0, gates=("errors=+50%,5%",))


class Fault(Exception):
    """What nothing foresaw."""


class World:
    """A server with two models, whose rollouts are at their first step, as if it had just been started again."""

    def __init__(self, folder: Path, executor: ThreadPoolExecutor) -> None:
        self.broken = ""
        """Where model "a" fails."""
        self.folder = folder
        self.kept: list[str] = []
        self.writer = StateWriter(StateDirectory(folder), executor)
        self.table = RouteTable()
        self.plant(self.table, "put", lambda route: route.name)
        self.plant(self.table, "under_way", lambda model: model)
        self.plant(self.writer.directory, "write", lambda model, data: model)
        manager = SimpleNamespace(
            records=(), meant=self._meant, keep_when_loaded=lambda *_: None, keep_versions=self._keep,
            release_versions=self._release,
        )  # fmt: skip
        server = SimpleNamespace(manager=manager, ask_model_ready=self._ask, hand_back=lambda *_: None)
        self.plant(server, "ask_model_ready", lambda model, version, answer: model)
        self.webhooks = Webhooks(WebhookClient())
        self.made = RolloutController(cast(Any, server), self.table, self.writer, self.webhooks, executor)

    def plant(self, owner: object, method: str, model_of: Callable[..., str]) -> None:
        whole = getattr(owner, method)

        def planted(*arguments: Any) -> Any:
            if self.broken == method and model_of(*arguments) == "a":
                raise Fault
            return whole(*arguments)

        setattr(owner, method, planted)

    def _ask(self, model: str, version: str, answer: Callable[[bool], None]) -> None:
        answer(True)

    def _meant(self, model: str) -> Any:
        raise NotFound(model)

    async def _keep(self, model: str, versions: tuple[int, ...], default: int) -> None:
        if self.broken == "keep" and model == "a":
            raise Fault
        self.kept.append(model)

    async def _release(self, model: str, **_: Any) -> None:
        return

    def weights(self) -> dict[str, float]:
        return {each["model"]: each["weight"] for each in self.made.statuses()}

    def states(self) -> dict[str, str]:
        return {each["model"]: each["state"] for each in self.made.statuses()}


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, work: Callable[[World], Awaitable[None]]) -> None:
    monkeypatch.setattr(controller, "TICK", 0.01)

    async def main() -> None:
        with ThreadPoolExecutor(2) as executor:
            world = World(tmp_path, executor)
            for model in ("a", "b"):
                record = RolloutRecord(model)
                record.run = RolloutRun(model, "1", SPEC, "2026-01-01T00:00:00Z")
                record.run.rollout.begin(0)
                world.writer.save(model, record.as_json())
            world.writer.flush()
            world.made.restore({})
            await world.made.start()
            running = asyncio.create_task(world.made.run())
            try:
                async with asyncio.timeout(60):
                    await work(world)
            finally:
                running.cancel()
                world.webhooks.close()

    asyncio.run(main())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("place", ["put", "under_way", "ask_model_ready"])
def test_a_rollout_that_fails_is_set_aside_at_its_weight_and_others_go_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        loop = world.made.loop
        world.broken = place
        await until(lambda: loop.is_set_aside("a"))
        (letter,) = loop.dead_letters
        assert letter.unit == "a" and "incident" in letter.text
        assert world.states()["a"] == "running"
        assert loop.admits("b") and world.states()["b"] == "running"
        world.broken = ""
        loop.retry("a")
        await until(lambda: not loop.failing and not loop.dead_letters)
        assert world.states() == {"a": "running", "b": "running"}

    run(tmp_path, monkeypatch, work)


def test_a_rollout_that_was_set_aside_is_aborted_when_it_is_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        world.broken = "under_way"
        await until(lambda: world.made.loop.is_set_aside("a"))
        world.made.loop.discard("a")
        assert world.states() == {"a": "aborted", "b": "running"}
        await until(lambda: world.kept == ["a"])

    run(tmp_path, monkeypatch, work)


def test_a_decision_that_could_not_take_effect_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        world.broken = "put"
        with pytest.raises(Fault):
            await world.made.command("a", "pause")
        await until(lambda: "a" in world.made.loop.failing)
        world.broken = ""
        await until(lambda: not world.made.loop.failing)
        assert [each["state"] for each in world.made.history("a")] == ["paused"]

    run(tmp_path, monkeypatch, work)


def test_what_follows_the_end_is_done_again_and_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        loop = world.made.loop
        world.broken = "keep"
        for model in ("a", "b"):
            await world.made.command(model, "abort")
        await until(lambda: loop.is_set_aside("end of 'a'"))
        assert world.kept == ["b"] and loop.admits("a")
        world.broken = ""
        loop.retry("end of 'a'")
        await until(lambda: world.kept == ["b", "a"])

    run(tmp_path, monkeypatch, work)


def test_a_state_that_could_not_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(world: World) -> None:
        def saved(model: str) -> Any:
            (found,) = (each for each in StateDirectory(tmp_path).read() if each.model == model)
            return found.document["run"]["rollout"]["state"]

        world.broken = "write"
        for model in ("a", "b"):
            await world.made.command(model, "pause")
        await until(lambda: "incident" in world.writer.problem and saved("b") == "paused")
        assert saved("a") == "running"
        world.broken = ""
        await until(lambda: saved("a") == "paused" and not world.writer.problem)
        await until(lambda: not world.made.loop.failing)

    run(tmp_path, monkeypatch, work)
