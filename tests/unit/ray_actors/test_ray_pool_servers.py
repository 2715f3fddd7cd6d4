"""Which servers are created, woken and stopped in Ray, as nodes come, drain and go. With a fake clock."""

from __future__ import annotations

import math

from nerite.autoscaling.policy import ScalingPolicy
from nerite.cluster.settings import ClusterSettings, MemberSource, PoolSettings, RouterSettings, ServerResources
from nerite.ray.plan import PoolPlan, ray_plan
from nerite.ray.pool_servers import NodeView, PoolServers, ServerOrder, ServerStep, ServerView

DRAIN = 40.0
LARGE = {"CPU": 8.0, "GPU": 1.0}


def plan(replicas: int = 2, scaling: ScalingPolicy | None = None, flags: tuple[str, ...] = ()) -> PoolPlan:
    pool = PoolSettings(
        "main",
        MemberSource(models="/models", replicas=replicas, flags=flags),
        scaling=scaling,
        resources=ServerResources(gpus=1),
    )
    return ray_plan(ClusterSettings(RouterSettings(), (pool,), "/cluster.toml"), "c").pools[0]


class Place:
    """Ray as it is seen: what is ordered happens at once, unless it is held."""

    def __init__(self, replicas: PoolServers, digest: str, *nodes: str) -> None:
        self.replicas = replicas
        self.digest = digest
        self.nodes = {name: NodeView(LARGE, name) for name in nodes}
        self.servers: dict[str, ServerView] = {}
        self.starting: set[str] = set()
        """Servers that have a node and are not ready."""
        self.full = False
        """No node has room for another server."""
        self.now = 0.0

    @property
    def members(self) -> list[str]:
        return [line.partition("name=")[2] for line in self.replicas.lines(self.servers, self.nodes)]

    def turn(self, wanted: int = 2, seconds: float = 1.0) -> list[ServerOrder]:
        self.now += seconds
        orders = self.replicas.decide(self.now, wanted, self.servers, self.nodes, set(self.members))
        for order in orders:
            if order.step is ServerStep.STOP:
                del self.servers[order.name]
            elif order.step is ServerStep.WAKE:
                self.servers[order.name] = self.servers[order.name]._replace(standby=False, ready=False)
            else:
                standby = order.step is ServerStep.CREATE_STANDBY
                node = "" if self.full else order.node
                self.servers[order.name] = ServerView(False, standby, f"h:1 name={order.name}", node, self.digest)
        return orders

    def ready(self, *names: str) -> None:
        for name in names or self.servers:
            self.servers[name] = self.servers[name]._replace(ready=True)

    def settle(self, wanted: int = 2) -> None:
        """Turn until nothing happens any more: all that is created is ready at once."""
        while any([self.turn(wanted), self.turn(wanted), self.turn(wanted)]):
            self.ready()


def place(*nodes: str, planned: PoolPlan | None = None) -> Place:
    planned = planned or plan()
    return Place(PoolServers(planned, {}, DRAIN), planned.digest, *nodes)


def test_servers_are_spread_over_nodes() -> None:
    ray = place("a", "b", "c")
    orders = ray.turn(3)
    assert [order.step for order in orders] == [ServerStep.CREATE] * 3
    assert sorted(order.node for order in orders) == ["a", "b", "c"]
    assert ray.members == []
    ray.ready("main/2")
    assert (ray.turn(3), ray.members) == ([], ["main/2"])


def test_a_node_that_is_too_small_is_not_asked() -> None:
    ray = place("a", "b")
    ray.nodes["a"] = NodeView({"CPU": 8.0})
    assert [order.node for order in ray.turn()] == ["b", "b"]
    ray = place()
    assert [order.node for order in ray.turn()] == ["", ""]


def test_a_lost_node_takes_its_members_away_at_once() -> None:
    ray = place("a", "b")
    ray.settle()
    node = ray.servers["main/1"].node
    del ray.nodes[node]
    assert ray.members == ["main/2"]
    assert ray.turn() == []  # Ray starts the actor again elsewhere
    ray.servers["main/1"] = ray.servers["main/1"]._replace(node="b", ready=False)
    assert (ray.turn(), ray.members) == ([], ["main/2"])
    ray.ready()
    assert (ray.turn(), ray.members) == ([], ["main/1", "main/2"])


