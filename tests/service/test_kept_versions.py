"""Versions that stay loaded beside those that the version policy selects."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from embedded import Embedded, embedded
from nerite.core.errors import InvalidArgument, NeriteError, NotFound
from nerite.repository.polling import Poller
from serving import IDENTITY, IN_PROCESS, adds, ensemble, pbtxt, python_model, step

CONFIG = pbtxt(parameters=IN_PROCESS)
BROKEN = "def initialize(self, args):\n    raise ValueError('no weights')\n" + IDENTITY


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """One model, of version 1."""
    models = tmp_path / "models"
    python_model(models, "adder", adds(1), CONFIG)
    return models


def run(repository: Path, scenario: Callable[[Embedded], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a scenario with a server of the repository."""

    async def inside() -> None:
        async with embedded(repository, **options) as server:
            await server.manager.load("adder")
            await scenario(server)

    asyncio.run(inside())


def test_a_candidate_runs_beside_the_baseline_and_takes_no_traffic(repository: Path) -> None:
    async def scenario(server: Embedded) -> None:
        (before,) = server.server.running_versions()
        python_model(repository, "adder", adds(2), CONFIG, version=2)
        await server.manager.keep_versions("adder", [2])
        assert await server.states() == {"1": "READY", "2": "READY"}
        assert server.server.model_metadata("adder", "")["versions"] == ["1", "2"]
        assert await server.infer("adder", 0.0) == 1.0, "the version that it went to before"
        assert [await server.infer("adder", 0.0, version) for version in ("1", "2")] == [1.0, 2.0]
        assert next(iter(server.server.running_versions())) is before, "it was not loaded again"

    run(repository, scenario)


def test_kept_through_reloads(repository: Path) -> None:
    async def scenario(server: Embedded) -> None:
        python_model(repository, "adder", adds(2), CONFIG, version=2)
        await server.manager.keep_versions("adder", [2])
        running = list(server.server.running_versions())
        await server.manager.load("adder")
        assert list(server.server.running_versions()) == running, "none has changed"
        python_model(repository, "adder", adds(20), CONFIG, version=2)
        python_model(repository, "adder", adds(3), CONFIG, version=3)
        await server.manager.load("adder")
        assert [await server.infer("adder", 0.0, version) for version in ("", "1", "2", "3")] == [1.0, 1.0, 20.0, 3.0]
        await server.manager.unload("adder")
        await server.manager.load("adder")
        assert await server.infer("adder", 0.0) == 1.0, "and when it was unloaded between"

    run(repository, scenario)


def test_a_changed_configuration_reaches_the_baseline_with_the_next_load(repository: Path) -> None:
    async def scenario(server: Embedded) -> None:
        python_model(repository, "adder", adds(2), pbtxt(4, parameters=IN_PROCESS), version=2)
        await server.manager.keep_versions("adder", [2])
        batches = {each.label: each.config.max_batch_size for each in server.server.running_versions()}
        assert batches == {"1": 8, "2": 4}
        await server.manager.load("adder")
        assert {each.config.max_batch_size for each in server.server.running_versions()} == {4}

    run(repository, scenario)


def test_kept_through_polls(repository: Path) -> None:
    async def scenario(server: Embedded) -> None:
        await server.manager.keep_versions("adder", [1])
        poller = asyncio.ensure_future(Poller(server.manager, 0.05).run())
        try:
            python_model(repository, "adder", adds(2), CONFIG, version=2)
            await server.reach({"1": "READY", "2": "READY"})
            assert await server.infer("adder", 0.0) == 1.0
            await server.manager.release_versions("adder")
            assert await server.infer("adder", 0.0) == 2.0
        finally:
            poller.cancel()

    run(repository, scenario, control_mode="poll")


def test_the_policy_chooses_after_the_release(repository: Path) -> None:
    async def scenario(server: Embedded) -> None:
        python_model(repository, "adder", adds(2), CONFIG, version=2)
        await server.manager.keep_versions("adder", [2])
        await server.manager.release_versions("adder")
        assert await server.infer("adder", 0.0) == 2.0, "the policy selects the latest version"
        await server.reach({"1": "UNAVAILABLE", "2": "READY"})
        assert server.manager.kept("adder") is None
        await server.manager.release_versions("adder")
        await server.manager.release_versions("nothing")

    run(repository, scenario)


def test_the_policy_is_the_one_in_the_files_at_the_release(repository: Path) -> None:
    async def scenario(server: Embedded) -> None:
        python_model(repository, "adder", adds(2), CONFIG, version=2)
        await server.manager.keep_versions("adder", [2])
        (repository / "adder" / "config.pbtxt").write_text(CONFIG + "version_policy: { specific { versions: [1] } }\n")
        await server.manager.release_versions("adder")
        assert await server.infer("adder", 0.0) == 1.0

    run(repository, scenario)


