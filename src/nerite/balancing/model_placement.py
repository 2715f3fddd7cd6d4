"""Which members hold which models: copies by demand, within the memory of each member.

A model wants as many copies as it takes for each to have at most ``target`` requests under way. Demand rises with the
average of seconds and falls with that of minutes, so that copies outlast a lull. A copy is unloaded only where another
model needs its memory, the longest unused first, never soon after it was loaded, and never the last copy of a model
that is in use. What is decided counts as done until the member says otherwise or a time is over.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from nerite.balancing.policy import check_ranges
from nerite.core.sizes import size_text

_QUIET: Final = 0.01
"""Requests under way on average below which a model is not in use."""
_DOUBLINGS: Final = 5
"""Of the pause after a failed load, at most."""


@dataclass(frozen=True)
class PlacementPolicy:
    """Settings of the placement of a pool's models. Times are in seconds."""

    target: float = 8.0
    """Requests under way for each copy."""
    rise: float = 10.0
    """Time constant of the average that adds copies."""
    fall: float = 300.0
    """Time constant of the average that keeps them."""
    hold: float = 60.0
    """For so long a copy stays after it was loaded."""
    retry: float = 60.0
    """For so long a failed load is not repeated at the same member; after each further failure twice as long."""
    patience: float = 600.0
    """For so long a load or unload may take."""
    unknown_bytes: int = 1 << 30
    """Memory of a model whose memory is not known."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        check_ranges(
            self,
            target=(0.01, 1e6),
            rise=(0.1, 86_400.0),
            fall=(0.1, 864_000.0),
            hold=(0.0, 86_400.0),
            retry=(1.0, 86_400.0),
            patience=(1.0, 86_400.0),
            unknown_bytes=(0, 2**60),
        )


class PlacementStep(StrEnum):
    """What a member is to do with a model."""

    LOAD = "load"
    UNLOAD = "unload"


class PlacementAction(NamedTuple):
    """A call of a member's repository API."""

    step: PlacementStep
    member: str
    model: str
    reason: str
    """For the log."""


class PlacementObstacle(NamedTuple):
    """Why a model is loaded nowhere, and will not be for a while."""

    text: str
    until_ns: int
    """When a load is tried again; 0: not before members or models change."""


class _Model:
    """Demand and copies of a model."""

    __slots__ = ("copies", "fast", "least", "memory", "most", "observed_ns", "slow", "used_ns", "waits")

    def __init__(self, memory: int) -> None:
        self.memory = memory
        self.least = 0
        self.most = 0
        self.fast = 0.0
        self.slow = 0.0
        self.observed_ns = 0
        self.used_ns = 0
        self.waits = False
        """Requests wait for its first copy."""
        self.copies: dict[str, int] = {}
        """When the copy of each member was first seen or ordered."""

    @property
    def in_use(self) -> bool:
        return self.fast > _QUIET or self.waits


class _Site:
    """A member and its memory."""

    __slots__ = ("available", "held", "memory")

    def __init__(self) -> None:
        self.memory = 0
        self.available = True
        self.held: set[str] = set()
        """Models that it has, loads or unloads."""


class _Order(NamedTuple):
    """An action that a member has not confirmed yet."""

    step: PlacementStep
    for_model: str
    since_ns: int


