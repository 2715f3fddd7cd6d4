"""Chooses endpoints for a gateway: the members of pools, by the address that the gateway knows."""

from __future__ import annotations

from collections.abc import Collection
from time import monotonic_ns
from typing import NamedTuple

from nerite.balancing.member import Member, RoutedRequest
from nerite.balancing.pool_balancer import NoMember
from nerite.router.pools import PoolTable, RouterPool


class EndpointChoice(NamedTuple):
    """Where a request goes."""

    pool: RouterPool
    member: Member
    endpoints: str
    """The address of the member, and after it those of others that would do, separated by commas."""


class EndpointTable:
    """The endpoints of all pools."""

    def __init__(self, table: PoolTable) -> None:
        """``table`` also counts what was chosen and refused."""
        self._table = table

    @property
    def ready(self) -> bool:
        """Whether any endpoint is."""
        return self._table.ready

    def choose(
        self, request: RoutedRequest, level: str, subset: Collection[str] | None, grpc: bool
    ) -> EndpointChoice | NoMember:
        """Choose a member. ``subset``: among these addresses only, None: among all. ``grpc``: it speaks gRPC."""
        now_ns = monotonic_ns()
        found = self._choose(request, level, subset, grpc, now_ns)
        self._table.decisions.note((monotonic_ns() - now_ns) / 1e9)
        if isinstance(found, NoMember):
            self._table.refused[str(found.status)] += 1
        return found

    def _choose(
        self, request: RoutedRequest, level: str, subset: Collection[str] | None, grpc: bool, now_ns: int
    ) -> EndpointChoice | NoMember:
        refusal: NoMember | None = None
        pools = [pool for pool in self._table.pools if pool.takes(level)]
        if level:
            pools.sort(key=lambda pool: not pool.settings.classes)
        for pool in pools:
            if not pool.serves(request.model):
                continue
            names = None if subset is None else _names(pool, subset)
            pick = pool.balancer.pick(request, now_ns, subset=names)
            if not isinstance(pick, NoMember):
                members = (pick.member, *pick.fallbacks)
                return EndpointChoice(pool, pick.member, ",".join(address_of(each, grpc) for each in members))
            refusal = refusal or pick
        return refusal or NoMember(503, f"no ready endpoint serves model '{request.model[:256]}'")

    def member_at(self, address: str) -> tuple[RouterPool, Member] | None:
        """Return who has an address."""
        for pool in self._table.pools:
            for load in pool.balancer.members:
                if address in (load.member.http, load.member.grpc):
                    return pool, load.member
        return None


def address_of(member: Member, grpc: bool) -> str:
    """Return the address of a member that a gateway connects to."""
    return member.grpc or member.http if grpc else member.http


def _names(pool: RouterPool, addresses: Collection[str]) -> set[str]:
    return {
        load.member.name
        for load in pool.balancer.members
        if load.member.http in addresses or load.member.grpc in addresses
    }