def test_released_without_the_candidate(repository: Path) -> None:
    async def scenario(server: Embedded) -> None:
        python_model(repository, "adder", adds(2), CONFIG, version=2)
        await server.manager.keep_versions("adder", [2])
        with pytest.raises(InvalidArgument, match="no version of model 'adder' would remain loaded"):
            await server.manager.release_versions("adder", without=[1, 2])
        assert await server.states() == {"1": "READY", "2": "READY"}
        await server.manager.release_versions("adder", without=[2])
        assert await server.infer("adder", 0.0) == 1.0
        with pytest.raises(NeriteError, match="version 2"):
            await server.infer("adder", 0.0, "2")

    run(repository, scenario)


def test_a_candidate_that_fails_to_load_changes_nothing(repository: Path) -> None:
    async def scenario(server: Embedded) -> None:
        python_model(repository, "adder", BROKEN, CONFIG, version=2)
        running = list(server.server.running_versions())
        with pytest.raises(InvalidArgument, match=r"load failed for model 'adder': version 2 is at .*no weights"):
            await server.manager.keep_versions("adder", [2])
        assert list(server.server.running_versions()) == running
        assert server.manager.kept("adder") is None
        (_, failed) = await server.index()
        assert server.ready(), "the candidate is not needed"
        assert failed["state"] == "UNAVAILABLE" and "no weights" in failed["reason"]
        ((_, error),) = await server.manager.load_all(["adder"])
        assert "no weights" in error.message
        assert not server.ready(), "the policy wants it"

    run(repository, scenario)


def test_versions_and_models_that_do_not_exist(repository: Path) -> None:
    async def scenario(server: Embedded) -> None:
        with pytest.raises(NotFound, match=r"version 7 has no directory .*/adder/7 \(versions there: 1\)"):
            await server.manager.keep_versions("adder", [7])
        with pytest.raises(NotFound, match="unknown model: 'nothing'"):
            await server.manager.keep_versions("nothing", [1])
        await server.manager.unload("adder")
        with pytest.raises(NotFound, match="has no available versions"):
            await server.manager.keep_versions("adder", [1])
        assert server.manager.kept("adder") is None

    run(repository, scenario)


def test_the_directory_of_a_kept_version_vanishes(repository: Path) -> None:
    async def scenario(server: Embedded) -> None:
        python_model(repository, "adder", adds(2), CONFIG, version=2)
        await server.manager.keep_versions("adder", [2])
        shutil.rmtree(repository / "adder" / "1")
        with pytest.raises(NeriteError, match=r"version 1 is kept for a rollout, and its directory .*/1 does not"):
            await server.manager.load("adder")
        assert await server.infer("adder", 0.0) == 1.0

    run(repository, scenario)


def test_a_server_that_starts_again_during_a_rollout(repository: Path) -> None:
    python_model(repository, "adder", adds(2), CONFIG, version=2)

    async def start(wanted: dict[str, str], answer: float) -> None:
        async with embedded(repository) as server:
            server.manager.keep_when_loaded("adder", [2], default=1)
            assert await server.manager.load_all(["adder"]) == []
            assert await server.states() == wanted
            assert await server.infer("adder", 0.0) == answer
            assert server.ready()

    asyncio.run(start({"1": "READY", "2": "READY"}, 1.0))
    python_model(repository, "adder", BROKEN, CONFIG, version=2)
    asyncio.run(start({"1": "READY", "2": "UNAVAILABLE"}, 1.0))
    shutil.rmtree(repository / "adder" / "2")
    asyncio.run(start({"1": "READY"}, 1.0))


def test_versions_of_an_ensemble(repository: Path) -> None:
    ensemble(repository, "twice", step("adder", "INPUT0", "a"), step("adder", "a", "OUTPUT0"))

    async def scenario(server: Embedded) -> None:
        await server.manager.load("twice")
        (repository / "twice" / "2").mkdir()
        await server.manager.keep_versions("twice", [2])
        assert server.server.model_metadata("twice", "")["versions"] == ["1", "2"]
        assert server.manager.meant("twice").latest == 1
        python_model(repository, "adder", adds(2), CONFIG, version=2)
        await server.manager.keep_versions("adder", [2])
        assert await server.infer("twice", 0.0) == 2.0
        await server.manager.release_versions("adder")
        assert await server.infer("twice", 0.0) == 4.0, "its steps go to the latest version"
        await server.manager.release_versions("twice")
        assert server.server.model_metadata("twice", "")["versions"] == ["2"]

    run(repository, scenario)
