"""Decides which models are in memory: which are loaded next, which leave for them, and which loads are refused.

``ModelResidency`` is told what happens and when; it has no clock and does no I/O. Its guarantees: the sizes of all
models that are loading, loaded or leaving stay within the budget as far as they are known; a model that works is
never evicted, one that an ensemble in memory needs not before that ensemble; and of the models that are wanted, those
of the best class go first, and within a class tenants take turns, each with the one that has waited longest, which
others pass for ``PASSING_NS`` at most. While several tenants have or want models, those of tenants beyond an equal
share of the budget leave before others. A model that can sleep does so instead of being evicted, if the host has the
memory for that.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum, IntEnum
from typing import Final, NamedTuple

from nerite.core.sizes import size_text
from nerite.scheduling.departures import Departures
from nerite.scheduling.residency_table import (
    EVICTABLE,
    HOST,
    Amounts,
    Residence,
    ResidencyTable,
    ResidentModel,
    add_amounts,
    larger_amounts,
)

PASSING_NS: Final = 5_000_000_000
"""How long others pass a model that waits for busy ones; then the least recently used of these is drained.

A model that by then does not fit beside the pinned ones and the overhead is refused.
"""
_FIRST_BACKOFF_NS: Final = 1_000_000_000
_LONGEST_BACKOFF_NS: Final = 60_000_000_000


class Activity(IntEnum):
    """What a model in memory does."""

    IDLE = 0
    WORKS = 1
    """It has requests, each of which ends by itself."""
    HOLDS = 2
    """It has state of clients that would be lost, such as sequences."""


class Step(Enum):
    """What an order asks for."""

    LOAD = "load"
    EVICT = "evict"
    DRAIN = "drain"
    """Send it no more requests, and unload it when those that it has are answered."""
    SLEEP = "sleep"
    """Put it to sleep, from which a load wakes it."""
    REFUSE = "refuse"
    """Refuse the requests that wait for it, for the reason given: it cannot fit."""


class ResidencyOrder(NamedTuple):
    """What is to be done with a model now."""

    step: Step
    model: str
    reason: str = ""


class ModelResidency:
    """The models of a server, those in memory, and those that are wanted."""

    def __init__(self, budget: Amounts, most_loads: int) -> None:
        """A place without a budget is not limited. At most ``most_loads`` models are loaded at the same time."""
        self.budget = dict(budget)
        self._most_loads = most_loads
        self._table = ResidencyTable()
        self._models = self._table.models
        self._wanted: dict[str, ResidentModel] = {}
        self._overhead: Amounts = {}
        self._number = 0
        self._turns: dict[str, int] = {}
        """Loads that each tenant had while others waited, or could have had."""
        self._turn = 0
        """Turns of the tenant for which the last load was begun."""

    # What happens.

    def describe(
        self, name: str, size: Amounts, needs: Collection[str] = (), *, pinned: bool = False, keep_alive_ns: int = 0
    ) -> None:
        """Add a model, or replace what is known of one. ``size``: what it takes, by a measurement or an estimate.

        ``needs``: the models without which it does not work. A ``keep_alive_ns`` of 0 is no limit.
        """
        model = self._table.describe(name, needs, pinned=pinned)
        model.keep_alive_ns = keep_alive_ns
        if model.residence is Residence.ABSENT:
            model.size = dict(size)
            model.failure, model.retry_ns, model.backoff_ns = "", 0, 0

    def forget(self, name: str) -> None:
        """Remove a model that is not in memory."""
        self._table.remove(name)
        self._wanted.pop(name, None)

    def want(
        self, name: str, order: int, now_ns: int, *, tenants: Collection[str] = ("",), ordered: bool = False
    ) -> None:
        """Note that requests of ``tenants`` wait for a model, the most important of which has class ``order``.

        ``ordered``: someone has it loaded, perhaps another model during its own load.
        """
        waiting = {each for model in self._wanted.values() for each in model.tenants}
        if not waiting:
            self._turns.clear()
            self._turn = 0
        for tenant in set(tenants) - waiting:
            self._turns[tenant] = max(self._turns.get(tenant, 0), self._turn)
        model = self._models[name]
        if name not in self._wanted:
            self._number += 1
            model.number, model.since_ns = self._number, now_ns
            self._wanted[name] = model
        model.order, model.tenants = order, tenants
        model.ordered = model.ordered or ordered

    def leave(self, name: str) -> None:
        """Note that no request waits for a model any more."""
        self._wanted.pop(name, None)

    def loaded(self, name: str, size: Amounts, seconds: float, now_ns: int) -> None:
        """Note that a model is in memory, what it takes there, and how long the load took."""
        model = self._table.model(name)
        model.size, model.seconds = dict(size), seconds
        self._table.move(model, Residence.RESIDENT, model.size)
        model.used_ns = max(model.used_ns, now_ns)
        self._wanted.pop(name, None)
        model.ordered = False
        model.failure, model.retry_ns, model.backoff_ns = "", 0, 0

    def failed(self, name: str, why: str, now_ns: int) -> None:
        """Note that a load has failed. The next is tried after a time that doubles with each failure."""
        for each in self._table.closure(name):
            model = self._models[each]
            if model.residence is Residence.LOADING:
                self._table.move(model, Residence.ABSENT, {})
        model = self._models[name]
        self._wanted.pop(name, None)
        model.ordered = False
        model.backoff_ns = min(max(2 * model.backoff_ns, _FIRST_BACKOFF_NS), _LONGEST_BACKOFF_NS)
        model.failure, model.retry_ns = why, now_ns + model.backoff_ns

    def unloaded(self, name: str) -> None:
        """Note that a model is no longer in memory."""
        if name in self._models:
            self._table.move(self._models[name], Residence.ABSENT, {})

    def can_sleep(self, name: str, rest: Amounts | None) -> None:
        """Note what a model takes while it sleeps, by a measurement or an estimate; None: it cannot sleep."""
        self._models[name].rest = rest

    def fell_asleep(self, name: str, rest: Amounts) -> None:
        """Note that a model sleeps, and what it takes, or that this was measured again."""
        model = self._models[name]
        model.rest = rest
        self._table.move(model, Residence.ASLEEP, rest)

    def kept(self, name: str, now_ns: int) -> None:
        """Note that a model was not evicted after all, because it has got a request meanwhile."""
        model = self._models[name]
        model.used_ns = now_ns
        self._table.move(model, Residence.RESIDENT, model.size)

    def used(self, name: str, now_ns: int) -> None:
        """Note when a model was last used."""
        model = self._models[name]
        model.used_ns = max(model.used_ns, now_ns)

    def measured(self, name: str, size: Amounts) -> None:
        """Replace the size of a model in memory."""
        model = self._table.at[Residence.RESIDENT].get(name)
        if model is not None:
            model.size = dict(size)
            self._table.move(model, Residence.RESIDENT, model.size)

    def measured_overhead(self, amounts: Amounts) -> None:
        """Replace what is used of the budget by nothing that could be evicted."""
        self._overhead = dict(amounts)

    # What is known.

    def __contains__(self, name: str) -> bool:
        return name in self._models

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._models))

    def residence(self, name: str) -> Residence:
        """Return where a model is."""
        model = self._models.get(name)
        return Residence.ABSENT if model is None else model.residence

    def size(self, name: str) -> Amounts:
        """Return what a model takes in memory, or is expected to take."""
        return self._models[name].size

    def taken(self, name: str) -> Amounts:
        """Return what a model takes now, at most."""
        return self._models[name].taken

    def seconds(self, name: str) -> float:
        """Return how long the last load of a model took; 0 if it is not known."""
        model = self._models.get(name)
        return 0.0 if model is None else model.seconds

    def expect_seconds(self, name: str, seconds: float) -> None:
        """Set how long a load is expected to take, as known from an earlier run of the server."""
        self._models[name].seconds = seconds

    def closure(self, name: str) -> list[str]:
        """Return a model and all that it needs, directly or not."""
        return self._table.closure(name)

    def needed_by(self, name: str) -> list[str]:
        """Return a model and those in memory that need it, directly or not; each before those that it needs."""
        return self._leavers(name)

    def is_pinned(self, name: str) -> bool:
        """Return whether a model stays in memory, for itself or because a pinned one needs it."""
        return name in self._table.pinned

    def in_memory(self) -> list[str]:
        """Return the models in memory, least recently used first."""
        return _by_last_use(self._table.at[Residence.RESIDENT].values())

    def asleep(self) -> list[str]:
        """Return the models that sleep, least recently used first."""
        return _by_last_use(self._table.at[Residence.ASLEEP].values())

    @property
    def wanted(self) -> list[str]:
        """The models that requests wait for, the first to be loaded first."""
        turns = dict(self._turns)
        found: list[tuple[int, int, int, str]] = []
        for model in sorted(self._wanted.values(), key=lambda model: (model.order, model.number)):
            found.append((model.order, self._turn_of(model, turns), model.number, model.name))
            if model.residence is not Residence.LOADING:  # its turn was taken
                _take_turn(model, turns)
        return [name for *_, name in sorted(found)]

    def _turn_of(self, model: ResidentModel, turns: Mapping[str, int]) -> int:
        return min(turns.get(tenant, self._turn) for tenant in model.tenants)

    def used_bytes(self) -> dict[str, int]:
        """Return what is used of each place: by models that are loading, in memory or leaving, and by the server."""
        total = dict(self._overhead)
        add_amounts(total, self._table.taken)
        return total

    def obstacle(self, name: str, now_ns: int) -> tuple[str, int]:
        """Return why the last load of a model has failed, and when the next may be tried; a time of 0: now."""
        model = self._models.get(name)
        if model is None or model.retry_ns <= now_ns:
            return "", 0
        return model.failure, model.retry_ns

    def shortage(self, name: str, activity: Callable[[str], Activity]) -> str:
        """Return, with all numbers, why a model does not fit at the moment; empty if it does."""
        need = self._need(name)
        used = self.used_bytes()
        texts = []
        for place, size in need.items():
            if place in self.budget and used.get(place, 0) + size > self.budget[place]:
                texts.append(self._shortage_at(name, place, size, used.get(place, 0), activity))
        return "; ".join(texts)

    def _shortage_at(self, name: str, place: str, size: int, used: int, activity: Callable[[str], Activity]) -> str:
        pinned, busy = [], []
        for model in self._models.values():
            if not model.taken.get(place):
                continue
            if self.is_pinned(model.name):
                pinned.append(model)
            elif model.residence not in EVICTABLE or activity(model.name) is not Activity.IDLE:
                busy.append(model)
        text = f"it needs {size_text(size)} of {place} memory, and {size_text(used)} of {size_text(self.budget[place])}"
        overhead = self._overhead.get(place, 0)
        own = f"{size_text(overhead)} belong to no model, " if overhead else ""
        return f"{text} are used: {own}{_sum_text(pinned, place, 'pinned')}, {_sum_text(busy, place, 'busy')}"

    # What to do.

    def decide(self, now_ns: int, activity: Callable[[str], Activity]) -> list[ResidencyOrder]:
        """Return what is to be done now, and take it for begun: each order is to be followed by what became of it.

        ``activity`` says what a model in memory does.
        """
        orders = [*self._end_of_keep_alive(now_ns, activity), *self._back_within_budget(activity)]
        reserved: dict[str, int] = {}
        loads = len(self._table.at[Residence.LOADING])
        prepared = 0  # loads that begin when others have left
        protected: set[str] = set()
        for name in self.wanted:
            model = self._models[name]
            closure = self._table.closure(name)
            protected.update(closure)
            if any(self._models[each].residence in (Residence.LOADING, Residence.LEAVING) for each in closure):
                continue  # its turn comes when that is over
            if model.residence is Residence.RESIDENT:
                del self._wanted[name]
                continue
            need = self._need(name)
            late = now_ns - model.since_ns >= PASSING_NS
            if impossible := self._impossible(name, need, activity, late=late):
                del self._wanted[name]
                orders.append(ResidencyOrder(Step.REFUSE, name, impossible))
                continue
            if self._fits(need, reserved, leaving=False):
                if loads >= self._most_loads and not model.ordered:
                    add_amounts(reserved, need)
                    continue
                loads += 1
                self._turn = self._turn_of(model, self._turns)
                _take_turn(model, self._turns)
                for each in closure:
                    self._begin_load(self._models[each], model.tenants)
                orders.append(ResidencyOrder(Step.LOAD, name))
                continue
            if not self._fits(need, reserved, leaving=True):
                if loads + prepared >= self._most_loads and not model.ordered:
                    add_amounts(reserved, need)
                    continue  # others stay until its turn has come
                room = self._make_room(need, reserved, protected, activity, drain=late)
                orders += room
                if not room and not late:
                    continue  # busy models are in the way: others may pass
            prepared += 1
            add_amounts(reserved, need)
        return orders

    def next_change_ns(self, now_ns: int) -> int | None:
        """Return when ``decide`` is to be called again even if nothing happens; None: not at all."""
        times = [
            model.used_ns + model.keep_alive_ns
            for model in self._table.evictable()
            if model.keep_alive_ns and not model.pinned and len(self._leavers(model.name)) == 1
        ]
        return min(times, default=None)

    def _end_of_keep_alive(self, now_ns: int, activity: Callable[[str], Activity]) -> Iterator[ResidencyOrder]:
        over = [each for each in self._table.evictable() if 0 < each.keep_alive_ns <= now_ns - each.used_ns]
        for name in _by_last_use(over):
            model = self._models[name]
            if self._is_free(name, (), activity) and len(self._leavers(name)) == 1:
                model.stays = {}
                self._table.move(model, Residence.LEAVING, model.taken)
                yield ResidencyOrder(Step.EVICT, name, "keep-alive")

    def _back_within_budget(self, activity: Callable[[str], Activity]) -> list[ResidencyOrder]:
        """Evict idle models if those in memory have grown beyond the budget."""
        if self._fits({}, {}, leaving=True):
            return []
        return self._make_room({}, {}, (), activity, drain=False, partly=True)

    def _make_room(
        self,
        need: Amounts,
        reserved: Amounts,
        protected: Collection[str],
        activity: Callable[[str], Activity],
        *,
        drain: bool,
        partly: bool = False,
    ) -> list[ResidencyOrder]:
        """Evict the least recently used idle models that make enough room, and with ``drain`` let busy ones empty.

        Without ``partly``, do nothing if all of them do not suffice.
        """
        room = self.budget.get(HOST, sys.maxsize) - self.used_bytes().get(HOST, 0)
        leaving = Departures(
            self._missing(need, reserved),
            -self._missing({HOST: need.get(HOST, 0) or 1}, reserved).get(HOST, -sys.maxsize),
            room - reserved.get(HOST, 0) - need.get(HOST, 0),
        )
        for worst in (Activity.IDLE, Activity.WORKS) if drain else (Activity.IDLE,):
            self._collect(leaving, protected, activity, worst)
        if not (leaving.suffice or partly):
            return []
        for name in reversed([*leaving]):  # the most recently used may not be needed
            model = self._models[name]
            if not any(other in leaving for other in model.needs):
                leaving.withdraw_if_others_suffice(name, model.taken)
        return [self._begin_leave(name, stays, activity(name)) for name, stays in leaving.first.items()]

    def _collect(
        self, leaving: Departures, protected: Collection[str], activity: Callable[[str], Activity], worst: Activity
    ) -> None:
        """Add the least recently used models that do no more than ``worst``, until they free enough."""
        for name in self._by_use():
            if leaving.suffice:
                return
            if name in leaving or not self._is_free(name, protected, activity, worst):
                continue
            group = [self._models[each] for each in self._leavers(name) if each not in leaving]
            if leaving.gain_from([model.taken for model in group]):
                idle = activity(name) is Activity.IDLE
                rest = self._rest_among(leaving, name, protected, activity) if idle else {}
                for model in group:
                    leaving.add(model.name, model.taken, rest)

    def _rest_among(
        self, leaving: Departures, name: str, protected: Collection[str], activity: Callable[[str], Activity]
    ) -> Amounts:
        """Return what a model will take asleep; nothing if it cannot sleep, or no memory of the host is left for that.

        Models that have slept for longer leave for it.
        """
        model = self._models[name]
        if model.rest is None or model.residence is not Residence.RESIDENT or len(self._leavers(name)) > 1:
            return {}
        if not any(amount > 0 and _less(model.rest, model.taken, place) for place, amount in leaving.missing.items()):
            return {}
        growth = model.rest.get(HOST, 0) - model.taken.get(HOST, 0)
        sleepers = [self._models[each] for each in self.asleep() if each not in leaving]
        older = [
            each for each in sleepers if each.used_ns <= model.used_ns and self._is_free(each.name, protected, activity)
        ]
        if leaving.spare + sum(each.taken.get(HOST, 0) for each in older) < growth:
            return {}
        for each in older:
            if leaving.spare < growth:
                leaving.add(each.name, each.taken, {})
        return model.rest

    def _begin_leave(self, name: str, stays: Amounts, activity: Activity) -> ResidencyOrder:
        """Count a model as leaving; return the order for that."""
        model = self._models[name]
        model.stays = stays
        self._table.move(model, Residence.LEAVING, larger_amounts(model.taken, stays))
        step = Step.SLEEP if stays else Step.EVICT if activity is Activity.IDLE else Step.DRAIN
        return ResidencyOrder(step, name, "memory")

    def _by_use(self) -> list[str]:
        """Return the models in memory by the last use of each and of the ensembles that need it.

        Those of tenants that have no more than their share come last.
        """
        names = [model.name for model in self._table.evictable()]
        last = {name: max(self._models[each].used_ns for each in self._leavers(name)) for name in names}
        modest = self._modest_tenants()
        return sorted(
            last,
            key=lambda name: (
                any(not modest.isdisjoint(self._models[each].tenants) for each in self._leavers(name)),
                last[name],
                self._models[name].used_ns,
            ),
        )

    def _modest_tenants(self) -> set[str]:
        """Return the tenants whose models take no more than an equal share of the budget; none if there is only one."""
        used: dict[str, dict[str, int]] = {each: {} for model in self._wanted.values() for each in model.tenants}
        for residence in (Residence.LOADING, *EVICTABLE):
            for model in self._table.at[residence].values():
                for tenant in model.tenants:
                    share = {place: size // len(model.tenants) for place, size in model.taken.items()}
                    add_amounts(used.setdefault(tenant, {}), share)
        if len(used) < 2:
            return set()
        return {
            tenant
            for tenant, amounts in used.items()
            if all(size * len(used) <= self.budget.get(place, sys.maxsize) for place, size in amounts.items())
        }

    def _is_free(
        self,
        name: str,
        protected: Collection[str],
        activity: Callable[[str], Activity],
        worst: Activity = Activity.IDLE,
    ) -> bool:
        """Return whether a model can leave, with the ensembles that need it."""
        return all(
            model.residence in EVICTABLE
            and not model.pinned
            and model.name not in protected
            and activity(model.name) <= worst
            for model in (self._models[each] for each in self._leavers(name))
        )

    def _leavers(self, name: str) -> list[str]:
        """Return the models that have to leave if one does: those in memory that need it, the outermost first."""
        return [each for each in self._table.upwards(name) if self._models[each].residence is not Residence.ABSENT]

    def _need(self, name: str) -> dict[str, int]:
        """Return what the load of a model adds to what is used."""
        need: dict[str, int] = {}
        for each in self._table.closure(name):
            model = self._models[each]
            if model.residence in (Residence.ABSENT, Residence.ASLEEP):
                add_amounts(
                    need, {place: max(size - model.taken.get(place, 0), 0) for place, size in model.size.items()}
                )
        return need

    def _begin_load(self, model: ResidentModel, tenants: Collection[str]) -> None:
        """Count a model that is not in memory, or asleep, as loading for ``tenants``."""
        if model.residence in (Residence.ABSENT, Residence.ASLEEP):
            model.tenants = tenants
            self._table.move(model, Residence.LOADING, larger_amounts(model.taken, model.size))

    def _missing(self, need: Amounts, reserved: Amounts) -> dict[str, int]:
        """Return how much room has to be made in each place, once those that leave are gone; negative if there is."""
        used = self.used_bytes()
        for model in self._table.at[Residence.LEAVING].values():
            add_amounts(used, {place: model.stays.get(place, 0) - size for place, size in model.taken.items()})
        return {
            place: used.get(place, 0) + reserved.get(place, 0) + need.get(place, 0) - limit
            for place, limit in self.budget.items()
            if need.get(place, 0) or not need
        }

    def _fits(self, need: Amounts, reserved: Amounts, *, leaving: bool) -> bool:
        """Return whether there is room; ``leaving``: once the models that leave are gone."""
        if leaving:
            return all(amount <= 0 for amount in self._missing(need, reserved).values())
        used = self.used_bytes()
        return all(
            used.get(place, 0) + reserved.get(place, 0) + size <= self.budget[place]
            for place, size in need.items()
            if size and place in self.budget
        )

    def _impossible(self, name: str, need: Amounts, activity: Callable[[str], Activity], *, late: bool) -> str:
        """Return why a model cannot be loaded; empty if it can, once others have left.

        The overhead may shrink when others leave, so it counts only once the model is ``late``.
        """
        fixed: dict[str, int] = dict(self._overhead) if late else {}
        for each in self._table.pinned.union(self._table.closure(name)):
            add_amounts(fixed, self._models[each].taken)
        if all(
            fixed.get(place, 0) + size <= self.budget.get(place, size)
            for place, size in need.items()
            if size
            if place in self.budget
        ):
            return ""
        return self.shortage(name, activity) or "it does not fit"


def _take_turn(model: ResidentModel, turns: dict[str, int]) -> None:
    for tenant in model.tenants:
        turns[tenant] = turns.get(tenant, 0) + 1


def _by_last_use(models: Iterable[ResidentModel]) -> list[str]:
    return [model.name for model in sorted(models, key=lambda model: model.used_ns)]


def _less(some: Amounts, other: Amounts, place: str) -> bool:
    return some.get(place, 0) < other.get(place, 0)


def _sum_text(models: Iterable[ResidentModel], place: str, what: str) -> str:
    found = sorted(models, key=lambda model: -model.taken.get(place, 0))
    if not found:
        return f"nothing is {what}"
    names = ", ".join(model.name for model in found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return f"{size_text(sum(model.taken.get(place, 0) for model in found))} are {what} ({names})"
