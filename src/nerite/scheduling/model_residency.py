"""Decides which models are in memory: which are loaded next, which leave for them, and which loads are refused.

``ModelResidency`` is told what happens and when; it has no clock and does no I/O. Its guarantees: the sizes of all
models that are loading, loaded or leaving stay within the budget as far as they are known; a model that works is
never evicted, one that an ensemble in memory needs not before that ensemble; and of the models that are wanted, those
of the best class go first, and within a class the one that has waited longest, which others pass for
``PASSING_NS`` at most.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum, IntEnum
from typing import Final, NamedTuple, TypeAlias

from nerite.core.sizes import size_text

HOST: Final = "host"
"""The memory of the machine. A GPU is called ``GPU`` and its number."""
PASSING_NS: Final = 5_000_000_000
"""How long others pass a model that waits for busy ones; then the least recently used of these is drained."""
_FIRST_BACKOFF_NS: Final = 1_000_000_000
_LONGEST_BACKOFF_NS: Final = 60_000_000_000

Amounts: TypeAlias = Mapping[str, int]
"""Bytes by place."""


class Activity(IntEnum):
    """What a model in memory does."""

    IDLE = 0
    WORKS = 1
    """It has requests, each of which ends by itself."""
    HOLDS = 2
    """It has state of clients that would be lost, such as sequences."""


class Residence(Enum):
    """Where a model is."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    LEAVING = "leaving"


class Step(Enum):
    """What an order asks for."""

    LOAD = "load"
    EVICT = "evict"
    DRAIN = "drain"
    """Send it no more requests, and unload it when those that it has are answered."""
    REFUSE = "refuse"
    """Refuse the requests that wait for it, for the reason given: it cannot fit."""


class ResidencyOrder(NamedTuple):
    """What is to be done with a model now."""

    step: Step
    model: str
    reason: str = ""


