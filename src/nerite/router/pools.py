"""The pools of a router: who is in them, what they serve, which of them gets a request, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from nerite.autoscaling.figures import PoolDemand
from nerite.balancing.member import Member, RoutedRequest
from nerite.balancing.pool_balancer import NoMember, PoolBalancer
from nerite.cluster.settings import PoolSettings
from nerite.core.errors import Exhausted, NeriteError, NotFound, Unavailable
from nerite.core.text import quoted_text
from nerite.observability.histogram import Histogram

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
        self.held = 0
        """Requests that wait for a member."""
        self.demand = None if settings.scaling is None else PoolDemand(settings.scaling)
        """What autoscaling is told; None without it."""
        self._models: frozenset[str] = frozenset()
        self._last_models: frozenset[str] | None = None
        """Models of the last ready members; None: there were none, or it is not known what they served."""
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
        if served or self._unknown:
            self._last_models = None if self._unknown else self._models

    @property
    def models(self) -> frozenset[str]:
        """Models that ready members are known to serve."""
        return self._models

    @property
    def ready(self) -> bool:
        """Whether a member is ready."""
        return any(load.ready for load in self.balancer.members)

    @property
    def wakes(self) -> bool:
        """Whether it may have no members until a request needs one."""
        scaling = self.settings.scaling
        return scaling is not None and not scaling.least

    @property
    def complete(self) -> bool:
        """Whether all members are ready, so that a model that none of them serves is not served by this pool."""
        return all(load.ready for load in self.balancer.members)

    def serves(self, model: str) -> bool:
        """Whether a ready member serves a model, or may: what it serves is not known. Every pool serves no model."""
        return self._unknown or not model or model in self._models

    def turn_away(self, model: str) -> None:
        """Note that no member could take a request, so that autoscaling may start one."""
        known = self._last_models
        if self.demand is not None and (known is None or model in known or model in self.settings.serves):
            self.demand.turned_away += 1

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
                if not (tried or request.sequence):
                    pool.turn_away(model)
            if pool.settings.borrows and (lent := self._borrow(pool, request, now_ns, tried, subset)):
                return lent
        if refusal is None:
            return self._unserved(model, level, fitting)
        return _REFUSALS.get(refusal.status, Unavailable)(refusal.text, refusal.retry_after)

    def may_serve(self, model: str) -> bool:
        """Whether a member of any pool is known to serve a model, or may."""
        return any(pool.serves(model) for pool in self.pools)

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
        for pool in fitting:
            if not pool.ready:
                pool.turn_away(model)
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
        """Whether any pool has a ready member, or gets one as soon as there is a request for it."""
        return any(pool.ready or pool.wakes for pool in self.pools)
