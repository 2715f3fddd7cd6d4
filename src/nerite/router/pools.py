"""The pools of a router: who is in them, what they serve, which of them gets a request, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from nerite.admission.policy import IDLE
from nerite.balancing.member import Member, RoutedRequest
from nerite.balancing.pool_balancer import NoMember, PoolBalancer
from nerite.cluster.settings import PoolSettings
from nerite.core.errors import Exhausted, NeriteError, NotFound, Unavailable
from nerite.core.text import quoted_text
from nerite.observability.histogram import Histogram
from nerite.router.idle_members import idle_members

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Bounds of the times of requests."""
DECISION_SECONDS: Final = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2)
"""Bounds of the times that the choice of a member takes."""


class SequenceLost(NeriteError):
    """The state of a sequence was on a member that is gone."""

    plain = True
    code = "NOT_FOUND"
    http_status = 410
    grpc_status = 9


_REFUSALS: Final[Mapping[int, type[NeriteError]]] = {429: Exhausted, 410: SequenceLost}
"""Errors by the status of ``NoMember``; ``Unavailable`` for any other."""


class RouterPool:
    """One pool with its members, and counts of what was sent to them."""

    def __init__(self, settings: PoolSettings, seed: int = 0) -> None:
        self.settings = settings
        self.name = settings.name
        self.balancer = PoolBalancer(settings.name, settings.balancing, seed)
        self.answers: Counter[tuple[str, str]] = Counter()
        """Attempts by member and code: a status, or how an attempt without one ended."""
        self.retries: Counter[str] = Counter()
        """Requests that went on to another member, by how their attempt ended."""
        self.picks: Counter[str] = Counter()
        """Choices of a member, by why it was that one."""
        self.seconds = Histogram(SECONDS)
        """Times of whole requests."""
        self.under_way = 0
        """Requests that are at a member."""
        self.idle: Counter[str] = Counter()
        """Those of the class idle, by member."""
        self.metered: set[str] = set()
        """Members that have a row of each request in a ledger of their own."""
        self._models: frozenset[str] = frozenset()
        self._unknown = False

    def set_members(self, members: Sequence[Member]) -> None:
        """Take what discovery has found."""
        self.balancer.set_members(members)
        names = {member.name for member in members}
        for key in [key for key in self.answers if key[0] not in names]:
            del self.answers[key]
        self._learn()

    def set_ready(self, name: str, ready: bool, models: Collection[str] | None = None) -> None:
        """Take what a health check has found. ``models`` None: not known, so the member may serve any."""
        self.balancer.set_ready(name, ready, models)
        self._learn()

    def _learn(self) -> None:
        served: set[str] = set()
        self._unknown = False
        for load in self.balancer.members:
            if not load.ready:
                continue
            if load.models is None:
                self._unknown = True
            else:
                served.update(load.models)
        self._models = frozenset(served)

    @property
    def models(self) -> frozenset[str]:
        """Models that ready members are known to serve."""
        return self._models

    @property
    def ready(self) -> bool:
        """Whether a member is ready."""
        return any(load.ready for load in self.balancer.members)

    @property
    def complete(self) -> bool:
        """Whether all members are ready, so that a model that none of them serves is not served by this pool."""
        return all(load.ready for load in self.balancer.members)

    def serves(self, model: str) -> bool:
        """Whether a ready member serves a model, or may: what it serves is not known. Every pool serves no model."""
        return self._unknown or not model or model in self._models

    @property
    def ready_members(self) -> Iterator[Member]:
        """The members that are ready."""
        return (load.member for load in self.balancer.members if load.ready)


class PoolChoice(NamedTuple):
    """Where a request goes."""

    pool: RouterPool
    member: Member
    fallbacks: tuple[Member, ...] = ()
    """Others that would do, the best first."""