class _Model:
    __slots__ = (
        "backoff_ns", "failure", "keep_alive_ns", "name", "needs", "number", "order", "ordered", "pinned", "residence",
        "retry_ns", "seconds", "since_ns", "size", "used_ns",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.needs: tuple[str, ...] = ()
        self.size: Amounts = {}
        self.pinned = False
        self.keep_alive_ns = 0
        self.residence = Residence.ABSENT
        self.used_ns = 0
        self.seconds = 0.0
        self.order = -1
        """Class of the most important request that waits; negative if none does."""
        self.ordered = False
        """It may be loaded beside any number of others, one of which may wait for it."""
        self.number = 0
        self.since_ns = 0
        self.failure = ""
        self.retry_ns = 0
        self.backoff_ns = 0


class ModelResidency:
    """The models of a server, those in memory, and those that are wanted."""

    def __init__(self, budget: Amounts, most_loads: int) -> None:
        """A place without a budget is not limited. At most ``most_loads`` models are loaded at the same time."""
        self.budget = dict(budget)
        self._most_loads = most_loads
        self._models: dict[str, _Model] = {}
        self._dependents: dict[str, set[str]] = {}
        self._overhead: Amounts = {}
        self._number = 0

    # What happens.

    def describe(
        self, name: str, size: Amounts, needs: Collection[str] = (), *, pinned: bool = False, keep_alive_ns: int = 0
    ) -> None:
        """Add a model, or replace what is known of one. ``size``: what it takes, by a measurement or an estimate.

        ``needs``: the models without which it does not work. A ``keep_alive_ns`` of 0 is no limit.
        """
        model = self._models.setdefault(name, _Model(name))
        for need in model.needs:
            self._dependents[need].discard(name)
        model.needs = tuple(needs)
        for need in model.needs:
            self._dependents.setdefault(need, set()).add(name)
        model.pinned, model.keep_alive_ns = pinned, keep_alive_ns
        if model.residence is Residence.ABSENT:
            model.size = dict(size)
            model.failure, model.retry_ns, model.backoff_ns = "", 0, 0

    def forget(self, name: str) -> None:
        """Remove a model that is not in memory."""
        model = self._models.pop(name)
        for need in model.needs:
            self._dependents[need].discard(name)

    def want(self, name: str, order: int, now_ns: int, *, ordered: bool = False) -> None:
        """Note that requests wait for a model, the most important of which has class ``order``.

        ``ordered``: someone has it loaded, perhaps another model during its own load.
        """
        model = self._models[name]
        if model.order < 0:
            self._number += 1
            model.number, model.since_ns, model.order = self._number, now_ns, order
        model.order = order
        model.ordered = model.ordered or ordered

    def leave(self, name: str) -> None:
        """Note that no request waits for a model any more."""
        if name in self._models:
            self._models[name].order = -1

    def loaded(self, name: str, size: Amounts, seconds: float, now_ns: int) -> None:
        """Note that a model is in memory, what it takes there, and how long the load took."""
        model = self._models.setdefault(name, _Model(name))
        model.residence, model.size, model.seconds = Residence.RESIDENT, dict(size), seconds
        model.used_ns = max(model.used_ns, now_ns)
        model.order, model.ordered = -1, False
        model.failure, model.retry_ns, model.backoff_ns = "", 0, 0

    def failed(self, name: str, why: str, now_ns: int) -> None:
        """Note that a load has failed. The next is tried after a time that doubles with each failure."""
        for each in self._closure(name):
            model = self._models[each]
            if model.residence is Residence.LOADING:
                model.residence = Residence.ABSENT
        model = self._models[name]
        model.order, model.ordered = -1, False
        model.backoff_ns = min(max(2 * model.backoff_ns, _FIRST_BACKOFF_NS), _LONGEST_BACKOFF_NS)
        model.failure, model.retry_ns = why, now_ns + model.backoff_ns

    def unloaded(self, name: str) -> None:
        """Note that a model is no longer in memory."""
        if name in self._models:
            self._models[name].residence = Residence.ABSENT

    def kept(self, name: str, now_ns: int) -> None:
        """Note that a model was not evicted after all, because it has got a request meanwhile."""
        model = self._models[name]
        model.residence, model.used_ns = Residence.RESIDENT, now_ns

    def used(self, name: str, now_ns: int) -> None:
        """Note when a model was last used."""
        model = self._models[name]
        model.used_ns = max(model.used_ns, now_ns)

    def measured(self, name: str, size: Amounts) -> None:
        """Replace the size of a model in memory."""
        if name in self._models and self._models[name].residence is Residence.RESIDENT:
            self._models[name].size = dict(size)

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

    def seconds(self, name: str) -> float:
        """Return how long the last load of a model took; 0 if it is not known."""
        model = self._models.get(name)
        return 0.0 if model is None else model.seconds

    def expect_seconds(self, name: str, seconds: float) -> None:
        """Set how long a load is expected to take, as known from an earlier run of the server."""
        self._models[name].seconds = seconds

    def closure(self, name: str) -> list[str]:
        """Return a model and all that it needs, directly or not."""
        return self._closure(name)

    def needed_by(self, name: str) -> list[str]:
        """Return a model and those in memory that need it, directly or not; each before those that it needs."""
        return self._leavers(name)

    def is_pinned(self, name: str) -> bool:
        """Return whether a model stays in memory, for itself or because a pinned one needs it."""
        return any(self._models[each].pinned for each in self._upwards(name))

    def in_memory(self) -> list[str]:
        """Return the models in memory, least recently used first."""
        found = [model for model in self._models.values() if model.residence is Residence.RESIDENT]
        return [model.name for model in sorted(found, key=lambda model: model.used_ns)]

    @property
    def wanted(self) -> list[str]:
        """The models that requests wait for, the first to be loaded first."""
        found = [model for model in self._models.values() if model.order >= 0]
        return [model.name for model in sorted(found, key=lambda model: (model.order, model.number))]

    def used_bytes(self) -> dict[str, int]:
        """Return what is used of each place: by models that are loading, in memory or leaving, and by the server."""
        total = dict(self._overhead)
        for model in self._models.values():
            if model.residence is not Residence.ABSENT:
                _add(total, model.size)
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
            if model.residence is Residence.ABSENT or not model.size.get(place):
                continue
            if self.is_pinned(model.name):
                pinned.append(model)
            elif model.residence is not Residence.RESIDENT or activity(model.name) is not Activity.IDLE:
                busy.append(model)
        text = f"it needs {size_text(size)} of {place} memory, and {size_text(used)} of {size_text(self.budget[place])}"
        return f"{text} are used: {_sum_text(pinned, place, 'pinned')}, {_sum_text(busy, place, 'busy')}"

    # What to do.

    def decide(self, now_ns: int, activity: Callable[[str], Activity]) -> list[ResidencyOrder]:
        """Return what is to be done now, and take it for begun: each order is to be followed by what became of it.

        ``activity`` says what a model in memory does.
        """
        orders = [*self._end_of_keep_alive(now_ns, activity), *self._back_within_budget(activity)]
        reserved: dict[str, int] = {}
        loads = sum(model.residence is Residence.LOADING for model in self._models.values())
        protected: set[str] = set()
        for name in self.wanted:
            model = self._models[name]
            closure = self._closure(name)
            protected.update(closure)
            if any(self._models[each].residence in (Residence.LOADING, Residence.LEAVING) for each in closure):
                continue  # its turn comes when that is over
            if model.residence is Residence.RESIDENT:
                model.order = -1
                continue
            need = self._need(name)
            if impossible := self._impossible(name, need, activity):
                model.order = -1
                orders.append(ResidencyOrder(Step.REFUSE, name, impossible))
                continue
            if self._fits(need, reserved, leaving=False):
                if loads >= self._most_loads and not model.ordered:
                    _add(reserved, need)
                    continue
                loads += 1
                for each in closure:
                    if self._models[each].residence is Residence.ABSENT:
                        self._models[each].residence = Residence.LOADING
                orders.append(ResidencyOrder(Step.LOAD, name))
                continue
            if not self._fits(need, reserved, leaving=True):
                late = now_ns - model.since_ns >= PASSING_NS
                room = self._make_room(need, reserved, protected, activity, drain=late)
                orders += room
                if not room and not late:
                    continue  # busy models are in the way: others may pass
            _add(reserved, need)
        return orders

    def next_change_ns(self, now_ns: int) -> int | None:
        """Return when ``decide`` is to be called again even if nothing happens; None: not at all."""
        times = [
            model.used_ns + model.keep_alive_ns
            for model in self._models.values()
            if model.residence is Residence.RESIDENT
            and model.keep_alive_ns
            and not model.pinned
            and len(self._leavers(model.name)) == 1
        ]
        return min(times, default=None)

    def _end_of_keep_alive(self, now_ns: int, activity: Callable[[str], Activity]) -> Iterator[ResidencyOrder]:
        for name in self.in_memory():
            model = self._models[name]
            if not model.keep_alive_ns or now_ns - model.used_ns < model.keep_alive_ns:
                continue
            if self._is_free(name, (), activity) and len(self._leavers(name)) == 1:
                model.residence = Residence.LEAVING
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
        missing = self._missing(need, reserved)
        leaving: list[str] = []

        def collect(worst: Activity) -> None:
            for name in self._by_use():
                if all(amount <= 0 for amount in missing.values()):
                    return
                group = [each for each in self._leavers(name) if each not in leaving]
                if name in leaving or not self._is_free(name, protected, activity, worst):
                    continue
                sizes = [self._models[each].size for each in group]
                if any(missing[place] > 0 and sum(size.get(place, 0) for size in sizes) > 0 for place in missing):
                    leaving.extend(group)
                    for size in sizes:
                        _add(missing, {place: -size.get(place, 0) for place in missing})

        collect(Activity.IDLE)
        if drain:
            collect(Activity.WORKS)
        if any(amount > 0 for amount in missing.values()) and not partly:
            return []
        for name in reversed(leaving[:]):  # the most recently used may not be needed
            size = self._models[name].size
            spare = all(missing[place] + size.get(place, 0) <= 0 for place in missing)
            if spare and not any(need in leaving for need in self._models[name].needs):
                leaving.remove(name)
                _add(missing, {place: size.get(place, 0) for place in missing})
        orders = []
        for name in leaving:
            idle = activity(name) is Activity.IDLE
            self._models[name].residence = Residence.LEAVING
            orders.append(ResidencyOrder(Step.EVICT if idle else Step.DRAIN, name, "memory"))
        return orders

    def _by_use(self) -> list[str]:
        """Return the models in memory by the last use of each and of the ensembles that need it."""
        last = {name: max(self._models[each].used_ns for each in self._leavers(name)) for name in self.in_memory()}
        return sorted(last, key=lambda name: last[name])

    def _is_free(
        self,
        name: str,
        protected: Collection[str],
        activity: Callable[[str], Activity],
        worst: Activity = Activity.IDLE,
    ) -> bool:
        """Return whether a model can leave, with the ensembles that need it."""
        return all(
            model.residence is Residence.RESIDENT
            and not model.pinned
            and model.name not in protected
            and activity(model.name) <= worst
            for model in (self._models[each] for each in self._leavers(name))
        )

    def _leavers(self, name: str) -> list[str]:
        """Return the models that have to leave if one does: those in memory that need it, the outermost first."""
        return [each for each in self._upwards(name) if self._models[each].residence is not Residence.ABSENT]

    def _upwards(self, name: str) -> list[str]:
        """Return a model and all that need it, directly or not; each before those that it needs."""
        found: dict[str, None] = {}

        def visit(each: str) -> None:
            for other in sorted(self._dependents.get(each, ())):
                if other not in found and other != name:
                    visit(other)
            found.setdefault(each)

        visit(name)
        return list(found)

    def _closure(self, name: str) -> list[str]:
        """Return a model and all that it needs, directly or not, as far as they are known."""
        found = [name]
        for each in found:
            found += [need for need in self._models[each].needs if need in self._models and need not in found]
        return found

    def _need(self, name: str) -> dict[str, int]:
        """Return what the load of a model adds to what is used."""
        need: dict[str, int] = {}
        for each in self._closure(name):
            if self._models[each].residence is Residence.ABSENT:
                _add(need, self._models[each].size)
        return need

    def _missing(self, need: Amounts, reserved: Amounts) -> dict[str, int]:
        """Return how much room has to be made in each place, once those that leave are gone; negative if there is."""
        used = self.used_bytes()
        for model in self._models.values():
            if model.residence is Residence.LEAVING:
                _add(used, {place: -size for place, size in model.size.items()})
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

    def _impossible(self, name: str, need: Amounts, activity: Callable[[str], Activity]) -> str:
        """Return why a model can never be loaded; empty if it can, once others have left."""
        closure = self._closure(name)
        fixed: dict[str, int] = {}  # without the overhead, which may shrink when other models leave
        for model in self._models.values():
            stays = model.residence is not Residence.ABSENT and (model.name in closure or self.is_pinned(model.name))
            if stays:
                _add(fixed, model.size)
        if all(
            fixed.get(place, 0) + size <= self.budget.get(place, size)
            for place, size in need.items()
            if size
            if place in self.budget
        ):
            return ""
        return self.shortage(name, activity) or "it does not fit"


def _add(total: dict[str, int], amounts: Amounts) -> None:
    for place, amount in amounts.items():
        total[place] = total.get(place, 0) + amount


def _sum_text(models: Iterable[_Model], place: str, what: str) -> str:
    found = sorted(models, key=lambda model: -model.size.get(place, 0))
    if not found:
        return f"nothing is {what}"
    names = ", ".join(model.name for model in found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return f"{size_text(sum(model.size.get(place, 0) for model in found))} are {what} ({names})"
