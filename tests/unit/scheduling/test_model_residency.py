"""Which models are in memory: never over the budget, never one that works evicted, and each that is wanted served."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from nerite.scheduling.model_residency import PASSING_NS, Activity, ModelResidency, ResidencyOrder, Step
from nerite.scheduling.residency_table import HOST, Residence

SECOND = 1_000_000_000
IDLE: Callable[[str], Activity] = lambda name: Activity.IDLE  # noqa: E731


def residency(budget: int, *, most_loads: int = 4, **sizes: int) -> ModelResidency:
    made = ModelResidency({HOST: budget}, most_loads)
    for name, size in sizes.items():
        made.describe(name, {HOST: size})
    return made


def in_memory(made: ModelResidency, *names: str, now: int = 0) -> None:
    for name in names:
        made.loaded(name, made.size(name), 1.0, now)
        now += 1


def steps(orders: list[ResidencyOrder]) -> list[tuple[Step, str]]:
    return [order[:2] for order in orders]


def test_a_model_that_fits_is_loaded_once_however_often_it_is_wanted() -> None:
    made = residency(100, a=60)
    made.want("a", 0, 1)
    made.want("a", 0, 2)
    assert steps(made.decide(3, IDLE)) == [(Step.LOAD, "a")]
    made.want("a", 0, 4)
    assert made.decide(5, IDLE) == []
    made.loaded("a", {HOST: 70}, 2.0, 6)
    assert made.decide(7, IDLE) == []
    assert made.used_bytes() == {HOST: 70}
    assert made.seconds("a") == 2.0


def test_the_least_recently_used_goes_and_the_load_waits_until_it_is_gone() -> None:
    made = residency(100, a=40, b=40, c=40)
    in_memory(made, "a", "b")
    made.used("a", 10)
    made.want("c", 0, 20)
    assert steps(made.decide(20, IDLE)) == [(Step.EVICT, "b")]
    assert made.decide(21, IDLE) == []
    made.unloaded("b")
    assert steps(made.decide(22, IDLE)) == [(Step.LOAD, "c")]


def test_what_a_pinned_model_needs_is_pinned_as_long_as_that_is_so() -> None:
    made = residency(100, inner=10, other=10)
    made.describe("outer", {}, ["inner", "late"], pinned=True)
    assert [made.is_pinned(name) for name in ("outer", "inner", "other")] == [True, True, False]
    made.describe("late", {HOST: 5}, ["other"])
    assert made.is_pinned("late")
    assert made.is_pinned("other")
    made.describe("outer", {}, ["inner"], pinned=True)
    assert [made.is_pinned(name) for name in ("inner", "late", "other")] == [True, False, False]
    made.forget("outer")
    assert not made.is_pinned("inner")


def test_no_more_are_evicted_than_are_needed() -> None:
    made = residency(100, small=10, large=80, new=60)
    in_memory(made, "small", "large")
    made.want("new", 0, 20)
    assert steps(made.decide(20, IDLE)) == [(Step.EVICT, "large")], "without it, the small one need not go"


def test_a_busy_model_is_not_evicted_and_another_passes_for_a_while() -> None:
    made = residency(100, busy=60, new=60, tiny=20)
    in_memory(made, "busy")
    made.want("new", 0, 20)
    made.want("tiny", 0, 21)

    def activity(name: str) -> Activity:
        return Activity.WORKS if name == "busy" else Activity.IDLE

    assert steps(made.decide(22, activity)) == [(Step.LOAD, "tiny")]
    made.loaded("tiny", {HOST: 20}, 1.0, 23)
    assert made.decide(24, activity) == []
    late = made.decide(20 + PASSING_NS, activity)
    assert steps(late) == [(Step.DRAIN, "busy")], "it gets no more requests, and goes when it has answered those it has"


def test_state_of_clients_is_never_drained() -> None:
    made = residency(100, stateful=60, new=60)
    in_memory(made, "stateful")
    made.want("new", 0, 0)
    assert made.decide(10 * PASSING_NS, lambda name: Activity.HOLDS) == []


def test_pinned_models_stay_and_what_cannot_fit_beside_them_is_refused_with_the_numbers() -> None:
    made = residency(100, new=60)
    made.describe("pinned", {HOST: 50}, pinned=True)
    in_memory(made, "pinned")
    made.want("new", 0, 20)
    (order,) = made.decide(20, IDLE)
    assert order.step is Step.REFUSE
    assert order.reason == (
        "it needs 60 B of host memory, and 50 B of 100 B are used: 50 B are pinned (pinned), nothing is busy"
    )
    assert made.wanted == []


def test_a_load_that_another_load_may_wait_for_does_not_wait_for_it() -> None:
    made = residency(100, most_loads=1, a=10, b=10, c=10)
    made.want("a", 0, 1)
    made.want("b", 0, 2)
    assert steps(made.decide(3, IDLE)) == [(Step.LOAD, "a")]
    made.want("c", 0, 4, ordered=True)
    assert steps(made.decide(5, IDLE)) == [(Step.LOAD, "c")]
    made.loaded("a", {HOST: 10}, 1.0, 6)
    made.loaded("c", {HOST: 10}, 1.0, 6)
    assert steps(made.decide(7, IDLE)) == [(Step.LOAD, "b")]


def test_what_the_server_itself_uses_is_waited_for() -> None:
    made = residency(100, a=60)
    made.measured_overhead({HOST: 50})
    made.want("a", 0, 1)
    assert made.decide(2, IDLE) == []
    assert made.shortage("a", IDLE).startswith("it needs 60 B of host memory, and 50 B of 100 B are used")
    made.measured_overhead({HOST: 20})
    assert steps(made.decide(3, IDLE)) == [(Step.LOAD, "a")]


def test_what_the_server_itself_uses_is_not_waited_for_for_ever() -> None:
    made = residency(100, a=60, other=20)
    in_memory(made, "other")
    made.measured_overhead({HOST: 45})
    made.want("a", 0, 1)
    assert made.decide(PASSING_NS, IDLE) == []
    (order,) = made.decide(1 + PASSING_NS, IDLE)
    assert order.step is Step.REFUSE, "and nothing is evicted for a load that would not fit even then"
    assert order.reason == (
        "it needs 60 B of host memory, and 65 B of 100 B are used: "
        "45 B belong to no model, nothing is pinned, nothing is busy"
    )


def test_the_better_class_goes_first() -> None:
    made = residency(100, most_loads=1, a=10, b=10)
    made.want("a", 5, 1)
    made.want("b", 2, 2)
    assert steps(made.decide(3, IDLE)) == [(Step.LOAD, "b")]


def test_an_ensemble_is_loaded_with_its_models_and_leaves_before_them() -> None:
    made = residency(100, part=30, other=30, new=80)
    made.describe("whole", {}, ["part", "other"])
    made.want("whole", 0, 1)
    assert steps(made.decide(1, IDLE)) == [(Step.LOAD, "whole")]
    assert made.used_bytes() == {HOST: 60}
    for name in ("part", "other", "whole"):
        made.loaded(name, made.size(name), 1.0, 2)
    made.used("whole", 50)
    made.want("new", 0, 60)
    assert steps(made.decide(60, IDLE)) == [(Step.EVICT, "whole"), (Step.EVICT, "part"), (Step.EVICT, "other")]


def test_a_model_of_a_pinned_ensemble_is_pinned() -> None:
    made = residency(100, part=60, new=60)
    made.describe("whole", {}, ["part"], pinned=True)
    in_memory(made, "part", "whole")
    assert made.is_pinned("part")
    made.want("new", 0, 9)
    assert [order.step for order in made.decide(9, IDLE)] == [Step.REFUSE]


def test_a_model_leaves_after_its_keep_alive() -> None:
    made = residency(100)
    made.describe("a", {HOST: 10}, keep_alive_ns=5 * SECOND)
    in_memory(made, "a")
    assert made.next_change_ns(SECOND) == 5 * SECOND
    assert made.decide(5 * SECOND - 1, IDLE) == []
    assert made.decide(6 * SECOND, lambda name: Activity.WORKS) == []
    assert [order[:3] for order in made.decide(6 * SECOND, IDLE)] == [(Step.EVICT, "a", "keep-alive")]


def test_models_that_have_grown_beyond_the_budget_make_room_again() -> None:
    made = residency(100, a=40, b=40)
    in_memory(made, "a", "b")
    made.measured("b", {HOST: 80})
    assert steps(made.decide(9, IDLE)) == [(Step.EVICT, "a")]


def test_each_gpu_has_a_budget_of_its_own() -> None:
    made = ModelResidency({HOST: 100, "GPU 0": 50, "GPU 1": 50}, 4)
    for name, gpu in (("zero", "GPU 0"), ("one", "GPU 1"), ("new", "GPU 1")):
        made.describe(name, {HOST: 1, gpu: 40})
    in_memory(made, "zero", "one")
    made.want("new", 0, 9)
    assert steps(made.decide(9, IDLE)) == [(Step.EVICT, "one")], "what is on another GPU would not help"


def test_after_a_failure_the_next_load_waits_twice_as_long_each_time() -> None:
    made = residency(100, a=10)
    waits = []
    now = 0
    for _ in range(3):
        made.want("a", 0, now)
        assert steps(made.decide(now, IDLE)) == [(Step.LOAD, "a")]
        made.failed("a", "no such file", now)
        why, until = made.obstacle("a", now)
        assert why == "no such file"
        waits.append((until - now) / SECOND)
        now = until
    assert waits == [1, 2, 4]
    assert made.obstacle("a", now) == ("", 0)


def test_one_that_was_not_evicted_after_all_is_used_again() -> None:
    made = residency(100, a=60, new=60)
    in_memory(made, "a")
    made.want("new", 0, 9)
    made.decide(9, IDLE)
    made.kept("a", 10)
    assert made.residence("a") is Residence.RESIDENT
    assert steps(made.decide(11, IDLE)) == [(Step.EVICT, "a")]


def on_gpu(host: int, gpu: int = 100, **sizes: int) -> ModelResidency:
    """Models that take their size of a GPU, and asleep as much of the host."""
    made = ModelResidency({HOST: host, "GPU 0": gpu}, 4)
    for name, size in sizes.items():
        made.describe(name, {HOST: 1, "GPU 0": size})
        made.can_sleep(name, {HOST: 1 + size, "GPU 0": 2})
    return made


def test_a_model_that_can_sleep_does_so_and_is_woken() -> None:
    made = on_gpu(200, a=60, b=60)
    in_memory(made, "a")
    made.want("b", 0, 10)
    assert steps(made.decide(10, IDLE)) == [(Step.SLEEP, "a")]
    assert made.used_bytes() == {HOST: 61, "GPU 0": 60}, "the host's memory is reserved before the GPU's is free"
    assert made.decide(11, IDLE) == []
    made.fell_asleep("a", {HOST: 70, "GPU 0": 5})
    assert made.used_bytes() == {HOST: 70, "GPU 0": 5}
    assert steps(made.decide(12, IDLE)) == [(Step.LOAD, "b")]
    in_memory(made, "b", now=13)
    made.want("a", 0, 14)
    assert steps(made.decide(14, IDLE)) == [(Step.SLEEP, "b")]
    made.fell_asleep("b", {HOST: 61, "GPU 0": 2})
    assert steps(made.decide(15, IDLE)) == [(Step.LOAD, "a")], "it needs 55 more, of which 93 are free"
    assert made.used_bytes() == {HOST: 131, "GPU 0": 62}
    made.loaded("a", made.size("a"), 1.0, 16)
    assert made.used_bytes() == {HOST: 62, "GPU 0": 62}


def test_without_memory_of_the_host_it_is_evicted() -> None:
    made = on_gpu(50, a=60, b=60)
    in_memory(made, "a")
    made.want("b", 0, 10)
    assert steps(made.decide(10, IDLE)) == [(Step.EVICT, "a")]


def test_one_that_has_slept_for_longer_leaves_the_memory_of_the_host_for_it() -> None:
    made = on_gpu(150, a=60, b=60, c=60)
    in_memory(made, "a", "b")
    made.fell_asleep("a", {HOST: 61, "GPU 0": 2})
    made.want("c", 0, 10)
    assert steps(made.decide(10, IDLE)) == [(Step.SLEEP, "b")], "there is room for both"
    made.fell_asleep("b", {HOST: 61, "GPU 0": 2})
    assert steps(made.decide(11, IDLE)) == [(Step.LOAD, "c")]
    in_memory(made, "c", now=12)
    made.describe("d", {HOST: 1, "GPU 0": 60})
    made.want("d", 0, 13)
    assert steps(made.decide(13, IDLE)) == [(Step.EVICT, "a")]
    assert made.decide(14, IDLE) == [], "its memory is not free yet"
    made.unloaded("a")
    assert steps(made.decide(15, IDLE)) == [(Step.SLEEP, "c")]


def test_it_sleeps_for_its_keep_alive_at_most() -> None:
    made = on_gpu(200, a=60)
    made.describe("a", {}, keep_alive_ns=5 * SECOND)
    made.loaded("a", {HOST: 1, "GPU 0": 60}, 1.0, 0)
    made.fell_asleep("a", {HOST: 61, "GPU 0": 2})
    assert made.next_change_ns(SECOND) == 5 * SECOND
    assert made.decide(4 * SECOND, IDLE) == []
    assert steps(made.decide(5 * SECOND, IDLE)) == [(Step.EVICT, "a")]


def test_a_model_that_an_ensemble_in_memory_needs_does_not_sleep() -> None:
    made = on_gpu(200, a=60, b=60)
    made.describe("both", {}, ["a"])
    in_memory(made, "a", "both")
    made.want("b", 0, 10)
    assert steps(made.decide(10, IDLE)) == [(Step.EVICT, "both"), (Step.EVICT, "a")]


class Simulation:
    """A server whose models are asked for at random, whose requests take a while, and that follows every order."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.budget = {HOST: 1000 + seed % 3 * 1500, "GPU 0": 600}
        self.residency = ModelResidency(self.budget, self.random.randint(1, 4))
        self.names = [f"model{number}" for number in range(30)]
        for number, name in enumerate(self.names):
            size = {HOST: self.random.randint(10, 300)}
            if number % 3 == 0:
                size["GPU 0"] = self.random.randint(10, 300)
            self.residency.describe(name, size, pinned=number == 0, keep_alive_ns=number % 5 * 7 * SECOND)
            if number % 6 == 0:
                self.residency.can_sleep(name, {HOST: size[HOST] + size["GPU 0"], "GPU 0": 5})
        for number in range(4):
            name = f"ensemble{number}"
            self.residency.describe(name, {}, self.random.sample(self.names[1:], 2))
            self.names.append(name)
        self.now = 0
        self.waiting: dict[str, int] = {}
        self.busy: dict[str, int] = {}
        """Until when a model works."""
        self.ends: list[tuple[int, Callable[[], None]]] = []
        self.longest = 0
        self.slept = 0

    def activity(self, name: str) -> Activity:
        """Steps of an ensemble keep its models busy from time to time, the ensemble all the time."""
        return Activity.WORKS if self.busy.get(name, 0) > self.now else Activity.IDLE

    def run(self, seconds: int) -> None:
        for tick in range(seconds * 4):
            self.now = tick * SECOND // 4
            if self.now < (seconds - 120) * SECOND:
                self.ask()
            for at, end in sorted(self.ends, key=lambda each: each[0]):
                if at <= self.now:
                    self.ends.remove((at, end))
                    end()
            for order in self.residency.decide(self.now, self.activity):
                self.follow(order)
            used = self.residency.used_bytes()
            for place in self.budget:
                assert used.get(place, 0) == sum(self.residency.taken(each).get(place, 0) for each in self.residency)
            assert all(used.get(place, 0) <= limit for place, limit in self.budget.items()), used

    def ask(self) -> None:
        if self.random.random() < 0.4:
            name = self.names[min(int(self.random.paretovariate(0.7)), len(self.names)) - 1]
            if self.residency.residence(name) is Residence.RESIDENT:
                self.use(name)
            else:
                self.waiting.setdefault(name, self.now)
                self.residency.want(name, self.random.randint(0, 1), self.now)

    def use(self, name: str) -> None:
        self.busy[name] = max(self.busy.get(name, 0), self.now + self.random.randint(1, 3 * SECOND))
        self.residency.used(name, self.now)

    def follow(self, order: ResidencyOrder) -> None:
        name = order.model
        if order.step is Step.LOAD:
            members = [
                each for each in self.residency.closure(name) if self.residency.residence(each) is Residence.LOADING
            ]

            def loaded() -> None:
                for each in members:
                    self.residency.loaded(each, self.residency.size(each), 1.0, self.now)
                    if each in self.waiting:
                        self.longest = max(self.longest, self.now - self.waiting.pop(each))
                        self.use(each)

            self.ends.append((self.now + self.random.randint(0, 2 * SECOND), loaded))
        elif order.step is Step.REFUSE:
            del self.waiting[name]
        else:
            needed = self.residency.needed_by(name)
            assert all(self.residency.residence(each) is Residence.LEAVING for each in needed), "nothing is left behind"
            if order.step is not Step.DRAIN:
                assert self.activity(name) is Activity.IDLE
            done = max(self.busy.get(name, 0), self.now) + self.random.randint(0, SECOND)
            end = self.fall_asleep if order.step is Step.SLEEP else self.residency.unloaded
            self.ends.append((done, lambda: end(name)))

    def fall_asleep(self, name: str) -> None:
        size = self.residency.size(name)
        self.residency.fell_asleep(name, {HOST: size[HOST] + size["GPU 0"], "GPU 0": 5})
        self.slept += 1


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens(seed: int) -> None:
    """Within the budget at all times, none evicted that works, and none that is wanted waits forever."""
    simulation = Simulation(seed)
    simulation.run(300)
    assert simulation.waiting == {}
    assert simulation.residency.wanted == []
    assert simulation.longest < 120 * SECOND


