"""Which members load which models, by demand and memory."""

from __future__ import annotations

from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st
from pools import SECOND

from nerite.balancing.model_placement import ModelPlacement, PlacementAction, PlacementPolicy, PlacementStep

GB: Final = 1 << 30
LOAD, UNLOAD = PlacementStep.LOAD, PlacementStep.UNLOAD


class Fleet:
    """Members that do what is decided, and say so."""

    def __init__(self, memory: dict[str, int], models: dict[str, int], policy: PlacementPolicy | None = None) -> None:
        self.placement = ModelPlacement(policy)
        self.memory = memory
        self.models = models
        self.held: dict[str, set[str]] = {name: set() for name in memory}
        self.demands: dict[str, float] = {}
        self.now = SECOND
        for name, size in memory.items():
            self.placement.set_member(name, size)
        for model, size in models.items():
            self.placement.set_model(model, size)

    def decide(self) -> list[tuple[PlacementStep, str, str]]:
        return [(each.step, each.member, each.model) for each in self.actions()]

    def actions(self) -> list[PlacementAction]:
        return self.placement.decide(self.now)

    def wait(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now += SECOND
            for model, demand in self.demands.items():
                self.placement.demand(model, demand, self.now)

    def do(self, actions: list[tuple[PlacementStep, str, str]]) -> None:
        for step, member, model in actions:
            (self.held[member].add if step is LOAD else self.held[member].discard)(model)
        for member, models in self.held.items():
            self.placement.set_held(member, models, self.now)

    def run(self, seconds: int) -> list[tuple[PlacementStep, str, str]]:
        """Play so many seconds. Returns all that was done."""
        done = []
        for _ in range(seconds):
            self.wait()
            actions = self.decide()
            done += actions
            self.do(actions)
        return done

    def copies(self, model: str) -> list[str]:
        return sorted(member for member, models in self.held.items() if model in models)


def test_the_first_request_loads_a_model_where_there_is_most_room() -> None:
    fleet = Fleet({"a": 4 * GB, "b": 8 * GB}, {"m": GB})
    assert fleet.decide() == []
    fleet.placement.demand("m", 1.0, fleet.now)
    assert fleet.actions() == [PlacementAction(LOAD, "b", "m", "0 of 1 copies")]
    assert fleet.decide() == [], "it is being loaded"


def test_copies_follow_demand_up_quickly_and_outlast_a_lull() -> None:
    fleet = Fleet(dict.fromkeys("abcd", 4 * GB), {"m": GB}, PlacementPolicy(target=4.0))
    fleet.demands["m"] = 2.0
    fleet.run(60)
    assert len(fleet.copies("m")) == 1
    fleet.demands["m"] = 11.0
    fleet.run(30)
    assert len(fleet.copies("m")) == 3
    fleet.demands["m"] = 1000.0
    fleet.run(60)
    assert len(fleet.copies("m")) == 4
    fleet.demands["m"] = 0.0
    assert fleet.run(300) == [], "nobody needs the memory"


def test_the_longest_unused_model_makes_room() -> None:
    fleet = Fleet({"a": 2 * GB}, {"old": GB, "new": GB, "next": GB}, PlacementPolicy(hold=10.0))
    for model in ("old", "new"):
        fleet.demands = {model: 1.0}
        fleet.run(5)
    fleet.demands = dict.fromkeys(fleet.models, 0.0)
    fleet.run(100)
    assert fleet.held["a"] == {"old", "new"}
    fleet.demands["next"] = 1.0
    fleet.wait()
    (action,) = fleet.actions()
    assert action == PlacementAction(UNLOAD, "a", "old", "makes room for 'next' (0 of 1 copies)")
    assert fleet.decide() == [], "its memory is not free until the member says so"
    fleet.do([action[:3]])
    assert fleet.decide() == [(LOAD, "a", "next")]


def test_the_last_copy_of_a_model_in_use_stays() -> None:
    fleet = Fleet({"a": GB, "b": GB}, {"busy": GB, "wanted": GB})
    fleet.demands["busy"] = 20.0
    fleet.run(100)
    assert fleet.copies("busy") == ["a", "b"]
    fleet.placement.set_model("busy", GB, most=1)
    fleet.demands["wanted"] = 1.0
    fleet.run(100)
    assert len(fleet.copies("busy")) == len(fleet.copies("wanted")) == 1
    fleet.placement.set_model("third", GB)
    fleet.models["third"] = GB
    fleet.demands["third"] = 5.0
    assert fleet.run(300) == []


def test_models_without_a_copy_come_before_more_copies_of_others() -> None:
    fleet = Fleet({"a": 2 * GB, "b": GB}, {"loud": GB, "quiet": GB, "idle": GB}, PlacementPolicy(hold=0.0))
    fleet.demands["loud"] = 100.0
    fleet.wait()
    fleet.do(fleet.decide())
    fleet.demands["quiet"] = 0.5
    fleet.wait()
    # Equal room at both: the first by name.
    assert fleet.decide() == [(LOAD, "a", "quiet"), (LOAD, "b", "loud")]


def test_a_copy_that_was_just_loaded_stays() -> None:
    fleet = Fleet({"a": GB}, {"one": GB, "two": GB}, PlacementPolicy(hold=200.0))
    fleet.demands = {"one": 1.0, "two": 0.0}
    fleet.run(3)
    fleet.demands = {"one": 0.0, "two": 1.0}
    assert fleet.run(150) == []
    assert fleet.run(100) == [(UNLOAD, "a", "one"), (LOAD, "a", "two")]


def test_a_lost_member_is_replaced_and_a_draining_one_gets_nothing() -> None:
    fleet = Fleet({"a": 4 * GB, "b": 2 * GB, "c": GB}, {"m": GB})
    fleet.demands["m"] = 1.0
    fleet.run(5)
    assert fleet.copies("m") == ["a"]
    fleet.placement.set_member("b", 2 * GB, available=False)
    fleet.placement.remove_member("a")
    del fleet.held["a"]
    assert fleet.run(5) == [(LOAD, "c", "m")]


def test_a_member_that_leaves_while_it_loads_takes_its_order_along() -> None:
    fleet = Fleet({"a": 4 * GB, "b": GB}, {"m": GB})
    fleet.placement.demand("m", 1.0, fleet.now)
    assert fleet.decide() == [(LOAD, "a", "m")]
    fleet.placement.remove_member("a")
    assert fleet.decide() == [(LOAD, "b", "m")]


def test_a_failed_load_is_tried_elsewhere_and_later_again() -> None:
    fleet = Fleet({"a": 2 * GB, "b": GB}, {"m": GB}, PlacementPolicy(retry=60.0))
    fleet.demands["m"] = 1.0
    fleet.wait()
    pauses = []
    last = fleet.now
    for _ in range(4):
        while not (actions := fleet.decide()):
            fleet.wait()
        ((_, member, _),) = actions
        pauses.append((member, (fleet.now - last) // SECOND))
        last = fleet.now
        fleet.placement.load_failed(member, "m", fleet.now)
    assert pauses == [("a", 0), ("b", 0), ("a", 60), ("b", 0)]
    while not fleet.decide():
        fleet.wait()
    assert (fleet.now - last) // SECOND == 120


def test_an_order_that_nobody_confirms_is_given_again_after_a_while() -> None:
    fleet = Fleet({"a": GB}, {"m": GB}, PlacementPolicy(patience=30.0))
    fleet.demands["m"] = 1.0
    fleet.wait()
    assert fleet.decide() == [(LOAD, "a", "m")]
    for _ in range(30):
        fleet.wait()
        fleet.placement.set_held("a", (), fleet.now)
        assert fleet.decide() == []
    fleet.wait()
    fleet.placement.set_held("a", (), fleet.now)
    assert fleet.decide() == [(LOAD, "a", "m")]


def test_as_many_copies_as_were_asked_for_without_demand() -> None:
    fleet = Fleet(dict.fromkeys("abc", GB), {"m": GB})
    fleet.placement.set_model("m", GB, least=2)
    fleet.run(10)
    assert len(fleet.copies("m")) == 2
    fleet.placement.remove_model("m")
    assert fleet.decide() == []


def test_a_request_for_a_model_without_a_copy_counts_at_once() -> None:
    fleet = Fleet({"a": GB}, {"m": GB})
    fleet.wait(100)
    fleet.placement.demand("m", 0.0, fleet.now)
    fleet.placement.demand("m", 1.0, fleet.now + 1000)
    assert fleet.decide() == [(LOAD, "a", "m")]


def test_an_order_whose_member_was_lost_is_given_again() -> None:
    fleet = Fleet({"a": 2 * GB, "b": GB}, {"m": GB})
    fleet.demands["m"] = 1.0
    fleet.wait()
    assert fleet.decide() == [(LOAD, "a", "m")]
    fleet.placement.order_lost("a", "m")
    assert fleet.placement.copies("m") == 0
    fleet.placement.set_member("a", 2 * GB, available=False)
    assert fleet.decide() == [(LOAD, "b", "m")]


def test_a_copy_that_was_not_unloaded_stays_for_a_while() -> None:
    fleet = Fleet({"a": GB}, {"one": GB, "two": GB}, PlacementPolicy(hold=20.0, rise=1.0))
    fleet.demands = {"one": 1.0, "two": 0.0}
    fleet.run(2)
    fleet.demands = {"one": 0.0, "two": 1.0}
    while not (actions := fleet.decide()):
        fleet.wait()
    assert actions == [(UNLOAD, "a", "one")]
    fleet.placement.unload_failed("a", "one", fleet.now)
    began = fleet.now
    while not fleet.decide():
        fleet.wait()
    assert (fleet.now - began) // SECOND == 20


def test_what_stands_in_the_way_of_a_model() -> None:
    fleet = Fleet({"a": 2 * GB, "b": GB}, {"m": 2 * GB, "large": 3 * GB})
    assert fleet.placement.obstacle("m", fleet.now) is None
    large = fleet.placement.obstacle("large", fleet.now)
    assert large is not None
    assert large == ("it needs 3 GiB, and no member has more than 2 GiB for models", 0)
    fleet.placement.load_failed("a", "m", fleet.now)
    failed = fleet.placement.obstacle("m", fleet.now)
    assert failed is not None, "it fits nowhere else"
    assert failed.until_ns == fleet.now + 60 * SECOND
    assert fleet.placement.obstacle("m", failed.until_ns) is None
    fleet.placement.set_member("a", 2 * GB, available=False)
    fleet.placement.set_member("b", GB, available=False)
    assert fleet.placement.obstacle("large", fleet.now) is None, "no member is there: that may change"


DEMANDS = st.lists(
    st.dictionaries(st.sampled_from("klmnop"), st.sampled_from([0.0, 0.5, 3.0, 40.0])), min_size=1, max_size=12
)


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), min_size=6, max_size=6),
    DEMANDS,
)
@settings(max_examples=80, deadline=None)
def test_memory_is_kept_to_and_nothing_flaps(
    memory: list[int], sizes: list[int], demands: list[dict[str, float]]
) -> None:
    models = dict(zip("klmnop", (size * GB for size in sizes), strict=True))
    fleet = Fleet({f"s{place}": size * GB for place, size in enumerate(memory)}, models, PlacementPolicy(hold=5.0))
    for change in demands:
        fleet.demands.update(change)
        for _ in range(8):
            fleet.wait()
            for step, member, model in fleet.decide():
                if step is UNLOAD and fleet.demands.get(model):
                    assert len(fleet.copies(model)) > 1, "the last copy of a model in use"
                fleet.do([(step, member, model)])
                used = sum(models[each] for each in fleet.held[member])
                assert used <= fleet.memory[member]
    fleet.run(1200)
    assert fleet.run(100) == [], "with a steady demand there is an end"
