"""A round of loads: each model once, whoever asks for it, and circles end."""

from __future__ import annotations

import asyncio

import pytest

from nerite.core.errors import Internal
from nerite.repository.loading_round import LoadingRound, Waits
from nerite.repository.repositories import LoadOverrides


class Bench:
    """Models by name with the models that they are put together from."""

    def __init__(self, **parts: str) -> None:
        self.parts = parts
        self.loads: list[str] = []
        self.circles: dict[str, str] = {}
        self.waits: Waits = {}

    async def bring(self, name: str, _delivery: LoadOverrides | None, loading: LoadingRound) -> None:
        self.loads.append(name)
        await asyncio.sleep(0)
        if self.parts[name]:
            await loading.load_parts(name, self.parts[name])
        if circle := loading.circle(name):
            self.circles[name] = circle
        if name == "x":
            raise Internal("told to")

    def load(self, *names: str) -> list[object]:
        async def load() -> list[object]:
            loading = LoadingRound(self.bring, self.waits)
            return await asyncio.gather(*map(loading.load, names), return_exceptions=True)

        found = asyncio.run(load())
        assert self.waits == {}
        return found


def test_each_model_is_loaded_once_and_before_those_that_need_it() -> None:
    bench = Bench(a="bc", b="c", c="")
    assert bench.load("c", "a", "b") == [None, None, None]
    assert sorted(bench.loads) == ["a", "b", "c"]


def test_parts_come_with_an_ensemble() -> None:
    bench = Bench(a="b", b="c", c="")
    bench.load("a")
    assert bench.loads == ["a", "b", "c"]


def test_a_failure_is_told_to_who_asked_by_name() -> None:
    bench = Bench(a="x", x="")
    assert bench.load("a") == [None]
    (failure,) = bench.load("x")
    assert isinstance(failure, Internal)


@pytest.mark.parametrize("names", ["a", "b", "ab"])
def test_two_that_need_each_other(names: str) -> None:
    bench = Bench(a="b", b="a")
    bench.load(*names)
    assert bench.circles == {"a": "b", "b": "a"}


def test_one_that_needs_itself() -> None:
    bench = Bench(a="a")
    bench.load("a")
    assert bench.circles == {"a": "a"}


def test_a_circle_further_down_is_none_of_those_above() -> None:
    bench = Bench(a="b", b="c", c="b")
    bench.load("a")
    assert bench.circles.keys() == {"b", "c"}


def test_two_rounds_at_a_time_do_not_wait_for_each_other() -> None:
    bench = Bench(a="b", b="a")

    async def load() -> None:
        rounds = [LoadingRound(bench.bring, bench.waits) for _ in range(2)]
        await asyncio.wait_for(asyncio.gather(rounds[0].load("a"), rounds[1].load("b")), 10)

    asyncio.run(load())
    assert bench.circles