# Several tenants.


def served(made: ModelResidency, rounds: int, now: int = 100) -> list[str]:
    """Return the models in the order in which they are loaded, each as soon as the one before it is there."""
    loads: list[str] = []
    for _ in range(rounds):
        for order in made.decide(now, IDLE):
            if order.step is Step.LOAD:
                loads.append(order.model)
                made.loaded(order.model, made.size(order.model), 1.0, now)
            else:
                made.unloaded(order.model)
        now += 1
    return loads


def test_tenants_take_turns() -> None:
    made = residency(1000, most_loads=1, **{f"{tenant}{number}": 1 for tenant in "abc" for number in range(9)})
    for number in range(9):
        made.want(f"a{number}", 0, number, tenants=["alice"])
    assert served(made, 3) == ["a0", "a1", "a2"]
    for tenant, name in (("b", "bob"), ("c", "carol")):
        for number in range(2):
            made.want(f"{tenant}{number}", 0, 50, tenants=[name])
    assert served(made, 8) == ["b0", "c0", "a3", "b1", "c1", "a4", "a5", "a6"]


def test_loads_in_progress_count_as_turns() -> None:
    made = residency(1000, most_loads=2, a0=1, a1=1, a2=1, b0=1)
    for name in ("a0", "a1", "a2"):
        made.want(name, 0, 1, tenants=["alice"])
    assert steps(made.decide(2, IDLE)) == [(Step.LOAD, "a0"), (Step.LOAD, "a1")]
    made.want("b0", 0, 3, tenants=["bob"])
    made.loaded("a0", {HOST: 1}, 1.0, 4)
    assert steps(made.decide(5, IDLE)) == [(Step.LOAD, "b0")]


