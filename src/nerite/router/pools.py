"""The pools of a router: who is in them, what they serve, which of them gets a request, and what became of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from nerite.admission.policy import IDLE
from nerite.autoscaling.figures import PoolDemand
from nerite.balancing.member import Member, RoutedRequest
from nerite.balancing.member_load import MemberLoad
from nerite.balancing.model_demand import ModelDemand
from nerite.balancing.pool_balancer import NoMember, PoolBalancer
from nerite.cluster.settings import PoolSettings
from nerite.core.errors import Exhausted, NeriteError, NotFound, Unavailable
from nerite.core.text import quoted_text
from nerite.observability.histogram import Histogram
from nerite.router.held_requests import HeldRequest, HeldRequests, WaitingRequest
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


_FULL: Final = 429
_REFUSALS: Final[Mapping[int, type[NeriteError]]] = {429: Exhausted, 410: SequenceLost}
"""Errors by the status of ``NoMember``; ``Unavailable`` for any other."""


class MemberIndex(NamedTuple):
    """What a member says of its model repository."""

    known: frozenset[str]
    """Models that it could load."""
    held: frozenset[str]
    """Models that are in its memory, those that it loads and unloads included."""


class YieldingRequest(Protocol):
    """A request at a member that can be stopped, so that one that comes first has its room."""

    def preempt(self) -> bool:
        """Leave the member, and try again later; return False if it is too late for that."""


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
        self.held = 0
        """Requests that wait for a member, or for a copy of their model."""
        self.holds: Counter[str] = Counter()
        """Requests that have waited, by how that ended."""
        self.hold_seconds = Histogram(SECONDS)
        """Times that requests have waited."""
        self.model_demand = ModelDemand() if settings.placement is not None else None
        self.obstacles: dict[str, tuple[str, int]] = {}
        """Why no member has a model, and until when that will not change (0: not known)."""
        self.on_change: Callable[[], None] = _ignore
        """Called when requests that wait might go on."""
        self.on_hold: Callable[[str], None] = _ignore
        """Called with the model for which a request begins to wait."""
        self.indexes: dict[str, MemberIndex] = {}
        """The last that each member has said of its repository."""
        self._withheld: set[tuple[str, str]] = set()
        """Members and models that get no requests, because they are about to be unloaded there."""
        self.lent: Counter[str] = Counter()
        """Requests of other pools under way, by member."""
        self.yielding: dict[str, dict[YieldingRequest, None]] = {}
        """Requests that can be stopped for others, by member; the newest last."""
        self.preempted = 0
        """Requests that were stopped for others."""
        self._adapters: dict[str, frozenset[str]] = {}
        """LoRA adapters by member."""
        self.adapters: frozenset[str] = frozenset()
        """Models that are LoRA adapters of others, as far as members have said."""
        self._models: frozenset[str] = frozenset()
        self._known: frozenset[str] = frozenset()
        self.demand = None if settings.scaling is None else PoolDemand(settings.scaling)
        """What autoscaling is told; None without it."""
        self._last_models: frozenset[str] | None = None
        """Models of the last ready members; None: there were none, or it is not known what they served."""
        self._unknown = False

    def set_members(self, members: Sequence[Member]) -> None:
        """Take what discovery has found."""
        self.balancer.set_members(members)
        names = {member.name for member in members}
        for key in [key for key in self.answers if key[0] not in names]:
            del self.answers[key]
        for name in [name for name in self.indexes if name not in names]:
            del self.indexes[name]
        self.metered.intersection_update(names)
        for name in self._adapters.keys() - names:
            self.set_adapters(name, frozenset())
        self._learn()

    def set_ready(
        self, name: str, ready: bool, models: Collection[str] | None = None, index: MemberIndex | None = None
    ) -> None:
        """Take what a health check has found. ``models`` None: not known, so the member may serve any."""
        if index is None and models is not None:
            index = MemberIndex(frozenset(models), frozenset(models))
        if models is not None and self._withheld:
            models = frozenset(model for model in models if (name, model) not in self._withheld)
        news = index is not None and self.indexes.get(name) != index
        if index is not None and news:
            self.indexes[name] = index
        if self.balancer.set_ready(name, ready, models) or news:
            self._learn()
        else:
            self.on_change()

    def withhold(self, name: str, model: str) -> None:
        """Send no more requests for a model to a member, whatever health checks find, until ``give_back``."""
        self._withheld.add((name, model))
        self.doubt(name, model)

    def give_back(self, name: str, model: str) -> None:
        """Send requests for a model to a member again, once a health check has found it there."""
        self._withheld.discard((name, model))

    def doubt(self, name: str, model: str) -> None:
        """Send no requests for a model to a member until its next health check: it says that it does not have it."""
        for load in self.balancer.members:
            if load.member.name == name and load.models is not None and model in load.models:
                self.balancer.set_ready(name, load.ready, frozenset(load.models) - {model})
                self._learn()
                return

    def set_adapters(self, name: str, adapters: frozenset[str]) -> None:
        """Take which of a member's models are LoRA adapters."""
        if adapters != self._adapters.get(name, frozenset()):
            self._adapters[name] = adapters
            self.adapters = frozenset().union(*self._adapters.values())
            if not adapters:
                del self._adapters[name]

    def _learn(self) -> None:
        """Find out which models the members serve, and which they know."""
        served: set[str] = set()
        self._unknown = told = False
        for load in self.balancer.members:
            if not load.ready:
                continue
            if load.models is None:
                self._unknown = True
            else:
                told = True
                served.update(load.models)
        self._models = frozenset(served)
        # Of members that are gone, what they knew is forgotten once others have said what they know.
        known = frozenset[str]() if told else self._known
        self._known = known.union(*(index.known for index in self.indexes.values()))
        if served or self._unknown:
            self._last_models = None if self._unknown else self._models
        self.on_change()

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
        if self.demand is not None and self._may_know(model):
            self.demand.turned_away += 1

    def want(self, model: str, now_ns: int) -> None:
        """Note that a request that does not wait was refused, so that placement loads its model if none has it."""
        if self.model_demand is not None and not self.serves(model) and self._may_know(model):
            self.model_demand.refused(model, now_ns)

    @property
    def known(self) -> frozenset[str]:
        """Models that members have listed, as ready or as models that they could load."""
        return self._known

    def may_come_to_serve(self, model: str) -> bool:
        """Whether requests for a model may wait for a member that serves it. If nothing is known, any may."""
        return self.most_held > 0 and self._may_know(model)

    def _may_know(self, model: str) -> bool:
        last = self._last_models
        if last is None and not self._known:
            return True
        return model in self._known or model in self.settings.serves or model in (last or ())

    @property
    def most_held(self) -> int:
        """How many requests may wait."""
        return self.settings.most_held

    @property
    def hold_timeout(self) -> float:
        """Seconds for which a request may wait."""
        return self.settings.hold_timeout

    def obstacle_to(self, model: str, now_ns: int) -> tuple[str, int]:
        """Return why no member has a model, as far as is known, and when a wait makes sense again (0: now)."""
        text, until_ns = self.obstacles.get(model, ("", 0))
        return ("", 0) if 0 < until_ns <= now_ns else (text, until_ns)

    def hold_began(self, model: str) -> None:
        """Note that a request waits for a model."""
        self.on_hold(model)

    @property
    def lent_requests(self) -> int:
        """Requests of other pools at its members."""
        return self.lent.total()

    def lend(self, member: str) -> None:
        """Note that a member gets a request of another pool. ``take_back`` must follow."""
        self.lent[member] += 1

    def take_back(self, member: str) -> None:
        """Note that such a request has ended."""
        self.lent[member] -= 1
        if not self.lent[member]:
            del self.lent[member]

    def lendable(self) -> list[MemberLoad]:
        """Return the members that may take a request of another pool, as far as the reserve is concerned."""
        loads = [load for load in self.balancer.members if load.available]
        free = sum(not self.lent[load.member.name] for load in loads)
        return loads if free > self.settings.reserve else [load for load in loads if self.lent[load.member.name]]

    def has_room(self, load: MemberLoad) -> bool:
        """Whether a member has fewer requests than those up to which it is lent."""
        return load.requests < self.settings.lends * load.member.capacity

    def stop_one(self, member: str) -> bool:
        """Stop the newest request at a member that can be stopped; return whether there was one."""
        there = self.yielding.get(member, {})
        stopped = False
        while there and not stopped:
            request, _ = there.popitem()
            stopped = request.preempt()
        self.preempted += stopped
        if not there:
            self.yielding.pop(member, None)
        return stopped

    def make_room(
        self, loads: Iterable[MemberLoad], model: str, tried: Collection[str], subset: Collection[str] | None
    ) -> str:
        """Stop a request at the member that has most of those that can be stopped; return its name, or "" for none.

        Only members count that have room for a request to ``model`` then.
        """
        most = self.settings.balancing.max_requests

        def would_do(load: MemberLoad) -> bool:
            name = load.member.name
            return (
                bool(self.yielding.get(name))
                and load.available
                and name not in tried
                and (subset is None or name in subset)
                and (load.models is None or not model or model in load.models)
                and not 0 < most * load.member.capacity <= load.requests - 1
            )

        for load in sorted(filter(would_do, loads), key=lambda load: -len(self.yielding[load.member.name])):
            if self.stop_one(load.member.name):
                return load.member.name
        return ""

    def keep_room(self, member: str) -> None:
        """Stop a request of another pool at a member that gets one of its own, if it has as many as it is lent for."""
        if self.yielding.get(member):
            load = next((load for load in self.balancer.members if load.member.name == member), None)
            if load is not None and not self.has_room(load):
                self.stop_one(member)

    @property
    def ready_members(self) -> Iterator[Member]:
        """The members that are ready."""
        return (load.member for load in self.balancer.members if load.ready)