class PoolTable:
    """All pools, in the order of the cluster file."""

    def __init__(self, pools: Sequence[RouterPool]) -> None:
        self.pools = pools
        self.decisions = Histogram(DECISION_SECONDS)
        """Seconds from the last byte of a request to the choice of its member."""
        self.refused: Counter[str] = Counter()
        """Requests that were answered without a member, by code."""

    def choose(
        self,
        request: RoutedRequest,
        level: str,
        now_ns: int,
        tried: Collection[str] = (),
        subset: Collection[str] | None = None,
    ) -> PoolChoice | NeriteError:
        """Choose a member, or return the error for the client.

        ``tried``: members that have failed the request. ``subset``: choose among these names only.

        The first pool that takes the class and has a member for the model gets it. A class that a pool lists goes to
        such pools only. A pool that borrows uses idle members of the others when its own are full or gone.
        """
        if level == IDLE.name:
            return self._choose_idle(request, now_ns, tried, subset)
        model = request.model
        fitting = [pool for pool in self.pools if level in pool.settings.classes]
        fitting = fitting or [pool for pool in self.pools if not pool.settings.classes]
        refusal: NoMember | None = None
        for pool in fitting:
            if pool.serves(model):
                pick = pool.balancer.pick(request, now_ns, tried=tried, subset=subset)
                if not isinstance(pick, NoMember):
                    pool.picks[pick.reason] += 1
                    return PoolChoice(pool, pick.member, pick.fallbacks)
                refusal = refusal or pick
            if pool.settings.borrows and (lent := self._borrow(pool, request, now_ns, tried, subset)):
                return lent
        if refusal is None:
            return self._unserved(model, level, fitting)
        return _REFUSALS.get(refusal.status, Unavailable)(refusal.text, refusal.retry_after)

    def may_serve(self, model: str) -> bool:
        """Whether a member of any pool is known to serve a model, or may."""
        return any(pool.serves(model) for pool in self.pools)

    def may_have_room(self, request: RoutedRequest) -> bool:
        """Whether a member has idle room for a request, or none serves its model, which is the answer then."""
        pools = [pool for pool in self._idle_pools() if pool.serves(request.model)]
        return not pools or any(idle_members(pool.balancer.members, pool.idle, request) for pool in pools)

    def _idle_pools(self) -> Sequence[RouterPool]:
        """Return the pools that take the class idle: those that list it, or else all, those of other classes first."""
        own = [pool for pool in self.pools if IDLE.name in pool.settings.classes]
        return own or sorted(self.pools, key=lambda pool: not pool.settings.classes)

    def _choose_idle(
        self, request: RoutedRequest, now_ns: int, tried: Collection[str], subset: Collection[str] | None
    ) -> PoolChoice | NeriteError:
        """Choose a member with idle room."""
        pools = self._idle_pools()
        serving = [pool for pool in pools if pool.serves(request.model)]
        if not serving:
            return self._unserved(request.model, IDLE.name, pools)
        for pool in serving:
            names = idle_members(pool.balancer.members, pool.idle, request)
            if subset is not None:
                names.intersection_update(subset)
            pick = pool.balancer.pick(request, now_ns, tried=tried, subset=names) if names else None
            if pick is not None and not isinstance(pick, NoMember):
                pool.picks["idle"] += 1
                return PoolChoice(pool, pick.member, pick.fallbacks)
        return Unavailable(f"no member has idle room for model '{quoted_text(request.model)}'", 1)

    def _borrow(
        self,
        borrower: RouterPool,
        request: RoutedRequest,
        now_ns: int,
        tried: Collection[str],
        subset: Collection[str] | None,
    ) -> PoolChoice | None:
        """Choose an idle member of another pool."""
        for pool in self.pools:
            if pool is borrower or not pool.serves(request.model):
                continue
            idle = {load.member.name for load in pool.balancer.members if not load.requests}
            if subset is not None:
                idle.intersection_update(subset)
            pick = pool.balancer.pick(request, now_ns, tried=tried, subset=idle) if idle else None
            if pick is not None and not isinstance(pick, NoMember):
                pool.picks["borrowed"] += 1
                return PoolChoice(pool, pick.member)
        return None

    def _unserved(self, model: str, level: str, fitting: Sequence[RouterPool]) -> NeriteError:
        """Return the error for a model that no member of these pools is known to serve."""
        if not fitting:
            names = ", ".join(pool.name for pool in self.pools)
            return NotFound(
                f"no pool takes requests of class '{level}' (pools: {names}). "
                "Add the class to classes of a pool in the cluster file"
            )
        missing = [pool.name for pool in fitting if not pool.complete or not pool.ready]
        names = ", ".join(f"'{pool.name}'" for pool in fitting)
        if missing:
            return Unavailable(
                f"no ready member of pool {names} serves model '{quoted_text(model)}', "
                f"and members of pool {', '.join(missing)} are not ready",
                1,
            )
        return NotFound(f"Request for unknown model: '{quoted_text(model)}' is not served by a member of pool {names}")

    @property
    def ready(self) -> bool:
        """Whether any pool has a ready member."""
        return any(pool.ready for pool in self.pools)
