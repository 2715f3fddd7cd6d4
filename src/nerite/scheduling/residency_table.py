"""The models that a server may have in memory: where each is, what it takes there, and which others it needs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from enum import Enum
from itertools import chain
from typing import Final, TypeAlias

HOST: Final = "host"
"""The memory of the machine. A GPU is called ``GPU`` and its number."""
Amounts: TypeAlias = Mapping[str, int]
"""Bytes by place."""


class Residence(Enum):
    """Where a model is."""

    ABSENT = "absent"
    LOADING = "loading"
    RESIDENT = "resident"
    ASLEEP = "asleep"
    """Its weights are in the memory of the host, and it takes little of the GPUs."""
    LEAVING = "leaving"


EVICTABLE: Final = (Residence.ASLEEP, Residence.RESIDENT)
"""Where models are that can leave."""


class ResidentModel:
    """What is known of one model. Its residence and what it takes are changed by the table."""

    __slots__ = (
        "backoff_ns", "failure", "keep_alive_ns", "name", "needs", "number", "order", "ordered", "pinned", "residence",
        "rest", "retry_ns", "seconds", "since_ns", "size", "stays", "taken", "tenants", "used_ns",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.needs: tuple[str, ...] = ()
        self.size: Amounts = {}
        """What it takes when it is loaded."""
        self.rest: Amounts | None = None
        """What it takes while it sleeps; None if it cannot."""
        self.taken: Amounts = {}
        """What it takes now, at most."""
        self.stays: Amounts = {}
        """What it will take when it has left."""
        self.pinned = False
        self.keep_alive_ns = 0
        self.residence = Residence.ABSENT
        self.used_ns = 0
        self.seconds = 0.0
        self.order = 0
        """Class of the most important request that waits, if any does."""
        self.tenants: Collection[str] = ("",)
        """For whom it is wanted, or was loaded; an empty name is nobody's in particular."""
        self.ordered = False
        """It may be loaded beside any number of others, one of which may wait for it."""
        self.number = 0
        self.since_ns = 0
        self.failure = ""
        self.retry_ns = 0
        self.backoff_ns = 0


class ResidencyTable:
    """Keeps sums and sets up to date, so that a decision costs what it concerns, not what a server could load."""

    def __init__(self) -> None:
        self.models: dict[str, ResidentModel] = {}
        self.at: dict[Residence, dict[str, ResidentModel]] = {each: {} for each in Residence}
        """The models by where they are. Changed by ``move``."""
        self.taken: dict[str, int] = {}
        """What all models take now, at most."""
        self._dependents: dict[str, set[str]] = {}
        self._pinned: frozenset[str] | None = None
        """None: to be found out again."""

    def model(self, name: str) -> ResidentModel:
        """Return a model, which is added if it was not known."""
        if name not in self.models:
            self.models[name] = self.at[Residence.ABSENT][name] = ResidentModel(name)
            self._pinned = None
        return self.models[name]

    def move(self, model: ResidentModel, residence: Residence, taken: Amounts) -> None:
        """Note where a model is now, and what it takes."""
        del self.at[model.residence][model.name]
        self.at[residence][model.name] = model
        add_amounts(self.taken, {place: -amount for place, amount in model.taken.items()})
        add_amounts(self.taken, taken)
        model.residence, model.taken = residence, taken

    def describe(self, name: str, needs: Collection[str], *, pinned: bool) -> ResidentModel:
        """Add a model, or replace which others it needs."""
        model = self.model(name)
        self._forget_needs(model)
        model.needs, model.pinned = tuple(needs), pinned
        for need in model.needs:
            self._dependents.setdefault(need, set()).add(name)
        self._pinned = None
        return model

    def remove(self, name: str) -> None:
        """Remove a model that is not in memory."""
        model = self.models.pop(name)
        del self.at[model.residence][name]
        self._forget_needs(model)
        self._pinned = None

    def _forget_needs(self, model: ResidentModel) -> None:
        for need in model.needs:
            self._dependents[need].discard(model.name)

    @property
    def pinned(self) -> frozenset[str]:
        """The models that are pinned, or needed by one that is."""
        if self._pinned is None:
            found = [name for name, model in self.models.items() if model.pinned]
            self._pinned = frozenset(each for name in found for each in self.closure(name))
        return self._pinned

    def evictable(self) -> Iterable[ResidentModel]:
        """Return the models that can leave."""
        return chain(*(self.at[residence].values() for residence in EVICTABLE))

    def upwards(self, name: str) -> list[str]:
        """Return a model and all that need it, directly or not; each before those that it needs."""
        if not self._dependents.get(name):
            return [name]
        found: dict[str, None] = {}

        def visit(each: str) -> None:
            for other in sorted(self._dependents.get(each, ())):
                if other not in found and other != name:
                    visit(other)
            found.setdefault(each)

        visit(name)
        return list(found)

    def closure(self, name: str) -> list[str]:
        """Return a model and all that it needs, directly or not, as far as they are known."""
        found = [name]
        for each in found:
            found += [need for need in self.models[each].needs if need in self.models and need not in found]
        return found


def larger_amounts(some: Amounts, other: Amounts) -> Amounts:
    """Return the larger amount of each place."""
    return {place: max(some.get(place, 0), other.get(place, 0)) for place in {*some, *other}}


def add_amounts(total: dict[str, int], amounts: Amounts) -> None:
    """Add amounts to a total, in place."""
    for place, amount in amounts.items():
        total[place] = total.get(place, 0) + amount
