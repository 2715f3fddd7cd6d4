"""Which of several routers places models."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from nerite.router.placement_lease import PlacementLease

SECOND = 1_000_000_000


class Redis:
    """A connection that a test answers."""

    def __init__(self) -> None:
        self.there = True
        self.asked: list[Sequence[bytes]] = []

    def ask(self, command: Sequence[bytes], lease: PlacementLease) -> bool:
        if self.there:
            self.asked.append(command)
        return self.there


def test_a_router_without_redis_places_models() -> None:
    redis = Redis()
    redis.there = False
    lease = PlacementLease("p", redis)
    lease.exchange({}, SECOND)
    assert lease.leads(SECOND)


def test_the_one_with_the_lease_places_models_by_the_demand_of_all() -> None:
    lease = PlacementLease("p", Redis())
    lease.exchange({"m": 1.0}, SECOND)
    assert not lease.leads(SECOND), "nobody knows yet"
    lease.take(b'leads\n{"m":0.5,"n":2}\n{"m":0.25}', SECOND)
    assert lease.leads(SECOND)
    assert lease.others == {"m": 0.75, "n": 2.0}
    lease.take(b"", 2 * SECOND)
    assert not lease.leads(2 * SECOND)
    assert lease.others == {}


def test_a_lease_that_nobody_confirms_is_over() -> None:
    redis = Redis()
    lease = PlacementLease("p", redis)
    lease.exchange({}, SECOND)
    lease.take(b"", SECOND)
    lease.take(OSError("lost"), 2 * SECOND)
    assert not lease.leads(11 * SECOND)
    assert lease.leads(12 * SECOND), "Redis has not answered for long"
    redis.there = False
    lease.take(b'leads\n{"m":1}', 13 * SECOND)
    lease.exchange({}, 14 * SECOND)
    assert lease.leads(14 * SECOND)
    assert lease.others == {}, "what others have told is not known any more"


def test_what_is_told() -> None:
    lease = PlacementLease("p", Redis(), "me")
    command = lease.command({f"m{number}": float(number) for number in range(1200)})
    assert command[3:6] == (b"nerite:placement:p:lease", b"nerite:placement:p:demand", b"me")
    told = orjson.loads(command[-1])
    assert len(told) == 1000
    assert told["m1199"] == 1199.0


def test_what_others_wrote_is_not_trusted() -> None:
    lease = PlacementLease("p", Redis())
    lease.take(b'leads\n[1]\n{"m":"x","n":1}\n{', SECOND)
    assert lease.others == {"n": 1.0}
