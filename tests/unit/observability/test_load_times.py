"""Where the time of a load went: stages of versions and instances that are made side by side."""

from __future__ import annotations

import asyncio
import logging

import pytest

from nerite.observability.load_times import LoadTimes, load_of, log_loaded, stage


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_side_by_side_counts_once() -> None:
    clock = Clock()
    times = LoadTimes("m", clock)
    times.note("initialize", 103.0, 104.0)
    times.note("initialize", 103.5, 105.0)
    times.note("initialize", 103.6, 103.7)
    times.note("start of workers", 101.0, 103.0)
    times.note("initialize", 106.0, 106.5)
    times.note("warm-up", 106.5, 106.501)
    clock.now = 107.0
    assert times.stages == {"start of workers": 2.0, "initialize": 2.5, "warm-up": pytest.approx(0.001)}
    assert str(times) == "7.00 s (start of workers 2.00, initialize 2.50)"


def test_nothing_took_time() -> None:
    assert str(LoadTimes("m", Clock())) == "0.00 s"


def test_loads_side_by_side_have_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nerite.repository")

    async def part(name: str) -> None:
        with stage(name):
            await asyncio.sleep(0)

    async def load(model: str) -> None:
        with load_of(model):
            await asyncio.gather(part(f"first of {model}"), part(f"second of {model}"))
            log_loaded(model)
            log_loaded("an ensemble of it")

    async def loads() -> None:
        with stage("of no load"):
            await asyncio.gather(load("a"), load("b"))

    asyncio.run(loads())
    extras = [record.__dict__["extras"] for record in caplog.records]
    stages = {each["model"]: list(each["stages"]) for each in extras if "stages" in each}
    assert stages == {model: [f"first of {model}", f"second of {model}"] for model in "ab"}
    assert caplog.messages.count("successfully loaded 'an ensemble of it'") == 2


def test_a_stage_that_fails_counts_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "nerite.repository")
    with load_of("m"):
        with pytest.raises(ValueError), stage("initialize"):
            raise ValueError
        log_loaded("m")
    assert list(caplog.records[0].__dict__["extras"]["stages"]) == ["initialize"]
