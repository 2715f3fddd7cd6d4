"""What models free that leave memory together, and what those that sleep go on taking of the memory of the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nerite.scheduling.residency_table import HOST, Amounts, add_amounts


class Departures:
    """Models that leave memory together so that another one fits. Iterates over their names, in order."""

    def __init__(self, missing: dict[str, int], spare: int, room: int) -> None:
        """``missing``: what they have to free in each place; negative where there is room.

        ``spare``: what those that sleep may take of the host's memory when all have left; ``room``: before that.
        """
        self.missing = missing
        self.spare = spare
        self._room = room
        self._stays: dict[str, Amounts] = {}
        """By model, what it still takes when it has left."""
        self._later: set[str] = set()
        """Those that fall asleep only when others have left the memory of the host."""

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._stays))

    def __contains__(self, name: str) -> bool:
        return name in self._stays

    @property
    def suffice(self) -> bool:
        """Whether they free enough in every place."""
        return all(amount <= 0 for amount in self.missing.values())

    @property
    def first(self) -> dict[str, Amounts]:
        """Those that leave now, and what each of them still takes when it has left."""
        return {name: stays for name, stays in self._stays.items() if name not in self._later}

    def gain_from(self, taken: Sequence[Amounts]) -> bool:
        """Return whether some of these amounts are in a place where something is missing."""
        return any(
            amount > 0 and any(each.get(place, 0) > 0 for each in taken) for place, amount in self.missing.items()
        )

    def add(self, name: str, taken: Amounts, stays: Amounts) -> None:
        """Add a model that takes ``taken`` now, and ``stays`` when it has left: nothing, unless it sleeps."""
        growth = stays.get(HOST, 0) - taken.get(HOST, 0)
        self._stays[name] = stays
        self.spare -= growth
        if stays and growth > self._room:
            self._later.add(name)
        elif stays:
            self._room -= growth
        add_amounts(self.missing, {place: stays.get(place, 0) - taken.get(place, 0) for place in self.missing})

    def withdraw_if_others_suffice(self, name: str, taken: Amounts) -> None:
        """Let a model stay if the others free enough, and leave room for those that sleep."""
        stays = self._stays[name]
        freed = {place: taken.get(place, 0) - stays.get(place, 0) for place in self.missing}
        spared = taken.get(HOST, 0) - stays.get(HOST, 0)
        if all(self.missing[place] + freed[place] <= 0 for place in self.missing) and (
            spared <= self.spare or not any(self._stays.values())
        ):
            del self._stays[name]
            self.spare -= spared
            add_amounts(self.missing, freed)
