"""Who waits for whom: found when it is for ever, and never when it is not, in any mix of models and instances."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from nerite.dispatch.deadlocks import cycle, is_deadlocked

Ways = dict[str, Sequence[str]]


def members(start: str, ways: Ways) -> list[str]:
    return is_deadlocked(start, ways.__getitem__)


def test_nobody_waits() -> None:
    assert members("a", {"a": ()}) == []


def test_one_that_waits_for_itself() -> None:
    ways = {"a": ["a"]}
    assert members("a", ways) == ["a"]
    assert cycle("a", ways.__getitem__) == ["a", "a"]


def test_two_that_wait_for_each_other() -> None:
    ways = {"a": ["b"], "b": ["a"]}
    assert members("a", ways) == ["a", "b"]
    assert cycle("b", ways.__getitem__) == ["b", "a", "b"]


def test_one_way_out_is_enough() -> None:
    assert members("a", {"a": ["b", "c"], "b": ["a"], "c": ["a", "d"], "d": ()}) == []


def test_before_the_ring() -> None:
    ways = {"a": ["b"], "b": ["c"], "c": ["b"]}
    assert members("a", ways) == ["a", "b", "c"]
    assert cycle("a", ways.__getitem__) == ["a", "b", "c", "b"]


class Call:
    """A call from a model to another, by an instance that waits for it; None for a client's request."""

    def __init__(self, model: int, caller: Instance | None) -> None:
        self.model = model
        self.caller = caller
        self.instance: Instance | None = None


class Instance:
    """One instance of a model: idle, at work, or waiting for a call."""

    def __init__(self, model: int) -> None:
        self.model = model
        self.runs: Call | None = None
        self.waits: Call | None = None


class World:
    """Models with instances that call each other as it comes, until somebody waits for ever or all is done."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.models = [[Instance(model) for _ in range(self.rng.randint(1, 3))] for model in range(4)]
        self.queues: list[list[Call]] = [[] for _ in self.models]
        self.refused = 0
        for _ in range(self.rng.randint(1, 8)):
            self.queues[self.rng.randrange(len(self.models))].append(Call(self.rng.randrange(4), None))

    def ways(self, call: Call) -> list[Call]:
        """What the server says: see ``Dispatcher.waits_for``."""
        holders = [call.instance] if call.instance is not None else self.models[call.model]
        awaited = [holder.waits for holder in holders]
        return [] if None in awaited else [each for each in awaited if each is not None]

    def step(self) -> bool:
        """Do one thing that can be done; return whether there was any."""
        starts = [
            (instance, queue)
            for instances, queue in zip(self.models, self.queues, strict=True)
            for instance in instances
            if queue and instance.runs is None
        ]
        working = [each for each in self.instances if each.runs is not None and each.waits is None]
        if not starts and not working:
            return False
        if starts and (not working or self.rng.random() < 0.5):
            instance, queue = self.rng.choice(starts)
            instance.runs = queue.pop(0)
            instance.runs.instance = instance
            return True
        instance = self.rng.choice(working)
        if self.rng.random() < 0.55:
            self.end(instance)
        else:
            self.call(instance)
        return True

    @property
    def instances(self) -> list[Instance]:
        return [instance for instances in self.models for instance in instances]

    def end(self, instance: Instance) -> None:
        assert instance.runs is not None
        caller, instance.runs = instance.runs.caller, None
        if caller is not None:
            caller.waits = None

    def call(self, instance: Instance) -> None:
        call = instance.waits = Call(self.rng.randrange(len(self.models)), instance)
        queue = self.queues[call.model]
        queue.append(call)
        if all(other.runs is not None for other in self.models[call.model]) and is_deadlocked(call, self.ways):
            assert not self.hopeful(call), "a false alarm"
            queue.remove(call)
            instance.waits = None
            self.refused += 1

    def hopeful(self, call: Call) -> bool:
        """Whether ``call`` is answered if those at work finish: played through, step by step, on paper."""
        waiting = {each.waits: each for each in self.instances if each.waits is not None}
        free = {each for each in self.instances if each.waits is None}
        while True:
            answered = [
                each
                for each in waiting
                if (each.instance in free if each.instance else any(one in free for one in self.models[each.model]))
            ]
            if call in answered:
                return True
            if not answered:
                return False
            for each in answered:
                free.add(waiting.pop(each))


@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_no_world_stands_still_and_no_alarm_is_false(first: int) -> None:
    refused = 0
    for seed in range(first, first + 100):
        world = World(seed)
        for _ in range(5000):
            if not world.step():
                break
        assert not any(world.queues), f"seed {seed}: somebody waits for ever"
        assert not any(each.runs for each in world.instances), f"seed {seed}: somebody waits for ever"
        refused += world.refused
    assert refused > 0
