"""Chooses endpoints for a gateway: the members of pools, by the address that the gateway knows."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from time import monotonic_ns
from typing import NamedTuple

from nerite.balancing.member import Member, RoutedRequest
from nerite.core.errors import NeriteError, Unavailable
from nerite.router.pools import PoolTable, RouterPool


class EndpointChoice(NamedTuple):
    """Where a request goes."""

    pool: RouterPool
    member: Member
    endpoints: str
    """The address of the member, and after it those of others that would do, separated by commas."""
    lent: bool = False
    """``pool`` lends the member to the pool of the request."""


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
        self, request: RoutedRequest, level: str, subset: Collection[str] | None, *, grpc: bool
    ) -> EndpointChoice | NeriteError:
        """Choose a member. ``subset``: among these addresses only, None: among all. ``grpc``: it speaks gRPC."""
        began = monotonic_ns()
        names = None if subset is None else self._names(subset)
        found = self._table.choose(request, level, began, subset=names)
        self._table.decisions.note((monotonic_ns() - began) / 1e9)
        if isinstance(found, NeriteError):
            self._table.refused[str(found.http_status)] += 1
            return found
        members = (found.member, *found.fallbacks)
        addresses = ",".join(address_of(each, grpc=grpc) for each in members)
        return EndpointChoice(found.pool, found.member, addresses, found.borrower is not None)

    def choose_in_order(
        self, request: RoutedRequest, level: str, wanted: Sequence[str], *, grpc: bool
    ) -> EndpointChoice | NeriteError:
        """Choose the first of these hosts or addresses that is ready; the others are those to turn to."""
        found: list[EndpointChoice] = []
        refusal: NeriteError = Unavailable("no endpoint was asked for")
        for each in wanted:
            choice = self.choose(request, level, self._addresses_at(each), grpc=grpc)
            if isinstance(choice, NeriteError):
                refusal = choice
            elif all(other.member != choice.member for other in found):
                found.append(choice)
        if not found:
            return refusal
        return found[0]._replace(endpoints=",".join(address_of(each.member, grpc=grpc) for each in found))

    def _addresses_at(self, host: str) -> set[str]:
        return {
            load.member.http
            for pool in self._table.pools
            for load in pool.balancer.members
            if host in (load.member.http, load.member.http.rpartition(":")[0])
        }

    def member_at(self, address: str) -> tuple[RouterPool, Member] | None:
        """Return who has an address."""
        for pool in self._table.pools:
            for load in pool.balancer.members:
                if address in (load.member.http, load.member.grpc):
                    return pool, load.member
        return None

    def _names(self, addresses: Collection[str]) -> set[str]:
        return {
            load.member.name
            for pool in self._table.pools
            for load in pool.balancer.members
            if load.member.http in addresses or load.member.grpc in addresses
        }


def address_of(member: Member, *, grpc: bool) -> str:
    """Return the address of a member that a gateway connects to."""
    return member.grpc or member.http if grpc else member.http
