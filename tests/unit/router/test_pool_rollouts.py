"""Rollouts that a router leads: it asks and tells the members of a pool, and gives way to other routers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import orjson
import pytest

from fleet_server import Server
from nerite.balancing.member import Member
from nerite.cluster.settings import MemberSource, PoolSettings, RolloutSettings
from nerite.config.rollout_spec import RolloutSpec, WhenLost
from nerite.rollouts.fleet_order import FleetOrder
from nerite.rollouts.rollout import RolloutReason, RolloutState
from nerite.rollouts.run import RolloutRun
from nerite.rollouts.webhook import WebhookClient, Webhooks
from nerite.router.http_members import HttpMembers, MemberAnswer
from nerite.router.pool_rollouts import PoolRollout
from nerite.router.pools import RouterPool

SPEC = RolloutSpec("2", "1", steps=(50.0, 100.0), hold=0.0, requests=0, gates=("errors=+50%,5%",))
GATE = SPEC.gates[0]


class Members(HttpMembers):
    """Members without connections, which do what they are told."""

    def __init__(self, *names: str) -> None:
        super().__init__(1.0)
        self.servers = {name: Server(name) for name in names}

    async def ask(
        self, member: Member, method: str, path: str, body: bytes = b"", seconds: float = 5.0, fields: bytes = b""
    ) -> MemberAnswer:
        server, now = self.servers[member.name], time.monotonic_ns()
        if server.problem:
            return MemberAnswer(0, problem=server.problem)
        if method == "POST":
            assert path == "/v2/models/m/rollout/follow"
            order, run = FleetOrder.of_json(orjson.loads(body)), server.run
            lead = None if run is None else run.lead
            if run is not None and (lead is None or order.term < lead.order.term):
                return MemberAnswer(409, b'{"error": "it follows another one"}')
            server.hear(order, now)
        elif server.run is None:
            return MemberAnswer(404)
        return MemberAnswer(200, orjson.dumps(server.status(now)))


class World:
    """A pool of two members, and routers before it."""

    def __init__(self) -> None:
        self.members = Members("a", "b")
        self.pool = RouterPool(PoolSettings("p", MemberSource()))
        self.pool.set_members([Member(name, f"{name}:80") for name in self.members.servers])

    def router(self, spec: RolloutSpec = SPEC, when_lost: WhenLost = WhenLost.HOLD) -> PoolRollout:
        return PoolRollout(
            self.pool, RolloutSettings({"m": spec}, when_lost), "m", self.members, Webhooks(WebhookClient())
        )

    @property
    def states(self) -> list[tuple[str, float]]:
        runs = [server.run for server in self.members.servers.values()]
        return [("", 0.0) if run is None else (str(run.rollout.state), run.rollout.weight) for run in runs]


def steps(*rollouts: PoolRollout) -> dict[str, Any]:
    """Let routers look once, one after the other; return what the last one tells."""
    for rollout in rollouts:
        asyncio.run(rollout.step())
    return rollouts[-1].status()


def test_it_promotes_by_what_members_have_counted_together() -> None:
    world = World()
    rollout = world.router()
    steps(rollout)
    assert steps(rollout)["state"] == "running"
    steps(rollout)
    assert world.states == [("running", 50), ("running", 50)]
    for server in world.members.servers.values():
        server.counts = [[GATE, "", "", "0", "0.5", 0, 0, 150, 150, 0.0, 0.0]]
    told = steps(rollout, rollout)
    assert (told["state"], told["weight"], told["pool"], told["model"]) == ("promoted", 100, "p", "m")
    steps(rollout)
    assert world.states == [("promoted", 100), ("promoted", 100)]


def test_harm_that_no_member_shows_alone_is_rolled_back() -> None:
    world = World()
    rollout = world.router()
    steps(rollout, rollout, rollout)
    for server in world.members.servers.values():
        server.counts = [[GATE, "", "", "0", "0.5", 7, 0, 60, 60, 7.0, 0.0]]
    steps(rollout, rollout)
    assert world.states == [("rolled_back", 0), ("rolled_back", 0)]


def test_it_begins_when_all_members_answer() -> None:
    world = World()
    world.members.servers["b"].problem = "cannot be reached"
    rollout = world.router()
    assert steps(rollout) == {"pool": "p", "model": "m", "state": "", "text": "cannot be reached"}
    assert world.states == [("", 0), ("", 0)]
    steps(world.router(when_lost=WhenLost.GO_ON))
    assert world.states == [("checking", 0), ("", 0)]


def test_a_router_that_starts_later_leads_and_the_other_stands_by() -> None:
    world = World()
    first, second = world.router(), world.router()
    number = steps(first, first)["id"]
    assert steps(second)["id"] == number
    assert steps(first)["text"] == "this router no longer leads the rollout: another router does"
    assert steps(second, first)["state"] == "", "it does not take over while the other is heard"
    for server in world.members.servers.values():
        assert server.run is not None and server.run.lead is not None
        server.run.lead = type(server.run.lead)(server.run.lead.order, time.monotonic_ns() - 31_000_000_000)
    assert steps(first)["id"] == number
    assert "another router does" in steps(second)["text"]


def test_a_router_with_an_earlier_file_never_takes_over() -> None:
    world = World()
    earlier, later = world.router(), world.router(RolloutSpec("3", "1", gates=("errors",)))
    steps(earlier)
    assert steps(later)["to"] == "3"
    assert "a later cluster file asks for another" in steps(earlier)["text"]
    for server in world.members.servers.values():
        assert server.run is not None and server.run.lead is not None
        server.run.lead = type(server.run.lead)(server.run.lead.order, 0)
    steps(earlier)
    assert {server.run and server.run.spec.to for server in world.members.servers.values()} == {"3"}


def test_a_rollout_of_an_operator_holds_until_it_has_ended() -> None:
    world = World()
    own = world.members.servers["a"]
    own.run = RolloutRun("m", "0" * 12, RolloutSpec("3", "1"), "now")
    rollout = world.router()
    assert steps(rollout)["text"] == "a has a rollout of its own, which is checking: promote or abort it first"
    own.end(RolloutState.ABORTED, RolloutReason.OPERATOR, "an operator aborted the rollout")
    own.run = None
    assert steps(rollout)["state"] == "running"


@pytest.mark.parametrize("body", [b"[]", b"{}", b"<html>", b'{"state": "x", "fleet": null}'])
def test_members_of_other_releases_are_named(body: bytes) -> None:
    world = World()

    async def ask(*_: object, **__: object) -> MemberAnswer:
        return MemberAnswer(200, body)

    world.members.ask = ask  # type: ignore[method-assign]
    assert "its status cannot be read, is it of another release?" in steps(world.router())["text"]
