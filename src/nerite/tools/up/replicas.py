"""Which servers of a pool to start, wake and stop, so that it has as many as are wanted. Pure.

A server that is to go leaves the pool's members first, and is stopped only when the router does not list it any more:
then it gets no new requests, and those that it has end before its process does. A server that is to be replaced stays
a member until another one is ready in its place, unless it has no time for that.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import StrEnum, auto
from itertools import count
from typing import NamedTuple


class ReplicaStep(StrEnum):
    """What is to be done with a server."""

    START = auto()
    """Start it, as a member of the pool."""
    STAND_BY = auto()
    """Start it without models, to be woken."""
    WAKE = auto()
    """Have it load its models, as a member of the pool."""
    JOIN = auto()
    """Add it to the members: it is ready."""
    LEAVE = auto()
    """Remove it from the members."""
    STOP = auto()


class ReplicaOrder(NamedTuple):
    """A step for one server."""

    step: ReplicaStep
    name: str


class _Replica:
    """A server of the pool."""

    __slots__ = ("hurried", "joined", "leaving", "name", "ready", "replaced", "standby")

    def __init__(self, name: str, *, standby: bool, joined: bool) -> None:
        self.name = name
        self.standby = standby
        self.joined = joined
        """It is among the members."""
        self.ready = False
        self.leaving = False
        self.replaced = False
        self.hurried = False


class PoolReplicas:
    """The servers of one pool on this machine."""

    def __init__(self, pool: str, members: Collection[str] = (), standbys: Collection[str] = ()) -> None:
        """``members`` and ``standbys`` are names of servers that were started already."""
        self._pool = pool
        self._replicas = {name: _Replica(name, standby=False, joined=True) for name in members}
        self._replicas |= {name: _Replica(name, standby=True, joined=False) for name in standbys}

    @property
    def joined(self) -> list[str]:
        """Names of the members, as the members file has them."""
        return [each.name for each in self._replicas.values() if each.joined]

    @property
    def names(self) -> set[str]:
        """Names of all servers that are to run, or to end when the router lists them no more."""
        return set(self._replicas)

    def orders(
        self,
        wanted: int,
        warm: int,
        ready: Collection[str],
        listed: Collection[str],
        replaced: Collection[str] = (),
        hurried: Collection[str] = (),
    ) -> list[ReplicaOrder]:
        """Return what to do now; it counts as done from now on.

        ``ready``: servers that can serve, or be woken. ``listed``: members that the router knows. ``replaced``: servers
        that others are to take the places of; of these, ``hurried`` leave at once.
        """
        for each in self._replicas.values():
            each.ready = each.name in ready
            each.replaced, each.hurried = each.name in replaced, each.name in hurried
        return [*self._go(listed), *self._join(), *self._members(wanted), *self._standbys(warm)]

    def lost(self, name: str) -> None:
        """Forget a server that could not be started: another one takes its place."""
        self._replicas.pop(name, None)

    def _go(self, listed: Collection[str]) -> list[ReplicaOrder]:
        gone = [each for each in self._replicas.values() if each.leaving and each.name not in listed]
        return [self._stop(each) for each in gone]

    def _stop(self, replica: _Replica) -> ReplicaOrder:
        del self._replicas[replica.name]
        return ReplicaOrder(ReplicaStep.STOP, replica.name)

    def _join(self) -> list[ReplicaOrder]:
        orders = []
        for each in self._replicas.values():
            if each.ready and not (each.joined or each.standby or each.leaving or each.replaced):
                each.joined = True
                orders.append(ReplicaOrder(ReplicaStep.JOIN, each.name))
        return orders

    def _members(self, wanted: int) -> list[ReplicaOrder]:
        orders = []
        present = [each for each in self._replicas.values() if not (each.standby or each.leaving)]
        members = [each for each in present if not each.replaced]
        sleeping = [each for each in self._replicas.values() if each.standby and each.ready and not each.replaced]
        for _ in range(wanted - len(members)):
            if sleeping:
                woken = sleeping.pop(0)
                woken.standby = woken.ready = False
                orders.append(ReplicaOrder(ReplicaStep.WAKE, woken.name))
            else:
                orders.append(ReplicaOrder(ReplicaStep.START, self._add(standby=False)))
        # Those that serve stay longest, and among them those that were started first.
        members.sort(key=lambda each: (each.joined and each.ready, each.joined), reverse=True)
        missing = max(wanted - sum(each.joined and each.ready for each in members[: max(wanted, 0)]), 0)
        old = [each for each in present if each.replaced]
        serving = [each for each in old if each.joined and each.ready and not each.hurried]
        kept = serving[:missing]
        for each in [*members[max(wanted, 0) :], *(each for each in old if each not in kept)]:
            orders.append(self._leave(each))
        return orders

    def _leave(self, replica: _Replica) -> ReplicaOrder:
        if not replica.joined:
            return self._stop(replica)
        replica.joined, replica.leaving = False, True
        return ReplicaOrder(ReplicaStep.LEAVE, replica.name)

    def _standbys(self, warm: int) -> list[ReplicaOrder]:
        """Keep the reserve; members that are not ready yet come first."""
        standbys = [each for each in self._replicas.values() if each.standby]
        orders = [self._stop(each) for each in standbys if each.replaced]
        standbys = [each for each in standbys if not each.replaced]
        orders += [self._stop(each) for each in standbys[warm:]]
        if all(each.ready for each in self._replicas.values() if not (each.standby or each.leaving or each.replaced)):
            for _ in range(warm - len(standbys)):
                orders.append(ReplicaOrder(ReplicaStep.STAND_BY, self._add(standby=True)))
        return orders

    def _add(self, *, standby: bool) -> str:
        name = next(name for number in count(1) if (name := f"{self._pool}/{number}") not in self._replicas)
        self._replicas[name] = _Replica(name, standby=standby, joined=False)
        return name