class ModelPlacement:
    """Decides loads and unloads for the members of a pool. Times are in nanoseconds of a monotonic clock."""

    def __init__(self, policy: PlacementPolicy | None = None) -> None:
        self._policy = policy or PlacementPolicy()
        self._models: dict[str, _Model] = {}
        self._sites: dict[str, _Site] = {}
        self._orders: dict[tuple[str, str], _Order] = {}
        self._failures: dict[tuple[str, str], tuple[int, int]] = {}
        """How often a load failed in a row, and until when it is not repeated."""

    def set_model(self, model: str, memory: int | None = None, least: int = 0, most: int = 0) -> None:
        """Describe a model of the repository. ``most`` 0: as many copies as there are members."""
        known = self._models.setdefault(model, _Model(self._policy.unknown_bytes))
        if memory is not None:
            known.memory = memory
        known.least, known.most = least, most

    def remove_model(self, model: str) -> None:
        """Note that a model is no longer in the repository."""
        self._models.pop(model, None)

    def set_member(self, member: str, memory: int, available: bool = True) -> None:
        """Describe a member: its memory for models, and whether it may get more and counts at all."""
        site = self._sites.setdefault(member, _Site())
        site.memory, site.available = memory, available

    def remove_member(self, member: str) -> None:
        """Note that a member is gone, with its copies."""
        self._sites.pop(member, None)
        for known in self._models.values():
            known.copies.pop(member, None)
        self._orders = {key: order for key, order in self._orders.items() if key[0] != member}
        self._failures = {key: failure for key, failure in self._failures.items() if key[0] != member}

    def set_held(self, member: str, models: Collection[str], now_ns: int) -> None:
        """Take which models a member has loaded, as it says."""
        site = self._sites.get(member)
        if site is None:
            return
        held = set(models)
        for (name, model), order in list(self._orders.items()):
            if name == member:
                done = (model in held) == (order.step is PlacementStep.LOAD)
                if done or now_ns - order.since_ns > self._policy.patience * 1e9:
                    del self._orders[name, model]
                    if done:
                        self._failures.pop((name, model), None)
                else:
                    held.add(model)  # Its memory is not free until the member has confirmed.
        site.held = held
        for name, known in self._models.items():
            if name not in held:
                known.copies.pop(member, None)
            elif member not in known.copies:
                known.copies[member] = now_ns

    def load_failed(self, member: str, model: str, now_ns: int) -> None:
        """Note that a member could not load a model. It is asked again later, each time after twice as long."""
        self._orders.pop((member, model), None)
        if (site := self._sites.get(member)) and (known := self._models.get(model)):
            site.held.discard(model)
            known.copies.pop(member, None)
            times = self._failures.get((member, model), (0, 0))[0] + 1
            pause = self._policy.retry * 2 ** min(times - 1, _DOUBLINGS)
            self._failures[member, model] = times, now_ns + round(pause * 1e9)

    def order_lost(self, member: str, model: str) -> None:
        """Note that it is not known what became of an order, because the member is gone. It may be given again."""
        order = self._orders.pop((member, model), None)
        site, known = self._sites.get(member), self._models.get(model)
        if order is not None and order.step is PlacementStep.LOAD and site is not None:
            site.held.discard(model)
            if known is not None:
                known.copies.pop(member, None)

    def unload_failed(self, member: str, model: str, now_ns: int) -> None:
        """Note that a member did not unload a model. Its copy stays for as long as one that was just loaded."""
        self._orders.pop((member, model), None)
        if (known := self._models.get(model)) and member in known.copies:
            known.copies[member] = now_ns

    def demand(self, model: str, under_way: float, now_ns: int) -> None:
        """Note how many requests to a model are under way now, with those that wait for it or were refused.

        Call it about once a second for each model; a request to a model without a copy counts at once.
        """
        known = self._models.get(model)
        if known is None:
            return
        elapsed = (now_ns - known.observed_ns) / 1e9 if known.observed_ns else self._policy.rise
        known.observed_ns = now_ns
        known.fast += -math.expm1(-elapsed / self._policy.rise) * (under_way - known.fast)
        known.slow += -math.expm1(-elapsed / self._policy.fall) * (under_way - known.slow)
        known.waits = under_way > 0 and all((member, model) in self._orders for member in known.copies)
        if under_way > 0:
            known.used_ns = now_ns

    def copies_wanted(self, model: str) -> int:
        """Return how many copies the demand asks for."""
        known = self._models[model]
        members = sum(site.available for site in self._sites.values())
        wanted = math.ceil(max(known.fast, known.slow) / self._policy.target) if known.fast > _QUIET else 0
        wanted = max(wanted, int(known.waits))
        return max(min(wanted, known.most or members), min(known.least, members))

    def copies(self, model: str) -> int:
        """Return how many members that may get requests have the model or load it."""
        known = self._models.get(model)
        return sum(self._sites[member].available for member in known.copies) if known else 0

    def obstacle(self, model: str, now_ns: int) -> PlacementObstacle | None:
        """Return why a model that is loaded nowhere cannot be; None if it can, or nothing is known against it."""
        known = self._models.get(model)
        sites = {member: site for member, site in self._sites.items() if site.available}
        if known is None or not sites or self.copies(model):
            return None
        fitting = [member for member, site in sites.items() if site.memory >= known.memory]
        if not fitting:
            most = max(site.memory for site in sites.values())
            return PlacementObstacle(f"it needs {size_text(known.memory)}, and no member has more than "
                                     f"{size_text(most)} for models", 0)  # fmt: skip
        until = min(self._failures.get((member, model), (0, 0))[1] for member in fitting)
        return PlacementObstacle("its load has failed at every member", until) if until > now_ns else None

    def decide(self, now_ns: int) -> list[PlacementAction]:
        """Return what is to be done now, in this order. Call it every second or so, and after each change."""
        for key, order in list(self._orders.items()):
            if now_ns - order.since_ns > self._policy.patience * 1e9:
                del self._orders[key]
        actions: list[PlacementAction] = []
        short = []
        for name, known in self._models.items():
            if not (known.least or known.in_use):
                continue
            copies = sum(self._sites[member].available for member in known.copies if not self._leaves(member, name))
            wanted = self.copies_wanted(name)
            coming = {
                member
                for (member, _), order in self._orders.items()
                if order.step is PlacementStep.UNLOAD and order.for_model == name
            }
            if copies + len(coming) < wanted:
                short.append((copies > 0, -known.fast / (copies + 1), name, copies, wanted))
        # Models without any copy come first, then the ones with the most requests for each copy.
        for _, _, name, copies, wanted in sorted(short):
            actions += self._add_copy(name, f"{copies} of {wanted} copies", now_ns)
        return actions

    def _leaves(self, member: str, model: str) -> bool:
        order = self._orders.get((member, model))
        return order is not None and order.step is PlacementStep.UNLOAD

    def _free(self, site: _Site) -> int:
        return site.memory - sum(self._memory(model) for model in site.held)

    def _memory(self, model: str) -> int:
        known = self._models.get(model)
        return known.memory if known else self._policy.unknown_bytes

    def _add_copy(self, name: str, why: str, now_ns: int) -> Iterable[PlacementAction]:
        """Load a model where there is room, or make room for it. One load at a time for each member."""
        known = self._models[name]
        busy = {member for member, _ in self._orders}
        places = [
            (site, member)
            for member, site in self._sites.items()
            if site.available
            and member not in busy
            and name not in site.held
            and self._failures.get((member, name), (0, 0))[1] <= now_ns
        ]
        roomy = [(self._free(site), member) for site, member in places if self._free(site) >= known.memory]
        if roomy:
            # The member with the most room; with equal room, the first by name.
            member = min(roomy, key=lambda each: (-each[0], each[1]))[1]
            return [self._order(PlacementStep.LOAD, member, name, name, why, now_ns)]
        best: tuple[tuple[bool, int, str], list[str]] | None = None
        for site, member in places:
            victims = self._victims(site, member, known.memory - self._free(site), now_ns)
            if victims:
                newest = max(self._models[each].used_ns for each in victims)
                in_use = any(self._models[each].in_use for each in victims)
                cost = (in_use, newest, member)
                if best is None or cost < best[0]:
                    best = cost, victims
        if best is None:
            return ()
        (_, _, member), victims = best
        why = f"makes room for '{name}' ({why})"
        return [self._order(PlacementStep.UNLOAD, member, each, name, why, now_ns) for each in victims]

    def _victims(self, site: _Site, member: str, missing: int, now_ns: int) -> list[str]:
        """Return copies of a member whose memory suffices, the longest unused first; none if there are too few."""
        idle = []
        for name in site.held:
            known = self._models.get(name)
            if known is None or now_ns - known.copies.get(member, now_ns) < self._policy.hold * 1e9:
                continue
            others = sum(
                self._sites[other].available and (other, name) not in self._orders
                for other in known.copies
                if other != member
            )
            if others >= max(self.copies_wanted(name), int(known.in_use)):
                idle.append((known.in_use, known.used_ns, name))
        victims = []
        for _, _, name in sorted(idle):
            victims.append(name)
            missing -= self._memory(name)
            if missing <= 0:
                return victims
        return []

    def _order(
        self, step: PlacementStep, member: str, model: str, for_model: str, why: str, now_ns: int
    ) -> PlacementAction:
        self._orders[member, model] = _Order(step, for_model, now_ns)
        if step is PlacementStep.LOAD:
            self._sites[member].held.add(model)
            self._models[model].copies[member] = now_ns
        return PlacementAction(step, member, model, why)
