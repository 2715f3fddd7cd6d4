"""What the JSON part of an infer request says, worked out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from nerite.core.request import RequestHeader, SharedPlace
from nerite.core.tensor import Buffer

Place: TypeAlias = tuple[int, int] | SharedPlace | Buffer
"""Where an input is: from where to where behind the JSON part, in shared memory, or here."""
_ELSEWHERE = frozenset((tuple, SharedPlace))


class Plan:
    """A request header, the id, and for each input its place behind the JSON part or its bytes."""

    __slots__ = ("footprint", "header", "id", "places", "raw", "repeats", "size", "whole")

    def __init__(
        self,
        header: RequestHeader,
        id: str,
        places: Sequence[Place],
        size: int,
        *,
        raw: bool = False,
        footprint: int = 0,
    ) -> None:
        """``raw``: the plan was deduced from the model, which may be another one next time."""
        self.header = header
        self.id = id
        self.places = places
        self.size = size
        """Bytes behind the JSON part."""
        self.raw = raw
        self.repeats = not raw and not id and _ELSEWHERE.issuperset(map(type, places))
        """The same JSON part always means this plan, and holds no data."""
        self.footprint = footprint
        """Bytes that it takes in memory, about, if it is one that repeats."""
        self.whole = list(places) == [(0, size)]
        """There is one input, and it is everything behind the JSON part."""

    def of(self, id: str) -> Plan:
        """Return what the same request with another id is."""
        return Plan(self.header, id, self.places, self.size, raw=self.raw, footprint=self.footprint)

    def data(self, body: memoryview, start: int) -> list[Any]:
        """Return the inputs' bytes, given where in ``body`` the JSON part ends; their places if they lie elsewhere."""
        return [
            body[start + place[0] : start + place[1]] if isinstance(place, tuple) else place for place in self.places
        ]
