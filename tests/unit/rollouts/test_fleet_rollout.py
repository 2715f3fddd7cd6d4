"""The decider of a fleet's rollout: given reports and counts, it makes one decision for all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fleet_server import Server
from nerite.config.rollout_spec import AtDeadline, RolloutSpec, WhenLost
from nerite.core.errors import Conflict, InvalidArgument
from nerite.rollouts.fleet import LOST_NS, FleetRollout, Replica, order_under_way
from nerite.rollouts.fleet_order import FleetOrder
from nerite.rollouts.rollout import Rollout, RolloutCommand, RolloutReason, RolloutState
from nerite.rollouts.run import RolloutRun

SECOND = 1_000_000_000
SPEC = RolloutSpec("2", "1", steps=(50.0, 75.0, 100.0), hold=10.0, requests=0, gates=("errors=+50%,5%",))
ID = "0123456789ab"


class World:
    """Three replicas, a Prometheus and a command."""

    def __init__(self, spec: RolloutSpec = SPEC, when_lost: WhenLost = WhenLost.HOLD) -> None:
        self.now = 0
        self.spec, self.when_lost = spec, when_lost
        self.servers = {name: Server(name) for name in ("a", "b", "c")}
        self.counts: dict[tuple[str, str, str, float], int] = {}
        self.prometheus = True
        self.unread: set[str] = set()
        self.decided: list[tuple[str, float, str]] = []
        self.command()

    def command(self) -> None:
        """Start the command, again."""
        found = {name: server.replica(self.now) for name, server in self.servers.items()}
        self.fleet = FleetRollout.begin("m", self.spec, found, ID, "2026-01-01T00:00:00Z", when_lost=self.when_lost)

    def requests(self, count: int, bad: int = 0, others_bad: int = 0, *, of: str = "a", weight: float = 50.0) -> None:
        """Count requests of each arm, of which some are bad."""
        for arm, failed in (("candidate", bad), ("baseline", others_bad)):
            for metric, value in (("judged", count), ("bad", failed), ("bad_units", failed)):
                key = (f"boot of {of}", f"nerite_rollout_{metric}_total", arm, weight / 100)
                self.counts[key] = self.counts.get(key, 0) + value

    def samples(self) -> Iterator[tuple[Mapping[str, str], float]]:
        for (boot, name, arm, probability), value in self.counts.items():
            yield {
                "__name__": name, "boot": boot, "arm": arm, "gate": self.spec.gates[0], "prompt": "", "tenant": "",
                "stream": "0", "probability": repr(probability),
            }, float(value)  # fmt: skip

    def look(self, seconds: float = 1.0) -> None:
        """Do what the command does at each look."""
        self.now += round(seconds * SECOND)
        self.fleet.members(self.servers)
        if self.prometheus:
            boots = [f"boot of {name}" for name in self.servers if name not in self.unread]
            self.fleet.count(self.samples(), boots, self.now)
        else:
            self.fleet.miss("it is down", self.now)
        self.decided += [(str(each.state), each.weight, each.text) for each in self.fleet.decide(self.now)]
        for name, server in self.servers.items():
            self.fleet.see(name, server.hear(self.fleet.order(name), self.now), self.now)

    @property
    def weights(self) -> list[float]:
        return [server.weight for server in self.servers.values()]


def test_it_goes_from_step_to_step_and_is_promoted_on_all() -> None:
    world = World()
    world.look()
    assert world.weights == [0, 0, 0]
    world.look()
    assert world.weights == [50, 50, 50]
    world.look(11)
    world.look()
    assert world.weights == [75, 75, 75]
    world.look(11)
    world.look()
    assert world.weights == [75, 75, 75]  # without evidence nothing is promoted
    for name in world.servers:
        world.requests(400, of=name, weight=75.0)
    world.look()
    assert world.weights == [100, 100, 100]
    assert world.fleet.done
    assert [state for state, _, _ in world.decided] == ["running", "running", "promoted"]
    world.look()
    assert len(world.decided) == 3


def test_harm_that_no_replica_shows_alone_rolls_back_all() -> None:
    world = World()
    world.look()
    world.look()
    for name in world.servers:
        world.requests(60, bad=5, of=name)
        world.look()
        last = world.weights
        assert last == [50, 50, 50] or name == "c"
    world.look()
    assert world.weights == [0, 0, 0]
    assert world.decided[-1][0] == "rolled_back"


def test_counts_of_an_ended_process_stay_and_a_new_one_begins_at_0() -> None:
    world = World()
    world.look()
    world.look()
    world.requests(100)
    world.look()
    world.counts = {("new boot", *key[1:]): value for key, value in world.counts.items()}
    world.look()
    assert world.fleet.verdict is not None
    assert world.fleet.verdict.candidate_requests == 200
    world.look()
    assert world.fleet.verdict.candidate_requests == 200


def test_a_command_that_is_started_again_goes_on() -> None:
    world = World()
    world.look()
    world.look()
    world.look(11)
    world.look()
    assert world.weights == [75, 75, 75]
    world.requests(400, weight=75.0)
    world.look(5)
    world.command()
    assert (world.fleet.id, world.fleet.rollout.step) == (ID, 1)
    world.look()
    world.look(3)
    assert world.weights == [75, 75, 75]  # the time in the step before counts, that between the commands does not
    world.look(3)
    assert world.weights == [100, 100, 100]


def test_a_command_with_other_settings_is_refused() -> None:
    world = World()
    world.look()
    world.spec = replace(SPEC, hold=11.0)
    with pytest.raises(Conflict, match="other settings"):
        world.command()
    world.spec = replace(SPEC, webhook="http://hooks/")
    world.command()
    assert world.fleet.rollout.spec.webhook == "http://hooks/"
    assert world.fleet.order("a").rollout.spec.webhook == ""


def test_the_older_of_two_commands_gives_up() -> None:
    world = World()
    world.look()
    older = world.fleet
    world.command()
    world.look()
    with pytest.raises(Conflict, match="its term is 2"):
        world.servers["a"].hear(older.order("a"), world.now)
    with pytest.raises(Conflict, match="another fleet command leads"):
        older.see("a", world.servers["a"].replica(world.now), world.now)


def test_it_holds_while_a_replica_is_lost() -> None:
    world = World()
    world.look()
    world.look()
    world.servers["b"].problem = "connection refused"
    world.look()
    world.look(11)
    world.look(100)
    assert world.weights == [50, 50, 50]
    assert "b: connection refused" in world.fleet.holds
    world.servers["b"].problem = ""
    world.look()
    world.look()
    assert world.weights == [75, 75, 75]


def test_harm_is_rolled_back_while_a_replica_is_lost_and_that_follows_later() -> None:
    world = World()
    world.look()
    world.look()
    world.servers["b"].problem = "connection refused"
    world.requests(200, bad=100)
    world.look()
    assert world.weights == [0, 50, 0]
    assert (world.fleet.done, world.fleet.behind) == (False, ["b"])
    world.servers["b"].problem = ""
    world.look()
    assert world.weights == [0, 0, 0]
    assert world.fleet.done


def test_it_goes_on_without_a_lost_replica_if_asked() -> None:
    world = World(when_lost=WhenLost.GO_ON)
    world.look()
    world.servers["b"].problem = "connection refused"
    world.look()
    world.look(11)
    assert world.weights == [75, 0, 75]


def test_it_rolls_back_for_a_lost_replica_if_asked() -> None:
    world = World(when_lost=WhenLost.ROLL_BACK)
    world.look()
    world.look()
    world.servers["b"].problem = "connection refused"
    world.look()
    world.look(LOST_NS / SECOND - 1)
    assert world.weights == [50, 50, 50]
    world.look(1)
    assert world.weights == [0, 50, 0]
    assert "b was lost for a minute: connection refused" in world.decided[-1][2]


def test_it_holds_while_prometheus_or_one_replica_is_not_read() -> None:
    world = World()
    world.look()
    world.look()
    world.unread = {"c"}
    world.look(11)
    assert world.fleet.problems == {"c": "Prometheus has not read its metrics lately"}
    world.unread, world.prometheus = set(), False
    world.look(5)
    lead = world.servers["a"].run.lead  # type: ignore[union-attr]
    assert lead is not None and lead.leads(world.now)
    world.look(61)
    assert world.weights == [50, 50, 50]
    assert not lead.leads(world.now)  # replicas watch by themselves
    world.prometheus = True
    world.look()
    assert world.weights == [75, 75, 75]
    assert lead.leads(world.now)


def test_a_new_replica_is_brought_to_the_present_step() -> None:
    world = World()
    world.look()
    world.look()
    world.servers["d"] = Server("d")
    world.look()
    assert world.weights == [50, 50, 50, 50]
    del world.servers["a"]
    world.look(11)
    assert world.weights == [75, 75, 75]


def test_a_check_that_fails_on_one_ends_all() -> None:
    world = World()
    world.servers["b"].blocked = "another tokenizer"
    world.look()
    world.look()
    assert world.decided == [("aborted", 0.0, "b: another tokenizer")]
    assert world.fleet.done


def test_a_check_that_fails_on_a_late_replica_holds() -> None:
    world = World()
    world.look()
    world.look()
    world.servers["d"] = Server("d")
    world.servers["d"].blocked = "no memory"
    world.look()
    world.look(11)
    world.look()
    assert world.weights == [50, 50, 50, 0]
    assert "nerite rollout clear m --url d" in world.fleet.problems["d"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [(RolloutState.ROLLED_BACK, RolloutReason.WORSE), (RolloutState.ABORTED, RolloutReason.OPERATOR)],
)
def test_how_one_replica_ends_holds_for_all(state: RolloutState, reason: RolloutReason) -> None:
    world = World()
    world.look()
    world.look()
    world.servers["c"].end(state, reason, "as it is")
    world.look()
    world.look()
    assert world.decided[-1] == (str(state), 0.0, "c: as it is")
    assert world.weights == [0, 0, 0]


def test_a_candidate_that_is_not_ready_on_one_replica_rolls_back() -> None:
    world = World()
    world.look()
    world.look()
    world.servers["c"].ready = False
    for _ in range(12):
        world.look()
    assert world.decided[-1][0] == "rolled_back"


def test_a_wish_is_carried_out_once_and_answered() -> None:
    world = World()
    world.look()
    world.look()
    lead = world.servers["a"].run.lead  # type: ignore[union-attr]
    assert lead is not None
    lead.ask(RolloutCommand.PAUSE, "w1", world.now, force=False)
    world.look()
    world.look()
    assert world.decided[-1][0] == "paused"
    assert {server.run.rollout.state for server in world.servers.values() if server.run} == {RolloutState.PAUSED}
    assert lead.wish is None


def test_a_replica_with_a_rollout_of_its_own_is_refused() -> None:
    run = RolloutRun("m", ID, SPEC, "now")
    own = Replica.of_status({**run.status(), "fleet": None})
    with pytest.raises(Conflict, match="a has a rollout of its own"):
        order_under_way({"a": own}, SPEC)


def test_limits_alone_are_no_gates_of_a_fleet() -> None:
    order = FleetOrder(ID, 1, 1, "now", Rollout(replace(SPEC, gates=("restarts<=0",))))
    with pytest.raises(InvalidArgument, match="such as errors or p99"):
        FleetRollout("m", order)


def test_a_limit_that_one_replica_exceeds_rolls_back_all() -> None:
    world = World(replace(SPEC, gates=(*SPEC.gates, "restarts<=0")))
    world.look()
    world.look()
    run = world.servers["b"].run
    assert run is not None
    run.judge.gauge("restarts", 3.0, 0.0, world.now)
    run.findings(world.now)
    world.look()
    world.look()
    assert "restarts<=0" in world.decided[-1][2]
    assert world.weights == [0, 0, 0]


def test_a_promotion_at_the_deadline_waits_for_all_replicas() -> None:
    world = World(replace(SPEC, deadline=20.0, at_deadline=AtDeadline.PROMOTE))
    world.look()
    world.look()
    world.servers["b"].problem = "gone"
    world.look(25)
    world.look(1)
    assert world.decided[-1][0] == "inconclusive"


def orders() -> dict[str, Any]:
    return FleetOrder(ID, 1, 1, "now", Rollout(SPEC)).as_json()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"id": "x"}, "id: must have 12"),
        ({"term": 0}, "term: must be"),
        ({"term": True}, "term: must be"),
        ({"lease": 0}, "lease: must be"),
        ({"blind": 1}, "blind: must be"),
        ({"text": 5}, "text: must be"),
        ({"verdict": {"x": "y"}}, "verdict: must be"),
        ({"verdict": {"reason": 5}}, "verdict: its values"),
        ({"rollout": []}, "rollout: must be"),
        ({"rollout": {}}, "rollout: has another form"),
        ({"more": 1}, "exactly the keys"),
    ],
)
def test_orders_that_are_refused(change: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidArgument, match=told):
        FleetOrder.of_json({**orders(), **change})


def test_an_order_needs_a_baseline() -> None:
    with pytest.raises(InvalidArgument, match="from: is missing"):
        FleetOrder.of_json(FleetOrder(ID, 1, 1, "now", Rollout(replace(SPEC, baseline=""))).as_json())
    assert FleetOrder.of_json(orders()).as_json() == orders()


def test_a_replica_whose_check_failed_is_asked_again_after_clear() -> None:
    world = World()
    world.look()
    world.look()
    late = world.servers["d"] = Server("d")
    late.blocked = "no memory"
    world.look()
    late.blocked, late.run = "", None
    world.look()
    assert world.weights == [50, 50, 50, 50]
    assert world.fleet.problems == {}


def test_what_a_replica_keeps_outlives_a_restart() -> None:
    world = World()
    world.look()
    world.look()
    server = world.servers["a"]
    assert server.run is not None
    server.run = RolloutRun.of_json("m", server.run.as_json(), world.now)
    found = order_under_way({"a": server.replica(world.now)}, SPEC)
    assert found is not None and found.rollout.as_json() == world.fleet.order("a").rollout.as_json()
    lead = server.run.lead
    assert lead is not None and lead.leads(world.now + 60 * SECOND) and not lead.leads(world.now + 61 * SECOND)
    with pytest.raises(Conflict, match="is silent for 61 s"):
        lead.ask(RolloutCommand.PROMOTE, "w", world.now + 61 * SECOND, force=True)


def declared(world: World, spec: RolloutSpec, number: str = ID) -> FleetRollout:
    """Return the rollout that a router leads whose cluster file asks for it."""
    found = {name: server.replica(world.now) for name, server in world.servers.items()}
    world.fleet = FleetRollout.of_declaration(
        "m", spec, found, number, "2026-01-01T00:00:00Z", lease=30.0, when_lost=WhenLost.HOLD
    )
    return world.fleet


OTHER = "fedcba987654"


def test_what_is_declared_is_acted_on_once() -> None:
    world = World()
    declared(world, SPEC)
    world.look()
    world.look()
    assert world.weights == [50, 50, 50]
    assert declared(world, SPEC, OTHER).id == ID, "another router goes on with it"
    world.servers["a"].end(RolloutState.ABORTED, RolloutReason.OPERATOR, "an operator aborted the rollout")
    world.look()
    world.look()
    assert world.fleet.rollout.state is RolloutState.ABORTED
    again = declared(world, SPEC, OTHER)
    assert (again.id, again.rollout.state) == (ID, RolloutState.ABORTED), "it is not started again"
    world.servers["d"] = Server("d")
    world.look()
    assert world.servers["d"].run is not None and world.servers["d"].run.rollout.state is RolloutState.ABORTED


def test_a_change_of_what_is_declared_begins_another_rollout() -> None:
    world = World()
    declared(world, SPEC)
    world.look()
    world.look()
    changed = declared(world, replace(SPEC, hold=20.0), OTHER)
    assert (changed.id, changed.rollout.state, changed.order("a").term) == (OTHER, RolloutState.CHECKING, 2)
    world.look()
    assert declared(world, SPEC, "0" * 12).id == "0" * 12, "to change it back is a change, too"


def test_a_version_that_was_promoted_before_is_not_rolled_out_again() -> None:
    world = World()
    declared(world, SPEC)
    world.look()
    for server in world.servers.values():
        server.end(RolloutState.PROMOTED, RolloutReason.FORCED, "an operator promoted the candidate")
    changed = declared(world, replace(SPEC, hold=20.0), OTHER)
    assert (changed.id, changed.rollout.state) == (OTHER, RolloutState.PROMOTED)
    assert declared(world, replace(SPEC, to="3"), OTHER).rollout.state is RolloutState.CHECKING


def test_rollouts_of_operators_hold() -> None:
    world = World()
    declared(world, SPEC)
    world.look()
    own = world.servers["b"]
    own.run = RolloutRun("m", OTHER, replace(SPEC, to="3"), "now")
    for server in world.servers.values():
        server.run = own.run
    with pytest.raises(Conflict, match="a has a rollout of its own, which is checking"):
        declared(world, replace(SPEC, to="4"))
    own.end(RolloutState.ROLLED_BACK, RolloutReason.WORSE, "worse")
    with pytest.raises(Conflict, match="a has had another rollout since"):
        declared(world, SPEC)
    assert declared(world, replace(SPEC, to="4")).rollout.state is RolloutState.CHECKING


def test_a_router_with_a_later_file_overtakes_an_earlier_one() -> None:
    world = World()
    earlier = declared(world, SPEC)
    world.look()
    later = declared(world, replace(SPEC, to="3"), OTHER)
    assert earlier.overtaken(later.order("a")) == "a later cluster file asks for another"
    assert later.overtaken(earlier.order("a")) == "" == later.overtaken(None)
    assert earlier.overtaken(declared(world, SPEC).order("a")) == "another router does"