def test_an_actor_that_has_ended_for_good_is_created_again_with_backoff() -> None:
    ray = place("a", "b")
    ray.settle()
    delays = []
    for _ in range(9):
        del ray.servers["main/1"]
        ray.replicas.ended("main/1", ray.now)
        waited = 0.0
        while not ray.turn(seconds=0.25):
            waited += 0.25
        delays.append(waited + 0.25)
    assert delays[:4] == [0.5, 1.0, 2.0, 4.0] and delays[-1] == 30.0
    ray.ready()
    ray.turn()
    ray.replicas.ended("main/1", ray.now)
    del ray.servers["main/1"]
    assert not ray.turn(seconds=0.25) and ray.turn(seconds=0.25)


def test_servers_of_a_draining_node_stay_until_others_are_ready() -> None:
    ray = place("a", "b")
    ray.settle()
    node = ray.servers["main/1"].node
    ray.nodes[node] = ray.nodes[node]._replace(ends_in=math.inf)
    (order,) = ray.turn()
    assert order == (ServerStep.CREATE, "main/3", "b" if node == "a" else "a")
    assert (ray.turn(), ray.members) == ([], ["main/1", "main/2"])
    ray.ready("main/3")
    ray.turn()
    assert ray.members == ["main/2", "main/3"]
    assert ray.turn() == [(ServerStep.STOP, "main/1", "")]
    assert ray.turn() == []


def test_a_server_leaves_in_time_before_its_node_ends() -> None:
    ray = place("a", "b")
    ray.settle()
    node = ray.servers["main/1"].node
    ray.nodes[node] = ray.nodes[node]._replace(ends_in=DRAIN + 60)
    ray.turn()
    assert ray.members == ["main/1", "main/2"]
    ray.nodes[node] = ray.nodes[node]._replace(ends_in=DRAIN)
    ray.turn()
    assert ray.members == ["main/2"]
    assert (ServerStep.STOP, "main/1", "") in ray.turn()


def test_servers_with_old_settings_are_replaced_one_after_the_other() -> None:
    ray = place("a", "b")
    ray.settle()
    changed = plan(flags=("--log-verbose=1",))
    ray.replicas = PoolServers(changed, {"main/1": False, "main/2": False}, DRAIN)
    ray.digest = changed.digest
    assert [name for _, name, _ in ray.turn()] == ["main/3"]
    ray.ready()
    ray.turn()
    assert ray.members == ["main/2", "main/3"]
    assert [(order.step, order.name) for order in ray.turn()] == [(ServerStep.STOP, "main/1")]
    ray.settle()
    assert {view.digest for view in ray.servers.values()} == {changed.digest} and len(ray.servers) == 2


def test_an_old_server_makes_room_if_the_new_one_finds_none() -> None:
    ray = place("a")
    ray.settle()
    changed = plan(flags=("--log-verbose=1",))
    ray.replicas = PoolServers(changed, {"main/1": False, "main/2": False}, DRAIN)
    ray.digest, ray.full = changed.digest, True
    assert [name for _, name, _ in ray.turn()] == ["main/3"]
    assert (ray.turn(seconds=10), ray.members) == ([], ["main/1", "main/2"])
    ray.turn(seconds=16)
    assert ray.members == ["main/2"]
    assert (ServerStep.STOP, "main/1", "") in ray.turn()


def test_a_standby_is_woken_and_is_a_member_once_it_has_its_models() -> None:
    ray = place("a", "b", planned=plan(scaling=ScalingPolicy(least=1, most=4, warm=1, rate=10)))
    ray.turn(1)
    ray.ready()
    assert [order.step for order in ray.turn(1)] == [ServerStep.CREATE_STANDBY]
    ray.ready()
    ray.turn(1)
    assert ray.members == ["main/1"]
    assert ray.turn(2)[0] == (ServerStep.WAKE, "main/2", "")
    assert (ray.turn(2), ray.members) == ([], ["main/1"])
    ray.ready("main/2")
    ray.turn(2)
    assert ray.members == ["main/1", "main/2"]


def test_what_was_woken_and_is_started_again_by_ray_is_woken_again() -> None:
    ray = place("a", "b", planned=plan(scaling=ScalingPolicy(least=1, most=4, warm=1, rate=10)))
    ray.turn(1)
    ray.ready()
    ray.turn(1)
    ray.ready()
    ray.turn(2)
    ray.servers["main/2"] = ray.servers["main/2"]._replace(standby=True, ready=True)
    assert (ServerStep.WAKE, "main/2", "") in ray.turn(2)
    assert "main/2" not in ray.members


def test_fewer_are_wanted() -> None:
    ray = place("a", "b")
    ray.settle()
    ray.turn(1)
    assert ray.members == ["main/1"]
    assert ray.turn(1) == [(ServerStep.STOP, "main/2", "")]