def test_a_model_that_several_want_comes_when_the_first_of_them_has_a_turn() -> None:
    made = residency(1000, most_loads=1, a0=1, a1=1, a2=1)
    for name in ("a0", "a1", "a2"):
        made.want(name, 0, 1, tenants=["alice"])
    made.want("a2", 0, 2, tenants=["alice", "bob"])
    assert served(made, 3) == ["a0", "a2", "a1"]


def test_a_better_class_goes_before_any_turn() -> None:
    made = residency(1000, most_loads=1, a0=1, a1=1, b0=1)
    made.want("b0", 1, 0, tenants=["bob"])
    made.want("a0", 0, 1, tenants=["alice"])
    made.want("a1", 0, 1, tenants=["alice"])
    assert served(made, 3) == ["a0", "a1", "b0"]


def test_a_tenant_beyond_its_share_evicts_its_own_models() -> None:
    made = residency(10, most_loads=1, warm=1, cold=1, **{f"a{number}": 1 for number in range(40)})
    made.want("warm", 0, 0, tenants=["bob"])
    assert served(made, 1, now=1) == ["warm"]
    for number in range(40):
        made.want(f"a{number}", 0, 2, tenants=["alice"])
    assert served(made, 100, now=10) == [f"a{number}" for number in range(40)]
    assert made.residence("warm") is Residence.RESIDENT, "it was the least recently used by far"
    made.want("cold", 0, 200, tenants=["bob"])
    assert served(made, 2, now=201) == ["cold"]
    assert made.residence("warm") is Residence.RESIDENT


def test_without_tenants_the_least_recently_used_goes_whoever_wanted_it() -> None:
    made = residency(2, most_loads=1, a=1, b=1, c=1)
    for at, name in enumerate("abc"):
        made.want(name, 0, at, tenants=["alice"])
        assert served(made, 2, now=10 * at) == [name]
    assert made.residence("a") is Residence.ABSENT