def _ignore(*_: object) -> None:
    pass


class PoolChoice(NamedTuple):
    """Where a request goes."""

    pool: RouterPool
    member: Member
    fallbacks: tuple[Member, ...] = ()
    """Others that would do, the best first."""
    borrower: RouterPool | None = None
    """The pool whose request it is, if ``pool`` lends it the member."""


class PoolTable:
    """All pools, in the order of the cluster file."""

    def __init__(self, pools: Sequence[RouterPool]) -> None:
        self.pools = pools
        self.preempts = any(pool.settings.preempts for pool in pools)
        """Whether requests of a pool may stop those of others."""
        self.decisions = Histogram(DECISION_SECONDS)
        """Seconds from the last byte of a request to the choice of its member."""
        self.refused: Counter[str] = Counter()
        """Requests that were answered without a member, by code."""
        self.held = HeldRequests()
        self.obstacle: Callable[[], str] = lambda: ""
        """Returns why requests are better sent elsewhere, whatever the members are like; empty if there is nothing."""
        for pool in pools:
            pool.on_change = self.held.offer_soon

    def choose(
        self,
        request: RoutedRequest,
        level: str,
        now_ns: int,
        tried: Collection[str] = (),
        subset: Collection[str] | None = None,
        *,
        borrow: bool = True,
    ) -> PoolChoice | NeriteError:
        """Choose a member, or return the error for the client.

        ``tried``: members that have failed the request. ``subset``: choose among these names only. ``borrow`` False:
        do not send it to a member of another pool.

        The first pool that takes the class and has a member for the model gets it. A class that a pool lists goes to
        such pools only. A pool that borrows uses members that others lend when its own are full or gone. Requests of
        a pool that preempts stop others: where a member has as many as it is lent for, and where all are full.
        """
        if level == IDLE.name:
            return self._choose_idle(request, now_ns, tried, subset)
        model = request.model
        fitting = self._fitting(level)
        if request.stored_at:
            fitting = sorted(fitting, key=lambda pool: not pool.balancer.keeps(request))
        refusal: NoMember | None = None
        for pool in fitting:
            if pool.serves(model):
                pick = pool.balancer.pick(request, now_ns, tried=tried, subset=subset)
                if isinstance(pick, NoMember) and pick.status == _FULL and pool.settings.preempts:
                    if pool.make_room(pool.balancer.members, model, tried, subset):
                        pick = pool.balancer.pick(request, now_ns, tried=tried, subset=subset)
                elif not isinstance(pick, NoMember) and pool.settings.preempts:
                    pool.keep_room(pick.member.name)
                if not isinstance(pick, NoMember):
                    pool.picks[pick.reason] += 1
                    return PoolChoice(pool, pick.member, pick.fallbacks)
                refusal = refusal or pick
                if not (tried or request.sequence):
                    pool.turn_away(model)
            # A sequence would leave a member that was lent to it in the middle.
            if borrow and pool.settings.borrows and not request.sequence:
                lent = self._borrow(pool, request, now_ns, tried, subset)
                if lent is not None:
                    return lent
        if refusal is None:
            return self._unserved(model, level, fitting)
        return _REFUSALS.get(refusal.status, Unavailable)(refusal.text, refusal.retry_after)

    def _fitting(self, level: str) -> list[RouterPool]:
        """Return the pools for requests of a class."""
        fitting = [pool for pool in self.pools if level in pool.settings.classes]
        return fitting or [pool for pool in self.pools if not pool.settings.classes]

    def may_serve(self, model: str) -> bool:
        """Whether a member of any pool is known to serve a model, or may."""
        return any(pool.serves(model) or pool.may_come_to_serve(model) for pool in self.pools)

    def hold(
        self, waiting: WaitingRequest, request: RoutedRequest, level: str, order: int, *, behind: bool = False
    ) -> HeldRequest | NeriteError | None:
        """Let a request wait for a member; return the error if it may not now, and None if no pool lets it wait.

        ``behind``: only if others wait already, whom it must not overtake. Requests in the middle of a sequence do not
        wait: their state is gone, or on a member that is not ready. Batches learn from the refusal that there is no
        idle room. What does not wait counts for placement all the same.
        """
        idle = level == IDLE.name
        pools = self._idle_pools() if idle else self._fitting(level)
        if request.model and not idle and (not request.sequence or request.sequence_start):
            for pool in pools:
                if self.held.queue.has(pool.name, request.model) or (
                    not behind and pool.may_come_to_serve(request.model)
                ):
                    return self.held.hold(pool, request.model, order, waiting)
        if not behind:
            for pool in pools:
                pool.want(request.model, self.held.clock())
        return None

    def is_adapter(self, model: str) -> bool:
        """Whether a model is a LoRA adapter of another one, as far as members have said."""
        return any(model in pool.adapters for pool in self.pools)

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
        """Choose a member of another pool that has room, or on which a request can be stopped for this one."""
        lenders = [
            pool for pool in self.pools if pool is not borrower and pool.settings.lends and pool.serves(request.model)
        ]
        for pool in lenders:
            names = {load.member.name for load in pool.lendable() if pool.has_room(load)}
            if subset is not None:
                names.intersection_update(subset)
            if names and (lent := self._lent(pool, borrower, request, now_ns, tried, names)):
                return lent
        if borrower.settings.preempts:
            for pool in lenders:
                name = pool.make_room(pool.lendable(), request.model, tried, subset)
                if name and (lent := self._lent(pool, borrower, request, now_ns, tried, (name,))):
                    return lent
        return None

    def _lent(
        self,
        lender: RouterPool,
        borrower: RouterPool,
        request: RoutedRequest,
        now_ns: int,
        tried: Collection[str],
        names: Collection[str],
    ) -> PoolChoice | None:
        pick = lender.balancer.pick(request, now_ns, tried=tried, subset=names)
        if isinstance(pick, NoMember):
            return None
        lender.picks["borrowed"] += 1
        return PoolChoice(lender, pick.member, borrower=borrower)

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
        if any(model in pool.known for pool in fitting):
            return Unavailable(f"no member of pool {names} has loaded model '{quoted_text(model)}'", 1)
        return NotFound(f"Request for unknown model: '{quoted_text(model)}' is not served by a member of pool {names}")

    @property
    def ready(self) -> bool:
        """Whether any pool has a ready member, or gets one for the next request, and there is no obstacle."""
        return not self.obstacle() and any(pool.ready or pool.wakes for pool in self.pools)
